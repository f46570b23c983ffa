//! `gemma eval` with a reference: kinds of text, and windows.

use crate::{common, shell};
use common::{Form, TinyModel};
use gemma::checkpoint::Dtype;
use serde_json::Value;
use shell::{Run, gemma, gemma_in};
use std::fs;
use tempfile::TempDir;

/// Writes tiny models `b` and `c` with one vocabulary, `a` quantised from `b`, and two lists of
/// ids.
fn setup() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::tiny(1).write(&dir.path().join("b"), Form::TextV4, Dtype::BF16, 1);
    TinyModel::tiny(2).write(&dir.path().join("c"), Form::TextV4, Dtype::BF16, 1);
    gemma_in(
        dir.path(),
        &["quantize", "b", "a", "--linear", "i4-g32", "--embedding", "i8-row", "-q"],
        b"",
    )
    .ok();
    let ids = |n: u32, k: u32| {
        format!("{{\"ids\": {:?}}}", (0..n).map(|i| (i * i + k) % 150).collect::<Vec<_>>())
    };
    fs::write(dir.path().join("x.json"), ids(90, 3)).unwrap();
    fs::write(dir.path().join("y.json"), ids(60, 7)).unwrap();
    dir
}

fn eval(dir: &TempDir, more: &[&str]) -> Run {
    gemma_in(
        dir.path(),
        &[&["eval", "-m", "a", "--reference", "b", "--json", "-q"], more].concat(),
        b"",
    )
}

fn number(json: &Value, keys: &[&str]) -> f64 {
    keys.iter().fold(json, |j, k| &j[*k]).as_f64().unwrap()
}

#[test]
fn kinds_of_text_are_told_apart_and_summed() {
    let dir = setup();
    let (x, y) = (
        eval(&dir, &["--ids", "x.json"]).ok().json(),
        eval(&dir, &["--ids", "y.json"]).ok().json(),
    );
    assert!(x.get("categories").is_none());
    let both = eval(&dir, &["--ids", "one=x.json", "--ids", "y.json", "-c", "90"]).ok().json();
    assert_eq!((&both["categories"]["one"], &both["categories"]["y"]), (&x, &y));
    let mean = (number(&x, &["kld", "mean"]) * 89.0 + number(&y, &["kld", "mean"]) * 59.0) / 148.0;
    assert!((number(&both, &["kld", "mean"]) - mean).abs() < 1e-9);
    assert_eq!(
        both["kld"]["max"],
        [&x, &y]
            .into_iter()
            .max_by(|a, b| number(a, &["kld", "max"]).total_cmp(&number(b, &["kld", "max"])))
            .unwrap()["kld"]["max"]
    );
    assert_eq!(both["tokens"], 150);
    assert!(number(&both, &["nll_stderr"]) > 0.0 && number(&both, &["kld", "stderr"]) > 0.0);
    assert!(number(&both, &["top1_stderr"]) > 0.0 && number(&both, &["ppl_ratio_stderr"]) > 0.0);
    let shown = ["eval", "-m", "a", "--reference", "b", "--ids", "x.json", "-q"];
    let shown = gemma_in(dir.path(), &shown, b"").ok();
    assert_eq!(shown.text().matches(" +- ").count(), 3, "{}", shown.text());
    let log = gemma_in(dir.path(), &["eval", "-m", "a", "--ids", "x.json"], b"").ok();
    assert!(log.err.contains("evaluating 90 tokens"), "{}", log.err);
    gemma_in(dir.path(), &["eval", "-m", "a"], b"").fails(2, &["gemma eval FILE", "--ids"]);
    eval(&dir, &["--ids", "x.json", "--ids", "x.json"])
        .fails(2, &["two texts of kind x", "help: "]);
    let text =
        gemma_in(dir.path(), &["eval", "-m", "a", "--ids", "x.json", "--ids", "y.json", "-q"], b"")
            .ok();
    assert!(
        text.text().lines().count() == 3 && text.text().starts_with("all  150 tokens: mean NLL "),
        "{text:?}"
    );
    assert!(text.text().lines().all(|line| line.matches(" +- ").count() == 2), "{text:?}");
}

#[test]
fn skipped_tokens_are_context_only() {
    let dir = setup();
    let whole = eval(&dir, &["--ids", "x.json", "-c", "45"]).ok().json();
    let half = eval(&dir, &["--ids", "x.json", "-c", "45", "--skip", "22"]).ok().json();
    let nll = |j: &Value| j["nll"].as_array().unwrap().clone();
    assert_eq!((nll(&whole).len(), nll(&half).len()), (88, 44));
    assert_eq!(nll(&half)[..22], nll(&whole)[22..44]);
    eval(&dir, &["--ids", "x.json", "-c", "45", "--skip", "44"]).fails(2, &["--skip 44", "help: "]);
}

/// Every window of a text begins with BOS, so the windows after the first are scored as well as it.
#[test]
fn windows_of_a_text_begin_with_bos() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("t.txt"), "The sun is a star. ".repeat(40)).unwrap();
    let eval = |c: &str| {
        let path = dir.path().join("t.txt");
        gemma(&["eval", path.to_str().unwrap(), "-c", c, "--json", "-q"], b"").ok().json()
    };
    let (whole, cut) = (eval("2000"), eval("21"));
    let windows = (whole["tokens"].as_u64().unwrap() - 1).div_ceil(20);
    assert_eq!(cut["tokens"].as_u64().unwrap(), whole["tokens"].as_u64().unwrap() - 1 + windows);
    // The kind of a text may come before its path.
    let plain =
        gemma_in(dir.path(), &["eval", "prose=t.txt", "-c", "21", "--json", "-q"], b"").ok().json();
    assert_eq!(plain, cut);
    // The token after BOS is scored in each window.
    assert_eq!(cut["nll"].as_array().unwrap().len() as u64, whole["tokens"].as_u64().unwrap() - 1);
    assert_eq!(cut["nll"][0], whole["nll"][0]);
}
