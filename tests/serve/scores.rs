//! Log-probabilities of prompts (`echo` with `logprobs`) equal the likelihoods of `gemma eval`,
//! whatever other requests run.

use crate::equality::{has_vulkan, on, tiny};
use crate::{server, shell};
use serde_json::{Value, json};
use server::Server;
use shell::{BINARY, command, wait};
use std::path::Path;

const PATH: &str = "/v1/completions";

/// Sends a request as lm-evaluation-harness does. Returns the choices.
fn ask(server: &Server, more: Value) -> Vec<Value> {
    let mut body = json!({"echo": true, "logprobs": 1, "max_tokens": 1, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.post(PATH, &body).ok()["choices"].as_array().unwrap().clone()
}

/// Returns a list of the log-probabilities.
fn list<'a>(choice: &'a Value, name: &str) -> &'a [Value] {
    choice["logprobs"][name].as_array().unwrap()
}

/// Returns the result of `gemma eval` for tokens.
fn evaluated(dir: &Path, options: &[&str], ids: &[u64]) -> (Vec<f64>, Vec<u64>) {
    std::fs::write(dir.join("ids.json"), json!({"ids": ids}).to_string()).unwrap();
    let mut eval = command(BINARY, dir);
    on(&mut eval);
    eval.args(["eval", "-q", "--json", "--ids", "ids.json"]).args(options);
    let figures = wait(eval, b"").ok().json();
    let numbers = |name: &str| figures[name].as_array().unwrap().iter();
    let nll = numbers("nll").map(|x| x.as_f64().unwrap()).collect();
    (nll, numbers("top1").map(|x| x.as_u64().unwrap()).collect())
}

/// Compares the lists with a prompt of these tokens, which begin with BOS. The client sent all but
/// the first `hidden` of them.
fn compare(choice: &Value, ids: &[u64], hidden: usize, (nll, top1): &(Vec<f64>, Vec<u64>)) {
    let [tokens, own, best, offsets] =
        ["tokens", "token_logprobs", "top_logprobs", "text_offset"].map(|name| list(choice, name));
    // The lists also have the one token of the answer.
    let shown = ids.len() - hidden;
    assert_eq!([tokens, own, best, offsets].map(<[Value]>::len), [shown + 1; 4]);
    assert!(own[0].is_null() && best[0].is_null());
    let text = choice["text"].as_str().unwrap();
    let mut at = 0;
    for i in 0..shown {
        let token = tokens[i].as_str().unwrap();
        assert_eq!(offsets[i], at);
        assert!(text.chars().skip(at).collect::<String>().starts_with(token), "{token:?}");
        at += token.chars().count();
        if i == 0 {
            continue;
        }
        let got = own[i].as_f64().unwrap();
        let place = i + hidden;
        assert!((got + nll[place - 1]).abs() < 1e-5, "{i}: {got} {}", nll[place - 1]);
        let likeliest = best[i].as_object().unwrap().values().map(|x| x.as_f64().unwrap());
        let is_greedy = likeliest.fold(f64::NEG_INFINITY, f64::max) == got;
        assert_eq!(is_greedy, top1[place - 1] == ids[place], "{i}");
    }
}

/// Checks prompts of `sentences` sentences.
fn check(options: &[&str], sentences: usize) {
    let dir = tempfile::tempdir().unwrap();
    // `gemma eval` uses the device while the server does.
    let more = ["--parallel", "4", "--log", "off", "--cache-ram", "20MB", "--device-lock", "off"];
    let server = Server::start_in(dir.path(), &[&more[..], options].concat(), on);
    let subjects = ["rivers", "colours", "numbers", "houses", "the sea"];
    let text: String =
        (0..sentences).map(|i| format!("Sentence {i} is about {}. ", subjects[i % 5])).collect();
    let ids = server.post("/tokenize", &json!({"content": text})).ok()["tokens"].clone();
    let ids: Vec<u64> = serde_json::from_value(ids).unwrap();
    let whole = [&[2], &ids[..]].concat();
    let want = evaluated(dir.path(), options, &whole);

    // The first prompt is read. The next ones find it in the cache.
    let by_text = ask(&server, json!({"prompt": text})).remove(0);
    compare(&by_text, &whole, 1, &want);
    assert!(by_text["text"].as_str().unwrap().starts_with(&text));
    let by_ids = ask(&server, json!({"prompt": ids})).remove(0);
    assert_eq!(by_ids, by_text);
    let with_bos = ask(&server, json!({"prompt": whole})).remove(0);
    compare(&with_bos, &whole, 0, &want);
    let sum: f64 =
        list(&with_bos, "token_logprobs")[1..whole.len()].iter().map(|x| x.as_f64().unwrap()).sum();
    let nll: f64 = want.0.iter().sum();
    assert!((sum + nll).abs() < 1e-6 * nll, "{sum} {nll}");

    // Without an answer the lists are those of the prompt.
    let mut bare = ask(&server, json!({"prompt": ids, "max_tokens": 0})).remove(0);
    assert_eq!((&bare["text"], &bare["finish_reason"]), (&json!(text), &json!("length")));
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(bare["logprobs"][name].take(), json!(list(&by_text, name)[..ids.len()]));
    }

    // An answer that ends at once has an entry for its end token, because clients drop the last
    // entry.
    let ended = ask(&server, json!({"prompt": whole, "logit_bias": {"1": 100}})).remove(0);
    assert_eq!((&ended["text"], &ended["finish_reason"]), (&json!(text), &json!("stop")));
    compare(&ended, &whole, 0, &want);

    // The tokens of a greedy answer are the likeliest ones.
    let grown = ask(&server, json!({"prompt": ids, "max_tokens": 8})).remove(0);
    let (own, best) = (list(&grown, "token_logprobs"), list(&grown, "top_logprobs"));
    for i in ids.len()..own.len() {
        assert!(best[i].as_object().unwrap().values().any(|x| *x == own[i]), "{i}: {grown}");
    }

    // Several prompts in one request, some with a common prefix, at the same time as other
    // requests.
    let half = &ids[..ids.len() / 2];
    let alone = [json!(ids), json!(half), json!([ids[0]]), json!(whole)]
        .map(|prompt| ask(&server, json!({"prompt": prompt})).remove(0));
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let server = &server;
            scope.spawn(move || {
                let body = json!({"prompt": "Rivers", "seed": seed, "max_tokens": 40,
                    "presence_penalty": 1, "temperature": 1});
                server.post(PATH, &body).ok();
            });
            let (alone, ids, whole) = (&alone, &ids, &whole);
            scope.spawn(move || {
                let prompts = json!([ids, half, [ids[0]], whole]);
                for (i, mut choice) in
                    ask(server, json!({"prompt": prompts})).into_iter().enumerate()
                {
                    choice["index"] = 0.into();
                    assert_eq!(choice, alone[i], "prompt {i}");
                }
            });
        }
    });
}

#[test]
fn scores_of_prompts_are_the_likelihoods_of_eval() {
    check(&["--device", "cpu"], 40);
}

#[test]
fn scores_of_prompts_are_the_likelihoods_of_eval_on_vulkan_too() {
    if has_vulkan() {
        let dir = tempfile::tempdir().unwrap();
        check(&["--device", "vulkan", "-m", &tiny(dir.path())], 12);
    }
}
