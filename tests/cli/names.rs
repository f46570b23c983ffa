//! Names of models: sizes, and completion in shells.

use crate::common::{TinyModel, gguf};
use crate::pull::FakeHub;
use crate::shell;
#[cfg(unix)]
use shell::bash;
use shell::{gemma, gemma_in};
use std::fs;

/// `FakeHub` has every id, so the folder in the cache shows which one was requested.
#[test]
fn a_size_is_pulled_as_the_smallest_file_and_found_by_its_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    gguf::float_file(&TinyModel::tiny(1), 1).write(&path);
    let hub = FakeHub::new(&[("gemma-3-4b-it-q4_0.gguf", &fs::read(path).unwrap(), true)]);
    let home = dir.path();
    for name in ["4b", "gemma3:4b", "gemma-3-4b", "gemma3", "gemma-3-4b-it-qat-q4_0-gguf"] {
        let run = hub.pull(home, name).ok();
        let note = format!("{name} is google/gemma-3-4b-it-qat-q4_0-gguf");
        assert!(run.err.contains(&note), "{}", run.err);
        assert!(run.text().contains("models--google--gemma-3-4b-it-qat-q4_0-gguf"), "{run:?}");
        gemma_in(home, &["inspect", name, "--json"], b"").ok();
    }
    // A file that is already quantised cannot be quantised.
    let quantize = gemma_in(home, &["quantize", "4b", "out"], b"");
    quantize.fails(3, &["google/gemma-3-4b-it is not in", "gemma pull google/gemma-3-4b-it\n"]);
    let listed = gemma_in(home, &["completions", "--models"], b"").ok();
    assert_eq!(listed.text(), "google/gemma-3-4b-it-qat-q4_0-gguf\n");
    gemma_in(home, &["inspect", "gemma-3-4b-it"], b"").fails(3, &["no model at"]);
    // An unfinished download does not cause a search for another file.
    let blobs =
        home.join(".cache/huggingface/hub/models--google--gemma-3-4b-it-qat-q4_0-gguf/blobs");
    fs::write(blobs.join("1.incomplete"), "").unwrap();
    gemma_in(home, &["inspect", "4b"], b"").fails(3, &["not complete", "gemma pull google/"]);
    fs::write(home.join("4b"), "").unwrap();
    gemma_in(home, &["inspect", "4b"], b"").fails(3, &["4b"]);
}

/// Completion scripts ask the program for the names of models.
#[cfg(unix)]
#[test]
fn shells_complete_the_names_of_models_on_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join(".cache/huggingface/hub/models--org--mine");
    for folder in ["snapshots/c0ffee", "refs"] {
        fs::create_dir_all(repo.join(folder)).unwrap();
    }
    fs::write(repo.join("refs/main"), "c0ffee").unwrap();
    fs::write(repo.join("snapshots/c0ffee/config.json"), r#"{"model_type": "gemma3"}"#).unwrap();
    let path = r#"mkdir bin && ln -s "$G" bin/gemma && PATH=$PWD/bin:$PATH"#;
    let complete = r#"complete_with() {
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _gemma gemma "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        echo "${COMPREPLY[*]}"
    }"#;
    let script = format!(
        "{path}\nsource <(gemma completions bash)\n{complete}\n\
         complete_with gemma chat -m or\ncomplete_with gemma plan o"
    );
    assert_eq!(bash(dir.path(), &script).ok().text(), "org/mine\norg/mine\n");
    for shell in ["zsh", "fish"] {
        let script = gemma(&["completions", shell], b"").ok();
        let calls = script.text().matches("gemma completions --models 2>/dev/null)").count();
        assert!(calls >= 10 && !script.text().contains("GEMMA-MODELS"), "{shell}: {calls}");
    }
}
