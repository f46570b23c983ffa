//! Commands on complete models: quantize, inspect, eval, bench, and settings that a model contains.

use crate::{common, shell};
use common::{Dims, Form, TinyModel, gguf};
use gemma::checkpoint::Dtype;
use gemma::testing::CUT_WORK;
use serde_json::{Value, json};
use shell::{BINARY, command, gemma, gemma_in, wait, with_model};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Makes a directory with a tiny model of floats in `tiny`.
fn with_tiny() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::tiny(1).write(&dir.path().join("tiny"), Form::TextV4, Dtype::BF16, 1);
    dir
}

/// Returns every file of a directory by name.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = |e: std::io::Result<fs::DirEntry>| {
        let e = e.unwrap();
        (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())
    };
    fs::read_dir(dir).unwrap().map(file).collect()
}

/// Returns the bytes of all tensors, from the headers of the safetensors files.
fn tensor_bytes(dir: &Path) -> u64 {
    let mut sum = 0;
    for (_, bytes) in files(dir).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        for (_, tensor) in
            header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__")
        {
            sum += tensor["data_offsets"][1].as_u64().unwrap()
                - tensor["data_offsets"][0].as_u64().unwrap();
        }
    }
    sum
}

const IDS: &str = r#"{"ids": [2, 9, 17, 33, 5, 80, 120, 7]}"#;

#[test]
fn quantize_makes_a_model_that_works_and_the_same_one_each_time() {
    let dir = with_tiny();
    let at = |name: &str| dir.path().join(name);
    let run = |args: &[&str]| gemma_in(dir.path(), args, b"");
    let plan = run(&["quantize", "tiny", "q", "--dry-run"]).ok();
    assert!(!at("q").exists());
    assert_eq!(run(&["quantize", "tiny", "q"]).ok().text(), "");
    run(&["quantize", "tiny", "again", "-q", "-t", "1"]).ok();
    let (first, second) = (files(&at("q")), files(&at("again")));
    assert!(
        first.contains_key("config.json") && first.contains_key("quant-report.json"),
        "{:?}",
        first.keys()
    );
    for (name, bytes) in &first {
        assert!(second.get(name) == Some(bytes), "{name} differs");
    }
    assert_eq!(first.len(), second.len());

    let text = plan.text();
    let number = |text: &str| text.trim().replace(',', "").parse::<u64>().unwrap();
    let total = text
        .lines()
        .find(|l| l.starts_with("| all"))
        .unwrap()
        .split('|')
        .rfind(|cell| !cell.trim().is_empty())
        .unwrap();
    assert_eq!(number(total), tensor_bytes(&at("q")), "{text}");
    let directory = text
        .lines()
        .find_map(|l| l.strip_prefix("directory"))
        .unwrap()
        .split(" bytes")
        .next()
        .unwrap();
    assert_eq!(number(directory), first.values().map(|f| f.len() as u64).sum::<u64>(), "{text}");

    run(&["quantize", "tiny", "q"]).fails(2, &["exist"]);
    run(&["quantize", "q", "third", "--linear=i4-g64"])
        .fails(3, &["quantised", "--allow-requantize"]);
    run(&["quantize", "q", "third", "--linear=i4-g64", "--dry-run"])
        .fails(3, &["quantised", "--allow-requantize"]);
    assert!(!at("third").exists());
    run(&["quantize", "q", "third", "--linear=i4-g64", "--allow-requantize"]).ok();
    let report = run(&["inspect", "q", "--json", "--verify"]).ok().json();
    let said = run(&["inspect", "q"]).ok();
    let last = said.text().lines().last().unwrap();
    assert!(
        last.starts_with("| all ")
            && last.contains(&format!(" {} |", report["tensors"].as_array().unwrap().len())),
        "{last}"
    );
    assert!(
        said.text().contains("| q_proj ") && said.text().contains("| input_layernorm "),
        "{}",
        said.text()
    );
    assert_eq!(report["layers"], 4);
    assert!(report["bits_per_weight"].as_f64().unwrap() < 8.5, "{report}");

    fs::write(at("ids.json"), IDS).unwrap();
    let figures = run(&["eval", "-m", "q", "--ids", "ids.json", "--json"]).ok().json();
    let floats = run(&["eval", "-m", "tiny", "--ids", "ids.json", "--json"]).ok().json();
    let apart =
        (figures["mean_nll"].as_f64().unwrap() - floats["mean_nll"].as_f64().unwrap()).abs();
    assert!(apart > 0.0 && apart < 1.0, "{apart}");
}

#[test]
fn a_damaged_model_is_3() {
    let dir = with_tiny();
    let weights = dir.path().join("tiny/model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    for length in [bytes.len() - 1, bytes.len() / 2, 100, 3, 0] {
        fs::write(&weights, &bytes[..length]).unwrap();
        for args in [
            &["generate", "hi", "-m", "tiny"][..],
            &["inspect", "tiny"],
            &["quantize", "tiny", "out"],
        ] {
            gemma_in(dir.path(), args, b"").fails(3, &["tiny"]);
        }
    }
    assert!(!dir.path().join("out").exists());
    fs::write(&weights, &bytes).unwrap();
    gemma_in(dir.path(), &["generate", "hi", "-m", "tiny"], b"")
        .fails(3, &["tokenizer.json", "help: "]);
    fs::write(dir.path().join("tiny/config.json"), "{").unwrap();
    gemma_in(dir.path(), &["inspect", "tiny"], b"").fails(3, &["config.json"]);
}

#[test]
fn eval_takes_ids_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let eval = |ids: &str, more: &[&str]| {
        fs::write(dir.path().join("ids.json"), ids).unwrap();
        gemma_in(dir.path(), &[&["eval", "-q", "--json", "--ids", "ids.json"], more].concat(), b"")
    };
    let figures = eval(IDS, &[]).ok().json();
    let list = |key: &str| figures[key].as_array().unwrap().clone();
    let number = |key: &str| figures[key].as_f64().unwrap();
    assert_eq!(
        figures.as_object().unwrap().keys().collect::<Vec<_>>(),
        ["tokens", "mean_nll", "nll_stderr", "perplexity", "nll", "top1"]
    );
    assert_eq!((number("tokens"), list("nll").len(), list("top1").len()), (8.0, 7, 8));
    let mean = list("nll").iter().map(|v| v.as_f64().unwrap()).sum::<f64>() / 7.0;
    assert!(
        (mean - number("mean_nll")).abs() < 1e-6
            && (mean.exp() / number("perplexity") - 1.0).abs() < 1e-6
    );
    // Without the leading BOS every figure changes, since none is added.
    let without = eval(&IDS.replace("2, 9,", "9,"), &[]).ok().json();
    assert_eq!(without["tokens"], 7);
    assert_ne!(without["nll"][0], figures["nll"][1]);

    eval(IDS, &["--reference", "absent"]).fails(3, &["absent"]);
    eval(r#"{"ids": [2]}"#, &[]).fails(2, &["two"]);
    eval(r#"{"ids": [2, 4000000000]}"#, &[]).fails(3, &["4000000000"]);
    for bad in [r#"{"ids": [2, -1]}"#, r#"{"ids": "x"}"#, "[2, 5]", "", "{}"] {
        eval(bad, &[]).fails(3, &["ids.json", "help: "]);
    }
}

#[test]
fn a_model_agrees_with_itself() {
    let dir = with_tiny();
    fs::write(dir.path().join("ids.json"), IDS).unwrap();
    let args = ["eval", "-m", "tiny", "--reference", "tiny", "--ids", "ids.json", "--json", "-q"];
    let json = gemma_in(dir.path(), &args, b"").ok().json();
    assert_eq!((&json["top1_agreement"], &json["ppl_ratio"]), (&json!(1.0), &json!(1.0)));
    for key in ["mean", "median", "p99", "max"] {
        assert!(json["kld"][key].as_f64().unwrap().abs() < 1e-6, "{json}");
    }
}

#[test]
fn bench_reports_what_was_asked_for() {
    let args = [
        "bench",
        "-q",
        "--only",
        "decode,verify",
        "--tg",
        "4",
        "--rows",
        "1,2",
        "--repetitions",
        "1",
        "--json",
    ];
    let run = gemma(&args, b"").ok();
    assert_eq!(run.err, "");
    let json = run.json();
    let names: Vec<&str> =
        json["results"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["tg4", "verify 1 row", "verify 2 rows"]);
    for row in json["results"].as_array().unwrap() {
        let figure = |key: &str| row["figure"][key].as_f64().unwrap();
        assert!(
            figure("median") > 0.0
                && figure("min") <= figure("median")
                && figure("median") <= figure("max"),
            "{row}"
        );
        assert_eq!(row["figure"]["runs"].as_array().unwrap().len(), 1);
    }
    assert!(
        json["machine"]["threads"].as_u64().unwrap() > 0
            && json["model"]["weights"].as_u64().unwrap() > 0,
        "{json}"
    );
    gemma(&["bench", "--repetitions", "0"], b"").fails(2, &["--repetitions"]);
    let too_many = ["bench", "--only", "kernels", "--kernel-rows", "4096"];
    gemma(&too_many, b"").fails(2, &["--kernel-rows 4096"]);
}

/// A kernel that skips work is fast and wrong. With two threads, the second one's part is skipped:
/// the buffers still hold the result of an earlier pass, so only NaN in them reveals it.
#[test]
fn a_poisoned_bench_finds_kernels_that_leave_elements_out() {
    let dir = tempfile::tempdir().unwrap();
    let bench = |more: &[&str], cut: Option<&str>| {
        let mut command = command(BINARY, dir.path());
        command.args(["bench", "--only", "verify", "--rows", "1,3", "-p", "9", "-r", "1"]);
        command.args(["-d", "cpu", "-t", "2"]).args(more);
        command.envs(cut.map(|label| (CUT_WORK, label)));
        wait(command, b"")
    };
    let whole = bench(&["--poison"], None).ok();
    let verdict = "poison: passes over 1, 3, 9 rows give the same bits";
    assert!(whole.err.contains(verdict), "{whole:?}");
    for label in ["qkv", "gate_up", "rope", "attention"] {
        bench(&[], Some(label)).ok();
        let found = "a kernel does not compute all elements: a pass over 1 row gives other scores";
        bench(&["--poison"], Some(label)).fails(1, &[found]);
    }
}

#[test]
fn bench_times_kernels_and_texts_and_compares_with_an_older_run() {
    let dir = tempfile::tempdir().unwrap();
    let tests = ["--only", "kernels,text", "--tg", "4", "--kernel-rows", "1,2"];
    let short = ["bench", "-q", "--repetitions", "1", "--text-tokens", "12"];
    let bench =
        |more: &[&str]| gemma_in(dir.path(), &[&short[..], &tests, more].concat(), b"").ok();
    let run = bench(&["--json"]);
    let json = run.json();
    // A layer's gate and up matrices multiply every channel of a row with all their weights.
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/demo-target/config.json");
    let config: Value = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
    let size = |key: &str| config[key].as_u64().unwrap();
    let of_a_row = 2 * size("hidden_size") * size("intermediate_size") * size("num_hidden_layers");
    for rows in [1, 2] {
        let mut kernels = json["kernels"].as_array().unwrap().iter();
        let is_gate_up = |k: &&Value| k["rows"] == rows && k["label"] == "gate_up";
        let kernel = kernels.find(is_gate_up).unwrap();
        let counts = (&kernel["passes"], &kernel["macs"]);
        assert_eq!(counts, (&json!(4), &json!(4 * rows * of_a_row)), "{rows} rows");
    }
    assert_eq!(json["text"]["kinds"].as_array().unwrap().len(), 5, "{json}");
    assert!(json["text"]["acceptance"]["passes"].as_u64().unwrap() > 0, "{json}");
    fs::write(dir.path().join("run.json"), &run.out).unwrap();
    let text = bench(&["--compare", "run.json"]);
    assert!(text.text().contains("| before |") || text.text().contains(" before |"), "{text:?}");
    assert!(text.text().lines().all(|line| line.chars().count() <= 100), "{text:?}");
    fs::write(dir.path().join("run.json"), "{}").unwrap();
    let wrong = ["bench", "--compare", "run.json"];
    gemma_in(dir.path(), &wrong, b"").fails(3, &["run.json is not a result"]);
}

#[test]
fn a_doctor_says_what_a_run_would_do_here() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str], env: &[(&str, &str)]| {
        let mut command = command(BINARY, dir.path());
        command.args(["doctor", "--json"]).args(args).envs(env.iter().copied());
        let run = wait(command, b"");
        let json = run.json();
        assert_eq!(json["exit_code"], run.code, "{json:#}");
        (run.code, json)
    };
    let find = |json: &Value, name: &str| {
        let found = json["checks"].as_array().unwrap().iter().find(|c| c["name"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {json:#}")).clone()
    };
    // An empty list of drivers means that there is no driver. A run continues, unless it asks for a
    // GPU.
    let no_driver = [("VK_DRIVER_FILES", "/nonexistent"), ("VK_ICD_FILENAMES", "/nonexistent")];
    let (code, json) = run(&[], &no_driver);
    let vulkan = find(&json, "vulkan");
    assert_eq!((code, &find(&json, "kernels, cpu")["status"]), (0, &json!("PASS")));
    // A driver is suggested only if a GPU has a device node.
    assert_eq!(
        vulkan["status"] == "WARN",
        !vulkan["commands"].as_array().unwrap().is_empty(),
        "{vulkan}"
    );
    // The sizes that fit are printed, unless a model is named.
    assert!(
        json["sizes"]["sizes"].as_array().unwrap().iter().any(|row| row["fits"] == true),
        "{json:#}"
    );
    assert_eq!(run(&["-d", "cpu", "-m", "absent"], &[]).1["sizes"], Value::Null);
    assert_eq!(run(&["-d", "vulkan"], &no_driver).0, 4);
    assert_eq!(run(&["-d", "cpu", "-m", "absent"], &[]).0, 3);
    let text = gemma_in(dir.path(), &["doctor", "-d", "cpu"], b"").ok();
    assert!(text.text().lines().all(|line| line.chars().count() <= 80), "{}", text.text());
    assert!(text.text().contains("PASS  kernels, cpu") && text.err.is_empty(), "{text:?}");
    assert!(
        text.text().contains("| Gemma 3 27b ") && text.text().contains("gemma plan"),
        "{text:?}"
    );
}

#[test]
fn models_on_the_machine_are_listed_and_broken_ones_say_why() {
    let dir = with_tiny();
    let at = |name: &str| dir.path().join(name);
    let list = |args: &[&str]| gemma_in(dir.path(), &[&["list"], args].concat(), b"").ok();
    let models = |args: &[&str]| {
        let json = list(&[&["--json"], args].concat()).json();
        let models = json["models"].as_array().unwrap().iter();
        models
            .map(|m| (m["model"].as_str().unwrap().to_owned(), m.clone()))
            .collect::<BTreeMap<_, _>>()
    };
    let found = models(&[]);
    let tiny = &found["tiny"];
    assert_eq!(
        (found.len(), &tiny["format"], &tiny["bits_per_weight"]),
        (1, &json!("checkpoint"), &json!(16.0))
    );
    assert_eq!((&tiny["fits"], &tiny["error"]), (&json!(true), &Value::Null));
    // Artifacts, GGUF files and snapshots of the cache are listed. Other model families and a
    // directory of settings are not.
    gemma_in(dir.path(), &["quantize", "tiny", "q"], b"").ok();
    let snapshot = ".cache/huggingface/hub/models--google--gemma-3-1b-it-qat-q4_0-gguf";
    let files = format!("{snapshot}/snapshots/c0ffee");
    fs::create_dir_all(at(&format!("{snapshot}/refs"))).unwrap();
    fs::write(at(&format!("{snapshot}/refs/main")), "c0ffee").unwrap();
    fs::create_dir_all(at(&files)).unwrap();
    gguf::float_file(&TinyModel::tiny(1), 0).write(&at(&format!("{files}/model.gguf")));
    fs::write(at(&format!("{files}/mmproj-model.gguf")), "no model").unwrap();
    fs::copy(at(&format!("{files}/model.gguf")), at("own.gguf")).unwrap();
    for (name, config) in [("llama", r#"{"model_type": "llama"}"#), ("settings", r#"{"port": 80}"#)]
    {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("config.json"), config).unwrap();
    }
    let found = models(&[]);
    let names = ["google/gemma-3-1b-it-qat-q4_0-gguf", "own.gguf", "q", "tiny"];
    assert!(found.keys().eq(&names), "{found:#?}");
    assert_eq!(
        (&found["own.gguf"]["format"], &found["q"]["format"]),
        (&json!("GGUF"), &json!("quantised"))
    );
    assert_eq!(found["google/gemma-3-1b-it-qat-q4_0-gguf"]["bytes"], found["own.gguf"]["bytes"]);
    // Broken models: an unfinished download, a truncated file, a directory without weights.
    let unfinished = ".cache/huggingface/hub/models--google--gemma-3-27b-it/blobs";
    fs::create_dir_all(at(unfinished)).unwrap();
    fs::write(at(unfinished).join("abc.incomplete"), "").unwrap();
    let whole = fs::read(at("own.gguf")).unwrap();
    fs::write(at("own.gguf"), &whole[..whole.len() / 2]).unwrap();
    fs::create_dir(at("gemma-3-4b-it")).unwrap();
    fs::copy(at("tiny/config.json"), at("gemma-3-4b-it/config.json")).unwrap();
    let found = models(&[]);
    for (name, why) in [
        ("google/gemma-3-27b-it", "gemma pull"),
        ("own.gguf", "own.gguf"),
        ("gemma-3-4b-it", "no model.safetensors"),
    ] {
        let error = found[name]["error"].as_str().unwrap_or_else(|| panic!("{found:#?}"));
        assert!(error.contains(why) && found[name]["bytes"].is_null(), "{name}: {error}");
    }
    let text = list(&[]);
    assert!(
        text.text().contains("| tiny ") && text.text().contains("Cannot be used:\n"),
        "{text:?}"
    );
    // A directory without models: the output explains how to get one.
    fs::create_dir(at("empty")).unwrap();
    assert!(models(&["empty"]).keys().all(|name| name.starts_with("google/")));
    fs::remove_dir_all(at(".cache")).unwrap();
    let text = list(&["empty"]);
    for words in ["There is no Gemma here", "\n  gemma pull ", "\n  gemma chat -m "] {
        assert!(text.text().contains(words), "{text:?}");
    }
    // Gemma 4 needs no token.
    let is_gated = !text.text().contains("gemma pull gemma4-");
    assert_eq!(text.text().contains("HF_TOKEN"), is_gated, "{text:?}");
    assert_eq!(list(&["empty", "--json"]).json()["models"], json!([]));
}

/// Returns the line of `--print-config` about an option, a comment or not.
fn shown(dir: &Path, env: &[(&str, &str)], args: &[&str], option: &str) -> String {
    let mut command = command(BINARY, dir);
    command
        .args(["generate", "-q", "--print-config", "-m", "tiny"])
        .args(args)
        .envs(env.iter().copied());
    let run = wait(command, b"").ok();
    let is_its = |line: &&str| line.trim_start_matches("# ").starts_with(&format!("{option} = "));
    let line = run.text().lines().find(is_its).unwrap_or_else(|| panic!("{run:?}"));
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_flag_beats_the_environment_beats_a_file_beats_the_model() {
    let dir = with_tiny();
    let generation = dir.path().join("tiny/generation_config.json");
    assert_eq!(shown(dir.path(), &[], &[], "temp"), "# temp = 1 # built in");
    fs::write(&generation, r#"{"temperature": 0.5}"#).unwrap();
    assert_eq!(
        shown(dir.path(), &[], &[], "temp"),
        "# temp = 0.5 # the model's generation_config.json"
    );
    let user = dir.path().join(".config/gemma");
    fs::create_dir_all(&user).unwrap();
    fs::write(user.join("config.toml"), "temp = 0.4\nmin-p = 0.1").unwrap();
    let line = shown(dir.path(), &[], &[], "temp");
    assert!(line.starts_with("temp = 0.4 # ") && line.ends_with("gemma/config.toml"), "{line}");
    fs::write(dir.path().join("gemma.toml"), "temp = 0.9\n[generate]\ntemp = 0.3").unwrap();
    assert_eq!(shown(dir.path(), &[], &[], "temp"), "temp = 0.3 # gemma.toml");
    let env = [("GEMMA_TEMP", "0.2")];
    assert_eq!(shown(dir.path(), &env, &[], "temp"), "temp = 0.2 # environment GEMMA_TEMP");
    assert_eq!(shown(dir.path(), &env, &["--temp", "0.1"], "temp"), "temp = 0.1 # command line");
    assert!(shown(dir.path(), &env, &[], "min-p").starts_with("min-p = 0.1 # "));
    assert_eq!(shown(dir.path(), &[("GEMMA_TEMP", "")], &[], "temp"), "temp = 0.3 # gemma.toml");
}

/// Vocabulary of a model with the demo's tokenizer.
const ROWS: usize = 16_384;

/// Returns a model of one layer, and a GGUF file of it with the demo's tokenizer and without a
/// template.
fn with_letters() -> (TinyModel, gguf::File) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/demo-target/tokenizer.json");
    let json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let model = TinyModel::new(Dims { vocab: ROWS, n_layers: 1, ..Dims::default() }, 15);
    let mut file = gguf::float_file(&model, gguf::BF16);
    file.keys.extend(gguf::tokenizer_keys(&json, ROWS));
    (model, file)
}

#[test]
fn a_draft_without_a_tokenizer_takes_the_targets() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (model, file) = with_letters();
    file.write(&at("target.gguf"));
    model.write(&at("draft"), Form::TextV4, Dtype::BF16, 1);
    assert!(!at("draft/tokenizer.json").exists());
    let run = |draft: &str| {
        let args = ["generate", "-m", "target.gguf", "--raw", "The", "--temp", "0", "-n", "40"];
        gemma_in(
            dir.path(),
            &[&args[..], &["--json", "--draft-tree", "3", "--draft", draft]].concat(),
            b"",
        )
    };
    let (plain, drafted) = (run("off").ok().json(), run("draft").ok().json());
    assert_eq!(drafted["text"], plain["text"]);
    let sources = drafted["draft"]["sources"].as_array().unwrap();
    let model = sources.iter().find(|source| source["name"] == "model").expect("it drafts");
    assert!(model["accepted"].as_u64().unwrap() > 0, "the same tokens: {model}");
    // Another vocabulary size says nothing about the tokens, unless it is that of this project's
    // draft models.
    let other = TinyModel::new(Dims { vocab: 9000, n_layers: 1, ..Dims::default() }, 15);
    other.write(&at("other"), Form::TextV4, Dtype::BF16, 1);
    run("other").fails(3, &["other/tokenizer.json is missing"]);
    for size in ["small", "medium"] {
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/gemma3-draft").join(size);
        run(own.to_str().unwrap()).fails(3, &["made for a tokenizer of 255999 tokens or more"]);
    }
}

#[test]
fn a_missing_template_is_noted_and_mistyped_control_tokens_are_a_detail() {
    let dir = tempfile::tempdir().unwrap();
    let (_, mut file) = with_letters();
    for (key, value) in &mut file.keys {
        if let ("tokenizer.ggml.token_type", gguf::Val::I32s(types)) = (key.as_str(), value) {
            types[105] = 1;
        }
    }
    file.write(&dir.path().join("base.gguf"));
    file.set("tokenizer.chat_template", gguf::Val::Str("{{ messages[0].content }}".into()));
    file.write(&dir.path().join("it.gguf"));
    let said = |args: &[&str]| {
        let run = [&["generate", "hi", "-n", "1", "--draft", "off"], args].concat();
        gemma_in(dir.path(), &run, b"").ok().err
    };
    let base = said(&["-m", "base.gguf"]);
    let note = "note: no chat template in base.gguf: it is perhaps a base model";
    assert!(base.contains(note) && base.contains("--raw continues text"), "{base}");
    assert!(!base.contains("ordinary text"), "{base}");
    let detail = "<start_of_turn> as ordinary text";
    assert!(said(&["-m", "base.gguf", "-v"]).contains(detail));
    for silent in [&["-m", "base.gguf", "--raw"][..], &["-m", "it.gguf"], &[]] {
        let said = said(silent);
        assert!(!said.contains("template") && !said.contains("ordinary text"), "{said}");
    }
}

#[test]
fn an_old_template_is_noted_and_another_can_be_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let old = "{# format_function_declaration <|turn> #}old: {{ messages[0].content }}";
    with_model(dir.path(), &[("chat_template.jinja", old.as_bytes())]);
    fs::write(dir.path().join("own.jinja"), "own: {{ messages[0].content }}").unwrap();
    let rendered = |options: &[&str]| {
        let command = ["tokenize", "-m", "m", "--rendered", "Hi"];
        let run = gemma_in(dir.path(), &[&command, options].concat(), b"").ok();
        (run.text().to_owned(), run.err)
    };
    let (text, said) = rendered(&[]);
    assert!(text == "<bos>old: Hi" && said.contains("--chat-template google"), "{text} {said}");
    let (text, said) = rendered(&["--chat-template", "own.jinja"]);
    assert!(text == "<bos>own: Hi" && said.is_empty(), "{text} {said}");
    let (text, said) = rendered(&["--chat-template", "google"]);
    let google = "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n";
    assert!(text == google && said.is_empty(), "{text} {said}");
    let run = |options: &[&str]| {
        let command = ["generate", "-m", "m", "-n", "2", "--chat-template", "own.jinja", "Hi"];
        gemma_in(dir.path(), &[&command, options].concat(), b"")
    };
    assert!(!run(&[]).ok().err.contains("template"));
    run(&["--raw"]).fails(2, &["--raw", "--chat-template"]);
    fs::remove_file(dir.path().join("own.jinja")).unwrap();
    run(&[]).fails(3, &["own.jinja"]);
}

#[test]
fn models_of_lm_studio_and_ollama_are_listed_under_names_that_work() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let write = |path: &str| {
        let path = home.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        gguf::float_file(&TinyModel::tiny(1), 0).write(&path.with_extension("gguf"));
        fs::rename(path.with_extension("gguf"), path).unwrap();
    };
    write(".lmstudio/models/org/gemma-3-1b-GGUF/gemma-3-1b-Q4_0.gguf");
    write(".cache/lm-studio/models/org/old/old.gguf");
    let digest = "ab".repeat(32);
    write(&format!(".ollama/models/blobs/sha256-{digest}"));
    let manifest = home.join(".ollama/models/manifests/registry.ollama.ai/library/gemma3/1b");
    fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    let layer = json!({"mediaType": "application/vnd.ollama.image.model",
        "digest": format!("sha256:{digest}")});
    fs::write(manifest, json!({"layers": [layer]}).to_string()).unwrap();
    let list = gemma_in(home, &["list", "--json"], b"").ok().json();
    let found = list["models"].as_array().unwrap();
    let names: Vec<&str> = found.iter().map(|m| m["model"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 3, "{list:#}");
    assert_eq!(names[0], "gemma3:1b");
    for name in names {
        let json = gemma_in(home, &["inspect", name, "--json"], b"").ok().json();
        assert_eq!(json["layers"], 4, "{name}");
    }
    let places = list["looked_in"].as_array().unwrap();
    assert!(places.iter().any(|p| p.as_str().unwrap().ends_with(".ollama/models")), "{list:#}");
}
