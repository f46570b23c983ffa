//! Scalar twin of `cpu::linear`: the same results from the canonical matrix, by the definition.

use crate::compute::act::{ActValues, ActView};
use crate::tensor::{Group, Matrix, math};

/// Matrix product: `out[r, n] = act row r times weight row n`, f32 `[act.rows, m.rows]`.
///
/// `cpu::linear` defines the order of operations.
pub fn linear(m: &Matrix<'_>, act: &ActView<'_>, out: &mut [f32]) {
    assert_eq!((act.cols, out.len()), (m.cols, act.rows * m.rows));
    let (mut weights, mut codes) = (vec![0.0; m.cols], vec![0; m.cols]);
    for n in 0..m.rows {
        match act.values {
            ActValues::F32(values) => {
                m.decode_row(n, &mut weights);
                for (r, x) in values.chunks_exact(m.cols).take(act.rows).enumerate() {
                    out[r * m.rows + n] =
                        weights.iter().zip(x).fold(0.0, |y, (w, x)| w.mul_add(*x, y));
                }
            }
            ActValues::I8(_) => {
                m.row_codes(n, &mut codes);
                for r in 0..act.rows {
                    out[r * m.rows + n] = row(m, n, &codes, act, r, |term| term);
                }
            }
        }
    }
}

/// Returns the largest sum of absolute terms over the products of each row of int8 activations.
///
/// Scaled sums and minima cancel each other, so the product itself may be much smaller.
pub fn sizes(m: &Matrix<'_>, act: &ActView<'_>) -> Vec<f32> {
    let (mut sizes, mut codes) = (vec![0f32; act.rows], vec![0; m.cols]);
    for n in 0..m.rows {
        m.row_codes(n, &mut codes);
        let rows = sizes.iter_mut().enumerate();
        rows.for_each(|(r, size)| *size = size.max(row(m, n, &codes, act, r, f32::abs)));
    }
    sizes
}

/// Returns row `r` of int8 activations times weight row `n` with the integers `codes`. `factor`
/// maps the factors of each term, for example to absolute values.
fn row(
    m: &Matrix<'_>,
    n: usize,
    codes: &[i32],
    act: &ActView<'_>,
    r: usize,
    factor: impl Fn(f32) -> f32,
) -> f32 {
    let ActValues::I8(values) = act.values else { return 0.0 };
    let (group, groups) = (m.format.group_cols(m.cols), m.format.groups(m.cols));
    let (side, unit) = (m.format.code.spec().side, m.code_unit());
    let x = values[r * m.cols..][..m.cols].chunks_exact(group);
    let mut y = 0.0;
    for (g, (x, codes)) in x.zip(codes.chunks_exact(group)).enumerate() {
        let (factors, sx) = (m.factors(n, g), act.scales[r * groups + g]);
        let sum = x.iter().zip(codes).map(|(x, q)| q * *x as i32).sum::<i32>();
        let (product, scale) = (factor(sum as f32 * sx), factor(factors.scale * unit));
        y = match m.format.group {
            Group::Row => product * scale,
            Group::Cols(_) => product.mul_add(scale, y),
        };
        if side.has_min() {
            let sum = x.iter().map(|x| *x as i32).sum::<i32>();
            y = factor(sum as f32 * sx).mul_add(factor(factors.min), y);
        }
    }
    y
}

/// Gated product: `out = gelu_tanh(gate) * up`, f32 `[act.rows, gate.rows]`.
pub fn gate_up(
    gate: &Matrix<'_>,
    act_gate: &ActView<'_>,
    up: &Matrix<'_>,
    act_up: &ActView<'_>,
    out: &mut [f32],
) {
    let mut ups = vec![0.0; out.len()];
    linear(gate, act_gate, out);
    linear(up, act_up, &mut ups);
    for (o, u) in out.iter_mut().zip(ups) {
        *o = math::gelu_tanh(*o) * u;
    }
}
