//! The conversion itself: rows in, codes and scales out, one tensor after the other.

use super::{Layout, Progress, Recipe, Report, TensorReport};
use crate::checkpoint::artifact;
use crate::error::{Fault, Kind};
use crate::gemma::Weights;
use crate::tensor::quantize::quantize as quantize_rows;
use crate::tensor::{Format, Matrix};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

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

/// Converts `source` into the directory `dst`, which must not exist or be empty. Byte-identical on every run.
pub fn quantize(
    source: &Weights,
    dst: &Path,
    recipe: &Recipe,
    threads: usize,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Report> {
    let checkpoint = source.checkpoint().context("made-up weights have no files to convert")?;
    if !checkpoint.formats().is_empty() {
        let what = format!("{} is quantised already", checkpoint.name());
        return Err(Fault::model(what).help("start from the original checkpoint: a second rounding only adds error").into());
    }
    let layout = Layout::new(source, recipe)?;
    check_destination(dst, layout.bytes())?;
    let staging = Staging::new(dst)?;
    let mut tensors = Vec::new();
    let mut done = 0;
    let total = layout.parameters();
    for shard in 0..layout.shards {
        let path = staging.path.join(layout.file(shard));
        let mut file =
            BufWriter::with_capacity(1 << 20, File::create(&path).with_context(|| format!("creating {}", path.display()))?);
        file.write_all(&layout.header(shard)?)?;
        for entry in layout.entries.iter().filter(|e| e.shard == shard) {
            let mut hash = Sha256::new();
            let mut put = |bytes: &[u8]| {
                hash.update(bytes);
                file.write_all(bytes).with_context(|| format!("writing {}", path.display()))
            };
            let mut error = (0.0, 0.0);
            match entry.format {
                None => put(bytemuck::cast_slice(&source.vector(entry.role, entry.layer)?))?,
                Some(format) => {
                    let matrix = source.matrix(entry.role, entry.layer)?;
                    let mut scales = Vec::new();
                    let rows = (CHUNK / entry.cols).max(1);
                    for start in (0..entry.rows).step_by(rows) {
                        let n = rows.min(entry.rows - start);
                        let naming = || Fault::model(format!("{}, rows {start} to {}", entry.name, start + n));
                        for part in chunk(&matrix, start, n, format, threads).with_context(naming)? {
                            put(&part.0.codes)?;
                            scales.extend_from_slice(&part.0.scales);
                            error = (error.0 + part.1.0, error.1 + part.1.1);
                        }
                        done += (n * entry.cols) as u64;
                        progress(Progress { tensor: &entry.name, done, total });
                    }
                    put(bytemuck::cast_slice(&scales))?;
                }
            }
            tensors.push(TensorReport {
                name: entry.name.clone(),
                format: entry.format.map_or("f32".into(), |f| f.to_string()),
                shape: if entry.format.is_some() { vec![entry.rows, entry.cols] } else { vec![entry.cols] },
                bytes: entry.bytes(),
                bits_per_weight: 8.0 * entry.bytes() as f64 / (entry.rows * entry.cols) as f64,
                relative_error: if error.1 > 0.0 { f64::sqrt(error.0 / error.1) } else { 0.0 },
                sha256: hash.finalize().iter().map(|b| format!("{b:02x}")).collect(),
            });
        }
        file.into_inner()
            .map_err(|e| e.into_error())
            .and_then(|f| f.sync_all())
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let report = Report {
        version: env!("CARGO_PKG_VERSION").into(),
        linear: recipe.linear.to_string(),
        embedding: recipe.embedding.to_string(),
        parameters: total,
        bytes: layout.bytes(),
        bits_per_weight: 8.0 * layout.bytes() as f64 / total as f64,
        tensors,
    };
    let write = |name: &str, bytes: &[u8]| {
        let path = staging.path.join(name);
        fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))
    };
    if let Some(index) = layout.index() {
        write("model.safetensors.index.json", &pretty(&index)?)?;
    }
    write("config.json", &pretty(&artifact::with_formats(checkpoint.config(), &layout.formats()))?)?;
    write("quant-report.json", &pretty(&serde_json::to_value(&report)?)?)?;
    for name in SIDE_FILES {
        if let Some(bytes) = checkpoint.side_file(name)? {
            write(name, &bytes)?;
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

type Quantised = (Matrix<'static>, (f64, f64));

/// Rows `start..start + n`, cut evenly among threads; each part with its squared error and the squares it came from.
fn chunk(matrix: &Matrix<'_>, start: usize, n: usize, format: Format, threads: usize) -> Result<Vec<Quantised>> {
    let threads = threads.clamp(1, n);
    let work = |t: usize| -> Result<Quantised> {
        let (from, to) = (start + t * n / threads, start + (t + 1) * n / threads);
        let mut values = vec![0f32; (to - from) * matrix.cols];
        for (row, out) in (from..to).zip(values.chunks_exact_mut(matrix.cols)) {
            matrix.dequantize_row(row, out);
        }
        let packed = quantize_rows(format, to - from, matrix.cols, &values)?;
        let mut row = vec![0f32; matrix.cols];
        let mut error = (0.0, 0.0);
        for (i, source) in values.chunks_exact(matrix.cols).enumerate() {
            packed.dequantize_row(i, &mut row);
            for (s, r) in source.iter().zip(&row) {
                error.0 += (*s as f64 - *r as f64).powi(2);
                error.1 += (*s as f64).powi(2);
            }
        }
        Ok((packed, error))
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|t| scope.spawn(move || work(t))).collect();
        handles.into_iter().map(|h| h.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    })
}

/// Refuses a destination that holds something, or whose disk has no room.
fn check_destination(dst: &Path, bytes: u64) -> Result<()> {
    let taken = || {
        Fault::usage(format!("{} exists and is not empty", dst.display())).help("choose another destination, or remove it first")
    };
    if dst.exists() && !(dst.is_dir() && fs::read_dir(dst)?.next().is_none()) {
        return Err(taken().into());
    }
    let parent = parent_of(dst);
    if !parent.is_dir() {
        return Err(Fault::usage(format!("{} is not a directory", parent.display())).help("create it first").into());
    }
    let needed = bytes + (64 << 20);
    match free_bytes(&parent) {
        Some(free) if free < needed => {
            let gb = |b: u64| b as f64 / 1e9;
            let what = format!("{} has {:.2} GB free, {:.2} GB are needed", parent.display(), gb(free), gb(needed));
            Err(Fault::new(Kind::Usage, what).help("free some space, or choose a destination on another disk").into())
        }
        _ => Ok(()),
    }
}

fn parent_of(path: &Path) -> PathBuf {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

/// Bytes that this user may still write there; `None` where the system does not say.
fn free_bytes(dir: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(dir.as_os_str().as_bytes()).ok()?;
    // SAFETY: plain C data, filled by the call below.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a terminated path and a valid struct.
    (unsafe { libc::statvfs(path.as_ptr(), &mut stat) } == 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The directory beside the destination where files grow; removed unless published.
struct Staging {
    path: PathBuf,
    published: bool,
}

impl Staging {
    fn new(dst: &Path) -> Result<Self> {
        let name = dst.file_name().context("the destination needs a name")?.to_string_lossy();
        let path = parent_of(dst).join(format!(".{name}.{}.partial", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Staging { path, published: false })
    }

    /// Renames it to its final name: from here on everything is there.
    fn publish(mut self, dst: &Path) -> Result<()> {
        File::open(&self.path).and_then(|d| d.sync_all()).context("syncing the directory")?;
        fs::rename(&self.path, dst).with_context(|| format!("moving {} to {}", self.path.display(), dst.display()))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
