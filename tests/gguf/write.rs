//! GGUF files of the quantiser: they reproduce the source bit for bit, and sources that GGUF cannot
//! represent are refused.

use crate::common;
use common::gguf::{self, directory, logits};
use common::{Dims, TinyModel};
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::error::{Kind, fault_of};
use gemma::models::{ChatTemplate, Generation, Special, TensorSpec, Tokenizer, Weights};
use gemma::quant::{
    Importance, Nearest, QuantPlan, QuantProgress, QuantReport, QuantizeOptions, Recipe, quantize,
    run,
};
use gemma::tensor::Format;
use gemma::tensor::quantize::quantize as round;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const GGUF: QuantizeOptions = QuantizeOptions {
    threads: 2,
    shard_bytes: 1 << 40,
    memory: None,
    restart: false,
    requantize: false,
    gguf: true,
    verify: true,
};

/// Returns a model in which every sixth layer is global, as llama.cpp expects.
fn model(seed: u64) -> TinyModel {
    TinyModel::new(Dims { n_layers: 6, pattern: 6, ..Dims::default() }, seed)
}

fn open(path: &Path) -> Weights {
    Weights::open(Checkpoint::open(path).unwrap()).unwrap()
}

fn convert(
    from: &Weights,
    to: &Path,
    recipe: &Recipe,
    options: &QuantizeOptions,
) -> anyhow::Result<QuantReport> {
    quantize(from, to, recipe, options, &mut |_| Ok(()))
}

fn inline(linear: &str, embedding: &str) -> Recipe {
    Recipe::inline(linear.parse().unwrap(), embedding.parse().unwrap())
}

/// Returns pieces with merges that do not follow from their scores: `a bc` is not one.
fn small_tokenizer() -> Value {
    let mut pieces: Vec<String> = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "a",
        "b",
        "c",
        "▁",
        "ab",
        "bc",
        "abc",
        "▁▁",
        "▁▁▁",
        "<0x64>",
        "<mask>",
    ]
    .map(String::from)
    .to_vec();
    pieces.extend((pieces.len()..105).map(|i| format!("<unused{i}>")));
    pieces.extend(["<start_of_turn>", "<end_of_turn>", "▁a"].map(String::from));
    let vocab: serde_json::Map<_, _> =
        pieces.iter().enumerate().map(|(i, p)| (p.clone(), i.into())).collect();
    let added = [
        (0, true),
        (1, true),
        (2, true),
        (3, true),
        (11, false),
        (12, false),
        (14, false),
        (20, false),
        (105, true),
        (106, true),
    ]
    .map(|(i, special)| {
        json!({"id": i, "content": pieces[i], "special": special,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
    });
    json!({
        "version": "1.0", "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "model": {"type": "BPE", "vocab": vocab, "byte_fallback": true, "fuse_unk": true,
            "unk_token": "<unk>",
            "merges": [["▁", "▁"], ["▁▁", "▁"], ["b", "c"], ["a", "b"], ["▁", "a"], ["ab", "c"]]},
    })
}

/// Writes a directory with everything that a GGUF file needs.
fn source(seed: u64, dir: &Path, dtype: Dtype) -> PathBuf {
    let path = directory(&model(seed), dir, dtype);
    fs::write(path.join("tokenizer.json"), small_tokenizer().to_string()).unwrap();
    fs::write(path.join("chat_template.jinja"), "{{ bos_token }}{{ messages[0].content }}")
        .unwrap();
    path
}

/// Returns every tensor of a GGUF file as stored.
fn raw(path: &Path) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut all: Vec<_> = checkpoint
        .tensors()
        .map(|(n, t)| (n.to_string(), t.shape.to_vec(), t.data.to_vec()))
        .collect();
    all.sort();
    all
}

#[test]
fn a_stopped_file_goes_on_in_the_rows_of_its_table() {
    let dir = tempfile::tempdir().unwrap();
    let from = open(&source(27, dir.path(), Dtype::F32));
    let out = |calls: usize, name: &str| {
        let (mut solver, mut left) = (Nearest::new(2), calls);
        let (recipe, importance) = (inline("i4-g32", "i4-g32"), |_, _| 1.0);
        let importance = Importance::Relative(&importance);
        let mut plan = QuantPlan::new(&from, &recipe, &GGUF, &solver, importance).unwrap();
        plan.chunk = 16 * 128;
        let path = dir.path().join(name);
        let done = run(&from, &path, &plan, &GGUF, &mut solver, &mut |_| {
            left -= 1;
            anyhow::ensure!(left > 0, "enough");
            Ok(())
        });
        done.map(|_| fs::read(path).unwrap())
    };
    let whole = out(usize::MAX, "whole.gguf").unwrap();
    for calls in [3, 2] {
        out(calls, "b.gguf").unwrap_err();
    }
    let journal = fs::read_to_string(dir.path().join(".b.gguf.partial/journal")).unwrap();
    assert!(journal.lines().last().unwrap().contains("\"rows\":48"), "{journal}");
    assert!(out(usize::MAX, "b.gguf").unwrap() == whole);
    // If another file appears at the destination during the run, it stays, and so does the result.
    let (mine, made) = (dir.path().join("c.gguf"), dir.path().join(".c.gguf.partial/files"));
    let recipe = inline("i4-g32", "i4-g32");
    let appears = &mut |_: QuantProgress<'_>| Ok(fs::write(&mine, "mine")?);
    let error = quantize(&from, &mine, &recipe, &GGUF, appears).unwrap_err();
    assert!(error.to_string().contains("c.gguf appeared during the run"), "{error:#}");
    assert_eq!(fs::read(&mine).unwrap(), b"mine");
    assert_eq!(fs::read_dir(made).unwrap().count(), 1);
    fs::remove_file(&mine).unwrap();
    convert(&from, &mine, &recipe, &GGUF).unwrap();
    assert!(fs::read(&mine).unwrap() == whole);
}

#[test]
fn a_q4_0_file_comes_out_again_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(21);
    // As in Google's files: Q4_0 with an embedding table in f16. Also all in Q4_0, or in Q8_0.
    for (i, (kind, format, table, recipe)) in [
        (gguf::Q4_0, "i4-g32", gguf::F16, Recipe::load("int4").unwrap()),
        (gguf::Q4_0, "i4-g32", gguf::Q4_0, inline("i4-g32", "i4-g32")),
        (gguf::Q8_0, "i8-g32", gguf::Q8_0, inline("i8-g32", "i8-g32")),
    ]
    .into_iter()
    .enumerate()
    {
        let mut file = gguf::file(&model, |t| {
            let (name, shape, values) = &model.tensors[t];
            if name.starts_with("embed") && table == gguf::F16 {
                return (table, gguf::floats(table, values));
            }
            let format: Format = format.parse().unwrap();
            (kind, gguf::blocks(kind, &round(format, shape[0], shape[1], values).unwrap()))
        });
        file.remove("gemma3.attention.sliding_window_pattern");
        file.keys.extend(gguf::tokenizer_keys(&small_tokenizer(), 160));
        let path = |what: &str| dir.path().join(format!("{i}-{what}"));
        file.write(&path("in.gguf"));
        let first = open(&path("in.gguf"));
        convert(&first, &path("artifact"), &recipe, &QuantizeOptions::default()).unwrap();
        let second = open(&path("artifact"));
        convert(&second, &path("out.gguf"), &recipe, &GGUF).unwrap();
        let (a, b) = (raw(&path("in.gguf")), raw(&path("out.gguf")));
        assert_eq!(a.len(), b.len());
        for (a, b) in
            a.iter().zip(&b).filter(|(a, _)| table != gguf::F16 || a.0 != "token_embd.weight")
        {
            assert!(a == b, "{} differs from {}", a.0, b.0);
        }
        let third = open(&path("out.gguf"));
        // A table of int8 rows is read back in groups: the same values, but their products are
        // summed in another order.
        if table != gguf::F16 {
            assert_eq!(logits(&second), logits(&third));
            assert_eq!(logits(&first), logits(&third));
        }
        assert_eq!(first.config(), third.config());
    }
}

#[test]
fn what_is_written_says_all_that_the_directory_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = source(22, dir.path(), Dtype::BF16);
    let from = open(&path);
    for (linear, embedding, exact) in
        [("bf16", "f32", true), ("i4-row", "i8-g64", false), ("i4-g128", "bf16", false)]
    {
        let recipe = inline(linear, embedding);
        // On Windows, the name of a mapped file stays in use.
        let file = |name: &str| dir.path().join(format!("{name}-{linear}.gguf"));
        let (out, twice, again) = (file("out"), file("twice"), file("again"));
        let artifact = dir.path().join(format!("artifact-{linear}"));
        convert(&from, &artifact, &recipe, &QuantizeOptions::default()).unwrap();
        let plan = QuantPlan::new(
            &from,
            &recipe,
            &GGUF,
            &Nearest::new(1),
            Importance::Relative(&|_, _| 1.0),
        )
        .unwrap();
        convert(&from, &out, &recipe, &GGUF).unwrap();
        assert_eq!(fs::metadata(&out).unwrap().len(), plan.total_bytes);
        let to = open(&out);
        assert!(to.notes().is_empty(), "{:?}", to.notes());
        assert_eq!(to.config(), from.config());
        for &TensorSpec { role, layer, .. } in from.tensors() {
            let values = |w: &Weights| match role.is_matrix() {
                true => w.matrix(role, layer).unwrap().dequantize(),
                false => w.vector(role, layer).unwrap(),
            };
            assert_eq!(values(&to), values(&open(&artifact)), "{role:?}");
            if exact {
                assert_eq!(values(&to), values(&from), "{role:?}");
            }
        }
        // A second run, and a run from the written file, give the same result.
        convert(&from, &twice, &recipe, &QuantizeOptions { threads: 5, ..GGUF }).unwrap();
        assert_eq!(raw(&twice), raw(&out));
        if exact {
            convert(&open(&twice), &again, &recipe, &GGUF).unwrap();
            assert_eq!(raw(&twice), raw(&again));
        }
        let checkpoint = to.checkpoint().unwrap();
        assert_eq!(
            ChatTemplate::from_checkpoint(checkpoint, &gemma::models::gemma3::DIALECT)
                .unwrap()
                .source(),
            "{{ bos_token }}{{ messages[0].content }}"
        );
        let generation = Generation::of(checkpoint).unwrap();
        assert_eq!(
            (generation.eos, generation.top_k, generation.top_p),
            (vec![1, 106], Some(64), Some(0.95))
        );
    }
}

#[test]
fn the_tokenizer_goes_there_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let bundled =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/demo-target/tokenizer.json"))
            .unwrap();
    let dims = Dims {
        vocab: 16_390,
        n_layers: 1,
        pattern: 6,
        dim: 32,
        ffn_dim: 32,
        n_heads: 1,
        n_kv_heads: 1,
        ..Dims::default()
    };
    let big = directory(&TinyModel::new(dims, 23), &dir.path().join("big"), Dtype::BF16);
    fs::write(big.join("tokenizer.json"), &bundled).unwrap();
    let small = source(23, dir.path(), Dtype::BF16);
    let texts = [
        "abc  abc   a",
        "a<mask>b <unused20><end_of_turn>d",
        "Hello there,\n\n    world — 😀 <0x41> 1234 unbelievably",
        "<start_of_turn>",
    ];
    for (i, path) in [&big, &small].into_iter().enumerate() {
        let out = dir.path().join(format!("{i}.gguf"));
        convert(&open(path), &out, &inline("bf16", "bf16"), &GGUF).unwrap();
        let read = |bytes: &[u8]| Tokenizer::from_bytes(bytes).unwrap();
        let want = read(&fs::read(path.join("tokenizer.json")).unwrap());
        let weights = open(&out);
        let got =
            read(&weights.checkpoint().unwrap().side_file("tokenizer.json").unwrap().unwrap());
        for text in texts {
            for special in [Special::AsText, Special::Parse] {
                assert_eq!(
                    got.encode(text, special).unwrap(),
                    want.encode(text, special).unwrap(),
                    "{text:?}"
                );
            }
        }
        assert_eq!(got.control(), want.control());
        // A draft model may be in either kind of file.
        assert!(got.sha256() != want.sha256() && got.agrees_with(&want) && want.agrees_with(&got));
        assert!(
            !got.agrees_with(&read(
                &fs::read(if i == 0 {
                    small.join("tokenizer.json")
                } else {
                    big.join("tokenizer.json")
                })
                .unwrap()
            ))
        );
    }
}

#[test]
fn a_run_that_was_ended_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let from = open(&source(24, dir.path(), Dtype::F16));
    let (whole, cut) = (dir.path().join("whole.gguf"), dir.path().join("cut.gguf"));
    let recipe = inline("i4-g32", "i8-row");
    convert(&from, &whole, &recipe, &GGUF).unwrap();
    let mut left = 24;
    let result = quantize(&from, &cut, &recipe, &GGUF, &mut |progress| {
        left -= progress.error.is_some() as usize;
        anyhow::ensure!(left > 0, "enough");
        Ok(())
    });
    assert!(result.is_err() && !cut.exists());
    assert!(gemma::quant::unfinished(&cut).is_some_and(|u| u.done > 20));
    convert(&from, &cut, &recipe, &GGUF).unwrap();
    assert!(fs::read(&cut).unwrap() == fs::read(&whole).unwrap());
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn what_cannot_be_said_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = source(25, dir.path(), Dtype::BF16);
    let out = dir.path().join("out.gguf");
    let refused = |path: &Path, recipe: &Recipe, kind: Kind, word: &str| {
        let error = convert(&open(path), &out, recipe, &GGUF).expect_err(word);
        let fault = fault_of(&error).unwrap_or_else(|| panic!("{error:#}"));
        assert_eq!(fault.kind, kind, "{error:#}");
        assert!(fault.help.is_some() && format!("{error:#}").contains(word), "{error:#}");
    };
    let fine = inline("i4-g32", "i8-row");
    for linear in ["i2-g32", "i4-row+h128", "i2-row"] {
        refused(&path, &inline(linear, "bf16"), Kind::Usage, linear);
    }
    let edit = |key: &str, value: Value| {
        let other = dir.path().join(format!("other-{key}"));
        fs::create_dir(&other).unwrap();
        for file in fs::read_dir(&path).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), other.join(file.file_name())).unwrap();
        }
        let mut config: Value =
            serde_json::from_slice(&fs::read(other.join("config.json")).unwrap()).unwrap();
        config[key] = value;
        fs::write(other.join("config.json"), config.to_string()).unwrap();
        other
    };
    refused(&edit("query_pre_attn_scalar", json!(21)), &fine, Kind::Model, "attention scale");
    refused(&edit("sliding_window_pattern", json!(3)), &fine, Kind::Model, "every 6th");
    refused(&edit("rope_local_base_freq", json!(5000.0)), &fine, Kind::Model, "local layers");
    fs::remove_file(path.join("tokenizer.json")).unwrap();
    refused(&path, &fine, Kind::Model, "tokenizer.json");
    fs::write(path.join("tokenizer.json"), small_tokenizer().to_string()).unwrap();
    fs::create_dir(&out).unwrap();
    refused(&path, &fine, Kind::Usage, "exists");
}

#[test]
fn the_commands_take_and_make_such_files() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(26, dir.path(), Dtype::BF16);
    fs::write(dir.path().join("ids.json"), r#"{"ids": [2, 4, 5, 6, 7, 105, 106, 4]}"#).unwrap();
    let gemma = |args: &[&str]| {
        let mut command = assert_cmd::Command::cargo_bin("gemma").unwrap();
        let output = command
            .args(args)
            .arg("-q")
            .current_dir(dir.path())
            .env_remove("GEMMA_MODEL")
            .assert()
            .success();
        String::from_utf8(output.get_output().stdout.clone()).unwrap()
    };
    let from = from.to_str().unwrap();
    gemma(&["quantize", from, "a.gguf", "--linear", "bf16", "--embedding", "bf16"]);
    let eval = |model: &str| gemma(&["eval", "-m", model, "--ids", "ids.json", "--json"]);
    assert_eq!(eval("a.gguf"), eval(from));
    let report: Value =
        serde_json::from_str(&gemma(&["inspect", "a.gguf", "--json", "--verify"])).unwrap();
    assert_eq!((&report["layers"], &report["vocab"]), (&json!(6), &json!(160)));
    assert_eq!(
        gemma(&["tokenize", "-m", "a.gguf", "abc a"]),
        gemma(&["tokenize", "-m", from, "abc a"])
    );
    let text = |model: &str| {
        gemma(&["generate", "-m", model, "--seed", "3", "-n", "8", "--draft", "ngram", "abc"])
    };
    assert_eq!(text("a.gguf"), text(from));
    if cfg!(feature = "bundled") {
        // No bundled draft model knows these tokens. The run prints that and goes on without
        // drafts.
        let mut command = assert_cmd::Command::cargo_bin("gemma").unwrap();
        command
            .args(["generate", "-m", "a.gguf", "--seed", "3", "-n", "8", "--draft", "auto", "abc"]);
        let output = command
            .current_dir(dir.path())
            .env_remove("GEMMA_MODEL")
            .assert()
            .success()
            .get_output()
            .clone();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.contains("there is no bundled draft model for this model")
                && said.contains("was made for a tokenizer of 255999"),
            "{said}"
        );
        assert_eq!(String::from_utf8(output.stdout).unwrap(), text("a.gguf"));
    }
}

/// A kill between the last rename and the end leaves an empty `files/`.
#[test]
fn leftovers_beside_a_finished_file_are_swept() {
    let dir = tempfile::tempdir().unwrap();
    let from = open(&source(31, dir.path(), Dtype::BF16));
    let (dst, partial) = (dir.path().join("d.gguf"), dir.path().join(".d.gguf.partial"));
    let again = || {
        fs::create_dir_all(partial.join("files")).unwrap();
        fs::write(partial.join("journal"), "{}\n").unwrap();
        let error = convert(&from, &dst, &inline("i4-g32", "i8-g32"), &GGUF).unwrap_err();
        assert!(error.to_string().ends_with("exists"), "{error:#}");
    };
    fs::write(&dst, "a result").unwrap();
    again();
    assert!(!partial.exists());
    // Unfinished work stays.
    fs::create_dir_all(partial.join("files")).unwrap();
    fs::write(partial.join("files/model.gguf"), "half of it").unwrap();
    again();
    assert!(partial.exists());
}
