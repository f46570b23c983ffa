//! Round-to-nearest quantisation into any format, without calibration data. The scale has a closed
//! form with a Hadamard; otherwise scales are searched.

use super::encode::{BLOCK, CodingDevice, Encoder, OnProcessor, row_scale};
use super::integer::{Integer, ScaleRule};
use super::round::{code_of_nearest, f16_nonzero, scale_for};
use super::{Code, Format, Matrix, Values, hadamard};
use anyhow::{Result, ensure};
use half::{bf16, f16};
use rayon::prelude::*;

/// Quantises `values` (`[rows, cols]`, row-major) into `format` by rounding to nearest.
///
/// Fails for NaN and infinite weights, which would silently corrupt a whole row.
pub fn quantize(
    format: Format,
    rows: usize,
    cols: usize,
    values: &[f32],
) -> Result<Matrix<'static>> {
    quantize_by(&OnProcessor, format, rows, cols, values)
}

/// Like [`quantize`], with trellis codes computed by `device`.
pub fn quantize_by(
    device: &dyn CodingDevice,
    format: Format,
    rows: usize,
    cols: usize,
    values: &[f32],
) -> Result<Matrix<'static>> {
    ensure!(
        values.len() == rows * cols,
        "[{rows}, {cols}] needs {} values, got {}",
        rows * cols,
        values.len()
    );
    format.check_cols(cols)?;
    if format.code.is_trellis() {
        return quantize_tiles(device, format, rows, cols, values);
    }
    let mut codes = Vec::with_capacity(rows * format.row_bytes(cols));
    let mut side = Vec::with_capacity(rows * format.row_side(cols));
    let mut row = vec![0f32; cols];
    for (index, source) in values.chunks_exact(cols).enumerate() {
        ensure!(
            source.iter().all(|v| v.is_finite()),
            "row {index} holds a value that is not finite"
        );
        row.copy_from_slice(source);
        if format.hadamard {
            hadamard::transform(&mut row);
        }
        match format.code.spec().values {
            Values::Trellis { .. } | Values::Grid(_) => {}
            Values::Float if format.code == Code::F32 => {
                row.iter().for_each(|v| codes.extend_from_slice(&v.to_le_bytes()))
            }
            Values::Float => {
                row.iter().for_each(|v| codes.extend_from_slice(&bf16::from_f32(*v).to_le_bytes()))
            }
            Values::Integer(integer) => {
                for group in row.chunks_exact(format.group_cols(cols)) {
                    quantize_group(&integer, format, group, &mut codes, &mut side);
                }
            }
        }
    }
    Matrix::new(format, rows, cols, codes, side)
}

/// Quantises one group: appends its packed codes and its side.
fn quantize_group(
    integer: &Integer,
    format: Format,
    group: &[f32],
    codes: &mut Vec<u8>,
    side: &mut Vec<u8>,
) {
    let (scale, min) = match integer.scale {
        ScaleRule::Range => range(integer, group),
        _ => (scale_for(integer, format, group), f16::ZERO),
    };
    let (factor, least) = (scale.to_f32(), min.to_f32());
    let nearest = group.iter().map(|v| code_of_nearest(integer, v - least, factor).0);
    let stored: Vec<u8> = nearest.collect();
    let at = codes.len();
    codes.resize(at + stored.len() * integer.bits as usize / 8, 0);
    integer.pack(&stored, &mut codes[at..]);
    side.extend(scale.to_le_bytes());
    if format.code.spec().side.has_min() {
        side.extend(min.to_le_bytes());
    }
}

/// Codes tiles of 16 rows and columns, each by its best path. Then refits the scales to the codes.
fn quantize_tiles(
    device: &dyn CodingDevice,
    format: Format,
    rows: usize,
    cols: usize,
    values: &[f32],
) -> Result<Matrix<'static>> {
    let bad = values.iter().position(|v| !v.is_finite());
    ensure!(bad.is_none(), "row {} holds a value that is not finite", bad.unwrap_or(0) / cols);
    let mut wanted = values.to_vec();
    if format.hadamard {
        wanted.par_chunks_mut(cols).for_each(hadamard::transform);
    }
    let scales: Vec<f32> = wanted.par_chunks(cols).map(|row| row_scale(format, row)).collect();
    let mut encoder = Encoder::new(format, rows, cols, scales.clone())?;
    let mut decoded = vec![0.0; rows * cols];
    encoder.encode(device, 0..cols / BLOCK, &wanted, &mut decoded)?;
    let mut fits = vec![(0f64, 0f64); rows]; // sums of wanted times coded, and of coded squared
    let both = wanted.par_chunks(cols).zip(decoded.par_chunks(cols));
    fits.par_iter_mut().zip(both).for_each(|(fit, (target, coded))| {
        for (target, coded) in target.chunks_exact(BLOCK).zip(coded.chunks_exact(BLOCK)) {
            fit.0 += target.iter().zip(coded).map(|(t, c)| (t * c) as f64).sum::<f64>();
            fit.1 += coded.iter().map(|c| (c * c) as f64).sum::<f64>();
        }
    });
    let refit = |(s, (cross, square)): (&f32, &(f64, f64))| match *cross > 0.0 && *square > 0.0 {
        true => s * (cross / square) as f32,
        false => *s,
    };
    let scales: Vec<f32> = scales.iter().zip(&fits).map(refit).collect();
    encoder.finish(Some(&scales))
}

/// Returns the scale and the minimum of a group.
fn range(integer: &Integer, group: &[f32]) -> (f16, f16) {
    let (low, high) =
        group.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
    // The minimum is rounded to nearest, so no weight is below it by more than half a step.
    let min = f16::from_f32(low.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()));
    (f16_nonzero(((high - min.to_f32()) / integer.high).max(0.0)), min)
}

/// Returns numbers of a unit Gaussian, deterministic in `seed`.
#[cfg(test)]
pub(crate) fn gaussian(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as f32 + 0.5) / (1u64 << 31) as f32
    };
    (0..n)
        .map(|_| (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean squared errors on a unit Gaussian. The bounds are slightly above the published figures
    /// of each code.
    #[test]
    fn error_is_what_the_literature_says() {
        let (rows, cols) = (64, 1024);
        let x = gaussian(rows * cols, 7);
        for (name, bound) in [
            ("i8-row", 1e-3),
            ("i8a-row", 1e-3),
            ("i4-g32", 0.0078),
            ("i4-row+h128", 0.0125),
            ("i2-g128", 0.121),
            ("i2-row+h128", 0.125),
        ] {
            let m = quantize(name.parse().unwrap(), rows, cols, &x).unwrap();
            let mse =
                x.iter().zip(m.dequantize()).map(|(a, b)| (a - b).powi(2) as f64).sum::<f64>()
                    / x.len() as f64;
            assert!(mse < bound && mse > bound * 0.02, "{name}: {mse}");
        }
    }

    /// No format is worse than the table, or much better than it.
    #[test]
    fn errors_are_what_the_table_says() {
        let (rows, cols) = (32, 1024);
        let x = gaussian(rows * cols, 9);
        for format in Format::written().filter(|format| format.code.is_integer()) {
            let coded = quantize(format, rows, cols, &x).unwrap().dequantize();
            let squares = x.iter().zip(coded).map(|(a, b)| (a - b).powi(2) as f64).sum::<f64>();
            let (error, table) = (squares / x.len() as f64, format.distortion());
            assert!(error < 1.1 * table && error > 0.1 * table, "{format}: {error}, not {table}");
        }
    }

    #[test]
    fn zeros_stay_zero_and_bad_values_are_refused() {
        for name in ["i8-row", "i4-g32", "i2-row"] {
            let m = quantize(name.parse().unwrap(), 1, 32, &[0.0; 32]).unwrap();
            assert!(m.dequantize().iter().all(|v| *v == 0.0), "{name}");
        }
        let mut bad = [0.5; 32];
        bad[3] = f32::NAN;
        assert!(quantize(Format::I8_ROW, 1, 32, &bad).is_err());
    }

    #[test]
    fn a_q4_0_lattice_is_recovered_exactly() {
        let lattice: Vec<f32> = (0..64).map(|i| ((i * 5 % 16) as f32 - 8.0) * 0.25).collect();
        let m = quantize(Format::I4_G32, 2, 32, &lattice).unwrap();
        assert_eq!(m.dequantize(), lattice);
    }
}
