//! Messages of `gemma quantize`: recipes, sizes, progress, and the effect of an interrupt.

use crate::{common, shell};
use common::{Dims, Form, TinyModel};
use gemma::checkpoint::Dtype;
use shell::{BINARY, Run, code, command, gemma_in};
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

fn source() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::tiny(4).write(&dir.path().join("src"), Form::TextV4, Dtype::BF16, 1);
    dir
}

fn run(dir: &Path, more: &[&str]) -> Run {
    gemma_in(dir, &[&["quantize", "src", "dst"], more].concat(), b"")
}

#[test]
fn recipes_are_listed_with_what_they_make_of_each_size() {
    let dir = tempfile::tempdir().unwrap();
    let said = gemma_in(dir.path(), &["quantize", "--list"], b"").ok();
    let text = said.text();
    // This recipe has a size only for the mixture of experts, and the others only for the other
    // models.
    let row = text.lines().find(|l| l.starts_with("| 26b-9gb ")).unwrap();
    let cells: Vec<&str> = row.split('|').map(str::trim).collect();
    assert_eq!(cells[3..7], ["-"; 4], "{row}");
    assert!(cells[7].parse::<f64>().unwrap() < 10.0, "{row}");
    assert!(text.contains("| 26B-A4B, GB | error |"), "{text}");
    for name in ["seed", "int4", "9gb", "10gb", "12gb"] {
        let row = text
            .lines()
            .find(|l| l.starts_with(&format!("| {name} ")))
            .unwrap_or_else(|| panic!("{name}: {text}"));
        let cells: Vec<f64> =
            row.split('|').skip(2).filter_map(|cell| cell.trim().parse().ok()).collect();
        // Bits per weight, four sizes that decrease with the model, and an error.
        assert_eq!(cells.len(), 6, "{row}");
        assert!(
            cells[0] > 2.0 && cells[0] < 9.0 && cells[1..5].is_sorted_by(|a, b| a >= b),
            "{row}"
        );
        assert!(text.lines().any(|l| l.starts_with(name)), "what {name} is for");
    }
    let row = text.lines().find(|l| l.starts_with("| 9gb ")).unwrap();
    assert!(row.contains(" 8.9") || row.contains(" 9.00 "), "{row}");
    assert!(text.lines().all(|l| l.chars().count() <= 130), "{text}");
    // The list of formats follows.
    let formats = text.split("| format ").nth(1).unwrap();
    for name in ["i4-g32", "t3-row+h128"] {
        let row = formats.lines().find(|l| l.starts_with(&format!("| {name} "))).unwrap();
        let cells: Vec<f64> =
            row.split('|').skip(2).filter_map(|cell| cell.trim().parse().ok()).collect();
        assert!(cells.len() == 2 && cells[0] > 3.0 && cells[1] < 0.1, "{row}");
    }
    // Without the option both arguments are required.
    gemma_in(dir.path(), &["quantize"], b"").fails(2, &["SRC", "DST"]);
}

#[test]
fn sizes_and_names_are_taken_as_people_write_them() {
    let dir = source();
    run(dir.path(), &["--target-size", "2"]).fails(2, &["2GB", "2bpw"]);
    run(dir.path(), &["--target-size", "99bpw"]).fails(2, &["bits per weight", "4.5bpw"]);
    run(dir.path(), &["--recipe", "Q4_K_M"]).fails(3, &["llama.cpp", "int4"]);
    run(dir.path(), &["Q4_K_M"]).fails(2, &["one too many", "int4"]);
    run(dir.path(), &["int4"]).fails(2, &["--recipe int4"]);
    run(dir.path(), &["--mem-limit", "1MB"]).fails(5, &["1.00 MB of memory", "MB or more"]);
    gemma_in(dir.path(), &["quantize", "src", "no/where/dst"], b"")
        .fails(1, &["mkdir -p no/where"]);
    let text = run(dir.path(), &["--target-size", "8bpw", "--dry-run"]).ok().text().to_owned();
    let bits: f64 = text
        .lines()
        .find(|l| l.starts_with("| all"))
        .unwrap()
        .split('|')
        .nth(2)
        .unwrap()
        .trim()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!(bits <= 8.0 && bits > 6.0, "{text}");
    let target = text.lines().find(|l| l.starts_with("target ")).unwrap();
    assert!(target.contains(" 8bpw, at most ") && target.ends_with(" bytes"), "{text}");
    assert!(!text.contains("10gb"), "a recipe that nobody named: {text}");
    assert!(!text.contains("tok/s"), "the speed of a device that is not here: {text}");
    assert!(!dir.path().join("dst").exists());
}

#[test]
fn a_log_gets_a_line_a_layer_and_v_one_a_tensor() {
    let dir = source();
    let said = run(dir.path(), &[]).ok();
    for layer in 1..=4 {
        assert!(
            said.err
                .lines()
                .any(|l| l.starts_with(&format!("layer {layer}/4 ")) && l.contains(" % done")),
            "{}",
            said.err
        );
    }
    assert!(!said.err.contains("relative error"), "{}", said.err);
    std::fs::remove_dir_all(dir.path().join("dst")).unwrap();
    let said = run(dir.path(), &["-v"]).ok();
    let line = said.err.lines().find(|l| l.contains("layers.2.mlp.up_proj")).unwrap();
    assert!(line.contains("i4-g32") && line.contains("relative error 0."), "{line}");
    std::fs::remove_dir_all(dir.path().join("dst")).unwrap();
    assert_eq!(run(dir.path(), &["-q"]).ok().err, "");
}

/// Returns a model so wide that the table's trellis codes take far longer than a signal.
fn slow() -> TinyModel {
    TinyModel::new(Dims { n_layers: 2, dim: 256, ffn_dim: 256, vocab: 8000, ..Dims::default() }, 8)
}

#[cfg(unix)]
#[test]
fn an_interrupt_is_answered_at_once_within_a_tensor() {
    let dir = tempfile::tempdir().unwrap();
    slow().write(&dir.path().join("src"), Form::TextV5, Dtype::BF16, 1);
    let args = ["quantize", "src", "dst", "--linear=i4-g32", "--embedding=t4-row+h128", "-t1"];
    let mut child = command(BINARY, dir.path()).args(args).spawn().unwrap();
    // The header is written before the first tensor, which is the table.
    let file = dir.path().join(".dst.partial/files/model.safetensors");
    while !file.exists() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    // SAFETY: a signal to a child that has not been waited for, so the id is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(code(child.wait().unwrap()), 130, "{said}");
    // The signal may come before the first rows are done.
    let is_kept = said.contains("tensors and the rows done since are kept");
    assert!(!is_kept || said.contains(" 0 of "), "{said}");
    assert!(is_kept || said.contains("before the first rows were done"), "{said}");
    assert!(said.contains("Ctrl-C again stops now"), "{said}");
    assert!(!dir.path().join("dst").exists());
    assert_eq!(dir.path().join(".dst.partial").exists(), is_kept);
    let again = gemma_in(dir.path(), &args, b"").ok();
    assert_eq!(again.err.contains("continuing .dst.partial: 0 of"), is_kept, "{}", again.err);
}

#[cfg(unix)]
#[test]
fn an_unfinished_run_is_told_by_what_was_typed() {
    let dir = tempfile::tempdir().unwrap();
    slow().write(&dir.path().join("src"), Form::TextV5, Dtype::BF16, 1);
    // A limit on file sizes ends the run after some tensors.
    let ended = shell::bash(
        dir.path(),
        r#"ulimit -f 1200; exec "$G" quantize src dst --linear i8-row --embedding i4-row -t2"#,
    );
    ended.fails(1, &["the same command continues"]);
    run(dir.path(), &["--recipe", "int4"])
        .fails(2, &["was begun with --linear i8-row --embedding i4-row", "--restart"]);
    run(dir.path(), &["--linear", "i8-row", "--embedding", "i4-row"]).ok();
}

/// Every device that encodes trellis codes writes the same directory. An unknown device is refused
/// before anything is written.
#[test]
fn a_gpu_finds_the_same_codes() {
    let dir = source();
    let quantize = |to: &str, more: &[&str]| {
        let args = ["quantize", "src", to, "--recipe", "few.toml"];
        gemma_in(dir.path(), &[&args[..], more].concat(), b"")
    };
    // Two small matrices, because a driver on the processor is slow.
    let recipe = "[formats]\n\"layers.0.self_attn.k_proj\" = \"t2-row+h128\"\n\
        \"layers.1.self_attn.k_proj\" = \"t3-row\"\n\
        \"linears\" = \"i8-row\"\n\"**\" = \"i8-row\"\n";
    fs::write(dir.path().join("few.toml"), recipe).unwrap();
    quantize("none", &["-d", "auto"]).fails(2, &["by name", "vulkan"]);
    quantize("none", &["-d", "npu"]).fails(2, &["unknown device", "vulkan"]);
    assert!(!dir.path().join("none").exists());
    if common::vulkan::device().is_none() {
        return;
    }
    quantize("cpu", &[]).ok();
    quantize("gpu", &["-d", "vulkan:0"]).ok();
    let files = |name: &str| {
        let file = |e: std::io::Result<fs::DirEntry>| {
            let e = e.unwrap();
            (e.file_name(), fs::read(e.path()).unwrap())
        };
        fs::read_dir(dir.path().join(name)).unwrap().map(file).collect::<BTreeMap<_, _>>()
    };
    let (cpu, gpu) = (files("cpu"), files("gpu"));
    assert!(cpu.len() > 3 && cpu.keys().eq(gpu.keys()));
    for (name, bytes) in &cpu {
        assert!(gpu[name] == *bytes, "{name:?}");
    }
}
