//! The conversion itself: rows in, codes and scales out, one tensor after the other, each noted in
//! the journal.

pub mod estimate;
mod journal;
mod resume;
mod sink;
mod source;
mod staging;
mod tensor;

use super::layout::{Entry, Target};
use super::plan::{Importance, Plan, REPORT_FILE, Report, TensorReport, prior};
use super::solver::{Nearest, Solver};
use super::verify::verify;
use super::{Options, Recipe};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::{Fault, Kind as FaultKind, fault_of};
use crate::models::Weights;
use crate::util::{hex, threads};
use anyhow::{Context, Result};
use journal::{Done, Found, Header, Journal, count, other_run, places};
use sha2::{Digest, Sha256};
use staging::{Growing, Staging, check_destination, check_space, partial_of, sweep};
use std::path::{Path, PathBuf};

/// Bytes after which a finished tensor is made durable; norms wait for the next matrix.
const SYNC_BYTES: u64 = 1 << 20;

/// Told at a tensor's start, after each chunk of its rows, and when it is done; once for a tensor
/// that was found done.
#[derive(Clone, Debug)]
pub struct Progress<'a> {
    /// What is converted or was found converted; `None` while the result is read back.
    pub entry: Option<&'a Entry>,
    /// Weights done.
    pub done: u64,
    /// Weights in all.
    pub total: u64,
    /// Once the tensor is done and in the journal: its relative error, see
    /// [`TensorReport::relative_error`].
    pub error: Option<f64>,
}

type Tell<'a> = &'a mut dyn FnMut(Progress<'_>) -> Result<()>;

/// What an earlier run left of a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    pub path: PathBuf,
    /// Tensors.
    pub done: usize,
}

/// Looks whether an earlier run was ended before `dst` was complete, and how far it came.
pub fn unfinished(dst: &Path) -> Option<Unfinished> {
    let path = partial_of(dst);
    let done = count(&path.join("journal"));
    (done > 0).then_some(Unfinished { path, done })
}

/// Plans and runs a conversion without data: every weight to the nearest code.
pub fn quantize(
    source: &Weights,
    dst: &Path,
    recipe: &Recipe,
    options: &Options,
    tell: Tell<'_>,
) -> Result<Report> {
    let mut solver = Nearest::new(options.threads);
    let n_layers = source.config().n_layers;
    let plan = Plan::new(
        source,
        recipe,
        options,
        &solver,
        Importance::Relative(&|role, layer| prior(role, layer, n_layers)),
    )?;
    run(source, dst, &plan, options, &mut solver, tell)
}

/// Converts `source` into `dst`: a directory, which must not exist or be empty, or a GGUF file,
/// which must not exist.
///
/// The same source, plan and solver give the same bytes, whatever the options and however often the
/// run was ended and begun again. After an error, one from `tell` included, the finished tensors
/// are kept for the next run, unless the source is at fault.
pub fn run(
    source: &Weights,
    dst: &Path,
    plan: &Plan,
    options: &Options,
    solver: &mut dyn Solver,
    tell: Tell<'_>,
) -> Result<Report> {
    threads::prepare_common_pool();
    let checkpoint = source.checkpoint().context("made-up weights have no files to convert")?;
    check_source(checkpoint, plan, options)?;
    sweep(dst);
    check_destination(dst, plan.layout.is_gguf())?;
    let staging = Staging::open(dst)?;
    let header = Header::new(checkpoint, plan, options)?;
    let (journal, found) =
        Journal::open(&staging.journal(), &header, &plan.layout, options.restart)?;
    let mut run = Run {
        source,
        plan,
        options,
        solver,
        tell: &mut *tell,
        staging: &staging,
        journal,
        weights: 0,
        unsynced: 0,
    };
    match run.all(&header, found, dst) {
        Ok(report) => {
            if options.verify {
                check_written(&staging, plan, options, tell)?;
            }
            let file = plan.layout.is_gguf().then(|| plan.layout.file(0));
            staging.publish(file.as_deref(), dst)?;
            Ok(report)
        }
        Err(error) => {
            let source_is_bad = fault_of(&error).is_some_and(|f| f.kind == FaultKind::Model);
            if source_is_bad || count(&staging.journal()) == 0 {
                staging.discard();
            }
            Err(error)
        }
    }
}

/// Reads back what was written, before anyone else sees it. What a disk has damaged the next run
/// finds and does again.
fn check_written(staging: &Staging, plan: &Plan, options: &Options, tell: Tell<'_>) -> Result<()> {
    let total = plan.layout.parameters();
    let written = Weights::open(Checkpoint::open(&staging.files())?)?;
    let reading = Progress { entry: None, done: total, total, error: None };
    verify(&written, options.threads, &mut |_| tell(reading.clone())).map(|_| ())
}

/// Refuses to round what is rounded already; packed weights that keep their format lose nothing.
pub fn check_source(checkpoint: &Checkpoint, plan: &Plan, options: &Options) -> Result<()> {
    let again = |e: &&Entry| match checkpoint.lookup(&e.name).map(|s| s.kind) {
        Some(Kind::Packed(format)) => e.target != Target::Format(format),
        Some(Kind::Blocks(_)) => e.target.is_packed(),
        _ => false,
    };
    match plan.layout.entries.iter().find(again) {
        Some(entry) if !options.requantize => {
            let what = format!(
                "{} is quantised already: `{}` would be rounded once more",
                checkpoint.name(),
                entry.name
            );
            let help = "start from the original checkpoint; if there is none, --allow-requantize \
                adds error to error";
            Err(Fault::model(what).help(help).into())
        }
        _ => Ok(()),
    }
}

/// What goes on from tensor to tensor.
struct Run<'a> {
    source: &'a Weights,
    plan: &'a Plan,
    options: &'a Options,
    solver: &'a mut dyn Solver,
    tell: Tell<'a>,
    staging: &'a Staging,
    journal: Journal,
    /// Converted so far.
    weights: u64,
    /// Bytes written since the last time all was made durable.
    unsynced: u64,
}

impl Run<'_> {
    fn all(&mut self, header: &Header, found: Found, dst: &Path) -> Result<Report> {
        let mut done = Vec::with_capacity(self.plan.layout.entries.len());
        let Found { done: found, is_moved } = found;
        let claimed = found.len();
        for (line, (entry, offset)) in found.into_iter().zip(places(&self.plan.layout)) {
            if !self.resume(&line, entry, offset)? {
                break;
            }
            if is_moved && self.source_hash(entry)? != line.source_sha256 {
                let begun = format!("before tensor `{}` changed in the source", entry.name);
                return Err(other_run(&self.staging.journal(), &begun).into());
            }
            done.push(line);
        }
        if done.len() < claimed || is_moved {
            self.journal.keep(header, &done)?;
        }
        if done.is_empty() {
            self.staging.empty()?;
        }
        let have: u64 = done.iter().map(|d| d.bytes).sum();
        check_space(dst, self.plan.total_bytes.saturating_sub(have))?;
        for shard in 0..self.plan.layout.shards {
            self.shard(shard, &mut done)?;
        }
        self.journal.sync()?;
        let checkpoint = self.source.checkpoint().context("files went missing")?;
        if !self.is_source_unchanged(checkpoint, header, &done)? {
            let fault = Fault::model(format!("{} changed while it was read", checkpoint.name()));
            return Err(fault.help("leave the source alone, and run the command again").into());
        }
        let mut hash = Sha256::new();
        done.iter().for_each(|d| hash.update(&d.source_sha256));
        let tensors = self.plan.layout.entries.iter().zip(&done);
        let tensors = tensors
            .map(|(e, d)| TensorReport::new(e, d.relative_error, d.sha256.clone()))
            .collect();
        let report = Report::new(self.plan, tensors, hex(hash.finalize()));
        if self.plan.layout.is_gguf() {
            return Ok(report);
        }
        for (name, bytes) in self.plan.made_files(self.source)? {
            self.staging.write(name, &bytes)?;
        }
        self.staging.write(REPORT_FILE, &report.to_file(self.plan)?)?;
        for (name, _) in &self.plan.side_files {
            let bytes =
                checkpoint.side_file(name)?.with_context(|| format!("{name} went missing"))?;
            self.staging.write(name, &bytes)?;
        }
        Ok(report)
    }

    /// Writes what a shard still lacks.
    fn shard(&mut self, shard: usize, done: &mut Vec<Done>) -> Result<()> {
        let plan = self.plan;
        let header = plan.layout.header(shard)?;
        let entries = || places(&plan.layout).enumerate().filter(|(_, (e, _))| e.shard == shard);
        let missing: Vec<_> =
            entries().filter(|(i, _)| *i >= done.len()).map(|(_, place)| place).collect();
        let Some(&(_, keep)) = missing.first() else { return Ok(()) };
        let path = self.staging.files().join(plan.layout.file(shard));
        let mut file =
            Growing::open(&path, if keep == 0 { 0 } else { header.len() as u64 + keep })?;
        if keep == 0 {
            file.write_all(&header)?;
        }
        for (entry, offset) in missing {
            file.begin(&entry.name);
            let before = self.weights;
            self.advance(entry, 0)?;
            let (sha256, source_sha256, relative_error) = self.tensor(entry, &mut file)?;
            let (tensor, format, bytes) =
                (entry.name.clone(), entry.target.to_string(), entry.bytes());
            let line =
                Done { tensor, format, offset, bytes, sha256, source_sha256, relative_error };
            self.unsynced += bytes;
            let durable = self.unsynced >= SYNC_BYTES;
            // The journal may only tell what is written.
            if durable { file.sync() } else { file.flush() }?;
            self.journal.push(&line)?;
            if durable {
                self.journal.sync()?;
                self.unsynced = 0;
            }
            done.push(line);
            self.layer_done(entry)?;
            self.weights = before + (entry.rows * entry.cols) as u64;
            self.say(entry, Some(relative_error))?;
        }
        file.sync()
    }

    /// Tells the solver where a layer ends.
    fn layer_done(&mut self, entry: &Entry) -> Result<()> {
        match crate::models::Role::LAYER.last() == Some(&entry.role) {
            true => self.solver.layer_done(entry.layer),
            false => Ok(()),
        }
    }

    fn advance(&mut self, entry: &Entry, weights: usize) -> Result<()> {
        self.weights += weights as u64;
        self.say(entry, None)
    }

    fn say(&mut self, entry: &Entry, error: Option<f64>) -> Result<()> {
        (self.tell)(Progress {
            entry: Some(entry),
            done: self.weights,
            total: self.plan.layout.parameters(),
            error,
        })
    }
}
