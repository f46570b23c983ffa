//! Google's Gemma 3 270M in Q4_K_M. `scripts/real-gemma.sh` fetches the weights and runs these
//! tests: `GEMMA_REAL` names the file, `GEMMA_REAL_F16` its expansion to f16. The golden data come
//! from `scripts/golden/real.py`.
//!
//! Devices: `GEMMA_REAL_DEVICES`, separated by blanks [default: cpu].

#[path = "../common/shell.rs"]
mod shell;

mod memory;
mod scores;
mod texts;

use serde::Deserialize;
use shell::{BINARY, Run};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Data of one text: likelihoods of `ids[1..]`, and at some positions the eight largest logits of
/// the next token.
#[derive(Deserialize)]
struct Text {
    ids: Vec<u32>,
    nll: Vec<f64>,
    top: BTreeMap<usize, (Vec<u32>, Vec<f32>)>,
}

#[derive(Deserialize)]
struct Golden {
    texts: BTreeMap<String, Text>,
    /// Prompts, each with llama.cpp's continuation at temperature 0.
    written: Vec<(Vec<u32>, Vec<u32>)>,
}

fn golden() -> Golden {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/real-270m.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn file(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable).unwrap_or_else(|| panic!("{variable} names no file"));
    assert!(Path::new(&path).is_file(), "{variable}: {path:?} is no file");
    path.into()
}

fn model() -> PathBuf {
    file("GEMMA_REAL")
}

fn devices() -> Vec<String> {
    let all = std::env::var("GEMMA_REAL_DEVICES").unwrap_or("cpu".into());
    all.split_whitespace().map(str::to_owned).collect()
}

/// Returns the program with the model on a device. It has no settings but the drivers of this
/// machine.
fn gemma(words: &[&str], device: &str) -> Command {
    // A machine with a GPU may lack cargo. There, the variable names the program.
    let program = std::env::var_os("CARGO_BIN_EXE_gemma").unwrap_or_else(|| BINARY.into());
    let mut command = Command::new(program);
    command.args(words).arg("-m").arg(model()).args(["-q", "-d", device]);
    command.env("GEMMA_VULKAN_CPU", "1").stdin(Stdio::null());
    command
}

fn run(mut command: Command) -> Run {
    let output = command.output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    Run { code: shell::code(output.status), out: output.stdout, err }.ok()
}
