//! The commands in which calls fail.

use crate::common::{Dims, Form, TinyModel};
use crate::shell::{BINARY, Run, command, wait};
use crate::terminals::Terminal;
use crate::{Faults, served};
use gemma::checkpoint::Dtype;
use gemma::testing::{FAIL, FAIL_COUNTS, Point};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};

/// A command in a directory that has the model as `m`.
pub struct Scenario {
    pub name: &'static str,
    /// Creates its other input files.
    pub prepare: fn(&Path),
    pub run: fn(&Path, &Faults) -> Run,
    /// Returns the bytes of its result; `None` if there is none.
    pub result: fn(&Path) -> Option<Vec<u8>>,
    /// Whether the command keeps finished work and the next run continues it.
    pub resumes: bool,
    /// Prefixes of the paths that a failed run may leave for the next one.
    pub kept: &'static [&'static str],
    pub points: &'static [Point],
}

impl Scenario {
    pub fn keeps(&self, path: &str) -> bool {
        self.kept.iter().any(|start| path.starts_with(start))
    }
}

/// Writes a random model with the tokenizer of the demo.
pub fn model(dir: &Path) -> PathBuf {
    let dims = Dims { vocab: 16384, n_layers: 3, dim: 64, ffn_dim: 128, ..Dims::default() };
    TinyModel::new(dims, 1).write(dir, Form::TextV4, Dtype::BF16, 1);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/demo-target").join(file);
        fs::copy(bundled, dir.join(file)).unwrap();
    }
    dir.to_path_buf()
}

/// Seconds after which a run counts as hanging.
const PATIENCE: &str = "900";

fn gemma(dir: &Path, faults: &Faults, args: &[&str], input: &[u8]) -> Run {
    let mut command = command("timeout", dir);
    command.args(["-k", "1", PATIENCE, BINARY]).args(args);
    command.env(gemma::vulkan::ALLOW_CPU_DRIVER, "1");
    faults.put(&mut command, dir);
    wait(command, input)
}

fn nothing(_: &Path) {}

fn no_result(_: &Path) -> Option<Vec<u8>> {
    None
}

const ON_CPU: [&str; 6] = ["-m", "m", "-d", "cpu", "-t", "2"];
const ON_GPU: [&str; 4] = ["-m", "m", "-d", "vulkan"];

fn generate(dir: &Path, faults: &Faults, device: &[&str], more: &[&str]) -> Run {
    let args = ["generate", "-n", "12", "--seed", "7", "--ignore-eos", "The river was"];
    gemma(dir, faults, &[&args[..], device, more].concat(), b"")
}

pub const GENERATE: Scenario = Scenario {
    name: "generate",
    prepare: nothing,
    run: |dir, faults| generate(dir, faults, &ON_CPU, &["--cache-dir", "cache"]),
    result: no_result,
    resumes: false,
    kept: &[],
    points: &[
        Point::Alloc,
        Point::Open,
        Point::Read,
        Point::Write,
        Point::Rename,
        Point::Map,
        Point::Page,
    ],
};

pub const GENERATE_FILE: Scenario = Scenario {
    name: "generate -o",
    run: |dir, faults| {
        let run = generate(dir, faults, &ON_CPU, &["-o", "out", "--stats-file", "stats"]);
        // The times in it differ.
        let _ = fs::remove_file(dir.join("stats"));
        run
    },
    result: |dir| fs::read(dir.join("out")).ok(),
    ..GENERATE
};

pub const GENERATE_VULKAN: Scenario = Scenario {
    name: "generate -d vulkan",
    run: |dir, faults| generate(dir, faults, &ON_GPU, &[]),
    points: &[Point::Submit, Point::Fence],
    ..GENERATE
};

pub const QUANTIZE: Scenario = Scenario {
    name: "quantize",
    run: |dir, faults| gemma(dir, faults, &["quantize", "m", "q", "-t", "2"], b""),
    result: |dir| {
        let mut files: Vec<_> = fs::read_dir(dir.join("q")).ok()?.map(Result::unwrap).collect();
        files.sort_by_key(fs::DirEntry::file_name);
        // The report contains times.
        files.retain(|file| file.file_name() != "quant-report.json");
        Some(files.iter().flat_map(|file| fs::read(file.path()).unwrap()).collect())
    },
    kept: &[".q.partial/"],
    points: &[
        Point::Alloc,
        Point::Open,
        Point::Read,
        Point::Write,
        Point::Message,
        Point::Sync,
        Point::Rename,
        Point::Map,
        Point::Page,
    ],
    ..GENERATE
};

pub const BATCH: Scenario = Scenario {
    name: "batch --resume",
    prepare: |dir| {
        let record = |n: usize| {
            let prompt = format!("What is {n} + 1?");
            json!({"id": n, "prompt": prompt, "max_tokens": 4, "seed": n}).to_string() + "\n"
        };
        fs::write(dir.join("in"), (0..4).map(record).collect::<String>()).unwrap();
    },
    run: |dir, faults| {
        let args = ["generate", "--batch", "in", "--resume", "out", "--parallel", "1"];
        gemma(dir, faults, &[&args[..], &ON_CPU].concat(), b"")
    },
    result: |dir| fs::read(dir.join("out")).ok(),
    resumes: true,
    points: &[
        Point::Alloc,
        Point::Open,
        Point::Read,
        Point::Write,
        Point::Sync,
        Point::Rename,
        Point::Map,
        Point::Page,
    ],
    ..GENERATE
};

/// Types a conversation at a terminal, until the program ends.
fn chat(dir: &Path, faults: &Faults) -> Run {
    let _ = fs::remove_file(dir.join("talk"));
    let args = ["chat", "-n", "8", "--seed", "7", "--ignore-eos", "--color", "never"];
    let env = [(FAIL, faults.fail.clone()), (FAIL_COUNTS, faults.counts.then(|| "counts".into()))];
    let env: Vec<_> = env.iter().filter_map(|(k, v)| Some((*k, v.as_deref()?))).collect();
    let mut terminal = Terminal::open(&[&args[..], &ON_CPU].concat(), &env, dir);
    for keys in ["Hello\r", "/save talk\r", "And then?\r", "/exit\r"] {
        match terminal.find("\x1b[?2004h") {
            Some(_) => terminal.keys(keys),
            None => break,
        }
    }
    let (code, err) = terminal.end();
    // A failed answer or command is reported, and the chat continues.
    let code = if code == Some(0) && err.contains("error: ") { Some(1) } else { code };
    Run { code: code.unwrap_or(-1), out: Vec::new(), err }
}

pub const CHAT: Scenario = Scenario {
    name: "chat",
    run: chat,
    result: |dir| fs::read(dir.join("talk")).ok(),
    ..GENERATE_FILE
};

pub const SERVE: Scenario = Scenario {
    name: "serve",
    run: |dir, faults| served::run(dir, faults, &ON_CPU),
    points: &[Point::Alloc, Point::Open, Point::Read, Point::Map, Point::Page],
    ..GENERATE
};

pub const SERVE_VULKAN: Scenario = Scenario {
    name: "serve -d vulkan",
    run: |dir, faults| served::run(dir, faults, &ON_GPU),
    points: &[Point::Submit, Point::Fence],
    ..GENERATE
};
