//! Scalar twin of `cpu::linear`: the same results from the canonical matrix, by the definition.

use crate::compute::cpu::linear::{ActValues, ActView};
use crate::tensor::{Code, Matrix, math};

/// `out[r, n] = act row r times weight row n`, f32 `[act.rows, m.rows]`; see `cpu::linear` for the
/// order of operations.
pub fn linear(m: &Matrix<'_>, act: &ActView<'_>, out: &mut [f32]) {
    assert_eq!((act.cols, out.len()), (m.cols, act.rows * m.rows));
    let (group, groups) = (m.format.group_cols(m.cols), m.format.groups(m.cols));
    let mut weights = vec![0.0; m.cols];
    let mut codes = vec![0; m.cols];
    for n in 0..m.rows {
        if m.format.code.is_integer() {
            m.row_codes(n, &mut codes);
        }
        match act.values {
            ActValues::F32(values) => {
                m.decode_row(n, &mut weights);
                for (r, x) in values.chunks_exact(m.cols).take(act.rows).enumerate() {
                    out[r * m.rows + n] =
                        weights.iter().zip(x).fold(0.0, |y, (w, x)| w.mul_add(*x, y));
                }
            }
            ActValues::I8(values) => {
                for (r, x) in values.chunks_exact(m.cols).take(act.rows).enumerate() {
                    let mut y = 0.0;
                    for (g, x) in x.chunks_exact(group).enumerate() {
                        let sum: i32 =
                            x.iter().zip(&codes[g * group..]).map(|(x, q)| q * *x as i32).sum();
                        let product = sum as f32 * act.scales[r * groups + g];
                        if m.format.code == Code::I8a {
                            let [scale, min] = [0, 1].map(|i| m.row_scales(n)[i].to_f32());
                            let all: i32 = x.iter().map(|x| *x as i32).sum();
                            y = (all as f32 * act.scales[r]).mul_add(min, product * scale);
                            continue;
                        }
                        let scale = m.row_scales(n)[g].to_f32() * m.code_unit();
                        y = if m.format.group == crate::tensor::Group::Row {
                            product * scale
                        } else {
                            product.mul_add(scale, y)
                        };
                    }
                    out[r * m.rows + n] = y;
                }
            }
        }
    }
}

/// `out = gelu_tanh(gate) * up`, f32 `[act.rows, gate.rows]`.
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
