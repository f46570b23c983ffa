//! Tensors of a vision tower by their Hugging Face names, from either kind of file.
//!
//! A file may have several prefixes before a name. Matrices keep the type of their file and are
//! converted to f32 one at a time, when they are used.

use super::resize::CHANNELS;
use crate::checkpoint::{Checkpoint, Dtype, TensorStorage, TensorView};
use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use gemma_base::compute::dense::DenseValues;
use gemma_base::error::Fault;
use rayon::prelude::*;

/// Remedy for a tower with parts that do not match.
pub const DAMAGED: &str = "the file is damaged or of another model: fetch it again";
/// Values that a thread reads at once.
const RUN: usize = 1 << 16;

/// A checkpoint, and the location of the tower's tensors in it.
#[derive(Debug)]
pub struct TowerFile {
    checkpoint: Checkpoint,
    /// Prefixes of the tower's tensors and of the projector's.
    prefixes: [&'static str; 2],
    /// Whether patches are stored channel by channel; Hugging Face files store them pixel by pixel.
    pub is_mmproj: bool,
}

/// The part of a tower, which selects one of the two prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    Tower,
    Projector,
}

/// Weight and bias of a LayerNorm.
pub type BiasedNorm = [Vec<f32>; 2];

/// A matrix with a checked shape.
#[derive(Clone, Debug)]
pub struct Dense {
    name: String,
    pub rows: usize,
    pub cols: usize,
    /// Pixels of a patch, if columns must be reordered from channel by channel to pixel by pixel.
    pixels: Option<usize>,
}

impl TowerFile {
    /// Selects, for each part, the first prefix with which a name exists.
    ///
    /// # Errors
    /// [`no_tower`] if there is none.
    pub fn new(
        checkpoint: Checkpoint,
        tower: (&str, &[&'static str]),
        projector: (&str, &[&'static str]),
    ) -> Result<TowerFile> {
        let find = |(name, prefixes): (&str, &[&'static str])| {
            let is_there = |prefix: &&&str| checkpoint.tensor(&format!("{prefix}{name}")).is_some();
            prefixes.iter().find(is_there).copied()
        };
        match (find(tower), find(projector)) {
            (Some(tower), Some(projector)) => {
                let is_mmproj = checkpoint.metadata().is_some();
                Ok(TowerFile { checkpoint, prefixes: [tower, projector], is_mmproj })
            }
            _ => Err(no_tower(&checkpoint).into()),
        }
    }

    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    fn full(&self, part: Component, name: &str) -> String {
        format!("{}{name}", self.prefixes[part as usize])
    }

    fn bad(&self, name: &str, what: impl std::fmt::Display) -> Fault {
        Fault::model(format!("{}: tensor `{name}` {what}", self.checkpoint.name())).help(DAMAGED)
    }

    fn view(&self, name: &str) -> Result<TensorView<'_>, Fault> {
        self.checkpoint.tensor(name).ok_or_else(|| self.bad(name, "is missing"))
    }

    /// Returns the shape of a tensor.
    pub fn shape(&self, part: Component, name: &str) -> Result<Vec<usize>, Fault> {
        let name = self.full(part, name);
        let found = self.checkpoint.lookup(&name).map(|stored| stored.shape);
        found.ok_or_else(|| self.bad(&name, "is missing"))
    }

    /// Reads all values of a tensor of this shape. Dimensions of 1 are ignored.
    ///
    /// # Errors
    /// A [`Fault`] if it is missing, has another shape or is not stored as floats.
    pub fn floats(&self, part: Component, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let name = self.full(part, name);
        let view = self.view(&name)?;
        let essential =
            |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|n| *n != 1).collect() };
        if essential(view.shape) != essential(shape) {
            let what = format!("has the shape {:?}, not {shape:?}", view.shape);
            return Err(self.bad(&name, what).into());
        }
        self.check_floats(&name, view)?;
        view.to_f32()
    }

    /// Reads weight and bias of a LayerNorm of `width` values.
    ///
    /// # Errors
    /// As [`TowerFile::floats`].
    pub fn norm(&self, name: &str, width: usize) -> Result<BiasedNorm> {
        let part = |end: &str| self.floats(Component::Tower, &format!("{name}.{end}"), &[width]);
        Ok([part("weight")?, part("bias")?])
    }

    fn check_floats(&self, name: &str, view: TensorView<'_>) -> Result<(), Fault> {
        match view.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => Ok(()),
            other => Err(self.bad(name, format!("is stored as {other}, not as floats"))),
        }
    }

    /// Finds a matrix with this number of rows. Dimensions after the first one are merged.
    ///
    /// # Errors
    /// A [`Fault`] if it is missing or has another shape.
    pub fn matrix(
        &self,
        part: Component,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Dense, Fault> {
        let name = self.full(part, name);
        let Some(stored) = self.checkpoint.lookup(&name) else {
            return Err(self.bad(&name, "is missing"));
        };
        let is_flat = stored.shape.len() == 2 || matches!(stored.kind, TensorStorage::Plain(_));
        let fits = stored.shape.first() == Some(&rows)
            && stored.shape[1..].iter().try_fold(1usize, |n, d| n.checked_mul(*d)) == Some(cols);
        if !fits || !is_flat {
            let what = format!("has the shape {:?}, not [{rows}, {cols}]", stored.shape);
            return Err(self.bad(&name, what));
        }
        if let TensorStorage::Plain(_) = stored.kind {
            self.check_floats(&name, self.view(&name)?)?;
        }
        Ok(Dense { name, rows, cols, pixels: None })
    }

    /// Finds a matrix with the values of a patch as columns. They are stored pixel by pixel in
    /// Hugging Face files and channel by channel in mmproj files, and used pixel by pixel.
    pub fn patch_matrix(
        &self,
        part: Component,
        name: &str,
        rows: usize,
        pixels: usize,
    ) -> Result<Dense, Fault> {
        let dense = self.matrix(part, name, rows, pixels * CHANNELS)?;
        Ok(Dense { pixels: self.is_mmproj.then_some(pixels), ..dense })
    }

    /// Reorders values of a patch that a mmproj file stores channel by channel.
    pub fn by_pixel(&self, values: Vec<f32>) -> Vec<f32> {
        match self.is_mmproj {
            true => {
                let mut out = vec![0.0; values.len()];
                interleave(&values, &mut out);
                out
            }
            false => values,
        }
    }

    /// Returns a matrix that is stored as 16-bit floats and needs no reordering.
    fn short(&self, dense: &Dense) -> Option<TensorView<'_>> {
        let view = self.checkpoint.tensor(&dense.name).filter(|_| dense.pixels.is_none());
        view.filter(|view| matches!(view.dtype, Dtype::F16 | Dtype::BF16))
    }

    /// Returns the values of a matrix: as stored, if they are 16-bit floats that need no
    /// reordering.
    pub fn values(&self, dense: &Dense) -> Result<DenseValues<'_>> {
        match self.short(dense) {
            Some(TensorView { dtype: Dtype::F16, data, .. }) => Ok(DenseValues::F16(data)),
            Some(TensorView { data, .. }) => Ok(DenseValues::Bf16(data)),
            None => self.floats_of(dense).map(DenseValues::F32),
        }
    }

    /// Returns the bytes of [`TowerFile::values`].
    pub fn value_bytes(&self, dense: &Dense) -> u64 {
        let width = if self.short(dense).is_some() { 2 } else { 4 };
        width * (dense.rows * dense.cols) as u64
    }

    /// Returns a matrix as f32 `[rows, cols]`, read with all threads of the current pool.
    pub fn load(&self, dense: &Dense) -> Result<Tensor> {
        let shape = (dense.rows, dense.cols);
        Ok(Tensor::from_vec(self.floats_of(dense)?, shape, &Device::Cpu)?)
    }

    fn floats_of(&self, dense: &Dense) -> Result<Vec<f32>> {
        let (rows, cols) = (dense.rows, dense.cols);
        let mut out = vec![0f32; rows * cols];
        let piece = (RUN / cols).max(1);
        let pieces = out.par_chunks_mut(piece * cols).enumerate();
        let stored = self.checkpoint.lookup(&dense.name).context("its tensor is there")?;
        match stored.kind {
            TensorStorage::Plain(_) => {
                let view = self.view(&dense.name)?;
                pieces.try_for_each(|(i, out)| {
                    let start = i * piece * cols;
                    let mut values = Vec::with_capacity(out.len());
                    view.read_f32(start..start + out.len(), &mut values)?;
                    out.copy_from_slice(&values);
                    Ok::<(), anyhow::Error>(())
                })?;
            }
            TensorStorage::Packed(_) => {
                let matrix = self.checkpoint.matrix(&dense.name)?;
                pieces.for_each(|(i, out)| {
                    for (row, out) in out.chunks_exact_mut(cols).enumerate() {
                        matrix.dequantize_row(i * piece + row, out);
                    }
                });
            }
        }
        if dense.pixels.is_some() {
            out.par_chunks_mut(cols).for_each_init(Vec::new, |stored, row| {
                stored.clear();
                stored.extend_from_slice(row);
                interleave(stored, row);
            });
        }
        Ok(out)
    }

    /// Returns the bytes of the tower's tensors in the file.
    pub fn bytes(&self) -> u64 {
        let is_own = |name: &str| self.prefixes.iter().any(|prefix| name.starts_with(prefix));
        let own = self.checkpoint.tensors().filter(|(name, _)| is_own(name));
        own.map(|(_, view)| view.data.len() as u64).sum()
    }
}

/// Reorders values from channel by channel to pixel by pixel.
fn interleave(by_channel: &[f32], out: &mut [f32]) {
    let pixels = by_channel.len() / CHANNELS;
    for (pixel, out) in out.as_chunks_mut::<CHANNELS>().0.iter_mut().enumerate() {
        *out = std::array::from_fn(|channel| by_channel[channel * pixels + pixel]);
    }
}

/// Returns the error for a model without a tower in its files.
pub fn no_tower(checkpoint: &Checkpoint) -> Fault {
    let what = format!("{} reads no images: its files hold no vision tower", checkpoint.name());
    Fault::model(what).help(
        "name the directory from which the model was made, or the `mmproj` GGUF file of its page: \
            --mmproj PATH",
    )
}
