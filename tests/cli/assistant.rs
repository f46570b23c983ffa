//! Gemma 4's assistant on the command line: found next to its model or named, listed, quantised,
//! and refused if it does not fit.

use crate::common::write_gemma4_pair;
use crate::shell::gemma_in;
use serde_json::json;
use std::fs;

#[test]
fn the_text_is_the_same_with_the_assistant_beside_the_model_named_or_quantised() {
    let dir = tempfile::tempdir().unwrap();
    write_gemma4_pair(dir.path());
    let run = |args: &[&str]| gemma_in(dir.path(), args, b"").ok();
    let formats = ["--linear", "i8-row", "--embedding", "i8-row"];
    run(&[&["quantize", "model-assistant", "small-assistant"][..], &formats].concat());
    for more in [&["--temp", "0"][..], &["--temp", "1", "--seed", "5"]] {
        let text = |draft: &str| {
            let args = [
                "generate",
                "-m",
                "model",
                "--raw",
                "-n",
                "40",
                "--ignore-eos",
                "-v",
                "--draft",
                draft,
            ];
            run(&[&args[..], more, &["How are you?"]].concat())
        };
        let plain = text("off");
        assert!(!plain.out.is_empty());
        for draft in ["auto", "model-assistant", "small-assistant"] {
            let drafted = text(draft);
            assert_eq!(drafted.out, plain.out, "--draft {draft}");
            let found = drafted.err.contains("model-assistant next to the model drafts for it");
            assert_eq!(found, draft == "auto", "{}", drafted.err);
            assert!(!drafted.err.contains("n-grams"), "{}", drafted.err);
        }
    }
    let lines: String =
        (0..5).map(|i| format!("{{\"prompt\": \"Say {i}\", \"seed\": {i}}}\n")).collect();
    let batch = |draft: &str| {
        let args = ["generate", "--batch", "-m", "model", "-n", "20", "--parallel", "3"];
        let drafts = ["--draft", draft, "--temp", "1"];
        let out = gemma_in(dir.path(), &[&args[..], &drafts].concat(), lines.as_bytes()).ok();
        let text = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let mut texts: Vec<String> =
            out.text().lines().map(|line| text(line)["text"].to_string()).collect();
        texts.sort();
        texts
    };
    assert_eq!(batch("auto"), batch("off"));
}

#[test]
fn an_assistant_is_listed_with_its_model_and_refused_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let model = write_gemma4_pair(dir.path());
    let run = |args: &[&str]| gemma_in(dir.path(), args, b"");
    let listed = run(&["list", "--json", "."]).ok().json();
    let models = listed["models"].as_array().unwrap();
    let named = |name: &str| models.iter().find(|m| m["model"] == name).unwrap();
    assert_eq!(named("model-assistant")["drafts_for"], json!(["model"]));
    assert_eq!(named("model-assistant")["fits"], false);
    assert!(named("model").get("drafts_for").is_none() && named("model")["fits"] == true);
    assert!(run(&["list", "."]).ok().text().contains("model-assistant drafts for model."));
    let assistant = dir.path().join("model-assistant");
    fs::copy(model.join("tokenizer.json"), assistant.join("tokenizer.json")).unwrap();
    let alone = ["generate", "-m", "model-assistant", "--raw", "Hi"];
    run(&alone).fails(3, &["is an assistant", "--draft"]);
    run(&["plan", "model-assistant"]).fails(3, &["is an assistant"]);
    let text = dir.path().join("text.txt");
    fs::write(&text, "A text of some words. ".repeat(200)).unwrap();
    let calibrate = ["quantize", "model-assistant", "q", "--calibrate", "text.txt"];
    let formats = ["--linear", "i8-row", "--embedding", "i8-row"];
    run(&[&calibrate[..], &formats].concat()).fails(2, &["an assistant", "without --calibrate"]);
    // An assistant of another width: if named, it is refused; if only next to the model, it is
    // ignored.
    let config = assistant.join("config.json");
    let other = fs::read_to_string(&config)
        .unwrap()
        .replace("\"backbone_hidden_size\": 32", "\"backbone_hidden_size\": 48");
    fs::write(&config, other).unwrap();
    let named = ["generate", "-m", "model", "--raw", "Hi", "--draft", "model-assistant"];
    run(&named).fails(3, &["cannot draft with model-assistant"]);
    let auto = ["generate", "-m", "model", "--raw", "Hi", "-n", "3", "-v"];
    assert!(run(&auto).ok().err.contains("model-assistant is not used"));
}
