//! Several models in one server. Each answer is that of `gemma generate`, even while models are
//! loaded and unloaded, and the memory of unloaded models is freed.

use crate::common::write_gemma4_pair;
use crate::gemma4;
use crate::server::Server;
use crate::shell::{Run, gemma_in, with_model};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const NAMES: [&str; 3] = ["demo", "noise", "four"];

/// Bytes that a server may keep after all unloads: less than 8 loads that leak 0.5 MB each.
const KEPT: u64 = 4_000_000;

/// Writes the bundled demo and two random models of Gemma 3's and 4's shape into `dir`, the latter
/// with an assistant next to it.
fn write_models(dir: &Path) {
    with_model(dir, &[]);
    fs::rename(dir.join("m"), dir.join("demo")).unwrap();
    fs::rename(gemma4::model(&dir.join("a")), dir.join("noise")).unwrap();
    fs::rename(write_gemma4_pair(&dir.join("b")), dir.join("four")).unwrap();
    fs::rename(dir.join("b/model-assistant"), dir.join("four-assistant")).unwrap();
    fs::remove_dir(dir.join("a")).unwrap();
    fs::remove_dir(dir.join("b")).unwrap();
}

fn start(dir: &Path, more: &[&str]) -> Server {
    let models = NAMES.iter().flat_map(|name| ["-m", name]);
    let options = models.chain(["--ctx-size", "300", "-t", "1"]).chain(more.iter().copied());
    Server::start_in(dir, &options.collect::<Vec<_>>(), |_| {})
}

fn body(name: &str, seed: usize) -> Value {
    json!({"model": name, "prompt": format!("Tell me {seed} things."), "seed": seed,
        "temperature": (seed % 2) as f64, "max_tokens": 16})
}

fn ask(server: &Server, name: &str, seed: usize) -> String {
    let reply = server.post("/v1/completions", &body(name, seed)).ok();
    assert_eq!(reply["model"], name);
    reply["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Returns the answer of `gemma generate`.
fn alone(dir: &Path, name: &str, seed: usize) -> String {
    let (prompt, seeded) = (format!("Tell me {seed} things."), seed.to_string());
    let temperature = (seed % 2).to_string();
    let options = ["generate", "--raw", "-q", "-m", name, "--draft", "off", "--seed", &seeded];
    let more = ["--temp", &temperature, "-n", "16", "--ctx-size", "300", "-t", "1", &prompt];
    gemma_in(dir, &[&options[..], &more].concat(), b"").ok().text().to_owned()
}

/// Returns the names of the loaded models.
fn loaded(server: &Server) -> Vec<String> {
    let list = server.get("/api/ps").ok();
    let names = list["models"].as_array().unwrap().iter();
    names.map(|model| model["name"].as_str().unwrap().to_owned()).collect()
}

#[track_caller]
fn wait_until_loaded(server: &Server, wanted: &[&str]) {
    let begun = Instant::now();
    while loaded(server) != wanted {
        let found = loaded(server);
        let said = || server.said();
        assert!(begun.elapsed() < Duration::from_secs(60), "{found:?}: {}", said());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn load(server: &Server, name: &str, keep_alive: Value) {
    let body = json!({"model": name, "keep_alive": keep_alive});
    let reply = server.post("/api/generate", &body).ok();
    assert_eq!((&reply["done"], &reply["done_reason"]), (&json!(true), &json!("load")));
}

/// Clients choose models at random, while models are unloaded as soon as they are idle.
#[test]
fn answers_are_those_of_generate_while_models_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    write_models(dir.path());
    let seeds = 4;
    let wanted: Vec<Vec<String>> = NAMES
        .iter()
        .map(|name| (0..seeds).map(|seed| alone(dir.path(), name, seed)).collect())
        .collect();
    let server = start(dir.path(), &["--keep-alive", "20ms", "--parallel", "2"]);
    assert!(loaded(&server).is_empty());
    let (before, anonymous) = (server.memory(), server.anonymous_memory());
    let ask_all = |requests: usize, first: u64| {
        let (server, wanted) = (&server, &wanted);
        std::thread::scope(|scope| {
            for client in 0..4 {
                scope.spawn(move || {
                    let mut rng = SmallRng::seed_from_u64(first + client);
                    for _ in 0..requests {
                        let (model, seed) = (rng.random_range(0..3), rng.random_range(0..seeds));
                        assert_eq!(ask(server, NAMES[model], seed), wanted[model][seed]);
                        if rng.random_range(0..3) == 0 {
                            std::thread::sleep(Duration::from_millis(60));
                        }
                    }
                });
            }
        });
        wait_until_loaded(server, &[]);
        server.memory()
    };
    let first = ask_all(8, 1);
    let second = ask_all(8, 11);
    let said = server.said();
    let loads: f64 = NAMES
        .iter()
        .map(|name| server.metric(&format!("gemma_model_loads_total{{model=\"{name}\"}}")))
        .sum();
    assert!(loads >= 8.0, "{loads} loads: {said}");
    // Pages of the program's own file stay, with the code and the bundled drafts that were used.
    // The allocator and idle threads keep up to 2.5 MB, however often a model was loaded.
    let left = server.anonymous_memory();
    println!("memory: {before} before, {first}, {second} after; {loads} loads");
    println!("of no file: {anonymous} before, {left} after");
    assert!(left <= anonymous + KEPT, "{anonymous} -> {left}, all {before}");
    assert!(second <= first + KEPT, "{first} -> {second}");
    // The log contains no request's text.
    assert!(said.contains("four is being loaded") && !said.contains("things"), "{said}");
}

#[test]
fn models_are_listed_loaded_and_unloaded_as_ollamas_clients_ask() {
    let dir = tempfile::tempdir().unwrap();
    write_models(dir.path());
    let server = start(dir.path(), &[]);
    for (path, list, key) in [("/v1/models", "data", "id"), ("/api/tags", "models", "name")] {
        let all = server.get(path).ok();
        let all = all[list].as_array().unwrap().iter();
        assert_eq!(all.map(|model| model[key].clone()).collect::<Vec<_>>(), NAMES);
    }
    // Describing a model does not load it.
    let shown = server.post("/api/show", &json!({"model": "four"})).ok();
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("thinking")), "{shown}");
    assert_eq!(shown["details"]["family"], "gemma4");
    assert_eq!(server.get("/v1/models/noise").ok()["max_model_len"], 300);
    assert!(loaded(&server).is_empty());

    load(&server, "noise", json!(-1));
    load(&server, "demo", json!("10m"));
    let list = server.get("/api/ps").ok();
    let models = list["models"].as_array().unwrap();
    let of = |name: &str| models.iter().find(|model| model["name"] == name).unwrap().clone();
    assert!(of("noise")["expires_at"].as_str().unwrap().starts_with("9999"), "{list}");
    let expires = of("demo")["expires_at"].as_str().unwrap().to_owned();
    assert!(expires.starts_with("20") && expires.len() == 20, "{list}");
    // The time runs from the last answer, and not from the load.
    std::thread::sleep(Duration::from_millis(1100));
    ask(&server, "demo", 1);
    let later = server.get("/api/ps").ok()["models"].clone();
    let later = later.as_array().unwrap().iter().find(|model| model["name"] == "demo").unwrap();
    assert!(*later["expires_at"].as_str().unwrap() > *expires, "{later}, not {expires}");
    assert_eq!((&of("demo")["size_vram"], &of("demo")["context_length"]), (&0.into(), &300.into()));
    assert_eq!(of("noise")["details"]["quantization_level"], "BF16");
    let unload = json!({"model": "noise", "keep_alive": 0});
    let reply = server.post("/api/generate", &unload).ok();
    assert_eq!((&reply["done_reason"], &reply["model"]), (&json!("unload"), &json!("noise")));
    wait_until_loaded(&server, &["demo"]);
    // A request to unload a model that is not loaded does not load it.
    let chat = json!({"model": "four", "messages": [], "keep_alive": "0s"});
    let reply = server.post("/api/chat", &chat).ok();
    assert_eq!(
        (&reply["done_reason"], &reply["message"]["content"]),
        (&"unload".into(), &"".into())
    );
    assert_eq!(loaded(&server), ["demo"]);
    // A model is unloaded after its answer.
    let answered = json!({"model": "noise", "prompt": "Hi", "keep_alive": 0, "stream": false,
        "options": {"num_predict": 3}});
    assert_eq!(server.post("/api/generate", &answered).ok()["done_reason"], "length");
    wait_until_loaded(&server, &["demo"]);
    // A model is unloaded after its keep-alive time.
    load(&server, "four", json!("30ms"));
    wait_until_loaded(&server, &["demo"]);
    let wrong = server.post("/api/generate", &json!({"model": "demo", "keep_alive": "soon"}));
    assert_eq!(wrong.status, 400, "{wrong:?}");
    assert_eq!(server.metric("gemma_model_loaded{model=\"demo\"}"), 1.0);
}

#[test]
fn a_request_names_one_of_several_models() {
    let dir = tempfile::tempdir().unwrap();
    write_models(dir.path());
    let server = Server::start_in(dir.path(), &["--models-dir", ".", "--ctx-size", "300"], |_| {});
    // The assistant is not listed as a model.
    let said = server.said();
    assert!(said.contains("four-assistant is left out"), "{said}");
    for name in ["none", "", "four-assistant"] {
        let reply = server.post("/v1/completions", &body(name, 1));
        assert_eq!(reply.status, 404, "{reply:?}");
        let error = &reply.json()["error"];
        assert_eq!(error["code"], "model_not_found");
        let message = error["message"].as_str().unwrap();
        assert!(NAMES.iter().all(|name| message.contains(name)), "{message}");
    }
    let mut nameless = body("", 1);
    nameless.as_object_mut().unwrap().remove("model");
    let reply = server.post("/v1/completions", &nameless);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("model")));
    assert_eq!(server.get("/v1/models/none").status, 404);
    assert_eq!(server.get("/tokenizer_info").status, 400);
    assert_eq!(server.get("/tokenizer_info?model=demo").ok()["model_max_length"], 300);
    // The name in the spelling of Ollama's clients.
    let latest = server.post("/v1/completions", &body("Demo:latest", 1)).ok();
    assert_eq!(latest["choices"][0]["text"], ask(&server, "demo", 1));
    let tokens = server.post("/tokenize", &json!({"model": "noise", "content": "Hello"})).ok();
    assert!(tokens["count"].as_u64().unwrap() > 0);
    assert_eq!(loaded(&server), ["demo", "noise"]);
}

/// Memory for one model at a time. The least recently used model makes room, even while it answers,
/// and a model that never fits is refused at once.
#[test]
fn a_model_that_needs_room_has_another_one_unloaded() {
    let dir = tempfile::tempdir().unwrap();
    write_models(dir.path());
    let planned = |name: &str| {
        let options = ["plan", name, "--ctx-size", "300", "--parallel", "4", "--json"];
        let plan = gemma_in(dir.path(), &options, b"").ok().json();
        let process = ["tokenizer", "drafts", "program"];
        let parts = process.map(|part| plan["process"][part].as_u64().unwrap());
        plan["cpu"]["total"].as_u64().unwrap() + parts.iter().sum::<u64>()
    };
    // The demo needs by far the most memory.
    let bytes = NAMES.map(planned);
    assert!(bytes[0] > bytes[1] + bytes[2] && bytes[1].min(bytes[2]) > 5_000_000, "{bytes:?}");
    let memory = format!("{}MB", bytes[0] / 1_000_000 + 2);
    let wanted = NAMES.map(|name| alone(dir.path(), name, 1));
    let server = start(dir.path(), &["--models-memory", &memory]);
    for at in [0, 1, 2, 1, 0, 2] {
        assert_eq!(ask(&server, NAMES[at], 1), wanted[at]);
        let now = loaded(&server);
        assert!(now.contains(&NAMES[at].to_owned()), "{now:?}");
        // The demo is only loaded without the others.
        assert_eq!(now.contains(&"demo".to_owned()), at == 0, "{now:?}");
        assert!(at != 0 || now.len() == 1, "{now:?}");
    }
    // Clients request all three models at the same time.
    std::thread::scope(|scope| {
        for (at, name) in NAMES.iter().enumerate() {
            let (server, wanted) = (&server, &wanted);
            scope.spawn(move || {
                for _ in 0..4 {
                    assert_eq!(ask(server, name, 1), wanted[at]);
                }
            });
        }
    });
    let said = server.said();
    assert!(said.contains("to make room for"), "{said}");
    drop(server);
    let server = start(dir.path(), &["--models-memory", "1MB"]);
    let reply = server.post("/v1/completions", &body("demo", 1));
    assert_eq!(reply.status, 503, "{reply:?}");
    assert!(
        reply.header("retry-after").is_some() && reply.body.contains("demo needs"),
        "{reply:?}"
    );
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_the_others_serving() {
    let dir = tempfile::tempdir().unwrap();
    write_models(dir.path());
    let server = start(dir.path(), &[]);
    let weights = dir.path().join("noise/model.safetensors");
    fs::rename(&weights, dir.path().join("away")).unwrap();
    let reply = server.post("/v1/completions", &body("noise", 1));
    assert_eq!(reply.status, 503, "{reply:?}");
    assert!(reply.header("retry-after").is_some() && reply.body.contains("noise"), "{reply:?}");
    assert_eq!(server.get("/health").status, 200);
    assert!(!ask(&server, "demo", 1).is_empty());
    fs::rename(dir.path().join("away"), &weights).unwrap();
    assert_eq!(ask(&server, "noise", 1), alone(dir.path(), "noise", 1));
    let said = server.said();
    assert!(said.contains("noise cannot be loaded: "), "{said}");
    // The names are checked at the start.
    let both = ["serve", "--port", "0", "-m", "demo", "-m"];
    let fails = |more: &[&str], code: i32, word: &str| {
        gemma_in(dir.path(), &[&both[..], more].concat(), b"").fails(code, &[word]);
    };
    fails(&["nothing/here"], 3, "nothing/here");
    fails(&["four-assistant"], 3, "assistant");
    fails(&["demo"], 2, "given twice");
    fails(&["noise", "--mmproj", "x"], 2, "--mmproj");
    fails(&["noise", "--draft", "four"], 2, "--draft four");
}

#[test]
fn ps_and_stop_ask_the_server() {
    let dir = tempfile::tempdir().unwrap();
    write_models(dir.path());
    let server = start(dir.path(), &["--api-key", "secret"]);
    let url = format!("http://{}", server.address);
    let run = |args: &[&str]| -> Run {
        let more = ["--url", &url, "--api-key", "secret"];
        gemma_in(dir.path(), &[args, &more[..]].concat(), b"")
    };
    assert_eq!(run(&["ps"]).ok().text(), "No model is loaded.\n");
    let body = json!({"model": "demo", "keep_alive": -1}).to_string();
    let key = "Authorization: Bearer secret\r\n";
    assert_eq!(server.request("POST", "/api/generate", key, &body).status, 200);
    let shown = run(&["ps"]).ok();
    assert!(shown.text().contains("demo") && shown.text().contains("for ever"), "{shown:?}");
    assert_eq!(run(&["ps", "--json"]).ok().json()["models"][0]["name"], "demo");
    run(&["stop", "demo:latest"]).ok();
    assert_eq!(run(&["ps"]).ok().text(), "No model is loaded.\n");
    let again = run(&["stop", "demo"]).ok();
    assert!(again.err.contains("demo is not loaded"), "{again:?}");
    run(&["stop", "nothing"]).fails(1, &["nothing", "four"]);
    let keyless = ["ps", "--url", &url];
    gemma_in(dir.path(), &keyless, b"").fails(1, &["--api-key"]);
    drop(server);
    run(&["ps"]).fails(1, &["no server answers", "gemma serve"]);
}

/// The only model of a server is loaded at the start, and unloaded on request.
#[test]
fn one_model_is_unloaded_if_it_is_asked_for() {
    let server = Server::start(&["--ctx-size", "300", "-t", "1"]);
    let name = server.get("/v1/models").ok()["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(loaded(&server), [&*name]);
    let completion = |model: &str| {
        let reply = server.post("/v1/completions", &body(model, 1)).ok();
        (reply["choices"][0]["text"].clone(), reply["system_fingerprint"].clone())
    };
    let first = completion("any");
    let full = server.memory();
    server.post("/api/generate", &json!({"model": "other", "keep_alive": 0})).ok();
    wait_until_loaded(&server, &[]);
    assert!(server.memory() < full);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/v1/models").ok()["data"][0]["id"], name);
    assert_eq!(completion("any"), first);
    assert_eq!(loaded(&server), [&*name]);
    assert_eq!(server.metric("gemma_model_loads_total"), 2.0);

    let server = Server::start(&["--ctx-size", "300", "--keep-alive", "50ms"]);
    wait_until_loaded(&server, &[]);
    assert!(!ask(&server, "any", 2).is_empty());
    wait_until_loaded(&server, &[]);
}

/// A model that is answering is unloaded after its answer. The server can end while models are
/// loaded.
#[cfg(unix)]
#[test]
fn answers_end_before_their_model_and_the_server_ends_all() {
    let dir = tempfile::tempdir().unwrap();
    write_models(dir.path());
    let server = start(dir.path(), &[]);
    load(&server, "demo", json!(-1));
    let long = json!({"model": "demo", "prompt": "Hi", "max_tokens": 150, "seed": 1,
        "ignore_eos": true});
    let wanted = server.post("/v1/completions", &long).ok()["choices"][0]["text"].clone();
    // A text counts as running for a moment after its answer.
    server.wait_for("gemma_running_texts{model=\"demo\"}", 0.0);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| server.post("/v1/completions", &long).ok());
        server.wait_for("gemma_running_texts{model=\"demo\"}", 1.0);
        let stop = json!({"model": "demo", "keep_alive": 0});
        assert_eq!(server.post("/api/generate", &stop).ok()["done_reason"], "unload");
        assert_eq!(asked.join().unwrap()["choices"][0]["text"], wanted);
    });
    wait_until_loaded(&server, &[]);
    load(&server, "four", json!(-1));
    load(&server, "noise", json!(-1));
    server.terminate();
    let (code, said) = server.wait();
    assert_eq!(code, 143, "{said}");
}
