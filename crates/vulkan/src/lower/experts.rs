//! Kernel calls of a mixture of experts: the choice of experts, the products of slots that share an
//! expert, and their sum. See `shaders/include/experts.glsl`.

use super::fuse::Forms;
use super::kernels::{self, ChoosePush, CombinePush, LinearPush, Matrix, OfExperts, Push};
use super::kernels::{Specialise, word};
use super::layout::{DeviceMatrix, Packing};
use super::rows::RowWork;
use super::{Access, Bucket, Call, Lowering};
use anyhow::Result;
use gemma_base::compute::{Act, BufferId, Choose, Combine, Experts, RowSet, WeightId};

/// Returns the words of the choice buffer: a header, three words per block of slots, and the slots.
pub fn choice_words(slots: usize) -> usize {
    3 + 4 * slots
}

/// Returns the expected number of distinct experts for `rows` rows, if all are equally likely.
fn distinct(rows: usize, experts: usize, used: usize) -> f64 {
    let missed = (1.0 - used as f64 / experts as f64).powi(rows as i32);
    experts as f64 * (1.0 - missed)
}

/// Most slots per block. Larger blocks are slower (docs/NOTES.md).
const MOST: usize = 32;

/// Returns the slots per block: twice the expected slots of an expert if all are equally likely, so
/// that few experts need two blocks.
fn block_slots(rows: usize, experts: usize, used: usize) -> usize {
    (2 * rows * used / experts).next_power_of_two().clamp(rows.min(2), MOST)
}

impl Lowering<'_> {
    /// Returns the call that chooses the experts of each row and sorts the slots by expert.
    pub(super) fn choose(&self, op: &Choose, bucket: Bucket) -> Call {
        let Choose { scores, factors, experts, used, chosen, weights } = *op;
        // Four lanes per expert, in the same subgroup.
        let info = self.info;
        let most = info.max_workgroup.min(info.max_subgroups * info.subgroup).min(512);
        let threads = (4 * word(experts)).next_power_of_two().clamp(128, most);
        let kernel = kernels::Choose {
            local: threads,
            threads,
            experts: word(experts),
            used: word(used),
            block: word(block_slots(bucket.rows, experts, used)),
        };
        let push = ChoosePush {
            scores: self.at(scores),
            factors: self.at(factors),
            chosen: self.at(chosen),
            weights: self.at(weights),
            choices: self.at(self.own.choices),
            counts: self.at(self.own.counts),
            step: self.at(self.step),
            room: word(bucket.rows * used),
            _gap: 0,
        };
        let mut accesses = vec![Access::Read(scores)];
        let written = [chosen, weights, self.own.choices, self.own.counts];
        accesses.extend(written.map(Access::Write));
        self.call(&kernel, &push, [bucket.rows, 1, 1], accesses)
    }

    /// Appends the products of the slots with their experts, and their gates.
    pub(super) fn experts(
        &self,
        op: &Experts,
        forms: &Forms,
        bucket: Bucket,
        out: &mut Vec<Call>,
    ) -> Result<()> {
        let is_gated = op.is_gated();
        let result = if is_gated { self.own.gate } else { op.out };
        out.push(self.products(op, op.first(), &op.act, result, bucket)?);
        if let Some((up, act)) = op.second() {
            out.push(self.products(op, up, act, self.own.up, bucket)?);
        }
        if is_gated {
            let work = RowWork {
                add: op.second().map(|_| self.own.up),
                z: forms.floats.then_some(op.out),
                prepare: forms.act.as_ref(),
                rows: RowSet::Slots(op.used),
                glu: true,
                ..RowWork::new(self.own.gate, op.width(self.matrix(op.first()).rows))
            };
            out.push(self.row_call(work, bucket));
        }
        Ok(())
    }

    /// Returns the products of the slots with one matrix of their experts.
    fn products(
        &self,
        op: &Experts,
        weight: WeightId,
        act: &Act,
        result: BufferId,
        bucket: Bucket,
    ) -> Result<Call> {
        let all = self.matrix(weight);
        let one = DeviceMatrix { rows: all.rows / op.experts, ..*all };
        let (rows, slots) = (bucket.rows, bucket.rows * op.used);
        let block = block_slots(rows, op.experts, op.used);
        let packing = Packing::of(one.format, one.rows, one.cols)?;
        let mut shape = self.slot_shape(&one, packing.as_ref(), block);
        shape.constants.extend(OfExperts { experts: true }.constants());
        let share = block.div_ceil(shape.block);
        let choices = Matrix { codes: self.at(self.own.choices), side: 0, out: 0 };
        let push = LinearPush {
            more_n: word(op.slots_of_act() | share << 16),
            more: [choices, Matrix { codes: 0, side: 0, out: 0 }],
            ..self.linear_push(&one, packing.as_ref(), act, result)
        };
        // Each expert may have one incomplete block.
        let blocks = slots.min(slots / block + op.experts);
        let read = distinct(rows, op.experts, op.used) / op.experts as f64;
        let inputs = [act.values, act.scales, act.sums, op.chosen, self.own.choices];
        let mut accesses: Vec<Access> = inputs.map(Access::Read).into();
        accesses.push(Access::Write(result));
        let groups = [blocks * share, one.rows.div_ceil(shape.rows), 1];
        Ok(Call {
            shader: shape.shader,
            constants: shape.constants,
            push: Push::of(&push),
            linear: None,
            epilogue: None,
            groups: groups.map(word),
            accesses,
            bytes: (all.bytes as f64 * read) as u64,
            work: (slots * one.rows * one.cols) as u64,
            label: "",
            dispatches: 0..0,
        })
    }

    pub(super) fn combine(&self, op: &Combine, bucket: Bucket) -> Call {
        let Combine { parts, weights, used, dim, out } = *op;
        let push = CombinePush {
            parts: self.at(parts),
            weights: self.at(weights),
            out: self.at(out),
            step: self.at(self.step),
            dim: word(dim),
            _gap: 0,
        };
        let accesses = vec![Access::Read(parts), Access::Read(weights), Access::Write(out)];
        let groups = [dim.div_ceil(256), bucket.rows, 1];
        self.call(&kernels::Combine { used: word(used) }, &push, groups, accesses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_hold_the_slots_that_an_expert_has() {
        for (rows, block) in [(1, 1), (2, 2), (4, 2), (8, 2), (16, 2), (32, 4), (128, 16)] {
            assert_eq!(block_slots(rows, 128, 8), block, "{rows} rows");
        }
        assert_eq!((block_slots(512, 128, 8), block_slots(4096, 128, 8)), (32, 32));
        assert_eq!((block_slots(1, 7, 3), block_slots(2, 7, 3)), (1, 2));
        assert!((distinct(2, 128, 8) - 15.5).abs() < 0.01);
    }
}
