//! Products with the chosen experts. All slots of one expert are multiplied together, so that its
//! weights are read once. The sums of a slot do not depend on the other slots.

use super::isa::Isa;
use super::linear::{self, OutputPlace, PackedMatrix, TILE};
use super::pool::Worker;
use crate::compute::act::{Act, ActValues, ActView};
use crate::compute::memory::Buffers;
use crate::compute::op::{ExpertWeights, Experts};
use crate::compute::operand::RowSet;
use crate::compute::reference;
use crate::compute::step::StepView;
use std::ops::Range;

/// Returns (expert, slot) pairs, sorted by expert.
fn by_expert(buffers: &Buffers, op: &Experts, step: &StepView<'_>) -> Vec<(u32, u32)> {
    let slots = step.live(RowSet::Slots(op.used));
    // SAFETY: the choice was made before the last barrier.
    let chosen: &[u32] = unsafe { buffers.slice(op.chosen, slots.start, slots.len()) };
    let numbered = chosen.iter().copied().zip(slots.start as u32..);
    let mut pairs: Vec<(u32, u32)> =
        numbered.filter(|(expert, _)| (*expert as usize) < op.experts).collect();
    pairs.sort_unstable();
    pairs
}

/// Returns the number of different experts that are chosen.
pub fn distinct(buffers: &Buffers, op: &Experts, step: &StepView<'_>) -> usize {
    by_expert(buffers, op, step).chunk_by(|a, b| a.0 == b.0).count()
}

/// Arguments of one dispatch.
pub struct ExpertCall<'a> {
    pub isa: Isa,
    pub buffers: &'a Buffers,
    pub op: &'a Experts,
    /// The matrices of [`Experts::first`] and [`Experts::second`].
    pub first: &'a PackedMatrix,
    pub second: Option<&'a PackedMatrix>,
}

impl ExpertCall<'_> {
    /// Computes a worker's share. `spare` is the working memory of the thread.
    pub fn run(&self, step: &StepView<'_>, worker: &Worker, spare: &mut Vec<f32>) {
        let pairs = by_expert(self.buffers, self.op, step);
        let experts: Vec<&[(u32, u32)]> = pairs.chunk_by(|a, b| a.0 == b.0).collect();
        let tiles = self.op.width(self.first.rows()) / TILE;
        let mine = worker.share(experts.len() * tiles);
        for (i, slots) in experts.into_iter().enumerate() {
            let first = i * tiles;
            let part = mine.start.max(first)..mine.end.min(first + tiles);
            if !part.is_empty() {
                self.multiply(slots, part.start - first..part.end - first, spare);
            }
        }
    }

    /// Multiplies the slots of one expert by some tiles of its outputs.
    fn multiply(&self, slots: &[(u32, u32)], part: Range<usize>, spare: &mut Vec<f32>) {
        let ExpertCall { buffers, op, first, .. } = *self;
        let (width, (expert, slot)) = (op.width(first.rows()), slots[0]);
        let origin = expert as usize * (first.tiles() / op.experts);
        let tiles = origin + part.start..origin + part.end;
        let row = |slot: u32| slot as usize / op.slots_of_act();
        let up = op.second().map(|(_, act)| act);
        if let [_] = slots {
            let out = OutputPlace {
                first: buffers.part(op.out, slot as usize * width, width),
                stride: width,
                tile: origin,
            };
            // SAFETY: activations were written before the last barrier; these outputs of the slot
            // belong to this worker.
            unsafe {
                let view = |act| reference::act_view(buffers, act, row(slot)..row(slot) + 1);
                self.products(&view(&op.act), up.map(view).as_ref(), tiles, out);
            }
            return;
        }
        let (n, cols) = (slots.len(), part.len() * TILE);
        let sizes = [&op.act].into_iter().chain(up).map(|act| n * floats(act)).sum::<usize>();
        spare.resize(spare.len().max(sizes + n * cols), 0.0);
        let (out, rest) = spare.split_at_mut(n * cols);
        let (of_act, of_up) = rest.split_at_mut(n * floats(&op.act));
        let rows = || slots.iter().map(|(_, slot)| row(*slot));
        // SAFETY: activations were written before the last barrier.
        let (act, up) = unsafe {
            (
                gathered(buffers, &op.act, rows(), of_act),
                up.map(|act| gathered(buffers, act, rows(), of_up)),
            )
        };
        let output = OutputPlace { first: out.as_mut_ptr(), stride: cols, tile: tiles.start };
        // SAFETY: the outputs lie in this thread's memory.
        unsafe { self.products(&act, up.as_ref(), tiles, output) };
        for ((_, slot), out) in slots.iter().zip(out.chunks_exact(cols)) {
            let place = *slot as usize * width + part.start * TILE;
            // SAFETY: these outputs of the slot belong to this worker.
            unsafe { buffers.slice_mut(op.out, place, cols) }.copy_from_slice(out);
        }
    }

    /// Multiplies rows by tiles of an expert. For a gated product, `tiles` are those of the gate.
    ///
    /// # Safety
    /// As for [`linear::linear`].
    unsafe fn products(
        &self,
        act: &ActView<'_>,
        act_up: Option<&ActView<'_>>,
        tiles: Range<usize>,
        out: OutputPlace,
    ) {
        let (isa, first) = (self.isa, self.first);
        let (up, act_up, up_from) = match self.op.weights {
            ExpertWeights::Plain(_) => {
                // SAFETY: the caller upholds the contract.
                return unsafe { linear::linear(isa, first, act, tiles, out) };
            }
            ExpertWeights::Fused(_) => (first, act, first.tiles() / self.op.experts / 2),
            ExpertWeights::Apart { .. } => (self.second.unwrap_or(first), act_up.unwrap_or(act), 0),
        };
        // SAFETY: as above.
        unsafe { linear::gate_up(isa, first, act, up, act_up, tiles, up_from, out) };
    }
}

/// Returns the floats of memory for one gathered row of activations.
fn floats(act: &Act) -> usize {
    act.cols / if act.format.int8 { 4 } else { 1 } + 2 * act.format.groups(act.cols)
}

/// Copies rows of activations to `memory`, without gaps.
///
/// # Safety
/// No other thread writes these rows during the call.
unsafe fn gathered<'a>(
    buffers: &Buffers,
    act: &Act,
    rows: impl ExactSizeIterator<Item = usize>,
    memory: &'a mut [f32],
) -> ActView<'a> {
    let (n, cols, groups) = (rows.len(), act.cols, act.format.groups(act.cols));
    let (scales, rest) = memory.split_at_mut(n * groups);
    let (sums, values) = rest.split_at_mut(n * groups);
    let sums = bytemuck::cast_slice_mut::<f32, i32>(sums);
    let bytes = bytemuck::cast_slice_mut::<f32, u8>(values);
    for (i, row) in rows.enumerate() {
        // SAFETY: the caller upholds the contract.
        let own = unsafe { reference::act_view(buffers, act, row..row + 1) };
        let from: &[u8] = match own.values {
            ActValues::I8(values) => bytemuck::cast_slice(values),
            ActValues::F32(values) => bytemuck::cast_slice(values),
        };
        bytes[i * from.len()..][..from.len()].copy_from_slice(from);
        scales[i * groups..][..groups].copy_from_slice(own.scales);
        sums[i * groups..][..groups].copy_from_slice(own.sums);
    }
    let values = match act.format.int8 {
        true => ActValues::I8(bytemuck::cast_slice(values)),
        false => ActValues::F32(values),
    };
    ActView { rows: n, cols, values, scales, sums }
}
