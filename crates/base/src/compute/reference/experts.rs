//! Twins of the operations of a mixture of experts.

use super::{act_view, linear};
use crate::compute::act::Act;
use crate::compute::memory::Buffers;
use crate::compute::op::{Choose, Combine, Experts, MAX_EXPERTS};
use crate::compute::operand::{RowSet, WeightId};
use crate::compute::step::StepView;
use crate::tensor::{Matrix, math};

/// Maps a score to an integer of the same order.
///
/// Both zeros are equal. NaN is the largest, so that it is chosen and appears in the output.
#[inline(always)]
pub fn order(score: f32) -> u32 {
    let bits = if score == 0.0 { 0 } else { score.to_bits() };
    match bits >> 31 {
        _ if score.is_nan() => u32::MAX,
        0 => bits | 1 << 31,
        _ => !bits,
    }
}

/// Runs [`Op::Choose`](crate::compute::Op::Choose) for one row.
pub fn choose(buffers: &Buffers, op: &Choose, r: usize) {
    let Choose { scores, factors, experts, used, chosen, weights } = *op;
    // SAFETY: one thread works on the row; inputs are not written by this op.
    let (scores, factors, chosen, weights): (&[f32], &[f32], &mut [u32], &mut [f32]) = unsafe {
        (
            buffers.slice(scores, r * experts, experts),
            buffers.slice(factors, 0, experts),
            buffers.slice_mut(chosen, r * used, used),
            buffers.slice_mut(weights, r * used, used),
        )
    };
    choose_row(scores, factors, chosen, weights);
}

/// Writes the `chosen.len()` experts of one row in ascending order, and their weights.
pub fn choose_row(scores: &[f32], factors: &[f32], chosen: &mut [u32], weights: &mut [f32]) {
    let (experts, used) = (scores.len(), chosen.len());
    let mut taken = [false; MAX_EXPERTS];
    let mut largest = None;
    for _ in 0..used {
        let mut best = None;
        for i in (0..experts).filter(|i| !taken[*i]) {
            let rank = order(scores[i]);
            if best.is_none_or(|(_, other)| rank > other) {
                best = Some((i, rank));
            }
        }
        let Some((i, _)) = best else { break };
        taken[i] = true;
        largest = largest.or(Some(scores[i]));
    }
    let (largest, mut sum) = (largest.unwrap_or_default(), 0.0);
    let places = chosen.iter_mut().zip(weights.iter_mut());
    for (i, (chosen, weight)) in (0..experts).filter(|i| taken[*i]).zip(places) {
        *chosen = i as u32;
        *weight = math::exp(scores[i] - largest);
        sum += *weight;
    }
    for (chosen, weight) in chosen.iter().zip(weights) {
        *weight = *weight / sum * factors[*chosen as usize];
    }
}

/// Runs [`Op::Experts`](crate::compute::Op::Experts) for all rows.
pub fn experts(buffers: &Buffers, op: &Experts, weights: &[Matrix<'static>], step: &StepView<'_>) {
    let width = op.width(weights[op.first().0 as usize].rows);
    for slot in step.live(RowSet::Slots(op.used)) {
        // SAFETY: the caller runs alone; activations and outputs are different buffers.
        let (expert, out): (u32, &mut [f32]) = unsafe {
            (buffers.slice(op.chosen, slot, 1)[0], buffers.slice_mut(op.out, slot * width, width))
        };
        if expert as usize >= op.experts {
            continue;
        }
        let row = slot / op.slots_of_act();
        let products = |weight: WeightId, act: &Act| {
            let matrix = &weights[weight.0 as usize];
            let n = matrix.rows / op.experts;
            let mut out = vec![0.0; n];
            // SAFETY: as above.
            let act = unsafe { act_view(buffers, act, row..row + 1) };
            linear::linear(
                &matrix.part(expert as usize * n..(expert as usize + 1) * n),
                &act,
                &mut out,
            );
            out
        };
        let mut all = products(op.first(), &op.act);
        if let Some((up, act)) = op.second() {
            all.extend(products(up, act));
        }
        if !op.is_gated() {
            out.copy_from_slice(&all);
            continue;
        }
        let (gates, ups) = all.split_at(width);
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            *out = math::gelu_tanh(*gate) * up;
        }
    }
}

/// Runs [`Op::Combine`](crate::compute::Op::Combine) for one row.
#[inline(always)]
pub fn combine(buffers: &Buffers, op: &Combine, r: usize) {
    let Combine { parts, weights, used, dim, out } = *op;
    // SAFETY: one thread works on the row; inputs are not written by this op.
    let (parts, weights, out): (&[f32], &[f32], &mut [f32]) = unsafe {
        (
            buffers.slice(parts, r * used * dim, used * dim),
            buffers.slice(weights, r * used, used),
            buffers.slice_mut(out, r * dim, dim),
        )
    };
    out.fill(0.0);
    for (part, weight) in parts.chunks_exact(dim).zip(weights) {
        for (out, part) in out.iter_mut().zip(part) {
            *out = weight.mul_add(*part, *out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::BufferId;

    fn chosen(scores: &[f32], used: usize) -> (Vec<u32>, Vec<f32>) {
        let mut buffers = Buffers::default();
        let [scores_id, factors, chosen, weights] =
            std::array::from_fn(|_| buffers.alloc("test", 64).unwrap());
        buffers.write(scores_id, 0, bytemuck::cast_slice(scores)).unwrap();
        let all: Vec<f32> = (0..scores.len()).map(|i| (1 << i) as f32).collect();
        buffers.write(factors, 0, bytemuck::cast_slice(&all)).unwrap();
        let experts = scores.len();
        let op = Choose { scores: scores_id, factors, experts, used, chosen, weights };
        choose(&buffers, &op, 0);
        let (mut indices, mut numbers) = (vec![0u32; used], vec![0f32; used]);
        let read = |id: BufferId, out: &mut [u8]| buffers.read(id, 0, out).unwrap();
        read(chosen, bytemuck::cast_slice_mut(&mut indices));
        read(weights, bytemuck::cast_slice_mut(&mut numbers));
        (indices, numbers)
    }

    #[test]
    fn the_largest_scores_are_chosen_and_of_equal_ones_the_first() {
        assert_eq!(chosen(&[1.0, 3.0, 2.0, 3.0], 2), (vec![1, 3], vec![1.0, 4.0]));
        assert_eq!(chosen(&[0.5, -0.0, 0.0, 0.5], 3).0, [0, 1, 3]);
        assert_eq!(chosen(&[-2.0, -1.0, -3.0, f32::NEG_INFINITY], 2).0, [0, 1]);
        let (indices, weights) = chosen(&[0.0, 1.0, -1.0, 2.0], 2);
        let e = 1f32.exp();
        assert_eq!(indices, [1, 3]);
        assert!((weights[0] - 2.0 / (1.0 + e)).abs() < 1e-6, "{weights:?}");
        assert!((weights[1] - 8.0 * e / (1.0 + e)).abs() < 1e-6, "{weights:?}");
    }

    #[test]
    fn a_score_that_is_no_number_shows() {
        for nan in [f32::NAN, -f32::NAN] {
            let (indices, weights) = chosen(&[5.0, 6.0, nan, 7.0], 2);
            assert_eq!(indices, [2, 3]);
            assert!(weights.iter().all(|w| w.is_nan()), "{weights:?}");
        }
    }
}
