//! Tensors as bytes that are read from their files when they are wanted, not through the map.

use super::{Checkpoint, Dtype, artifact};
use crate::error::Fault;
use crate::tensor::{Code, Coding, Source, StoredMatrix};
use anyhow::{Context, Result, ensure};

/// A raw tensor's bytes.
struct Tensor<'a> {
    checkpoint: &'a Checkpoint,
    /// Among the raw tensors.
    index: usize,
}

impl Source for Tensor<'_> {
    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.checkpoint.read_at(self.index, at, out)
    }
}

impl Checkpoint {
    /// Same as [`Checkpoint::matrix`], not read yet; all its claims are checked.
    pub fn stored_matrix(&self, name: &str) -> Result<StoredMatrix<'_>> {
        let source = |name: &str| -> Result<Box<dyn Source + '_>> {
            let index = *self.by_name.get(name).with_context(|| {
                Fault::model(format!("{}: there is no tensor `{name}`", self.name))
            })?;
            Ok(Box::new(Tensor { checkpoint: self, index }))
        };
        if self.formats.contains_key(name) {
            let matrix = self.packed(name)?;
            let side = matrix
                .format
                .code
                .is_integer()
                .then(|| source(&artifact::scales_name(name)))
                .transpose()?;
            let (format, rows, cols) = (matrix.format, matrix.rows, matrix.cols);
            let codes = source(&artifact::codes_name(name))?;
            return Ok(StoredMatrix { format, rows, cols, coding: Coding::Canonical, codes, side });
        }
        let view = self.tensor(name);
        let ggml = match view.map(|v| v.dtype) {
            Some(Dtype::F16) => Code::F16.spec().ggml,
            _ => self.block(name).map(|(_, ggml)| ggml),
        };
        let coding = ggml.map_or(Coding::Canonical, Coding::Blocks);
        let (rows, cols, format) = match (view, ggml) {
            (Some(view), Some(ggml)) if view.shape.len() == 2 => {
                let cols = if view.dtype == Dtype::U8 {
                    view.shape[1] / ggml.bytes * ggml.weights
                } else {
                    view.shape[1]
                };
                (view.shape[0], cols, self.format(name).context("its tensor is there")?)
            }
            _ => {
                let matrix = self.matrix(name)?;
                (matrix.rows, matrix.cols, matrix.format)
            }
        };
        format.check_cols(cols)?;
        Ok(StoredMatrix { format, rows, cols, coding, codes: source(name)?, side: None })
    }

    /// Bytes of a raw tensor from `at` on, see [`Checkpoint::read`].
    pub(super) fn read_at(&self, index: usize, at: usize, out: &mut [u8]) -> Result<()> {
        let (shard, entry) = &self.raw[index];
        let (length, tensor) = (entry.range.len(), &entry.name);
        let inside = at.checked_add(out.len()).is_some_and(|end| end <= length);
        ensure!(inside, "{} bytes at {at} lie outside tensor `{tensor}` of {length}", out.len());
        let what = format_args!("tensor `{tensor}`");
        self.read_shard(*shard, entry.range.start + at, out, &what)
    }

    /// Reads bytes of a weight file from `at` on; errors call them `what`.
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
