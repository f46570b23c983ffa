//! Output of `inspect`, `list` and `plan` for files that users have.

use crate::common::gguf::{self, File, Val};
use crate::common::{Dims, Form, TinyModel};
use gemma::checkpoint::Dtype;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Types of a file by their number: name, weights and bytes of a block.
const TYPES: [(u32, &str, usize, usize); 8] = [
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (30, "bf16", 1, 2),
    (2, "q4_0", 32, 18),
    (8, "q8_0", 32, 34),
    (6, "q5_0", 32, 22),
    (12, "q4_k", 256, 144),
    (14, "q6_k", 256, 210),
];

/// Returns a file with matrices that have these types in turn. All weights are zero.
fn mixed(model: &TinyModel, types: &[&str]) -> File {
    gguf::file(model, |i| {
        let name = types[i % types.len()];
        let (kind, _, weights, bytes) = TYPES.into_iter().find(|t| t.1 == name).unwrap();
        (kind, vec![0; model.tensors[i].2.len() / weights * bytes])
    })
}

fn json(command: &[&str], path: &Path) -> Value {
    let mut gemma = Command::new(env!("CARGO_BIN_EXE_gemma"));
    let out = gemma.args(command).arg(path).arg("--json").output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Returns the bytes of the weight files below a path.
fn on_disk(path: &Path) -> u64 {
    if path.is_file() {
        return fs::metadata(path).unwrap().len();
    }
    let files = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let is_weights = |path: &std::path::PathBuf| {
        path.extension().is_some_and(|e| e == "gguf" || e == "safetensors")
    };
    files.filter(is_weights).map(|path| fs::metadata(path).unwrap().len()).sum()
}

/// Checks the output for a model with matrices of these types.
#[track_caller]
fn check(path: &Path, types: &[&str]) {
    let inspected = json(&["inspect"], path);
    assert_eq!(inspected["file_bytes"].as_u64(), Some(on_disk(path)), "{path:?}");
    let tensors = inspected["tensors"].as_array().unwrap();
    let mut spelt: Vec<&str> = tensors
        .iter()
        .filter(|t| t["shape"].as_array().unwrap().len() == 2)
        .map(|t| t["format"].as_str().unwrap())
        .collect();
    spelt.sort();
    spelt.dedup();
    let mut types = types.to_vec();
    types.sort();
    assert_eq!(spelt, types, "{path:?}");

    let listed = json(&["list"], path.parent().unwrap());
    let models = listed["models"].as_array().unwrap();
    let own = models.iter().find(|m| {
        let at = Path::new(m["path"].as_str().unwrap());
        at == path || at.parent() == Some(path) || Some(at) == path.parent()
    });
    let own = own.unwrap_or_else(|| panic!("{path:?} is not in {listed}"));
    assert_eq!(own["bytes"].as_u64(), Some(on_disk(path)), "{path:?}");

    // f16 becomes f32 when it is loaded.
    let matrices: f64 = tensors
        .iter()
        .filter(|t| t["shape"].as_array().unwrap().len() == 2)
        .map(|t| {
            let times = if t["format"] == "f16" { 2.0 } else { 1.0 };
            times * t["bytes"].as_u64().unwrap() as f64
        })
        .sum();
    let planned = json(&["plan"], path)["cpu"]["bytes"]["weights"].as_u64().unwrap() as f64;
    assert!((planned / matrices - 1.0).abs() < 0.02, "{path:?}: {planned} of {matrices}");
}

#[test]
fn sizes_and_types_are_those_of_the_file() {
    let dims = Dims { dim: 256, ffn_dim: 512, n_heads: 8, ..Dims::default() };
    let model = TinyModel::new(dims, 5);
    let dir = tempfile::tempdir().unwrap();
    let mixes: [&[&str]; 8] = [
        &["f32"],
        &["f16"],
        &["bf16"],
        &["q8_0"],
        &["q4_0"],
        &["q4_k", "q6_k"],
        &["q5_0", "q4_k", "q8_0", "q6_k"],
        &["q4_0", "f16"],
    ];
    for (i, types) in mixes.into_iter().enumerate() {
        let at = dir.path().join(i.to_string());
        fs::create_dir(&at).unwrap();
        let path = at.join("model.gguf");
        mixed(&model, types).write(&path);
        check(&path, types);
    }

    // A file in two parts.
    let whole = mixed(&model, &["q4_0"]);
    let at = dir.path().join("parts");
    fs::create_dir(&at).unwrap();
    for (part, range) in [0..20, 20..whole.tensors.len()].into_iter().enumerate() {
        let mut file = File { tensors: whole.tensors[range].to_vec(), ..File::default() };
        if part == 0 {
            file.keys.clone_from(&whole.keys);
        }
        file.set("split.no", Val::U16(part as u16));
        file.set("split.count", Val::U16(2));
        file.set("split.tensors.count", Val::U32(whole.tensors.len() as u32));
        file.write(&at.join(format!("m-{:05}-of-00002.gguf", part + 1)));
    }
    check(&at, &["q4_0"]);

    // A directory of the hub, and an artifact.
    let hub = dir.path().join("hub").join("bf16");
    fs::create_dir(dir.path().join("hub")).unwrap();
    model.write(&hub, Form::TextV4, Dtype::BF16, 2);
    check(&hub, &["bf16"]);
    let artifact = dir.path().join("artifact").join("int4");
    fs::create_dir(dir.path().join("artifact")).unwrap();
    let mut gemma = Command::new(env!("CARGO_BIN_EXE_gemma"));
    let out = gemma.arg("quantize").args([&hub, &artifact]).args(["--recipe", "int4"]).output();
    assert!(out.unwrap().status.success());
    check(&artifact, &["i4-g32", "i8-g32"]);
}
