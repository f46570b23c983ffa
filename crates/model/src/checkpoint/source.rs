//! Tensors as byte sources that are read from their files on demand, not through the memory map.

use super::gguf::types::Opener;
use super::{Checkpoint, Dtype, artifact, flat};
use anyhow::{Context, Result, ensure};
use gemma_base::error::Fault;
use gemma_base::tensor::{SideKind, Source, StoredMatrix};
use half::f16;

/// The bytes of a stored tensor.
#[derive(Clone, Copy)]
struct CheckpointTensor<'a> {
    checkpoint: &'a Checkpoint,
    /// Index among the stored tensors.
    index: usize,
}

impl Source for CheckpointTensor<'_> {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.checkpoint.read_at(self.index, at, out)
    }
}

/// A tensor that is converted while it is read: units of `from` bytes become units of `to` bytes.
struct Converted<'a, F> {
    tensor: CheckpointTensor<'a>,
    from: usize,
    to: usize,
    /// Converts whole units.
    convert: F,
}

/// Bytes that are converted at once.
const RUN: usize = 64 << 10;

impl<F: Fn(&[u8], &mut [u8]) + Sync> Source for Converted<'_, F> {
    fn read_at(&self, mut at: usize, mut out: &mut [u8]) -> Result<()> {
        let (mut data, mut converted) = (Vec::new(), Vec::new());
        while !out.is_empty() {
            let (first, skipped) = (at / self.to, at % self.to);
            let units = (skipped + out.len()).div_ceil(self.to).min(RUN / self.from);
            data.resize(units * self.from, 0);
            converted.resize(units * self.to, 0);
            self.tensor.read_at(first * self.from, &mut data)?;
            (self.convert)(&data, &mut converted);
            let (part, rest) = out.split_at_mut(out.len().min(converted.len() - skipped));
            part.copy_from_slice(&converted[skipped..][..part.len()]);
            at += part.len();
            out = rest;
        }
        Ok(())
    }
}

/// A matrix side with floats that are checked while they are read.
struct CheckedSide<'a> {
    source: Box<dyn Source + 'a>,
    checkpoint: &'a Checkpoint,
    name: String,
    kind: SideKind,
    /// Bytes per row.
    row: usize,
}

impl Source for CheckedSide<'_> {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.source.read_at(at, out)?;
        self.checkpoint.check_side(&self.name, self.kind, self.row, (at, out))
    }
}

/// Converts f16 to f32.
fn widen(halves: &[u8], floats: &mut [u8]) {
    for (half, float) in halves.as_chunks().0.iter().zip(floats.as_chunks_mut().0) {
        *float = f16::from_le_bytes(*half).to_f32().to_le_bytes();
    }
}

impl Checkpoint {
    /// Like [`Checkpoint::matrix`], but reads the data later. Format, shapes and types are checked.
    pub fn stored_matrix(&self, name: &str) -> Result<StoredMatrix<'_>> {
        let StoredMatrix { format, rows, cols, codes, side } = self.unchecked_matrix(name)?;
        let (kind, row) = (format.code.spec().side, format.row_side(cols));
        let checked = |source| -> Box<dyn Source + '_> {
            Box::new(CheckedSide { source, checkpoint: self, name: name.into(), kind, row })
        };
        Ok(StoredMatrix { format, rows, cols, codes, side: side.map(checked) })
    }

    /// Fails for a side with a scale or minimum that no valid model has. `bytes` start at byte `at`
    /// of the side; each row has `row` bytes.
    pub(super) fn check_side(
        &self,
        name: &str,
        kind: SideKind,
        row: usize,
        (at, bytes): (usize, &[u8]),
    ) -> Result<()> {
        let Some((place, value)) = kind.damage(at, bytes) else { return Ok(()) };
        let what = format!(
            "{}: tensor `{name}` has a block with the scale {value} in row {}, block {}",
            self.name,
            place / row,
            place % row / kind.bytes()
        );
        let help = match self.formats.contains_key(name) {
            true => "the file is damaged: quantise the model again",
            false => "the file is damaged: fetch it again",
        };
        Err(Fault::model(what).help(help).into())
    }

    fn unchecked_matrix(&self, name: &str) -> Result<StoredMatrix<'_>> {
        let tensor = |name: &str| -> Result<CheckpointTensor<'_>> {
            let index = *self.by_name.get(name).with_context(|| {
                Fault::model(format!("{}: there is no tensor `{name}`", self.name))
            })?;
            Ok(CheckpointTensor { checkpoint: self, index })
        };
        if self.formats.contains_key(name) {
            let matrix = self.packed(name)?;
            let (format, rows, cols) = (matrix.format, matrix.rows, matrix.cols);
            let codes = Box::new(tensor(&artifact::codes_name(name))?);
            let side = match format.code.is_integer() {
                true => Some(Box::new(tensor(&artifact::scales_name(name))?) as Box<dyn Source>),
                false => None,
            };
            return Ok(StoredMatrix { format, rows, cols, codes, side });
        }
        let view = self.tensor(name);
        let opener = self.block(name).and_then(|(code, _)| Opener::new(code));
        let halves = view.is_some_and(|view| view.dtype == Dtype::F16);
        let (rows, cols, format) = match view.and_then(|view| flat(view.shape)) {
            Some([rows, cols]) if halves || opener.is_some() => {
                let ggml = opener.map(|opener| opener.ggml);
                let cols = ggml.map_or(cols, |ggml| cols / ggml.bytes * ggml.weights);
                (rows, cols, self.format(name).context("its tensor is there")?)
            }
            _ => {
                let matrix = self.matrix(name)?;
                (matrix.rows, matrix.cols, matrix.format)
            }
        };
        format.check_cols(cols)?;
        let tensor = tensor(name)?;
        let Some(opener) = opener else {
            let codes: Box<dyn Source> = match halves {
                true => Box::new(Converted { tensor, from: 2, to: 4, convert: widen }),
                false => Box::new(tensor),
            };
            return Ok(StoredMatrix { format, rows, cols, codes, side: None });
        };
        let part = |to, convert: fn(&Opener, &[u8], &mut [u8])| -> Box<dyn Source + '_> {
            let convert = move |data: &[u8], out: &mut [u8]| convert(&opener, data, out);
            Box::new(Converted { tensor, from: opener.ggml.bytes, to, convert })
        };
        let codes = part(opener.code_bytes(), Opener::codes);
        let side = Some(part(opener.side_bytes(), Opener::side));
        Ok(StoredMatrix { format, rows, cols, codes, side })
    }

    /// Reads bytes of a stored tensor from offset `at`, see [`Checkpoint::read`].
    pub(super) fn read_at(&self, index: usize, at: usize, out: &mut [u8]) -> Result<()> {
        let (shard, entry) = &self.raw[index];
        let (length, tensor) = (entry.range.len(), &entry.name);
        let inside = at.checked_add(out.len()).is_some_and(|end| end <= length);
        ensure!(inside, "{} bytes at {at} lie outside tensor `{tensor}` of {length}", out.len());
        let what = format_args!("tensor `{tensor}`");
        self.read_shard(*shard, entry.range.start + at, out, &what)
    }

    /// Reads bytes of a weight file from offset `at`. Errors call them `what`.
    pub(super) fn read_shard(
        &self,
        shard: usize,
        at: usize,
        out: &mut [u8],
        what: &dyn std::fmt::Display,
    ) -> Result<()> {
        self.shards[shard].read_at(at, out).map_err(|e| {
            let name = self.shard_names.get(shard);
            let file = name.map_or_else(|| self.name.clone(), |name| self.store.display(name));
            match e.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    let fault =
                        Fault::model(format!("{file}: {what} is cut off: the file became shorter"));
                    fault.help("fetch the file again").into()
                }
                _ => anyhow::Error::new(e).context(format!("reading {what} from {file}")),
            }
        })
    }
}
