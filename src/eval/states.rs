//! Hidden states that a reference's output head reads, kept in a file. The logits follow from them,
//! and would be 50 times larger for 27B.

use crate::compute::cpu::isa::Isa;
use crate::compute::cpu::linear::{ActValues, ActView, PackedMatrix, linear};
use crate::engine::Scores;
use crate::error::Fault;
use crate::gemma::{Role, Weights};
use crate::tensor::Token;
use crate::util::{hex, threads};
use anyhow::{Context, Result, ensure};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// Bytes of each tensor that tell one reference from another.
const SAMPLE: usize = 4096;

/// An output head of floats, multiplied exactly as an engine does.
pub struct Head<'a> {
    matrix: PackedMatrix,
    isa: Isa,
    threads: usize,
    dim: usize,
    weights: &'a Weights,
}

impl<'a> Head<'a> {
    pub fn new(weights: &'a Weights, threads: usize) -> Result<Head<'a>> {
        let role = if weights.has_own_head() { Role::Head } else { Role::Embed };
        let matrix = weights.matrix(role, 0)?;
        if matrix.format.code.is_integer() || matrix.format.hadamard {
            let what = format!("the reference's head is quantised ({})", matrix.format);
            return Err(Fault::usage(what)
                .help("stored states need a reference of floats; leave --states out")
                .into());
        }
        let isa = Isa::detect();
        Ok(Head {
            dim: matrix.cols,
            matrix: PackedMatrix::pack(&matrix, isa),
            isa,
            threads: threads.max(1),
            weights,
        })
    }

    pub fn vocab(&self) -> usize {
        self.matrix.rows()
    }

    /// Logits of some rows of `states` `[tokens, dim]`.
    pub(super) fn scores(
        &self,
        states: &[f32],
        rows: Range<usize>,
        out: &mut Scores,
    ) -> Result<()> {
        let vocab = self.vocab();
        let hidden = states
            .get(rows.start * self.dim..rows.end * self.dim)
            .context("fewer states than tokens")?;
        out.vocab = vocab;
        out.logits.clear();
        out.logits.resize(rows.len() * vocab, 0.0);
        let act = ActView {
            rows: rows.len(),
            cols: self.dim,
            values: ActValues::F32(hidden),
            scales: &[],
            sums: &[],
        };
        let tiles = self.matrix.tiles();
        let address = out.logits.as_mut_ptr() as usize;
        std::thread::scope(|scope| {
            for t in 0..self.threads {
                let (act, part) = (&act, tiles * t / self.threads..tiles * (t + 1) / self.threads);
                // SAFETY: each thread writes the columns of its own tiles of a buffer of `rows *
                // vocab` floats.
                threads::spawn(scope, move || unsafe {
                    linear(self.isa, &self.matrix, act, part, address as *mut f32, vocab)
                });
            }
        });
        Ok(())
    }
}

/// A file of states, and what they belong to.
pub struct States {
    /// `[tokens, dim]`
    pub hidden: Vec<f32>,
}

/// What states depend on: the reference, the tokens, the window.
fn key(weights: &Weights, tasks: &[&[Token]], window: usize) -> Result<HashMap<String, String>> {
    let checkpoint = weights.checkpoint().context("made-up weights have no files")?;
    let (mut model, mut text) = (Sha256::new(), Sha256::new());
    model.update(checkpoint.config().to_string());
    for (name, view) in checkpoint.tensors() {
        model.update(name);
        model.update(format!("{} {:?}", view.dtype, view.shape));
        model.update(&view.data[..view.data.len().min(SAMPLE)]);
    }
    for ids in tasks {
        text.update((ids.len() as u64).to_le_bytes());
        text.update(bytemuck::cast_slice::<u32, u8>(ids));
    }
    let entries = [
        ("reference", hex(model.finalize())),
        ("ids", hex(text.finalize())),
        ("window", window.to_string()),
    ];
    Ok(entries.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
}

impl States {
    /// The states in a file; `None` where there is none. States of another reference, text or
    /// window are refused.
    pub fn read(
        path: &Path,
        head: &Head<'_>,
        tasks: &[&[Token]],
        window: usize,
    ) -> Result<Option<States>> {
        let help = "remove the file to have it made again, or name another";
        let bad = |what: &str| Fault::model(format!("{} {what}", path.display())).help(help);
        let bytes = match std::fs::metadata(path) {
            Ok(meta) if !meta.is_file() => return Err(bad("is not a regular file").into()),
            Ok(_) => std::fs::read(path).with_context(|| format!("reading {}", path.display()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
        };
        let damaged = || bad("is not a file of stored states");
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|_| damaged())?;
        let found = metadata.metadata().clone().unwrap_or_default();
        for (name, value) in key(head.weights, tasks, window)? {
            if found.get(&name) != Some(&value) {
                return Err(bad(&format!("holds states for another {name}")).into());
            }
        }
        let file = SafeTensors::deserialize(&bytes).map_err(|_| damaged())?;
        let view = file.tensor("hidden").map_err(|_| damaged())?;
        let tokens: usize = tasks.iter().map(|t| t.len()).sum();
        if view.dtype() != Dtype::F32 || view.shape() != [tokens, head.dim] {
            return Err(damaged().into());
        }
        let hidden =
            view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Ok(Some(States { hidden }))
    }

    /// The bytes of their file.
    pub fn to_bytes(&self, head: &Head<'_>, tasks: &[&[Token]], window: usize) -> Result<Vec<u8>> {
        ensure!(self.hidden.len().is_multiple_of(head.dim), "the states are not whole rows");
        let shape = vec![self.hidden.len() / head.dim, head.dim];
        let view = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(&self.hidden))?;
        Ok(serialize([("hidden", view)], Some(key(head.weights, tasks, window)?))?)
    }
}
