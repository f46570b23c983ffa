//! Compares a kernel's output with that of its scalar twin: which numbers must have equal bits, the
//! tolerance of the others, and the first number that exceeds it.
//!
//! Integers, and floats computed from them by single roundings, have equal bits on every device.
//! Sums of floats are added in another order than in the twin, so they may differ by a share of the
//! largest number of their row. That share is ten times the largest difference measured on lavapipe
//! (norms 4e-7, attention and gates 1.1e-6, products of 256 terms 1.1e-6), because drivers may
//! round square roots and divisions differently and long rows add up more errors. One wrong term of
//! 21504 changes its sum by about eighty times that tolerance. int8 codes are compared with the
//! unrounded number, f16 numbers within one step.

use gemma_base::compute::poison;
use half::f16;
use std::fmt;

/// Tolerance of sums over a row in another order, and of square roots and divisions.
pub const SUMS: f32 = 4e-6;
/// Tolerance after the exponentials of attention or a gate.
pub const EXPONENTIALS: f32 = 2e-5;
/// Absolute tolerance of sums: devices may flush denormal terms to 0, and a sum has thousands of
/// terms.
pub const FLUSHED: f32 = 1e-33;
/// Tolerance of products over whole rows of floats or groups: thousands of terms with both signs.
pub const PRODUCTS: f32 = 2e-5;

/// Layout of numbers: `[outer, heads, dim / block, rows, block]`. A row is `(outer, rows)`, a
/// column `(heads, dim)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLayout {
    pub heads: usize,
    pub dim: usize,
    pub block: usize,
    pub rows: usize,
}

impl OutputLayout {
    /// Returns the layout `[rows, width]`.
    pub fn rows(width: usize) -> OutputLayout {
        OutputLayout { heads: 1, dim: width, block: width, rows: 1 }
    }

    pub fn row(&self, index: usize) -> usize {
        index / (self.heads * self.dim * self.rows) * self.rows + index / self.block % self.rows
    }

    pub fn column(&self, index: usize) -> usize {
        let part = index / (self.block * self.rows) % (self.dim / self.block);
        let head = index / (self.dim * self.rows) % self.heads;
        head * self.dim + part * self.block + index % self.block
    }
}

/// Tolerance of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Equal bits.
    Same,
    /// Within this share of the largest number of the row. An f16 number may also be the next one.
    Near(f32),
}

/// Type of numbers that kernels write.
pub trait Number: bytemuck::Pod + PartialEq + fmt::Debug {
    fn value(self) -> f32;
    /// Returns whether a device may compute this instead of `other`: another non-finite number, or
    /// 0 for a denormal.
    fn is_like(self, _other: Self) -> bool {
        false
    }
    /// Returns whether `other` may be the same number rounded in the other direction.
    fn is_next_to(self, _other: Self) -> bool {
        false
    }
}

/// Returns whether both are non-finite and the first was computed by a kernel, not left as poison.
/// A device may compute NaN instead of infinity.
fn are_lost<T: Number>(device: T, twin: T) -> bool {
    let are_lost = !device.value().is_finite() && !twin.value().is_finite();
    are_lost && !poison::is_left(bytemuck::bytes_of(&device))
}

impl Number for f32 {
    fn value(self) -> f32 {
        self
    }
    fn is_like(self, other: f32) -> bool {
        are_lost(self, other) || (self - other).abs() <= FLUSHED
    }
}

impl Number for i32 {
    fn value(self) -> f32 {
        self as f32
    }
}

impl Number for f16 {
    fn value(self) -> f32 {
        self.to_f32()
    }
    fn is_like(self, other: f16) -> bool {
        are_lost(self, other)
    }
    fn is_next_to(self, other: f16) -> bool {
        let (a, b) = (self.to_bits(), other.to_bits());
        a ^ b < 0x8000 && a.abs_diff(b) == 1
    }
}

/// The first number that exceeds its tolerance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub row: usize,
    pub column: usize,
    pub words: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "row {}, column {}: {}", self.row, self.column, self.words)
    }
}

/// Converts bytes to numbers.
pub fn typed<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    let mut values = vec![T::zeroed(); bytes.len() / size_of::<T>()];
    let len = size_of_val(&values[..]);
    bytemuck::cast_slice_mut(&mut values).copy_from_slice(&bytes[..len]);
    values
}

/// Returns the first code or scale of an int8 cache that differs from its twin's. Unless `exact`, a
/// difference of one rounding is allowed.
pub fn first_q8_difference(
    device: &[u8],
    twin: &[u8],
    grid: OutputLayout,
    codes: usize,
    exact: bool,
) -> Option<Difference> {
    if device == twin {
        return None;
    }
    let pairs = device.iter().zip(twin).map(|(a, b)| (*a as i8, *b as i8)).take(codes).enumerate();
    let most = if exact { 0 } else { 1 };
    let mut far = pairs.filter(|(_, (a, b))| i32::from(*a).abs_diff(i32::from(*b)) > most);
    if let Some((i, (a, b))) = far.next() {
        let words = format!("code {a}, its twin {b}");
        return Some(Difference { row: grid.row(i), column: grid.column(i), words });
    }
    let scales: [Vec<f16>; 2] = [typed(&device[codes..]), typed(&twin[codes..])];
    let same =
        |a: f16, b: f16| a.to_bits() == b.to_bits() || a.is_like(b) || (!exact && a.is_next_to(b));
    let i = scales[0].iter().zip(&scales[1]).position(|(a, b)| !same(*a, *b))?;
    let words = format!("scale {i} is {}, its twin {}", scales[0][i], scales[1][i]);
    Some(Difference { row: 0, column: 0, words })
}

/// Returns the first number of `device` that exceeds the tolerance of `rule`. The largest finite
/// number of a row counts as at least its entry in `sizes`, if there is one.
pub fn first_difference<T: Number>(
    device: &[u8],
    twin: &[u8],
    grid: OutputLayout,
    rule: Rule,
    sizes: &[f32],
) -> Option<Difference> {
    if device == twin {
        return None;
    }
    let (device, twin): (Vec<T>, Vec<T>) = (typed(device), typed(twin));
    let mut largest = vec![0f32; grid.row(twin.len() - 1) + grid.rows];
    let larger = |most: &mut f32, v: f32| *most = most.max(if v.is_finite() { v } else { 0.0 });
    largest.iter_mut().zip(sizes).for_each(|(most, size)| larger(most, *size));
    for (i, value) in twin.iter().enumerate() {
        larger(&mut largest[grid.row(i)], value.value().abs());
    }
    let far = |i: usize, a: T, b: T| match rule {
        _ if bytemuck::bytes_of(&a) == bytemuck::bytes_of(&b) || a.is_like(b) => false,
        Rule::Same => true,
        // A comparison with NaN is false, so NaN differs from every number.
        Rule::Near(share) => {
            !((a.value() - b.value()).abs() <= share * largest[grid.row(i)] || a.is_next_to(b))
        }
    };
    let at = (0..twin.len()).find(|i| far(*i, device[*i], twin[*i]))?;
    let (row, column) = (grid.row(at), grid.column(at));
    let limit = match rule {
        Rule::Same => String::new(),
        Rule::Near(share) => format!(", where {:.1e} apart would do", share * largest[row]),
    };
    Some(Difference {
        row,
        column,
        words: format!("{:?} instead of {:?}{limit}", device[at], twin[at]),
    })
}

/// Returns the first int8 code of `device`, `[rows, cols]`, that is not a valid rounding of the
/// twin's number.
///
/// A code that differs from the twin's is only valid if the unrounded number is near the midpoint
/// of the two. `exact` returns a row's unrounded codes and the tolerance of each.
pub fn first_wrong_code(
    device: &[i8],
    twin: &[i8],
    cols: usize,
    exact: impl Fn(usize) -> Vec<(f32, f32)>,
) -> Option<Difference> {
    let rows = device.chunks_exact(cols).zip(twin.chunks_exact(cols)).enumerate();
    for (row, (device, twin)) in rows.filter(|(_, (a, b))| a != b) {
        let exact = exact(row);
        let wrong = |c: &usize| {
            let (unrounded, slack) = exact[*c];
            let near = (device[*c] as f32 - unrounded).abs() <= 0.5 + slack;
            device[*c] != twin[*c] && !near
        };
        if let Some(column) = (0..cols).find(wrong) {
            let words = format!(
                "code {} instead of {}, {} unrounded",
                device[column], twin[column], exact[column].0
            );
            return Some(Difference { row, column, words });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(device: &[f32], twin: &[f32], width: usize) -> Option<Difference> {
        let bytes = bytemuck::cast_slice::<f32, u8>;
        first_difference::<f32>(
            bytes(device),
            bytes(twin),
            OutputLayout::rows(width),
            Rule::Near(1e-5),
            &[],
        )
    }

    #[test]
    fn the_first_far_number_is_named() {
        let twin = [1.0, 2.0, 3.0, 1e-9, 0.0, 0.0];
        assert_eq!(near(&twin, &twin, 3), None);
        assert_eq!(near(&[1.00002, 2.0, 3.0, 1e-9, 0.0, 0.0], &twin, 3), None);
        let found = near(&[1.0, 2.0, 3.0, 1e-9, 1e-13, 0.0], &twin, 3).unwrap();
        assert_eq!((found.row, found.column), (1, 1), "a row of small numbers has a small limit");
        assert_eq!(
            found.to_string(),
            "row 1, column 1: 1e-13 instead of 0.0, where 1.0e-14 apart would do"
        );
        assert!(near(&[f32::NAN, 2.0, 3.0], &twin[..3], 3).is_some());
        assert!(near(&[1.0], &[f32::NAN], 1).is_some());
        assert_eq!(near(&[f32::NAN], &[-f32::NAN], 1), None);
        assert_eq!(near(&[f32::NAN], &[f32::INFINITY], 1), None);
        let poison = f32::from_bits(poison::WORD);
        assert!(near(&[poison], &[f32::NAN], 1).is_some(), "a number that is left out");
        assert!(near(&[f32::INFINITY, 0.5], &[1.0, 0.5], 2).is_some());
        assert!(near(&[1.0, 0.5], &[f32::INFINITY, 0.5], 2).is_some());
        assert!(near(&[1.0, 0.4], &[f32::NAN, 0.5], 2).is_some());
        assert!(near(&[f32::INFINITY, 0.4], &[f32::INFINITY, 0.5], 2).is_some());
        assert_eq!(near(&[0.0, 1e-38], &[1e-39, 0.0], 2), None, "a denormal that is flushed");
    }

    #[test]
    fn the_same_means_the_same_bits() {
        let bytes = bytemuck::bytes_of::<f32>;
        let next = f32::from_bits(1f32.to_bits() + 1);
        assert!(
            first_difference::<f32>(
                bytes(&next),
                bytes(&1.0),
                OutputLayout::rows(1),
                Rule::Same,
                &[]
            )
            .is_some()
        );
        let (a, b) = (
            [f16::from_f32(1.0), f16::from_f32(8.0)],
            [f16::from_bits(0x3c01), f16::from_f32(8.0)],
        );
        let halves = |rule| {
            first_difference::<f16>(
                bytemuck::cast_slice(&a),
                bytemuck::cast_slice(&b),
                OutputLayout::rows(2),
                rule,
                &[],
            )
        };
        assert_eq!(halves(Rule::Near(1e-6)), None, "the next half is a rounding the other way");
        assert_eq!(halves(Rule::Same).unwrap().words, "1.0 instead of 1.0009766");
    }

    #[test]
    fn grids_know_rows_and_columns() {
        // [2 heads, 3 blocks of 4 channels, 5 rows, 4 channels], three times.
        let grid = OutputLayout { heads: 2, dim: 12, block: 4, rows: 5 };
        let mut seen = std::collections::HashSet::new();
        for (outer, head, part, row, e) in (0..3).flat_map(|o| {
            (0..2).flat_map(move |h| {
                (0..3).flat_map(move |p| (0..20).map(move |i| (o, h, p, i / 4, i % 4)))
            })
        }) {
            let index = (((outer * 2 + head) * 3 + part) * 5 + row) * 4 + e;
            assert_eq!(
                (grid.row(index), grid.column(index)),
                (outer * 5 + row, head * 12 + part * 4 + e)
            );
            seen.insert((grid.row(index), grid.column(index)));
        }
        assert_eq!(seen.len(), 360);
    }

    #[test]
    fn codes_round_what_they_stand_for() {
        let exact = |_| vec![(2.499, 0.01), (-3.2, 0.01), (7.0, 0.01)];
        assert_eq!(first_wrong_code(&[2, -3, 7], &[2, -3, 7], 3, exact), None);
        assert_eq!(first_wrong_code(&[3, -3, 7], &[2, -3, 7], 3, exact), None, "near the middle");
        let found = first_wrong_code(&[2, -4, 7], &[2, -3, 7], 3, exact).unwrap();
        assert_eq!(found.to_string(), "row 0, column 1: code -4 instead of -3, -3.2 unrounded");
    }
}
