//! The conversion itself: rows in, codes and scales out, one tensor after the other, each noted in
//! the journal.

use super::allocate::prior;
use super::journal::{Done, Found, Header, Journal, count, other_run, places};
use super::layout::{Entry, Target};
use super::plan::{Importance, Plan, TILE_ROWS};
use super::report::{FILE, Report, TensorReport, digits};
use super::sink::Sink;
use super::solver::{Nearest, Solver};
use super::source::Reader;
use super::staging::{Growing, Staging, check_destination, check_space, partial_of, sweep};
use super::verify::verify;
use super::{Options, Recipe, gguf};
use crate::checkpoint::gguf::types;
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::{Fault, Kind as FaultKind, fault_of};
use crate::models::Weights;
use crate::tensor::quantize::quantize as nearest;
use crate::tensor::{Format, Matrix};
use crate::util::hex;
use crate::util::threads::{self, Task};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
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
            staging.publish(plan.layout.is_gguf().then_some(gguf::FILE), dst)?;
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

/// Hashes the codes and scales of a matrix that is packed in the source.
fn packed_hash(matrix: &Matrix<'_>) -> Sha256 {
    let hash = Sha256::new_with_prefix(&matrix.codes);
    hash.chain_update(&matrix.side)
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
        self.staging.write(FILE, &report.to_file(self.plan)?)?;
        for (name, _) in &self.plan.side_files {
            let bytes =
                checkpoint.side_file(name)?.with_context(|| format!("{name} went missing"))?;
            self.staging.write(name, &bytes)?;
        }
        Ok(report)
    }

    /// Whether the source is what it was when `header` was made. A new stamp alone is no change: a
    /// link or other permissions make one.
    fn is_source_unchanged(
        &self,
        checkpoint: &Checkpoint,
        header: &Header,
        done: &[Done],
    ) -> Result<bool> {
        let now = Header::new(checkpoint, self.plan, self.options)?;
        if now.has_stamps_of(header) || !now.continues(header) {
            return Ok(now.continues(header));
        }
        for (entry, line) in self.plan.layout.entries.iter().zip(done) {
            if self.source_hash(entry)? != line.source_sha256 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// SHA-256 of what the source stores of a tensor, as [`Done::source_sha256`] has it.
    fn source_hash(&self, entry: &Entry) -> Result<String> {
        let reader = Reader::open(self.source, entry)?;
        let hash = match (entry.target, &reader) {
            (Target::Format(format), Reader::Packed { matrix, .. }) if matrix.format == format => {
                packed_hash(matrix)
            }
            _ => {
                let mut hash = Sha256::new();
                reader.pieces(0..entry.rows, &mut |bytes, _| {
                    hash.update(bytes);
                    Ok(())
                })?;
                hash
            }
        };
        Ok(hex(hash.finalize()))
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

    /// Whether a finished tensor lies where it should, byte for byte.
    fn resume(&mut self, line: &Done, entry: &Entry, offset: u64) -> Result<bool> {
        let layout = &self.plan.layout;
        let header = layout.header(entry.shard)?;
        let path = self.staging.files().join(layout.file(entry.shard));
        let Ok(mut file) = File::open(&path) else { return Ok(false) };
        let mut start = vec![0; header.len()];
        if file.read_exact(&mut start).is_err() || start != header {
            return Ok(false);
        }
        let whole = self.solver.wants_resumed(entry) && entry.role.is_matrix();
        let mut bytes =
            vec![
                0;
                if whole { entry.bytes() as usize } else { (entry.bytes() as usize).min(1 << 20) }
            ];
        let (mut hash, mut at) = (Sha256::new(), 0);
        while at < entry.bytes() {
            let n = bytes.len().min((entry.bytes() - at) as usize);
            if file.read_exact_at(&mut bytes[..n], header.len() as u64 + offset + at).is_err() {
                return Ok(false);
            }
            hash.update(&bytes[..n]);
            at += n as u64;
        }
        if hex(hash.finalize()) != line.sha256 {
            return Ok(false);
        }
        if let (true, Target::Format(format)) = (whole, entry.target) {
            let matrix = match entry.block {
                Some(code) => {
                    let (rows, cols) = (entry.rows, entry.cols);
                    let ggml = code.spec().ggml.context("blocks of a file have a type there")?;
                    let bytes = &bytes[..ggml.bytes_of(rows * cols)];
                    types::loaded(code, rows, cols, bytes, self.options.threads, Vec::new())?
                }
                None => {
                    let (codes, side) = bytes.split_at(entry.parts[0].bytes as usize);
                    Matrix::new(format, entry.rows, entry.cols, codes, side)?
                }
            };
            self.solver.resumed(entry, &matrix)?;
        }
        self.layer_done(entry)?;
        self.weights += (entry.rows * entry.cols) as u64;
        self.say(entry, Some(line.relative_error))?;
        Ok(true)
    }

    /// One tensor to the end of its file: SHA-256 of what was written and of its source, and the
    /// relative error.
    fn tensor(&mut self, entry: &Entry, file: &mut Growing) -> Result<(String, String, f64)> {
        let reader = Reader::open(self.source, entry)?;
        match (entry.target, &reader) {
            (Target::AsIs(_), _) => self.copy(entry, &reader, file),
            (Target::Format(format), Reader::Packed { matrix, .. }) if matrix.format == format => {
                self.repeat(entry, matrix, file)
            }
            (Target::Format(format), _) => self.convert(entry, format, &reader, file),
        }
    }

    /// Bytes as the source has them.
    fn copy(
        &mut self,
        entry: &Entry,
        reader: &Reader<'_>,
        file: &mut Growing,
    ) -> Result<(String, String, f64)> {
        let (mut sink, mut source_hash) = (Sink::new(entry, file), Sha256::new());
        reader.pieces(0..entry.rows, &mut |bytes, values| {
            source_hash.update(bytes);
            sink.plain(bytes, values)?;
            self.advance(entry, values.len())
        })?;
        Ok((sink.finish()?, hex(source_hash.finalize()), 0.0))
    }

    /// Tiles of rows that a chunk may have.
    fn most_tiles(&self, entry: &Entry) -> usize {
        (self.plan.chunk / entry.cols / TILE_ROWS).max(1)
    }

    /// Codes and scales as the source has them.
    fn repeat(
        &mut self,
        entry: &Entry,
        matrix: &Matrix<'_>,
        file: &mut Growing,
    ) -> Result<(String, String, f64)> {
        let mut sink = Sink::new(entry, file);
        sink.matrix(matrix)?;
        Ok((sink.finish()?, hex(packed_hash(matrix).finalize()), 0.0))
    }

    /// Codes as they come, then the scales. While a chunk is converted, the next one is read. An
    /// error from `tell` ends it between two chunks; what is done with the last one is worth
    /// finishing.
    fn convert(
        &mut self,
        entry: &Entry,
        format: Format,
        reader: &Reader<'_>,
        file: &mut Growing,
    ) -> Result<(String, String, f64)> {
        let (mut sink, mut source_hash) = (Sink::new(entry, file), Sha256::new());
        let (mut error, mut power) = (0.0, 0.0);
        let vector = !entry.role.is_matrix();
        let step = match self.solver.wants_whole(entry) {
            true => entry.rows,
            // Trellis codes take so long that a chunk is no more than a tile's rows for each
            // thread.
            false if format.code.is_trellis() => {
                TILE_ROWS * self.options.threads.clamp(1, self.most_tiles(entry))
            }
            false => TILE_ROWS * self.most_tiles(entry),
        };
        let chunk = |start: usize| start..(start + step).min(entry.rows);
        let mut values = reader.rows(chunk(0), &mut source_hash)?;
        for start in (0..entry.rows).step_by(step) {
            let (rows, next) = (chunk(start), chunk(start + step));
            let (matrix, ahead) = std::thread::scope(|scope| {
                let source_hash = &mut source_hash;
                let ahead = (!next.is_empty())
                    .then(|| threads::spawn(scope, move || reader.rows(next, source_hash)));
                let matrix = match vector {
                    true => nearest(format, rows.len(), entry.cols, &values),
                    false => self.solver.matrix(entry, format, rows.clone(), &values),
                };
                (matrix, ahead.map(Task::join))
            });
            let matrix = matrix?;
            // Row by row: the sum must not depend on the number of threads.
            for (e, p) in errors(&matrix, &values, self.options.threads) {
                error += e;
                power += p;
            }
            sink.matrix(&matrix)?;
            if start + step < entry.rows {
                self.advance(entry, values.len())?;
            }
            values = ahead.transpose()?.unwrap_or_default();
        }
        let relative = if power > 0.0 { digits(f64::sqrt(error / power), 6) } else { 0.0 };
        Ok((sink.finish()?, hex(source_hash.finalize()), relative))
    }
}

/// For each row its squared error and the squares that it came from.
pub(super) fn errors(matrix: &Matrix<'_>, values: &[f32], threads: usize) -> Vec<(f64, f64)> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let of = |rows: Range<usize>| -> Vec<(f64, f64)> {
        let mut decoded = vec![0f32; cols];
        let square = |v: f64| v * v;
        rows.map(|row| {
            let source = &values[row * cols..][..cols];
            matrix.dequantize_row(row, &mut decoded);
            let error = source.iter().zip(&decoded).map(|(s, d)| square((s - d) as f64)).sum();
            (error, source.iter().map(|s| square(*s as f64)).sum())
        })
        .collect()
    };
    let each = rows.div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        let of = &of;
        let spawn = |start| threads::spawn(scope, move || of(start..(start + each).min(rows)));
        let handles: Vec<_> = (0..rows).step_by(each).map(spawn).collect();
        handles.into_iter().flat_map(Task::join).collect()
    })
}
