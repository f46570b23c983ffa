//! Products of dense f32 matrices, with an order of sums that every device reproduces bit for bit.
//!
//! An element of a product is a sum over slices of [`SLICE`] terms. Each slice is summed by fused
//! multiply-adds from its first term, and then added to the sum of the slices before it.

use std::ops::Range;

/// Terms per slice. The `gemm` crate sums this many in one pass on every machine; its division of
/// longer sums depends on the processor's caches.
pub const SLICE: usize = 512;

/// Largest number of multiplications that one thread does alone, because waking others takes
/// longer.
const SMALL: usize = 4 << 20;

/// A matrix inside a slice of floats. Element `[i, j]` is at `i * row_stride + j * col_stride`.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub data: &'a [f32],
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<'a> View<'a> {
    /// Returns a view of a row-major matrix without gaps.
    pub fn of(data: &'a [f32], cols: usize) -> View<'a> {
        assert!(cols > 0 && data.len().is_multiple_of(cols));
        View { data, rows: data.len() / cols, cols, row_stride: cols, col_stride: 1 }
    }

    /// Returns a view of ranges of rows and columns.
    pub fn part(self, rows: Range<usize>, cols: Range<usize>) -> View<'a> {
        assert!(
            rows.end <= self.rows
                && cols.end <= self.cols
                && rows.start <= rows.end
                && cols.start <= cols.end
        );
        let start =
            (rows.start * self.row_stride + cols.start * self.col_stride).min(self.data.len());
        View { data: &self.data[start..], rows: rows.len(), cols: cols.len(), ..self }
    }

    pub fn transposed(self) -> View<'a> {
        let View { data, rows, cols, row_stride, col_stride } = self;
        View { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// Returns whether the last element is inside the slice.
    fn fits(&self) -> bool {
        self.rows == 0
            || self.cols == 0
            || (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride
                < self.data.len()
    }
}

/// Panics unless `c`, with rows `stride` apart, has room for the product `a b`.
pub fn check(c: &[f32], stride: usize, a: View<'_>, b: View<'_>) {
    assert!(a.cols == b.rows && a.fits() && b.fits() && b.cols <= stride);
    assert!(a.rows == 0 || b.cols == 0 || (a.rows - 1) * stride + b.cols <= c.len());
}

/// Computes `c = keep * c + factor * a b` on the processor. `c` is row-major with rows `stride`
/// apart.
pub fn multiply(c: &mut [f32], stride: usize, keep: f32, factor: f32, a: View<'_>, b: View<'_>) {
    check(c, stride, a, b);
    if a.rows == 0 || b.cols == 0 {
        return;
    }
    let strides = |v: View<'_>| (v.col_stride as isize, v.row_stride as isize);
    let parallelism = match a.rows * a.cols * b.cols > SMALL {
        true => gemm::Parallelism::Rayon(0),
        false => gemm::Parallelism::None,
    };
    for start in (0..a.cols.max(1)).step_by(SLICE) {
        let slice = start..a.cols.min(start + SLICE);
        let keep = if start == 0 { keep } else { 1.0 };
        let (a, b) = (a.part(0..a.rows, slice.clone()), b.part(slice, 0..b.cols));
        let ((a_cs, a_rs), (b_cs, b_rs)) = (strides(a), strides(b));
        // SAFETY: the three matrices are inside their slices, as checked above, and `c` is
        // borrowed exclusively for this call.
        unsafe {
            gemm::gemm(
                a.rows,
                b.cols,
                a.cols,
                c.as_mut_ptr(),
                1,
                stride as isize,
                keep != 0.0,
                a.data.as_ptr(),
                a_cs,
                a_rs,
                b.data.as_ptr(),
                b_cs,
                b_rs,
                keep,
                factor,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All processors and all divisions among threads return the same bits.
    #[test]
    fn sums_go_by_slices() {
        let (m, n, k) = (40, 30, 2 * SLICE + 7);
        let values: Vec<f32> = (0..m * k).map(|i| (i as f32).sqrt().fract() - 0.5).collect();
        let (a, b) = (View::of(&values, k), View::of(&values[..n * k], k).transposed());
        for keep in [0.0, 1.0] {
            let mut got = vec![0.25; m * n];
            multiply(&mut got, n, keep, 1.0, a, b);
            for (i, got) in got.into_iter().enumerate() {
                let (x, y) = (&values[i / n * k..][..k], &values[i % n * k..][..k]);
                let slices = x.chunks(SLICE).zip(y.chunks(SLICE));
                let sum = |(x, y): (&[f32], &[f32])| -> f32 {
                    x.iter().zip(y).fold(0.0, |sum, (x, y)| x.mul_add(*y, sum))
                };
                let want = slices.map(sum).fold(0.25 * keep, |whole, slice| whole + slice);
                assert_eq!(got.to_bits(), want.to_bits(), "element {i}, keep {keep}");
            }
        }
    }
}
