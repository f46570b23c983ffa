//! The interface of quantising methods: the calls that they receive, their order, and the state
//! that they get from an earlier run.

use crate::common;
use common::{Form, TinyModel};
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::models::{Role, Weights};
use gemma::quant::{
    ArtifactLayout, Importance, Nearest, QuantPlan, QuantProgress, QuantizeOptions, Recipe, Solver,
    TensorPlan, run,
};
use gemma::tensor::quantize::quantize;
use gemma::tensor::{Format, Matrix};
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

fn open(dir: &Path) -> Weights {
    Weights::open(Checkpoint::open(dir).unwrap()).unwrap()
}

/// Ends a run at tensor `n`.
fn stop_at(n: usize) -> impl FnMut(QuantProgress<'_>) -> anyhow::Result<()> {
    let mut left = n;
    move |p| {
        left -= p.error.is_some() as usize;
        anyhow::ensure!(left > 0, "enough");
        Ok(())
    }
}

/// Rounds like [`Nearest`], and records the calls.
#[derive(Default)]
struct Watched {
    whole: bool,
    /// State after each layer; empty means none.
    kept: Vec<f32>,
    said: Vec<String>,
    /// Codes of the matrices that passed through, by role and layer.
    seen: BTreeMap<(Role, usize), Vec<u8>>,
}

impl Solver for Watched {
    fn name(&self) -> String {
        "watched".into()
    }

    fn wants_whole(&self, entry: &TensorPlan) -> bool {
        self.whole && entry.role != Role::Embed
    }

    fn memory(&self, _: &ArtifactLayout) -> u64 {
        1_000_000_000
    }

    fn matrix(
        &mut self,
        entry: &TensorPlan,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> anyhow::Result<Matrix<'static>> {
        assert_eq!(values.len(), rows.len() * entry.cols);
        assert!(
            rows.start.is_multiple_of(16)
                && (rows.end.is_multiple_of(16) || rows.end == entry.rows)
        );
        let part = if rows.len() == entry.rows { String::new() } else { format!(" {rows:?}") };
        self.said.push(format!("{:?} {}{part}", entry.role, entry.layer));
        let matrix = quantize(format, rows.len(), entry.cols, values)?;
        self.seen.entry((entry.role, entry.layer)).or_default().extend_from_slice(&matrix.codes);
        Ok(matrix)
    }

    fn resumed(&mut self, entry: &TensorPlan, matrix: &Matrix<'_>) -> anyhow::Result<()> {
        self.said.push(format!("again {:?} {}", entry.role, entry.layer));
        self.seen.insert((entry.role, entry.layer), matrix.codes.to_vec());
        Ok(())
    }

    fn state(&mut self, layer: usize) -> anyhow::Result<Vec<&[f32]>> {
        self.said.push(format!("layer {layer} done"));
        Ok(if self.kept.is_empty() { Vec::new() } else { self.kept.chunks(2).collect() })
    }

    fn restore(&mut self, layer: usize, state: Vec<f32>) -> anyhow::Result<()> {
        self.said.push(format!("after layer {layer} with {state:?}"));
        Ok(())
    }
}

#[test]
fn a_solver_sees_every_matrix_in_the_order_of_the_forward_pass_again_after_a_stop() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    TinyModel::tiny(1).write(&src, Form::TextV4, Dtype::BF16, 1);
    let (source, options) =
        (open(&src), QuantizeOptions { threads: 2, ..QuantizeOptions::default() });
    let recipe = Recipe::inline("i4-g32".parse().unwrap(), "i8-row".parse().unwrap());
    let mut solver = Watched { whole: true, ..Watched::default() };
    let mut plan =
        QuantPlan::new(&source, &recipe, &options, &solver, Importance::Relative(&|_, _| 1.0))
            .unwrap();
    assert!(plan.memory > 1_000_000_000 && plan.solver == "watched");
    plan.chunk = 64 * 128;

    run(&source, &dst, &plan, &options, &mut solver, &mut stop_at(20)).unwrap_err();
    assert_eq!(solver.said[..4], ["Embed 0 0..64", "Embed 0 64..128", "Embed 0 128..160", "Q 0"]);
    assert_eq!(
        solver.said[4..11],
        ["K 0", "V 0", "O 0", "Gate 0", "Up 0", "Down 0", "layer 0 done"]
    );
    let first = std::mem::take(&mut solver.seen);

    solver.said.clear();
    run(&source, &dst, &plan, &options, &mut solver, &mut |_| Ok(())).unwrap();
    let again = ["Q", "K", "V", "O", "Gate", "Up", "Down"].map(|role| format!("again {role} 0"));
    assert_eq!(solver.said[..7], again);
    assert_eq!(solver.said.iter().filter(|s| s.ends_with("done")).count(), 3);
    assert_eq!(solver.said.last().unwrap(), "layer 3 done");
    for (at, codes) in solver.seen.iter() {
        assert!(first.get(at).is_none_or(|f| f == codes), "{at:?}: not what was written");
        assert_eq!(codes[..], open(&dst).matrix(at.0, at.1).unwrap().codes[..], "{at:?}");
    }
}

/// The saved state after a layer replaces the earlier tensors, as long as the state and those
/// tensors are unchanged.
#[test]
fn a_run_goes_on_behind_the_last_complete_layer() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    TinyModel::tiny(2).write(&src, Form::TextV4, Dtype::BF16, 1);
    let (source, options) =
        (open(&src), QuantizeOptions { threads: 2, ..QuantizeOptions::default() });
    let recipe = Recipe::inline("i4-g32".parse().unwrap(), "i8-row".parse().unwrap());
    let resumed_after = |damage: &dyn Fn(&Path)| -> Vec<String> {
        let dst = dir.path().join("dst");
        let kept = vec![1.5, -2.0, 0.25];
        let mut solver = Watched { whole: true, kept, ..Watched::default() };
        let plan =
            QuantPlan::new(&source, &recipe, &options, &solver, Importance::Relative(&|_, _| 1.0))
                .unwrap();
        run(&source, &dst, &plan, &options, &mut solver, &mut stop_at(34)).unwrap_err();
        assert!(solver.said.contains(&"layer 1 done".into()), "{:?}", solver.said);
        damage(&dst.with_file_name(".dst.partial"));
        solver.said.clear();
        run(&source, &dst, &plan, &options, &mut solver, &mut |_| Ok(())).unwrap();
        fs::remove_dir_all(&dst).unwrap();
        solver.said
    };
    let said = resumed_after(&|_| {});
    assert_eq!(said[0], "after layer 1 with [1.5, -2.0, 0.25]");
    assert!(!said.iter().any(|s| s.starts_with("again") && s.ends_with('1')), "{said:?}");

    let edit = |name: &'static str, at: fn(usize) -> usize| {
        move |partial: &Path| {
            let path = partial.join(name);
            let mut bytes = fs::read(&path).unwrap();
            let at = at(bytes.len());
            bytes[at] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    };
    for damage in [edit("state", |n| n - 1), edit("state", |_| 12), edit("state", |_| 60)] {
        let said = resumed_after(&damage);
        assert_eq!(said[0], "again Q 0", "{said:?}");
    }
    // The first shard begins with its header, so the damage is in the table.
    let said = resumed_after(&edit("files/model.safetensors", |n| n / 4));
    assert!(!said[0].starts_with("after"), "{said:?}");
}

/// A table that was stopped between two chunks continues after the last one. A table with rows
/// damaged since then starts again. The bytes are the same.
#[test]
fn a_stopped_table_goes_on_in_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    TinyModel::tiny(4).write(&src, Form::TextV4, Dtype::BF16, 1);
    let (source, options) =
        (open(&src), QuantizeOptions { threads: 2, ..QuantizeOptions::default() });
    for embedding in ["i4-g32", "t3-row", "i8-row+h128"] {
        let recipe = Recipe::inline("i4-g32".parse().unwrap(), embedding.parse().unwrap());
        let once = |dst: &Path, calls: usize| {
            let (mut left, mut solver) = (calls, Watched::default());
            let importance = Importance::Relative(&|_, _| 1.0);
            let mut plan = QuantPlan::new(&source, &recipe, &options, &solver, importance).unwrap();
            plan.chunk = 16 * 128;
            let mut tell = |_: gemma::quant::QuantProgress<'_>| {
                left -= 1;
                anyhow::ensure!(left > 0, "enough");
                Ok(())
            };
            let done = run(&source, dst, &plan, &options, &mut solver, &mut tell).is_ok();
            (solver.said, done)
        };
        let (whole, dst) = (dir.path().join("whole"), dir.path().join("dst"));
        assert!(once(&whole, usize::MAX).1);
        let partial = dir.path().join(".dst.partial");
        let flip = |path: &Path, at: usize| {
            let mut bytes = fs::read(path).unwrap();
            bytes[at] ^= 1;
            fs::write(path, bytes).unwrap();
        };
        type Damage<'a> = &'a dyn Fn();
        let damages: [(usize, Damage<'_>); 5] = [
            (64, &|| {}),
            (0, &|| {
                let file = partial.join("files/model.safetensors");
                flip(&file, fs::metadata(&file).unwrap().len() as usize - 1);
            }),
            (0, &|| flip(&partial.join("side"), 3)),
            (0, &|| fs::remove_file(partial.join("side")).unwrap()),
            (48, &|| {
                let journal = partial.join("journal");
                let text = fs::read(&journal).unwrap();
                fs::write(&journal, &text[..text.len() - 9]).unwrap();
            }),
        ];
        for (goes_on, damage) in damages {
            // One call for the start of the table, and one after each chunk.
            let (said, done) = once(&dst, 4);
            assert_eq!((said.last().unwrap().as_str(), done), ("Embed 0 32..48", false));
            let (said, done) = once(&dst, 2);
            assert_eq!((said.join(", "), done), ("Embed 0 48..64".into(), false), "{embedding}");
            damage();
            let (said, done) = once(&dst, usize::MAX);
            assert_eq!(said[0], format!("Embed 0 {goes_on}..{}", goes_on + 16), "{embedding}");
            assert!(done && !partial.exists());
            for name in ["model.safetensors", "quant-report.json"] {
                let read = |at: &Path| fs::read(at.join(name)).unwrap();
                assert!(read(&dst) == read(&whole), "{embedding}: {name}");
            }
            fs::remove_dir_all(&dst).unwrap();
        }
        fs::remove_dir_all(&whole).unwrap();
    }
}

/// With any number of rows in memory and with other work on the machine, the bytes are the same.
#[test]
fn chunks_change_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    TinyModel::tiny(2).write(&src, Form::TextV4, Dtype::F32, 1);
    let recipe = Recipe::inline("i2-row+h128".parse().unwrap(), "i4-g64".parse().unwrap());
    let mut first: Option<Vec<u8>> = None;
    for (i, (chunk, threads)) in
        [(1, 1), (40 * 128, 3), (1 << 20, 2), (1 << 20, 64)].into_iter().enumerate()
    {
        let (dst, options) = (
            dir.path().join(i.to_string()),
            QuantizeOptions { threads, ..QuantizeOptions::default() },
        );
        let (source, mut solver) = (open(&src), Nearest::new(threads));
        let mut plan =
            QuantPlan::new(&source, &recipe, &options, &solver, Importance::Relative(&|_, _| 1.0))
                .unwrap();
        plan.chunk = chunk;
        run(&source, &dst, &plan, &options, &mut solver, &mut |_| Ok(())).unwrap();
        let bytes = [
            fs::read(dst.join("model.safetensors")).unwrap(),
            fs::read(dst.join("quant-report.json")).unwrap(),
        ]
        .concat();
        assert!(
            *first.get_or_insert_with(|| bytes.clone()) == bytes,
            "chunks of {chunk}, {threads} threads"
        );
    }
}

/// A memory limit makes chunks smaller. A limit that is too low is refused with the lowest possible
/// one.
#[test]
fn a_memory_limit_is_kept_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::tiny(3).write(dir.path(), Form::TextV4, Dtype::BF16, 1);
    let source = open(dir.path());
    let recipe = Recipe::inline("i4-g32".parse().unwrap(), "i8-row".parse().unwrap());
    let plan = |memory| {
        QuantPlan::new(
            &source,
            &recipe,
            &QuantizeOptions { threads: 1, memory, ..QuantizeOptions::default() },
            &Nearest::new(1),
            Importance::Relative(&|_, _| 1.0),
        )
    };
    let free = plan(None).unwrap();
    let tight = plan(Some(free.memory - 10_000_000)).unwrap();
    assert!(tight.chunk < free.chunk && tight.memory <= free.memory - 10_000_000);
    let fault = gemma::error::fault_of(&plan(Some(1_000_000)).unwrap_err()).unwrap().clone();
    assert_eq!(fault.kind, gemma::error::Kind::Memory);
    let named = fault
        .help
        .unwrap()
        .split("--mem-limit ")
        .nth(1)
        .unwrap()
        .split("MB")
        .next()
        .unwrap()
        .parse::<u64>()
        .unwrap();
    assert!(plan(Some(named * 1_000_000)).is_ok());
}
