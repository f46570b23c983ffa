//! Operations of towers on rows of f32: products by candle, the others by the kernels of
//! [`gemma_base::compute::cpu::dense`].
//!
//! Results do not depend on the number of threads, since only the number of rows determines the
//! tiles. Sums are cut into slices of [`SLICE`] terms: `gemm`, which candle calls, sums a slice in
//! one pass on every machine, but cuts longer sums by cache sizes. A test compares products with
//! that definition, bit for bit.

use anyhow::{Context, Result};
use candle_core::{CpuStorage, Device, Storage, Tensor};
use gemma_base::compute::cpu::{Isa, dense};
use gemma_base::compute::dense::{DenseHeads, Limits};
use gemma_base::tensor::product::SLICE;
use rayon::prelude::*;

/// Most elements of a product for which `gemm` uses dot products.
const SMALL: usize = 256;

/// Rows of activations.
#[derive(Clone, Debug)]
pub struct Activations {
    pub data: Vec<f32>, // [rows, width]
    pub width: usize,
}

/// Clamps each value; NaN is kept.
pub fn clamp(x: &mut [f32], Limits { least, most }: Limits) {
    x.iter_mut().for_each(|v| *v = if *v < least { least } else { *v });
    x.iter_mut().for_each(|v| *v = if *v > most { most } else { *v });
}

impl Activations {
    pub fn new(data: Vec<f32>, width: usize) -> Activations {
        debug_assert!(width > 0 && data.len().is_multiple_of(width));
        Activations { data, width }
    }

    pub fn len(&self) -> usize {
        self.data.len() / self.width
    }

    /// Calls `each` with pieces of whole rows, on all threads of the current pool.
    pub fn on_pieces(&mut self, each: impl Fn(&mut [f32]) + Send + Sync) {
        let piece = tile(self.len()) * self.width;
        self.data.par_chunks_mut(piece).for_each(each);
    }

    /// Returns LayerNorm of each row.
    pub fn layer_norm(mut self, weight: &[f32], bias: &[f32], eps: f32) -> Activations {
        let isa = Isa::detect();
        self.on_pieces(|piece| dense::layer_norm(isa, piece, weight, bias, eps));
        self
    }

    /// Returns RMSNorm of each run of `width` values. An empty `weight` means all ones.
    pub fn rms_norm(mut self, width: usize, weight: &[f32], eps: f32) -> Activations {
        let isa = Isa::detect();
        self.on_pieces(|piece| dense::rms_norm(isa, piece, width, weight, eps));
        self
    }

    /// Calls `each` with each value and the corresponding value of `other`.
    pub fn zip(&mut self, other: &Activations, each: impl Fn(&mut f32, f32) + Send + Sync) {
        let piece = tile(self.len()) * self.width;
        let pieces = self.data.par_chunks_mut(piece).zip(other.data.par_chunks(piece));
        pieces.for_each(|(own, other)| own.iter_mut().zip(other).for_each(|(a, b)| each(a, *b)));
    }

    /// Rotates halves of heads, see [`gemma_base::compute::dense::DenseOp::Rotate`].
    pub fn rotate(&mut self, half: usize, columns: usize, angles: &[f32]) {
        for (i, row) in self.data.chunks_exact_mut(self.width).enumerate() {
            for (part, values) in row.chunks_exact_mut(half).enumerate() {
                let position = if part % 2 == 0 { i % columns } else { i / columns };
                let (first, second) = values.split_at_mut(half / 2);
                let (angles, _) = angles[position * half..][..half].as_chunks::<2>();
                for ((a, b), [sin, cos]) in first.iter_mut().zip(second).zip(angles) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }

    /// Returns the means of squares of `side` x `side` rows; the grid has `columns` squares in a
    /// row.
    pub fn pool(&self, side: usize, columns: usize) -> Activations {
        let tokens = self.len() / (side * side);
        let mut out = Activations::new(vec![0.0; tokens * self.width], self.width);
        let factor = 1.0 / (side * side) as f32;
        for (token, out) in out.data.chunks_exact_mut(self.width).enumerate() {
            let (left, top) = (token % columns * side, token / columns * side);
            for i in 0..side * side {
                let row = (top + i / side) * columns * side + left + i % side;
                let values = &self.data[row * self.width..][..self.width];
                out.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
            }
            out.iter_mut().for_each(|v| *v *= factor);
        }
        out
    }

    /// Returns the product with `matrix` `[width, n]`. Values are clamped to `input` first. `after`
    /// is called with finished rows.
    pub fn product(
        &self,
        matrix: &Tensor,
        input: Option<Limits>,
        after: impl Fn(&mut [f32]) + Sync,
    ) -> Result<Activations> {
        let (n, tile) = (matrix.dim(1)?, tile(self.len()));
        let mut out = Activations::new(vec![0.0; self.len() * n], n);
        let pieces = out.data.par_chunks_mut(tile * n).zip(self.data.par_chunks(tile * self.width));
        pieces.try_for_each(|(out, x)| {
            let mut x = x.to_vec();
            input.iter().for_each(|limits| clamp(&mut x, *limits));
            let x = Tensor::from_vec(x, (out.len() / n, self.width), &Device::Cpu)?;
            add_product(&x, matrix, out)?;
            after(out);
            Ok::<(), anyhow::Error>(())
        })?;
        Ok(out)
    }
}

/// Returns the rows per tile for this number of rows: enough tiles for many threads, and enough
/// rows per tile to amortise packing the matrix.
fn tile(rows: usize) -> usize {
    (rows / 16).next_multiple_of(16).clamp(32, 256)
}

/// Adds the product of `a` `[m, k]` and `b` `[k, n]` to `out` `[m, n]`, slice by slice.
fn add_product(a: &Tensor, b: &Tensor, out: &mut [f32]) -> Result<()> {
    let ((rows, depth), cols) = (a.dims2()?, b.dim(1)?);
    // `gemm` sums small products in a different order.
    let least = (SMALL / cols + 1).max(2);
    for start in (0..depth).step_by(SLICE) {
        let terms = SLICE.min(depth - start);
        let (a, b) = (a.narrow(1, start, terms)?, b.narrow(0, start, terms)?);
        let product = match rows < least {
            true => a.pad_with_zeros(0, 0, least - rows)?.matmul(&b)?,
            false => a.matmul(&b)?,
        };
        let (storage, _) = product.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(product)) = &*storage else {
            anyhow::bail!("a product is not in f32")
        };
        out.iter_mut().zip(product).for_each(|(sum, v)| *sum += v);
    }
    Ok(())
}

/// Computes attention of all rows to all rows: `softmax(scale * q k^T) v`, head by head.
pub fn attention(
    q: Activations,
    k: Activations,
    v: Activations,
    heads: DenseHeads,
    scale: f32,
) -> Result<Activations> {
    let (rows, width, isa) = (q.len(), q.width, Isa::detect());
    anyhow::ensure!(width == heads.queries * heads.dim && k.width == heads.keys * heads.dim);
    let tensor = |x: Activations| {
        let shape = (x.len(), x.width);
        Tensor::from_vec(x.data, shape, &Device::Cpu)
    };
    let (q, k, v) = (tensor(q)?, tensor(k)?.t()?, tensor(v)?);
    let shared = heads.queries / heads.keys;
    let tile = tile(rows).min(128);
    let mut out = Activations::new(vec![0.0; rows * width], width);
    out.data.par_chunks_mut(tile * width).enumerate().try_for_each(|(i, out)| {
        let n = out.len() / width;
        let q = q.narrow(0, i * tile, n)?;
        for head in 0..heads.queries {
            let at = head / shared * heads.dim;
            let mut scores = vec![0.0; n * rows];
            let (k, v) = (k.narrow(0, at, heads.dim)?, v.narrow(1, at, heads.dim)?);
            add_product(&q.narrow(1, head * heads.dim, heads.dim)?, &k, &mut scores)?;
            dense::softmax(isa, &mut scores, rows, scale);
            let mut sums = vec![0.0; n * heads.dim];
            add_product(&Tensor::from_vec(scores, (n, rows), &Device::Cpu)?, &v, &mut sums)?;
            let into = out.chunks_exact_mut(width).map(|row| &mut row[head * heads.dim..]);
            into.zip(sums.chunks_exact(heads.dim)).for_each(|(row, sums)| {
                row[..heads.dim].copy_from_slice(sums);
            });
        }
        Ok::<(), anyhow::Error>(())
    })?;
    Ok(out)
}

/// Runs `work` on a pool of `threads` threads.
///
/// # Errors
/// A [`Fault`] if they cannot be started.
pub fn on_threads<T: Send>(threads: usize, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
    pool.context(gemma_base::error::no_thread())?.install(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, step: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * step).sqrt().fract() - 0.5).collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    /// All processors and numbers of threads return the bits of the definition.
    #[test]
    fn products_go_by_slices_on_any_number_of_threads() {
        for (m, n, k) in
            [(1, 5, 700), (3, 40, 600), (2, 72, 72), (33, 40, 2 * SLICE + 1), (300, 19, 513)]
        {
            let (x, w) = (values(m * k, 1.37), values(n * k, 0.71));
            let matrix = Tensor::from_slice(&w, (n, k), &Device::Cpu).unwrap().t().unwrap();
            let sum = |(x, w): (&[f32], &[f32])| {
                x.iter().zip(w).fold(0.0f32, |sum, (x, w)| x.mul_add(*w, sum))
            };
            let element = |i: usize| {
                let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                x.chunks(SLICE).zip(w.chunks(SLICE)).map(sum).fold(0.0, |sum, v| sum + v)
            };
            let want: Vec<f32> = (0..m * n).map(element).collect();
            for threads in [1, 2, 3, 7] {
                let x = Activations::new(x.clone(), k);
                let got = on_threads(threads, || x.product(&matrix, None, |_| ())).unwrap();
                assert_eq!(bits(&got.data), bits(&want), "{m} {n} {k}, {threads} threads");
            }
        }
    }

    #[test]
    fn attention_is_that_of_its_definition_on_any_number_of_threads() {
        let (rows, heads) = (70, DenseHeads { queries: 4, keys: 2, dim: 16 });
        let row =
            |n: usize, step| Activations::new(values(rows * n * heads.dim, step), n * heads.dim);
        let run = |threads| {
            let (q, k, v) = (row(heads.queries, 0.3), row(heads.keys, 0.7), row(heads.keys, 1.1));
            on_threads(threads, || attention(q, k, v, heads, 2.0)).unwrap().data
        };
        let got = run(1);
        for threads in [2, 5] {
            assert_eq!(bits(&run(threads)), bits(&got));
        }
        let (q, k, v) = (row(heads.queries, 0.3), row(heads.keys, 0.7), row(heads.keys, 1.1));
        let head = |x: &Activations, row: usize, head: usize| {
            x.data[row * x.width + head * heads.dim..][..heads.dim].to_vec()
        };
        for (i, row) in got.chunks_exact(heads.queries * heads.dim).enumerate() {
            for (h, got) in row.chunks_exact(heads.dim).enumerate() {
                let own = head(&q, i, h);
                let score = |j: usize| -> f64 {
                    let key = head(&k, j, h / 2);
                    own.iter().zip(&key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                };
                let weights: Vec<f64> = (0..rows).map(|j| (2.0 * score(j)).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for (c, got) in got.iter().enumerate() {
                    let value = |j: usize| f64::from(head(&v, j, h / 2)[c]);
                    let want: f64 = (0..rows).map(|j| weights[j] / sum * value(j)).sum();
                    assert!((f64::from(*got) - want).abs() < 1e-6, "row {i} head {h}");
                }
            }
        }
    }

    #[test]
    fn clamping_keeps_what_is_no_number() {
        let mut x = [-3.0, 0.5, f32::NAN, 9.0];
        clamp(&mut x, Limits { least: -1.0, most: 1.0 });
        assert!(x[0] == -1.0 && x[1] == 0.5 && x[2].is_nan() && x[3] == 1.0);
    }
}
