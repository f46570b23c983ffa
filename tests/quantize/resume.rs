//! Runs that were killed, interrupted or out of disk space continue where they stopped, and end in
//! the same bytes.

use crate::{common, shell};
use common::{Dims, Form, TinyModel, write_model};
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::error::{Kind, fault_of};
use gemma::models::Weights;
use gemma::quant::{QuantProgress, QuantReport, QuantizeOptions, Recipe, quantize, unfinished};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use shell::{BINARY, bash, code, command, gemma_in};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

fn open(dir: &Path) -> Weights {
    Weights::open(Checkpoint::open(dir).unwrap()).unwrap()
}

fn recipe() -> Recipe {
    Recipe::inline("i4-g32".parse().unwrap(), "i8-row".parse().unwrap())
}

fn options() -> QuantizeOptions {
    QuantizeOptions { threads: 2, shard_bytes: 90_000, ..QuantizeOptions::default() }
}

/// Returns every file of a directory by name.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |e: fs::DirEntry| {
        (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).unwrap())
    };
    fs::read_dir(dir).unwrap().map(|e| read(e.unwrap())).collect()
}

/// Returns the names in a directory, including hidden ones.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Runs until this many tensors are done, then stops as after Ctrl-C.
fn stopped(
    source: &Weights,
    dst: &Path,
    options: &QuantizeOptions,
    tensors: usize,
) -> anyhow::Result<QuantReport> {
    let mut left = tensors;
    quantize(source, dst, &recipe(), options, &mut |p: QuantProgress<'_>| {
        anyhow::ensure!(left > 0, "interrupted");
        left -= p.error.is_some() as usize;
        Ok(())
    })
}

/// Runs to the end.
fn finish(source: &Weights, dst: &Path) -> anyhow::Result<QuantReport> {
    quantize(source, dst, &recipe(), &options(), &mut |_| Ok(()))
}

/// A directory with a source and the result of an undisturbed run.
struct Case {
    dir: tempfile::TempDir,
    undisturbed: BTreeMap<String, Vec<u8>>,
}

impl Case {
    fn new(seed: u64) -> Case {
        let dir = tempfile::tempdir().unwrap();
        TinyModel::tiny(seed).write(&dir.path().join("src"), Form::TextV4, Dtype::BF16, 2);
        finish(&open(&dir.path().join("src")), &dir.path().join("whole")).unwrap();
        let undisturbed = files(&dir.path().join("whole"));
        Case { dir, undisturbed }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn source(&self) -> Weights {
        open(&self.at("src"))
    }

    /// Asserts that the destination is right and that nothing is left next to it.
    fn assert_whole(&self) {
        assert!(files(&self.at("dst")) == self.undisturbed, "the bytes differ");
        assert_eq!(names(self.dir.path()), ["dst", "src", "whole"]);
    }
}

#[test]
fn an_interrupted_run_goes_on_where_it_was() {
    let case = Case::new(1);
    assert!(case.undisturbed.len() > 5, "several shards: {:?}", case.undisturbed.keys());
    let (source, dst) = (case.source(), case.at("dst"));
    assert_eq!(stopped(&source, &dst, &options(), 0).unwrap_err().to_string(), "interrupted");
    assert_eq!((unfinished(&dst), dst.exists()), (None, false), "nothing done, nothing kept");
    // Each run completes a few more tensors than the last. The count includes those of earlier
    // runs.
    for tensors in [3, 11, 11, 25, 40] {
        stopped(&source, &dst, &options(), tensors).unwrap_err();
        let left = unfinished(&dst).unwrap();
        assert_eq!(left.done, tensors);
        assert!(!dst.exists());
    }
    finish(&source, &dst).unwrap();
    case.assert_whole();
}

#[test]
fn what_was_torn_or_damaged_is_done_again() {
    let case = Case::new(2);
    let (source, dst, partial) = (case.source(), case.at("dst"), case.at(".dst.partial"));
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 8] = [
        ("half a line", |p| {
            let text = fs::read(p.join("journal")).unwrap();
            fs::write(p.join("journal"), &text[..text.len() - 30]).unwrap();
        }),
        ("a line of rubbish", |p| {
            let text = fs::read_to_string(p.join("journal")).unwrap();
            fs::write(p.join("journal"), text + "\0\0\0\n").unwrap();
        }),
        ("the first file cut short", |p| {
            let file = first_file(p);
            let length = fs::metadata(&file).unwrap().len();
            fs::OpenOptions::new().write(true).open(file).unwrap().set_len(length - 1).unwrap();
        }),
        ("bytes after the first file", |p| {
            let file = first_file(p);
            let bytes = fs::read(&file).unwrap();
            fs::write(file, [&bytes[..], &[7; 9]].concat()).unwrap();
        }),
        ("a byte turned over", |p| {
            let file = first_file(p);
            let mut bytes = fs::read(&file).unwrap();
            let at = bytes.len() - 100;
            bytes[at] ^= 4;
            fs::write(file, bytes).unwrap();
        }),
        ("a file gone", |p| fs::remove_file(first_file(p)).unwrap()),
        ("all files gone", |p| fs::remove_dir_all(p.join("files")).unwrap()),
        ("an empty journal", |p| fs::write(p.join("journal"), "").unwrap()),
    ];
    for (what, damage) in damages {
        stopped(&source, &dst, &options(), 30).unwrap_err();
        damage(&partial);
        finish(&source, &dst).unwrap_or_else(|e| panic!("{what}: {e:#}"));
        case.assert_whole();
        fs::remove_dir_all(&dst).unwrap();
    }
}

/// Returns the first file of tensors of an unfinished run.
fn first_file(partial: &Path) -> PathBuf {
    let files = partial.join("files");
    files.join(names(&files).into_iter().find(|n| n.contains("00001-of")).unwrap())
}

#[test]
fn another_run_is_never_continued() {
    let case = Case::new(3);
    let (source, dst) = (case.source(), case.at("dst"));
    stopped(&source, &dst, &options(), 20).unwrap_err();
    let refused = |recipe: &Recipe, options: &QuantizeOptions, expected: &str| {
        let error = quantize(&case.source(), &dst, recipe, options, &mut |_| Ok(())).unwrap_err();
        let fault = fault_of(&error).unwrap();
        assert_eq!(fault.kind, Kind::Usage);
        assert!(fault.what.contains(expected), "{} lacks {expected}", fault.what);
        assert!(fault.help.as_ref().unwrap().contains("--restart"));
        assert_eq!(unfinished(&dst).unwrap().done, 20, "what is there stays");
    };
    let other = Recipe::inline("i4-g64".parse().unwrap(), "i8-row".parse().unwrap());
    refused(&other, &options(), "i4-g32");
    refused(&recipe(), &QuantizeOptions { shard_bytes: 1_000_000, ..options() }, "other options");
    // Other bytes with the same length and time.
    let weights = case.at("src/model-00002-of-00002.safetensors");
    let bytes = fs::read(&weights).unwrap();
    change(&weights, bytes.len() - 1);
    refused(&recipe(), &options(), "model-00002-of-00002.safetensors changed");
    change(&weights, bytes.len() - 1);
    assert!(fs::read(&weights).unwrap() == bytes);
    let restart = QuantizeOptions { restart: true, ..options() };
    quantize(&case.source(), &dst, &recipe(), &restart, &mut |_| Ok(())).unwrap();
    case.assert_whole();
}

/// Flips a low bit of a byte, and restores the file's time.
fn change(file: &Path, at: usize) {
    let modified = fs::metadata(file).unwrap().modified().unwrap();
    let mut bytes = fs::read(file).unwrap();
    bytes[at] ^= 1;
    // The inode of the file stays the same.
    fs::write(file, bytes).unwrap();
    fs::File::options().write(true).open(file).unwrap().set_modified(modified).unwrap();
}

/// In parts of a large shard that are not sampled, finished tensors prove that it is the same.
#[test]
fn a_source_of_the_same_length_and_time_is_never_mixed_in() {
    let mut case = Case::new(9);
    larger().write(&case.at("src"), Form::TextV5, Dtype::BF16, 1);
    let (dst, weights) = (case.at("dst"), case.at("src/model.safetensors"));
    let bytes = fs::read(&weights).unwrap();
    // The first tensor is the largest. The samples have 4 kB of each 1/63.
    let between = bytes.len() / 63 * 3 / 2;
    stopped(&case.source(), &dst, &options(), 20).unwrap_err();
    change(&weights, between);
    let error = finish(&case.source(), &dst).unwrap_err();
    assert_eq!(fault_of(&error).unwrap().kind, Kind::Usage);
    assert!(error.to_string().contains("changed in the source"), "{error:#}");
    assert_eq!(unfinished(&dst).unwrap().done, 20, "what is there stays");
    change(&weights, between);
    // A copy with other times is accepted, more than once.
    let _ = fs::remove_dir_all(case.at("whole"));
    finish(&case.source(), &case.at("whole")).unwrap();
    case.undisturbed = files(&case.at("whole"));
    fs::rename(case.at("src"), case.at("old")).unwrap();
    fs::create_dir(case.at("src")).unwrap();
    for name in names(&case.at("old")) {
        fs::copy(case.at("old").join(&name), case.at("src").join(&name)).unwrap();
    }
    fs::remove_dir_all(case.at("old")).unwrap();
    stopped(&case.source(), &dst, &options(), 25).unwrap_err();
    assert_eq!(unfinished(&dst).unwrap().done, 25);
    finish(&case.source(), &dst).unwrap();
    case.assert_whole();
}

/// The finished rows of a tensor are compared with the source, too.
#[test]
fn rows_of_another_source_are_never_mixed_in() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    let dims = Dims { n_layers: 1, dim: 256, ffn_dim: 256, vocab: 24_000, ..Dims::default() };
    TinyModel::new(dims, 12).write(&src, Form::TextV5, Dtype::BF16, 1);
    let recipe = Recipe::inline("i4-g32".parse().unwrap(), "t4-row".parse().unwrap());
    let run = |most: u64| {
        quantize(&open(&src), &dst, &recipe, &QuantizeOptions::default(), &mut |p| {
            anyhow::ensure!(p.done < most, "interrupted");
            Ok(())
        })
    };
    // In the table, which is the first tensor.
    assert_eq!(run(1 << 19).unwrap_err().to_string(), "interrupted");
    let journal = fs::read_to_string(dir.path().join(".dst.partial/journal")).unwrap();
    assert!(journal.contains("\"rows\":"), "{journal}");
    // A part of the finished rows that is not sampled.
    let weights = src.join("model.safetensors");
    let between = fs::metadata(&weights).unwrap().len() as usize / 63 * 3 / 2;
    change(&weights, between);
    let error = run(1 << 20).unwrap_err();
    assert!(error.to_string().contains("changed in the source"), "{error:#}");
    change(&weights, between);
    assert_eq!(run(1 << 20).unwrap_err().to_string(), "interrupted");
}

#[test]
fn a_source_that_changes_meanwhile_is_noticed() {
    let case = Case::new(4);
    let (dst, shard) = (case.at("dst"), case.at("src/model-00001-of-00002.safetensors"));
    let last = fs::metadata(&shard).unwrap().len() as usize - 1;
    let run = |disturb: &dyn Fn()| {
        let mut calls = 0;
        quantize(&case.source(), &dst, &recipe(), &options(), &mut |_| {
            calls += 1;
            if calls == 10 {
                disturb();
            }
            Ok(())
        })
    };
    for (file, at) in [(case.at("src/config.json"), 3), (shard.clone(), last)] {
        let error = run(&|| change(&file, at)).unwrap_err();
        assert!(error.to_string().contains("changed while"), "{error:#}");
        assert_eq!(names(case.dir.path()), ["src", "whole"]);
        change(&file, at);
    }
    // A second link changes the inode's time, but no byte.
    run(&|| fs::hard_link(&shard, case.at("link")).unwrap()).unwrap();
    fs::remove_file(case.at("link")).unwrap();
    case.assert_whole();
}

#[test]
fn two_runs_never_share_a_destination() {
    let case = Case::new(5);
    let (source, dst, mut refusal) = (case.source(), case.at("dst"), None);
    quantize(&source, &dst, &recipe(), &options(), &mut |_| {
        if refusal.is_none() {
            refusal = Some(finish(&open(&case.at("src")), &dst).unwrap_err());
        }
        Ok(())
    })
    .unwrap();
    let refusal = refusal.unwrap();
    assert_eq!(fault_of(&refusal).unwrap().kind, Kind::Usage);
    assert!(refusal.to_string().contains("at work"), "{refusal:#}");
    case.assert_whole();
}

/// A run that is killed after its last rename may have removed any part of its own directory.
#[test]
fn leftovers_behind_the_last_rename_are_removed_by_the_next_run() {
    let case = Case::new(10);
    let (source, dst, partial) = (case.source(), case.at("dst"), case.at(".dst.partial"));
    let parts = ["journal", "lock", "side", "state"];
    let refused = |dst: &Path| {
        let error = finish(&source, dst).unwrap_err();
        assert!(error.to_string().contains("exists"), "{error:#}");
    };
    finish(&source, &dst).unwrap();
    let file = case.at("dst.gguf");
    fs::write(&file, "a whole result").unwrap();
    for left in 0..1 << parts.len() {
        for (dst, has_files) in [(&dst, false), (&dst, true), (&file, true), (&file, false)] {
            let name = dst.file_name().unwrap().to_str().unwrap();
            let partial = case.at(&format!(".{name}.partial"));
            fs::create_dir_all(if has_files { partial.join("files") } else { partial.clone() })
                .unwrap();
            let is_left = |i: &usize| left & 1 << i != 0;
            let left = (0..parts.len()).filter(is_left).map(|i| parts[i]);
            left.for_each(|part| fs::write(partial.join(part), "").unwrap());
            refused(dst);
            assert!(!partial.exists());
        }
    }
    fs::remove_file(&file).unwrap();
    case.assert_whole();
    // The work of another run stays: a locked one, and one that has files of its result.
    fs::create_dir(&partial).unwrap();
    let lock = fs::File::create(partial.join("lock")).unwrap();
    gemma::os::files::try_lock(&lock).unwrap();
    refused(&dst);
    assert!(partial.join("lock").exists());
    drop(lock);
    fs::create_dir(partial.join("files")).unwrap();
    fs::write(partial.join("files/model.safetensors"), "weights").unwrap();
    refused(&dst);
    assert_eq!(names(&partial.join("files")), ["model.safetensors"]);
}

#[test]
fn a_destination_that_appears_during_the_run_stays() {
    let case = Case::new(11);
    let (source, dst) = (case.source(), case.at("dst"));
    let error = quantize(&source, &dst, &recipe(), &options(), &mut |_| {
        fs::create_dir_all(&dst)?;
        Ok(fs::write(dst.join("mine"), "mine")?)
    });
    let error = error.unwrap_err();
    assert!(error.to_string().contains("dst appeared during the run"), "{error:#}");
    assert_eq!(files(&dst), BTreeMap::from([("mine".to_owned(), b"mine".to_vec())]));
    fs::remove_dir_all(&dst).unwrap();
    let mut written = 0;
    let count = &mut |p: QuantProgress<'_>| {
        written += (p.error.is_none() && p.entry.is_some()) as usize;
        Ok(())
    };
    quantize(&source, &dst, &recipe(), &options(), count).unwrap();
    assert_eq!(written, 0, "nothing is converted again");
    case.assert_whole();
}

/// Links and pipes in place of its own files are not waited for, and not trusted.
#[cfg(unix)]
#[test]
fn a_pipe_in_the_staging_directory_is_not_waited_for() {
    let case = Case::new(12);
    let (source, dst, partial) = (case.source(), case.at("dst"), case.at(".dst.partial"));
    for name in ["state", "side"] {
        stopped(&source, &dst, &options(), 30).unwrap_err();
        bash(case.dir.path(), &format!("rm -f .dst.partial/{name}; mkfifo .dst.partial/{name}"))
            .ok();
        finish(&source, &dst).unwrap();
        case.assert_whole();
        fs::remove_dir_all(&dst).unwrap();
    }
    fs::create_dir(&partial).unwrap();
    bash(case.dir.path(), "mkfifo .dst.partial/journal").ok();
    assert_eq!(unfinished(&dst), None);
    let error = finish(&source, &dst).unwrap_err();
    assert!(format!("{error:#}").contains("not a regular file"), "{error:#}");
}

/// A file that is truncated while it is read causes an error with the tensor's name, not a signal.
#[test]
fn a_shard_that_shrinks_is_an_error() {
    let case = Case::new(6);
    let (source, dst, mut calls) = (case.source(), case.at("dst"), 0);
    let weights = case.at("src/model-00002-of-00002.safetensors");
    let error = quantize(&source, &dst, &recipe(), &options(), &mut |_| {
        calls += 1;
        if calls == 5 {
            fs::File::options().write(true).open(&weights).unwrap().set_len(5000).unwrap();
        }
        Ok(())
    })
    .unwrap_err();
    assert_eq!(fault_of(&error).unwrap().kind, Kind::Model);
    assert!(error.to_string().contains("tensor `model.layers."), "{error:#}");
    assert!(!dst.exists() && unfinished(&dst).is_none());
}

#[test]
fn what_is_not_finite_is_refused_by_name_even_in_norms() {
    let dir = tempfile::tempdir().unwrap();
    let model = TinyModel::tiny(7);
    for (tensor, place, bad) in [
        ("layers.2.mlp.up_proj", 128 * 9 + 3, f32::NAN),
        ("layers.1.self_attn.q_norm", 3, f32::INFINITY),
    ] {
        let mut tensors = model.named(Form::TextV4);
        tensors.iter_mut().find(|t| t.0.contains(tensor)).unwrap().2[place] = bad;
        write_model(&dir.path().join("src"), &model.config(Form::TextV4), &tensors, Dtype::BF16, 1);
        gemma_in(dir.path(), &["quantize", "src", "dst"], b"").fails(3, &[tensor, "help: "]);
        assert_eq!(names(dir.path()), ["src"]);
    }
}

/// Returns a model that takes long enough to receive signals.
fn larger() -> TinyModel {
    TinyModel::new(Dims { n_layers: 6, dim: 256, ffn_dim: 1024, vocab: 2000, ..Dims::default() }, 8)
}

const LARGER: [&str; 6] =
    ["quantize", "src", "dst", "--linear=i4-g32", "-t1", "--embedding=i4-g64"];

/// Returns the bytes of the files that a run has written so far.
fn written(partial: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(partial.join("files")) else { return 0 };
    entries.filter_map(|e| Some(e.ok()?.metadata().ok()?.len())).sum()
}

/// Starts a run and waits until it has written `bytes` bytes, or ended.
fn start(dir: &Path, bytes: u64) -> Child {
    let mut child = command(BINARY, dir).args(LARGER).spawn().unwrap();
    while written(&dir.join(".dst.partial")) < bytes && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    child
}

#[test]
fn killed_at_any_moment_and_run_again_the_bytes_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    larger().write(&at("src"), Form::TextV5, Dtype::BF16, 3);
    gemma_in(dir.path(), &LARGER, b"").ok();
    let undisturbed = files(&at("dst"));
    fs::rename(at("dst"), at("whole")).unwrap();
    let total: u64 = undisturbed.values().map(|f| f.len() as u64).sum();
    let mut rng = SmallRng::seed_from_u64(20);
    let mut inside = 0;
    for _ in 0..20 {
        let mut child = start(dir.path(), rng.random_range(0..total));
        child.kill().unwrap();
        child.wait().unwrap();
        inside += !at("dst").exists() as usize;
        // If it was killed at the very end, the result may exist; the next run then only cleans up.
        let expected = if at("dst").exists() { 2 } else { 0 };
        assert_eq!(gemma_in(dir.path(), &LARGER, b"").code, expected);
        assert!(files(&at("dst")) == undisturbed, "the bytes differ");
        assert_eq!(names(dir.path()), ["dst", "src", "whole"]);
        fs::remove_dir_all(at("dst")).unwrap();
    }
    assert!(inside >= 10, "only {inside} of 20 were killed before the end");
}

/// A table takes most of the time, so runs are killed in the middle of it.
#[test]
fn killed_within_a_table_again_and_again_the_bytes_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let dims = Dims { n_layers: 1, dim: 256, ffn_dim: 256, vocab: 24_000, ..Dims::default() };
    TinyModel::new(dims, 12).write(&at("src"), Form::TextV5, Dtype::BF16, 1);
    let mut rng = SmallRng::seed_from_u64(21);
    let args = ["quantize", "src", "dst", "-t1", "--linear=i4-g32", "--embedding=t4-row"];
    gemma_in(dir.path(), &args, b"").ok();
    let undisturbed = files(&at("dst"));
    fs::remove_dir_all(at("dst")).unwrap();
    let mut within = 0;
    for _ in 0..8 {
        let mut child = command(BINARY, dir.path()).args(args).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(rng.random_range(0..2000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let journal = fs::read_to_string(at(".dst.partial/journal"));
        within += journal.is_ok_and(|text| text.contains("\"rows\":")) as usize;
    }
    if !at("dst").exists() {
        gemma_in(dir.path(), &args, b"").ok();
    }
    assert!(files(&at("dst")) == undisturbed, "the bytes differ");
    assert!(within > 0, "no run was killed within the table");
    assert_eq!(names(dir.path()), ["dst", "src"]);
}

#[cfg(unix)]
#[test]
fn the_first_ctrl_c_keeps_what_is_done_and_says_how_to_go_on() {
    let dir = tempfile::tempdir().unwrap();
    larger().write(&dir.path().join("src"), Form::TextV5, Dtype::BF16, 1);
    // A run may be faster than the signal. Then the test tries again.
    let said = (0..10).find_map(|_| {
        let _ = fs::remove_dir_all(dir.path().join("dst"));
        let mut child = start(dir.path(), 1_000_000);
        // SAFETY: a signal to a child that has not been waited for, so the id is still its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
        let said: Vec<String> =
            BufReader::new(child.stderr.take().unwrap()).lines().map(|l| l.unwrap()).collect();
        (code(child.wait().unwrap()) == 130).then_some(said)
    });
    let said = said.expect("no signal came in time");
    assert!(said.iter().any(|l| l.contains("the same command continues")), "{said:?}");
    let again = gemma_in(dir.path(), &LARGER, b"").ok();
    assert!(again.err.contains("continuing .dst.partial"), "{}", again.err);
    assert_eq!(names(dir.path()), ["dst", "src"]);
}

/// A limit on file sizes makes writes fail as a full disk does.
#[cfg(unix)]
#[test]
fn a_full_disk_keeps_what_is_done() {
    let dir = tempfile::tempdir().unwrap();
    larger().write(&dir.path().join("src"), Form::TextV5, Dtype::BF16, 1);
    let run = bash(dir.path(), &format!("ulimit -f 1000; exec \"$G\" {}", LARGER.join(" ")));
    run.fails(
        1,
        &["cannot write tensor `model.layers.", "model.safetensors", "the same command continues"],
    );
    assert!(!dir.path().join("dst").exists());
    let again = gemma_in(dir.path(), &LARGER, b"").ok();
    assert!(again.err.contains("continuing"), "{}", again.err);
    assert_eq!(names(dir.path()), ["dst", "src"]);
    gemma_in(dir.path(), &["inspect", "dst", "--verify"], b"").ok();
}
