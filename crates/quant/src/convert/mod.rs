//! The conversion of a model.
//!
//! It reads the rows of one tensor after the other, and writes codes and scales. The journal
//! records each finished tensor, and at intervals the finished rows.
//!
//! `tensor.rs` converts one tensor, `resume.rs` checks the work of an interrupted run, `staging.rs`
//! holds the files until the result is complete.

pub mod estimate;
mod journal;
mod resume;
mod sink;
mod source;
mod staging;
mod state;
mod tensor;

use super::layout::{TargetFormat, TensorPlan};
use super::plan::{Importance, QuantPlan, QuantReport, REPORT_FILE, TensorReport, prior};
use super::solver::{Nearest, Solver};
use super::verify::verify;
use super::{QuantizeOptions, Recipe};
use anyhow::{Context, Result};
use gemma_base::error::{Fault, Kind, fault_of};
use gemma_base::util::{hex, threads};
use gemma_model::checkpoint::{Checkpoint, TensorStorage};
use gemma_model::models::Weights;
use journal::{FinishedTensor, Journal, JournalHeader, JournalState, count, other_run, places};
use resume::BegunTensor;
use sha2::{Digest, Sha256};
use staging::{StagedFile, Staging, check_destination, check_space, partial_of, sweep};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes after which finished tensors are synced to disk. Norms are small and are synced together
/// with the next matrix.
const SYNC_BYTES: u64 = 1 << 20;

/// Interval at which finished rows are recorded in the journal. A killed run loses the work of at
/// most this interval, and the rows that were being converted.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// Progress of a conversion. It is reported at the start of each tensor, after each chunk of its
/// rows and at its end. A tensor of an earlier run is reported once.
#[derive(Clone, Debug)]
pub struct QuantProgress<'a> {
    /// The current tensor; `None` while the result is verified.
    pub entry: Option<&'a TensorPlan>,
    /// Converted weights.
    pub done: u64,
    /// All weights.
    pub total: u64,
    /// [`TensorReport::relative_error`] of a tensor that is finished and in the journal.
    pub error: Option<f64>,
}

type Tell<'a> = &'a mut dyn FnMut(QuantProgress<'_>) -> Result<()>;

/// The unfinished result of an earlier run with the same destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    pub path: PathBuf,
    /// Finished tensors.
    pub done: usize,
}

/// Returns the result of an earlier run that ended before `dst` was complete, if there is one.
pub fn unfinished(dst: &Path) -> Option<Unfinished> {
    let path = partial_of(dst);
    count(&path.join("journal")).map(|done| Unfinished { path, done })
}

/// Plans and runs a conversion without calibration: rounds every weight to the nearest code.
pub fn quantize(
    source: &Weights,
    dst: &Path,
    recipe: &Recipe,
    options: &QuantizeOptions,
    tell: Tell<'_>,
) -> Result<QuantReport> {
    let mut solver = Nearest::new(options.threads);
    let n_layers = source.config().layers.len();
    let plan = QuantPlan::new(
        source,
        recipe,
        options,
        &solver,
        Importance::Relative(&|role, layer| prior(role, layer, n_layers)),
    )?;
    run(source, dst, &plan, options, &mut solver, tell)
}

/// Converts `source` into `dst`. `dst` is a directory that is empty or does not exist, or a GGUF
/// file that does not exist.
///
/// The same source, plan and solver produce the same bytes, with any options and any number of
/// interruptions. After an error, including one returned by `tell`, finished tensors and rows are
/// kept for the next run, unless the error is in the source.
pub fn run(
    source: &Weights,
    dst: &Path,
    plan: &QuantPlan,
    options: &QuantizeOptions,
    solver: &mut dyn Solver,
    tell: Tell<'_>,
) -> Result<QuantReport> {
    threads::prepare_common_pool();
    let checkpoint = source.checkpoint().context("made-up weights have no files to convert")?;
    check_source(checkpoint, plan, options)?;
    sweep(dst);
    check_destination(dst, plan.layout.is_gguf())?;
    let staging = Staging::open(dst)?;
    let header = JournalHeader::new(checkpoint, plan, options)?;
    let (journal, found) =
        Journal::open(&staging.journal(), &header, &plan.layout, options.restart)?;
    let mut run = ConversionRun {
        source,
        plan,
        options,
        solver,
        tell: &mut *tell,
        staging: &staging,
        journal,
        weights: 0,
        unsynced: 0,
        saved: Instant::now(),
    };
    let result = run.all(&header, found, dst);
    // On Windows, a directory cannot be moved or removed while a file in it is open.
    drop(run);
    match result {
        Ok(report) => {
            if options.verify {
                check_written(&staging, plan, options, tell)?;
            }
            let file = plan.layout.is_gguf().then(|| plan.layout.file(0));
            staging.publish(file.as_deref(), dst)?;
            Ok(report)
        }
        Err(error) => {
            let source_is_bad = fault_of(&error).is_some_and(|f| f.kind == Kind::Model);
            if source_is_bad || count(&staging.journal()).is_none() {
                staging.discard();
            }
            Err(error)
        }
    }
}

/// Verifies the written files before they are published. After an error, the next run detects
/// damaged tensors and converts them again.
fn check_written(
    staging: &Staging,
    plan: &QuantPlan,
    options: &QuantizeOptions,
    tell: Tell<'_>,
) -> Result<()> {
    let total = plan.layout.parameters();
    let written = Weights::open(Checkpoint::open(&staging.files())?)?;
    let reading = QuantProgress { entry: None, done: total, total, error: None };
    verify(&written, options.threads, &mut |_| tell(reading.clone())).map(|_| ())
}

/// Returns an error for a source with quantised weights that would be rounded again. Packed weights
/// that keep their format are accepted, because they are copied without loss.
pub fn check_source(
    checkpoint: &Checkpoint,
    plan: &QuantPlan,
    options: &QuantizeOptions,
) -> Result<()> {
    let again = |e: &&TensorPlan| match checkpoint.lookup(&e.name).map(|s| s.kind) {
        Some(TensorStorage::Packed(format)) => e.target != TargetFormat::Format(format),
        _ => false,
    };
    match plan.layout.entries.iter().find(again) {
        Some(entry) if !options.requantize => {
            let what = format!(
                "{} is quantised already: `{}` would be rounded once more",
                checkpoint.name(),
                entry.name
            );
            let help = "start from the original checkpoint; \
                if there is none, --allow-requantize adds error to error";
            Err(Fault::model(what).help(help).into())
        }
        _ => Ok(()),
    }
}

/// State of a run.
struct ConversionRun<'a> {
    source: &'a Weights,
    plan: &'a QuantPlan,
    options: &'a QuantizeOptions,
    solver: &'a mut dyn Solver,
    tell: Tell<'a>,
    staging: &'a Staging,
    journal: Journal,
    /// Weights converted so far.
    weights: u64,
    /// Bytes written since the last sync.
    unsynced: u64,
    /// Time of the last record of finished rows.
    saved: Instant,
}

impl ConversionRun<'_> {
    fn all(
        &mut self,
        header: &JournalHeader,
        found: JournalState,
        dst: &Path,
    ) -> Result<QuantReport> {
        let mut done = Vec::with_capacity(self.plan.layout.entries.len());
        let JournalState { done: found, rows, is_moved } = found;
        let claimed = found.len();
        for (line, (entry, offset)) in found.into_iter().zip(places(&self.plan.layout)) {
            if !self.is_written(&line, entry, offset)? {
                break;
            }
            if is_moved && self.source_hash(entry)? != line.source_sha256 {
                let begun = format!("before tensor `{}` changed in the source", entry.name);
                return Err(other_run(&self.staging.journal(), &begun).into());
            }
            done.push(line);
        }
        let seen = self.restore_state(&done)?;
        for (i, (line, (entry, offset))) in done.iter().zip(places(&self.plan.layout)).enumerate() {
            self.resume(line, entry, offset, i < seen)?;
        }
        let mut begun = None;
        if let (Some(rows), true) = (&rows, done.len() == claimed)
            && let Some((entry, offset)) = places(&self.plan.layout).nth(claimed)
        {
            begun = self.resume_rows(rows, entry, offset)?;
        }
        if done.len() < claimed || is_moved || begun.is_some() != rows.is_some() {
            self.journal.keep(header, &done)?;
            if let (Some(rows), true) = (&rows, begun.is_some()) {
                self.journal.push(rows)?;
                self.journal.sync()?;
            }
        }
        if done.is_empty() && begun.is_none() {
            self.staging.empty()?;
        }
        let have: u64 = done.iter().map(|d| d.bytes).sum();
        check_space(dst, self.plan.total_bytes.saturating_sub(have))?;
        for shard in 0..self.plan.layout.shards {
            self.shard(shard, &mut done, &mut begun)?;
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
        let report = QuantReport::new(self.plan, tensors, hex(hash.finalize()));
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

    /// Converts the missing tensors of a shard. Some rows of the first one may exist already.
    fn shard(
        &mut self,
        shard: usize,
        done: &mut Vec<FinishedTensor>,
        begun: &mut Option<BegunTensor>,
    ) -> Result<()> {
        let plan = self.plan;
        let header = plan.layout.header(shard)?;
        let entries = || places(&plan.layout).enumerate().filter(|(_, (e, _))| e.shard == shard);
        let missing: Vec<_> =
            entries().filter(|(i, _)| *i >= done.len()).map(|(_, place)| place).collect();
        let path = self.staging.files().join(plan.layout.file(shard));
        let Some(&(_, offset)) = missing.first() else {
            // A damaged file may have bytes after its last tensor.
            let end = entries().map(|(_, (e, offset))| offset + e.bytes()).max().unwrap_or(0);
            return StagedFile::open(&path, header.len() as u64 + end)?.sync();
        };
        let keep = offset + begun.as_ref().map_or(0, |begun| begun.written.bytes);
        let mut file =
            StagedFile::open(&path, if keep == 0 { 0 } else { header.len() as u64 + keep })?;
        if keep == 0 {
            file.write_all(&header)?;
        }
        for (entry, offset) in missing {
            file.begin(&entry.name);
            let before = self.weights;
            self.advance(entry, 0)?;
            let begun = begun.take().unwrap_or_default();
            let (sha256, source_sha256, relative_error) = self.tensor(entry, &mut file, begun)?;
            let (tensor, format, bytes) =
                (entry.name.clone(), entry.target.to_string(), entry.bytes());
            let line = FinishedTensor {
                tensor,
                format,
                offset,
                bytes,
                sha256,
                source_sha256,
                relative_error,
            };
            self.unsynced += bytes;
            let durable = self.unsynced >= SYNC_BYTES;
            // The data must be written before the journal records it.
            if durable { file.sync() } else { file.flush() }?;
            self.journal.push(&line)?;
            if durable {
                self.journal.sync()?;
                self.unsynced = 0;
            }
            done.push(line);
            if entry.ends_layer {
                self.save_state(entry.layer, done)?;
            }
            self.weights = before + (entry.rows * entry.cols) as u64;
            self.say(entry, Some(relative_error))?;
        }
        file.sync()
    }

    fn advance(&mut self, entry: &TensorPlan, weights: usize) -> Result<()> {
        self.weights += weights as u64;
        self.say(entry, None)
    }

    fn say(&mut self, entry: &TensorPlan, error: Option<f64>) -> Result<()> {
        (self.tell)(QuantProgress {
            entry: Some(entry),
            done: self.weights,
            total: self.plan.layout.parameters(),
            error,
        })
    }
}
