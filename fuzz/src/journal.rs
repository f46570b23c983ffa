//! A conversion that resumes with a damaged journal, damaged files or damaged state. It either
//! writes the bytes of an undisturbed run, or refuses the journal; restarted, it then writes the
//! same bytes.

use super::DIRECTORY;
use super::made_up::{Cursor, edited};
use anyhow::{Result, ensure};
use gemma::checkpoint::Checkpoint;
use gemma::error::fault_of;
use gemma::models::Weights;
use gemma::quant::{
    Importance, Nearest, QuantPlan, QuantizeOptions, Recipe, Solver, TensorPlan, run,
};
use gemma::tensor::{Format, Matrix};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::LazyLock;

/// Contents of files by path.
type Files = BTreeMap<String, Vec<u8>>;

/// Columns of all matrices.
const DIM: usize = 32;

const CONFIG: &str = r#"{"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 32,
    "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": 48, "eos_token_id": 1}"#;

/// Rounds to the nearest code, and has a state after each layer.
struct WithState {
    nearest: Nearest,
    state: [f32; 4],
}

impl WithState {
    fn new() -> WithState {
        WithState { nearest: Nearest::new(1), state: [0.0; 4] }
    }
}

impl Solver for WithState {
    fn name(&self) -> String {
        "fuzzed".into()
    }

    fn wants_resumed(&self, _entry: &TensorPlan) -> bool {
        true
    }

    fn matrix(
        &mut self,
        entry: &TensorPlan,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<Matrix<'static>> {
        self.nearest.matrix(entry, format, rows, values)
    }

    fn resumed(&mut self, entry: &TensorPlan, matrix: &Matrix<'_>) -> Result<()> {
        assert!(matrix.rows <= entry.rows && matrix.cols == entry.cols);
        Ok(())
    }

    fn state(&mut self, layer: usize) -> Result<Vec<&[f32]>> {
        self.state = [layer as f32 + 0.5; 4];
        Ok(vec![&self.state])
    }

    fn restore(&mut self, layer: usize, state: Vec<f32>) -> Result<()> {
        assert_eq!(state, [layer as f32 + 0.5; 4], "a damaged state is ignored");
        Ok(())
    }
}

/// A source, and the results of complete and interrupted runs.
struct Case {
    source: Weights,
    plan: QuantPlan,
    whole: Files,
    /// Staging directories of interrupted runs.
    partial: Vec<Files>,
}

static CASE: LazyLock<Case> = LazyLock::new(|| Case::new().expect("the directory has room"));

fn options(restart: bool) -> QuantizeOptions {
    QuantizeOptions { threads: 1, shard_bytes: 4000, restart, ..QuantizeOptions::default() }
}

/// Writes a model of small weights.
fn write_source(directory: &Path) -> Result<()> {
    let mut header = Map::new();
    let mut data: Vec<u8> = Vec::new();
    let mut add = |name: String, shape: &[usize]| {
        let start = data.len();
        let count: usize = shape.iter().product();
        // bf16 from 1/8 to 1/2 of both signs.
        let values = (0..count).map(|i| (start + i * 40_503) as u16);
        data.extend(values.flat_map(|x| (0x3e00 | x & 0x80ff).to_le_bytes()));
        let offsets = [start, data.len()];
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": offsets}));
    };
    add("model.embed_tokens.weight".into(), &[48, DIM]);
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize]| {
            add(format!("model.layers.{layer}.{name}.weight"), shape);
        };
        for name in ["input", "post_attention", "pre_feedforward", "post_feedforward"] {
            add(&format!("{name}_layernorm"), &[DIM]);
        }
        ["self_attn.q_norm", "self_attn.k_norm"].iter().for_each(|name| add(name, &[DIM]));
        for name in ["q", "k", "v", "o"] {
            add(&format!("self_attn.{name}_proj"), &[DIM, DIM]);
        }
        ["gate", "up", "down"].iter().for_each(|n| add(&format!("mlp.{n}_proj"), &[DIM, DIM]));
    }
    add("model.norm.weight".into(), &[DIM]);
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::create_dir_all(directory)?;
    fs::write(directory.join("config.json"), CONFIG)?;
    let whole = [&length[..], header.as_bytes(), &data].concat();
    Ok(fs::write(directory.join("model.safetensors"), whole)?)
}

/// Reads all files below a directory.
fn read(directory: &Path, prefix: &str, files: &mut Files) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let name = format!("{prefix}{}", name.to_string_lossy());
        match path.is_dir() {
            true => read(&path, &format!("{name}/"), files)?,
            false => _ = files.insert(name, fs::read(&path)?),
        }
    }
    Ok(())
}

fn files_of(directory: &Path) -> Result<Files> {
    let mut files = Files::new();
    read(directory, "", &mut files)?;
    Ok(files)
}

impl Case {
    fn new() -> Result<Case> {
        let directory = DIRECTORY.join("source");
        write_source(&directory)?;
        let source = Weights::open(Checkpoint::open(&directory)?)?;
        let recipe = Recipe::inline("i4-g32".parse()?, "i8-row".parse()?);
        let importance = Importance::Relative(&|_, _| 1.0);
        let mut plan =
            QuantPlan::new(&source, &recipe, &options(false), &WithState::new(), importance)?;
        // Sixteen rows of a matrix at a time.
        plan.chunk = 16 * DIM;
        let mut case = Case { source, plan, whole: Files::new(), partial: Vec::new() };
        let destination = DIRECTORY.join("whole");
        case.run(&destination, false, usize::MAX)?;
        case.whole = files_of(&destination)?;
        for calls in 1.. {
            if case.run(&DIRECTORY.join("part"), false, calls).is_ok() {
                break;
            }
            let partial = DIRECTORY.join(".part.partial");
            if partial.exists() {
                case.partial.push(files_of(&partial)?);
                fs::remove_dir_all(partial)?;
            }
        }
        Ok(case)
    }

    /// Runs the conversion until its progress was reported `calls` times.
    fn run(&self, destination: &Path, restart: bool, mut calls: usize) -> Result<()> {
        let mut tell = |_: gemma::quant::QuantProgress<'_>| {
            ensure!(calls > 0, "interrupted");
            calls -= 1;
            Ok(())
        };
        let mut solver = WithState::new();
        let options = options(restart);
        run(&self.source, destination, &self.plan, &options, &mut solver, &mut tell).map(|_| ())
    }
}

/// Edits a line of the journal.
fn edit_journal(cursor: &mut Cursor<'_>, journal: &mut Vec<u8>) {
    const FIELDS: &str = "tensor format offset bytes sha256 source_sha256 relative_error rows side
        sums journal version source stamps recipe solver shard_bytes";
    let mut lines: Vec<Vec<u8>> =
        journal.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    if lines.is_empty() {
        return;
    }
    let (at, other) = (cursor.index(lines.len()), cursor.index(lines.len()));
    match cursor.byte() % 8 {
        0 => _ = lines.remove(at),
        1 => lines.insert(at, lines[other].clone()),
        2 => lines.swap(at, other),
        3 => {
            let length = cursor.byte().into();
            lines.insert(at, [cursor.bytes(length), b"\n"].concat());
        }
        4 => lines.truncate(at),
        _ => {
            // Keeps the digest after the last space.
            let space = lines[at].iter().rposition(|byte| *byte == b' ').unwrap_or(0);
            let (json, digest) = lines[at].split_at(space);
            if let Ok(line) = serde_json::from_slice(json) {
                lines[at] = [&edited(cursor, &line, FIELDS), digest].concat();
            }
        }
    }
    *journal = lines.concat();
}

/// Damages a file of the staging directory.
fn edit_file(cursor: &mut Cursor<'_>, files: &mut Files) {
    let Some(name) = files.keys().nth(cursor.index(files.len().max(1))).cloned() else { return };
    let other = files.values().nth(cursor.index(files.len())).cloned().unwrap_or_default();
    let bytes = files.get_mut(&name).expect("it is a key of the map");
    match cursor.byte() % 8 {
        0 => _ = files.remove(&name),
        1 => *bytes = other,
        2 => bytes.truncate(cursor.index(bytes.len() + 1)),
        3 => bytes.extend(vec![cursor.byte(); cursor.byte().into()]),
        _ if bytes.is_empty() => {}
        _ => {
            let at = cursor.index(bytes.len());
            bytes[at] ^= cursor.byte();
        }
    }
}

pub fn journal(data: &[u8]) {
    let (case, mut cursor) = (&*CASE, Cursor::new(data));
    let mut files = case.partial[cursor.index(case.partial.len())].clone();
    for _ in 0..cursor.byte() % 5 {
        match files.get_mut("journal").filter(|_| cursor.byte() % 2 == 0) {
            Some(journal) => edit_journal(&mut cursor, journal),
            None => edit_file(&mut cursor, &mut files),
        }
    }
    let (destination, staging) = (DIRECTORY.join("new"), DIRECTORY.join(".new.partial"));
    for (name, bytes) in &files {
        let path = staging.join(name);
        fs::create_dir_all(path.parent().expect("it is in the directory")).expect("there is room");
        fs::write(path, bytes).expect("there is room");
    }
    let resumed = case.run(&destination, false, usize::MAX);
    if let Err(error) = &resumed {
        assert!(fault_of(error).is_some(), "an error says what to do: {error:#}");
        assert!(!destination.exists());
        case.run(&destination, true, usize::MAX).expect("a new run needs nothing of an old one");
    }
    let made = files_of(&destination).expect("it is there");
    assert!(made == case.whole, "the bytes differ");
    assert!(!staging.exists());
    fs::remove_dir_all(destination).expect("it is there");
}
