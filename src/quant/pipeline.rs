//! The conversion itself: rows in, codes and scales out, one tensor after the other.

use super::staging::{Staging, check_destination};
use super::{Entry, Layout, Options, Progress, Recipe, Report, TensorReport};
use crate::checkpoint::{TensorView, artifact};
use crate::error::Fault;
use crate::gemma::Weights;
use crate::tensor::quantize::quantize as quantize_rows;
use crate::tensor::{Format, Matrix};
use anyhow::{Context, Result};
use half::f16;
use sha2::{Digest, Sha256};
use std::io::Write;
use std::ops::Range;
use std::path::Path;

/// Weights quantised at once: bounds the memory to some tens of megabytes.
const CHUNK: usize = 4 << 20;

/// Files that travel with a model, copied where the source has them.
const SIDE_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Converts `source` into the directory `dst`, which must not exist or be empty.
///
/// The same source and recipe give the same bytes, whatever the options. On any error, one from `progress` included, nothing
/// is left behind.
pub fn quantize(
    source: &Weights,
    dst: &Path,
    recipe: &Recipe,
    options: &Options,
    progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
) -> Result<Report> {
    let checkpoint = source.checkpoint().context("made-up weights have no files to convert")?;
    if !checkpoint.formats().is_empty() {
        let what = format!("{} is quantised already", checkpoint.name());
        return Err(Fault::model(what).help("start from the original checkpoint: a second rounding only adds error").into());
    }
    let layout = Layout::new(source, recipe, options.shard_bytes)?;
    check_destination(dst, layout.bytes())?;
    let staging = Staging::new(dst)?;
    let mut run = Run { threads: options.threads, done: 0, total: layout.parameters(), hash: Sha256::new(), progress };
    let mut tensors = Vec::new();
    for shard in 0..layout.shards {
        let mut file = staging.create(&layout.file(shard))?;
        file.write_all(&layout.header(shard)?)?;
        for entry in layout.entries.iter().filter(|e| e.shard == shard) {
            let view = checkpoint.tensor(&entry.name).with_context(|| format!("{} went missing", entry.name))?;
            tensors.push(match entry.format {
                Some(format) => run.matrix(entry, format, view, &mut file)?,
                None => {
                    run.hash.update(view.data);
                    let values = source.vector(entry.role, entry.layer)?;
                    run.plain(entry, &values, &mut file)?
                }
            });
        }
        file.finish()?;
    }
    let report = Report {
        version: env!("CARGO_PKG_VERSION").into(),
        source_sha256: hex(run.hash),
        linear: recipe.linear.to_string(),
        embedding: recipe.embedding.to_string(),
        parameters: layout.parameters(),
        bytes: layout.bytes(),
        bits_per_weight: 8.0 * layout.bytes() as f64 / layout.parameters() as f64,
        tensors,
    };
    if let Some(index) = layout.index() {
        staging.write("model.safetensors.index.json", &pretty(&index)?)?;
    }
    staging.write("config.json", &pretty(&artifact::with_formats(checkpoint.config(), &layout.formats()))?)?;
    staging.write("quant-report.json", &pretty(&serde_json::to_value(&report)?)?)?;
    for name in SIDE_FILES {
        if let Some(bytes) = checkpoint.side_file(name)? {
            staging.write(name, &bytes)?;
        }
    }
    staging.publish(dst)?;
    Ok(report)
}

fn pretty(value: &serde_json::Value) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// What goes on from tensor to tensor.
struct Run<'a> {
    threads: usize,
    /// Weights converted, of `total`.
    done: u64,
    total: u64,
    /// Of the source.
    hash: Sha256,
    progress: &'a mut dyn FnMut(Progress<'_>) -> Result<()>,
}

impl Run<'_> {
    fn advance(&mut self, tensor: &str, weights: usize) -> Result<()> {
        self.done += weights as u64;
        (self.progress)(Progress { tensor, done: self.done, total: self.total })
    }

    fn plain(&mut self, entry: &Entry, values: &[f32], file: &mut dyn Write) -> Result<TensorReport> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        file.write_all(bytes)?;
        self.advance(&entry.name, values.len())?;
        Ok(report(entry, 0.0, hex(Sha256::new_with_prefix(bytes))))
    }

    /// Codes as they come, then the scales.
    fn matrix(&mut self, entry: &Entry, format: Format, view: TensorView<'_>, file: &mut dyn Write) -> Result<TensorReport> {
        let mut hash = Sha256::new();
        let mut put = |bytes: &[u8]| {
            hash.update(bytes);
            file.write_all(bytes)
        };
        let mut scales: Vec<f16> = Vec::new();
        let (mut error, mut power) = (0.0, 0.0);
        let step = (CHUNK / entry.cols).max(1);
        for start in (0..entry.rows).step_by(step) {
            let rows = start..(start + step).min(entry.rows);
            let n = rows.len();
            for part in self.chunk(entry, format, view, rows)? {
                put(&part.matrix.codes)?;
                scales.extend_from_slice(&part.matrix.scales);
                // Row by row: the sum must not depend on the number of threads.
                for (e, p) in part.errors {
                    error += e;
                    power += p;
                }
            }
            self.advance(&entry.name, n * entry.cols)?;
        }
        put(bytemuck::cast_slice(&scales))?;
        Ok(report(entry, if power > 0.0 { f64::sqrt(error / power) } else { 0.0 }, hex(hash)))
    }

    /// Some rows, cut evenly among threads; this thread hashes the source meanwhile.
    fn chunk(&mut self, entry: &Entry, format: Format, view: TensorView<'_>, rows: Range<usize>) -> Result<Vec<Quantised>> {
        let (n, threads) = (rows.len(), self.threads.clamp(1, rows.len()));
        let row_bytes = entry.cols * view.dtype.bytes();
        std::thread::scope(|scope| {
            let start = |t: usize| rows.start + t * n / threads;
            let spawn = |t| scope.spawn(move || convert(entry, format, view, start(t)..start(t + 1)));
            let handles: Vec<_> = (0..threads).map(spawn).collect();
            self.hash.update(&view.data[rows.start * row_bytes..rows.end * row_bytes]);
            handles.into_iter().map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }
}

fn report(entry: &Entry, relative_error: f64, sha256: String) -> TensorReport {
    TensorReport {
        name: entry.name.clone(),
        format: entry.format.map_or("f32".into(), |f| f.to_string()),
        shape: if entry.format.is_some() { vec![entry.rows, entry.cols] } else { vec![entry.cols] },
        bytes: entry.bytes(),
        bits_per_weight: 8.0 * entry.bytes() as f64 / (entry.rows * entry.cols) as f64,
        relative_error,
        sha256,
    }
}

/// Converted rows, and for each its squared error and the squares it came from.
struct Quantised {
    matrix: Matrix<'static>,
    errors: Vec<(f64, f64)>,
}

fn convert(entry: &Entry, format: Format, view: TensorView<'_>, rows: Range<usize>) -> Result<Quantised> {
    let cols = entry.cols;
    let mut values = Vec::with_capacity(rows.len() * cols);
    view.read_f32(rows.start * cols..rows.end * cols, &mut values)?;
    if let Some(at) = values.iter().position(|v| !v.is_finite()) {
        let (row, value) = (rows.start + at / cols, values[at]);
        return Err(Fault::model(format!("tensor `{}` holds {value} in row {row}", entry.name))
            .help("the source is damaged or was merged badly: fetch or make it again")
            .into());
    }
    let matrix = quantize_rows(format, rows.len(), cols, &values)?;
    let mut decoded = vec![0f32; cols];
    let error = |(row, source): (usize, &[f32])| {
        matrix.dequantize_row(row, &mut decoded);
        let square = |v: f64| v * v;
        let error = source.iter().zip(&decoded).map(|(s, d)| square((s - d) as f64)).sum();
        (error, source.iter().map(|s| square(*s as f64)).sum())
    };
    let errors = values.chunks_exact(cols).enumerate().map(error).collect();
    Ok(Quantised { matrix, errors })
}
