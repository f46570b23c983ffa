//! Poison: a bit pattern in buffers before kernels compute them. It makes two bugs visible in the
//! results: output elements that a kernel leaves out, and scratch memory read before it is written.

use super::cache::{KvFormat, KvLayer};
use super::op::{Commit, Op, Rope};
use super::operand::BufferId;
use super::plan::Dispatch;
use super::step::StepView;
use std::collections::HashSet;
use std::ops::Range;

/// NaN as f16 and as f32. Kernels never compute the int8 code -128 (its first byte), nor the i32 or
/// token that two of these f16 form.
const POISON: [u8; 2] = 0xff80_u16.to_le_bytes();

/// Two copies of the pattern: the word that a device fills buffers with.
pub const WORD: u32 = 0xff80_ff80;

/// A buffer that dispatches write before they read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Computed {
    pub id: BufferId,
    /// Smallest write, in bytes: 2 for f16 and int8 numbers of a cache, else 4.
    pub unit: usize,
}

/// Returns whether a number still is poison, as opposed to a NaN that a kernel computed.
pub fn is_left(number: &[u8]) -> bool {
    number == &WORD.to_le_bytes()[..number.len()]
}

/// Fills bytes with poison.
pub fn fill(bytes: &mut [u8]) {
    bytes.as_chunks_mut().0.fill(POISON);
}

/// Returns the buffers that these dispatches write before they read them.
pub fn computed(dispatches: &[Dispatch]) -> Vec<Computed> {
    let (mut read, mut computed) = (HashSet::new(), Vec::<Computed>::new());
    for op in dispatches.iter().map(|dispatch| &dispatch.op) {
        read.extend(op.inputs());
        for id in op.outputs() {
            if !read.contains(&id) && computed.iter().all(|other| other.id != id) {
                computed.push(Computed { id, unit: unit(op, id) });
            }
        }
    }
    computed
}

/// Returns the buffers to poison before a pass: those that it computes.
///
/// Leaves out the embeddings if rows of images were written there before the pass.
pub fn before_pass(dispatches: &[Dispatch], step: &StepView<'_>) -> Vec<Computed> {
    let mut computed = computed(dispatches);
    if step.has_images() {
        let embedded = |own: &Computed| {
            dispatches.iter().any(|d| matches!(d.op, Op::Embed(embed) if embed.out == own.id))
        };
        computed.retain(|own| !embedded(own));
    }
    computed
}

fn unit(op: &Op, id: BufferId) -> usize {
    let layers: &[KvLayer] = match op {
        Op::Rope(Rope { kv, .. }) => std::slice::from_ref(kv),
        Op::Commit(Commit { layers }) => layers,
        _ => &[],
    };
    let holds = |kv: &&KvLayer| [kv.k, kv.v, kv.scratch_k, kv.scratch_v].contains(&id);
    let format = layers.iter().find(holds).map(|kv| kv.format);
    if format.is_none_or(|format| format == KvFormat::F32) { 4 } else { 2 }
}

/// Compares `result`, computed by a twin into a poisoned output, with the output `before`.
///
/// Poisons the units of `before` that the twin wrote, and copies the other units from `before` to
/// `result`. Returns the range of the poisoned bytes, in whole words.
pub fn trace(before: &mut [u8], result: &mut [u8], unit: usize) -> Range<usize> {
    let poison = &WORD.to_le_bytes()[..unit];
    let mut written = before.len()..0;
    let units = before.chunks_exact_mut(unit).zip(result.chunks_exact_mut(unit));
    for (i, (before, result)) in units.enumerate() {
        if result == poison {
            result.copy_from_slice(before);
        } else {
            before.copy_from_slice(poison);
            let word = i * unit / 4 * 4;
            written = written.start.min(word)..word + 4;
        }
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::{Act, ActFormat, WeightId};
    use crate::compute::{Cap, Linear, LinearJob, Norm, Op, RowSet};
    use crate::tensor::Format;

    #[test]
    fn poison_is_no_number() {
        let mut bytes = [0; 4];
        fill(&mut bytes);
        assert_eq!(u32::from_le_bytes(bytes), WORD);
        assert!(f32::from_le_bytes(bytes).is_nan());
        assert!(half::f16::from_bits(0xff80).is_nan());
        // Sums of the int8 codes of a row are always larger than this value.
        assert!(bytes[0] as i8 == -128 && i32::from_le_bytes(bytes) < -127 * 60_000);
    }

    #[test]
    fn a_trace_poisons_what_the_twin_wrote_and_keeps_the_rest() {
        let words = |words: [u32; 5]| bytemuck::cast::<[u32; 5], [u8; 20]>(words);
        let (held, twin) = ([1, 2, 3, 4, 5], [WORD, 7, 8 << 16 | 0xff80, 9, WORD]);
        let (mut before, mut result) = (words(held), words(twin));
        assert_eq!(trace(&mut before, &mut result, 4), 4..16);
        assert_eq!(before, words([1, WORD, WORD, WORD, 5]));
        assert_eq!(result, words([1, 7, 8 << 16 | 0xff80, 9, 5]));
        let (mut before, mut result) = (words(held), words(twin));
        assert_eq!(trace(&mut before, &mut result, 2), 4..16);
        assert_eq!(before, words([1, WORD, 0xff80_0003, WORD, 5]), "a half that is not written");
        assert_eq!(result, words([1, 7, 8 << 16 | 3, 9, 5]));
        let mut untouched = words([WORD; 5]);
        assert!(trace(&mut before.clone(), &mut untouched, 2).is_empty());
        assert_eq!(untouched, before);
    }

    #[test]
    fn buffers_that_are_read_first_are_not_computed() {
        let [x, w, out, values, logits] = [0, 1, 2, 3, 4].map(BufferId);
        let norm = Norm { x, add: None, scale: 1.0, w, eps: 1e-6, dim: 16, out, rows: RowSet::All };
        let format = ActFormat::for_weights("f32".parse::<Format>().unwrap());
        let act = Act { format, cols: 16, values, scales: values, sums: values };
        let jobs = vec![LinearJob { weight: WeightId(0), act, out: logits }];
        let ops = [
            Op::Norm(norm),
            Op::Linear(Linear { jobs, rows: RowSet::All }),
            Op::Cap(Cap { logits, vocab: 16, cap: 1.0 }),
        ];
        let dispatches = ops.map(|op| Dispatch { op, label: "op", layer: None });
        let of = |id| Computed { id, unit: 4 };
        assert_eq!(computed(&dispatches), [out, logits].map(of));
        assert_eq!(computed(&dispatches[2..]), []);
    }
}
