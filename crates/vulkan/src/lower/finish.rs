//! Epilogues: the last workgroups of a call perform the next operation, which saves a dispatch.
//!
//! Waiting for a dispatch costs some microseconds, several times per layer. The rotation of a head
//! and the merge of an attention block need only a part of the output: the last workgroup that
//! writes to that part performs them. A norm needs a whole row: the last workgroup of the call
//! performs it for one row, and would take longer than a dispatch for two. Gate times up has no
//! epilogue, because it would slow down the products by more than a dispatch (docs/NOTES.md).

use super::fuse::Fused;
use super::kernels::{
    AttentionPush, Heads, Join, LinearPush, NextNorm, SharedParts, Specialise, word,
};
use super::linear::{MANY_FLOATS, NORM_TEAMS};
use super::sizes::{COUNTS, EPILOGUE_BYTES};
use super::{Access, Bucket, Call, Lowering, kv_code, preparation};
use crate::device::pipeline::Shader;
use gemma_base::compute::{Act, KvFormat, Norm, Op, Rope};
use gemma_base::tensor::Group;
use std::collections::HashMap;
use std::mem::offset_of;

/// Most rows of a pass with epilogues. With more rows, a separate dispatch is faster.
const ROWS: usize = 32;
/// Most rows for merged attention that is rounded by whole rows, which a single workgroup does.
const WHOLE_ROWS: usize = 2;
/// Most workgroups that share rows, as a multiple of those that keep the device busy. Half and
/// twice as many were slower (docs/NOTES.md).
const GROUPS_OF_SHARES: usize = 4;
/// Most channels of a head that a linear layer quantises to int8. The head is kept in shared
/// memory.
const MOST_SHARED_CHANNELS: usize = 256;
/// Channels per block in `row.comp`.
const BLOCK: usize = 128;
/// Offsets of the epilogue's address in the push constants of linear layers and of attention.
const LINEAR_EPILOGUE: usize = offset_of!(LinearPush, epilogue);
const ATTENTION_EPILOGUE: usize = offset_of!(AttentionPush, epilogue);

/// Arguments of an epilogue. They are in a buffer of the executor, and the call receives their
/// address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Arguments of the saved call, then the address of the counters.
    pub bytes: Vec<u8>,
    /// Offset in the call's push constants for the address of these bytes.
    pub at: usize,
}

impl Lowering<'_> {
    /// Returns the epilogue that replaces the call `saved`. Its address goes to byte `at` of the
    /// push constants.
    fn epilogue(&self, saved: &Call, at: usize) -> Epilogue {
        let mut bytes = saved.push.bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes.extend(self.at(self.own.counts).to_le_bytes());
        assert!(bytes.len() <= EPILOGUE_BYTES, "arguments of {} bytes", bytes.len());
        Epilogue { bytes, at }
    }

    /// Adds the work of `saved` to `call` as its epilogue.
    fn take_over(&self, call: &mut Call, saved: Call, at: usize) {
        call.epilogue = Some(self.epilogue(&saved, at));
        call.accesses.extend(saved.accesses);
        call.accesses.push(Access::Write(self.own.counts));
    }

    /// Adds the operation `next` to the linear calls as an epilogue. Returns false if that is
    /// impossible.
    pub(super) fn finish_linear(&self, calls: &mut [Call], next: &Fused, bucket: Bucket) -> bool {
        match next.op {
            Op::Norm(norm) => self.finish_norm(&mut calls[0], next, norm, bucket),
            Op::Rope(rope) => self.finish_rope(calls, rope, bucket),
            _ => false,
        }
    }

    /// Adds a rotation to linear calls as an epilogue, if possible. Each call rotates its own
    /// heads.
    fn finish_rope(&self, calls: &mut [Call], op: &Rope, bucket: Bucket) -> bool {
        let Rope { q, keys, n_heads, kv, .. } = op;
        let fits = |call: &Call| {
            let units = call.groups[0] as usize * (n_heads + 2 * kv.n_kv_heads);
            let whole = call.linear.is_some_and(|(_, rows)| kv.head_dim.is_multiple_of(rows));
            whole && call.shader != Shader::LinearMany && units <= COUNTS
        };
        let room = kv.format != KvFormat::Q8 || kv.head_dim <= MOST_SHARED_CHANNELS;
        if !(self.finish && bucket.rows <= ROWS && room && calls.iter().all(fits)) {
            return false;
        }
        let rope = self.rope(op, bucket);
        // Buffers of heads, and the scratch buffers for their keys and values.
        let mut outs = vec![(*q, None)];
        outs.extend(
            keys.iter().flat_map(|own| [(own.k, Some(kv.scratch_k)), (own.v, Some(kv.scratch_v))]),
        );
        let mut first = 0;
        for call in calls {
            let heads = Heads {
                heads: true,
                head_dim: word(kv.head_dim),
                kv: kv_code(kv),
                first_matrix: word(first),
                v_norm: keys.is_some_and(|own| own.v_norm),
            };
            call.constants.extend(heads.constants());
            call.epilogue = Some(self.epilogue(&rope, LINEAR_EPILOGUE));
            let written: Vec<_> = outs.iter().filter(|(out, _)| call.writes(*out)).collect();
            first += written.len();
            call.accesses.extend(written.iter().filter_map(|(_, kept)| *kept).map(Access::Write));
            // Each head has its own counter.
            call.accesses.push(Access::Share(self.own.counts));
        }
        true
    }

    /// Lets several workgroups share the parts of a row if the call would have few workgroups. The
    /// last one adds up their sums.
    pub(super) fn share_parts(&self, call: &mut Call) {
        let groups: usize = call.groups.iter().map(|g| *g as usize).product();
        let suits = |shares: &usize| {
            groups * shares <= GROUPS_OF_SHARES * self.info.busy
                && groups * shares * MANY_FLOATS <= self.own.partial_floats
        };
        let shares = [16, 8, 4, 2].into_iter().find(suits);
        let Some(shares) = shares.filter(|_| call.shader == Shader::LinearMany) else { return };
        call.groups[2] = word(shares);
        call.constants.extend(SharedParts { shares: word(shares) }.constants());
        let own = [self.own.partials, self.own.counts];
        let bytes = own.iter().flat_map(|id| self.at(*id).to_le_bytes()).collect();
        call.epilogue = Some(Epilogue { bytes, at: LINEAR_EPILOGUE });
        call.accesses.extend(own.map(Access::Write));
    }

    /// Returns whether `next` is a norm that can be an epilogue of the linear layer before it.
    pub(super) fn can_norm(&self, next: &Op, bucket: Bucket) -> bool {
        let info = self.info;
        let fits = NORM_TEAMS <= info.max_subgroups && NORM_TEAMS * 32 <= info.max_workgroup;
        matches!(next, Op::Norm(_)) && self.finish && fits && bucket.rows == 1
    }

    /// Adds a norm of its result to the linear call as an epilogue, if possible.
    fn finish_norm(&self, call: &mut Call, next: &Fused, norm: &Norm, bucket: Bucket) -> bool {
        // Only kernels with all rows in one workgroup support it.
        let kernels = [Shader::Linear, Shader::LinearFloat, Shader::LinearTrellis];
        let can = kernels.contains(&call.shader) && call.groups[0] == 1;
        if !(can && self.can_norm(next.op, bucket)) {
            return false;
        }
        let forms = &next.forms;
        let (hadamard, int8, group) = preparation(forms.act.as_ref());
        let constants = NextNorm {
            norm: true,
            dim: word(norm.dim),
            next_prepare: forms.act.is_some(),
            next_hadamard: hadamard,
            next_int8: int8,
            next_group: group,
        };
        call.constants.extend(constants.constants());
        self.take_over(call, self.norm(norm, forms, bucket), LINEAR_EPILOGUE);
        true
    }

    /// Returns whether attention over split pages can merge them in an epilogue and prepare `act`.
    ///
    /// Its workgroups `groups` process `rows` rows each. `width` channels belong to a KV head.
    pub(super) fn can_join(
        &self,
        act: Option<&Act>,
        groups: [usize; 3],
        rows: usize,
        width: usize,
        bucket: Bucket,
    ) -> bool {
        // A scale of the whole row needs all heads, so the last workgroup of the call quantises all
        // rows.
        let few = rows <= WHOLE_ROWS
            || !act.is_some_and(|a| a.format.int8 && a.format.group == Group::Row);
        let counters = groups[1] * (groups[0] + 1);
        self.finish
            && few
            && width.is_multiple_of(BLOCK)
            && bucket.rows <= ROWS
            && counters <= COUNTS
    }

    /// Adds the merge of attention parts to `call` as an epilogue. The call itself has `slots`.
    pub(super) fn finish_join(&self, call: &mut Call, join: Join, merge: Call) {
        call.constants.extend(join.constants());
        self.take_over(call, merge, ATTENTION_EPILOGUE);
    }
}

/// Epilogues on the device: the offset of each, by its bytes.
#[derive(Default)]
pub struct Epilogues {
    places: HashMap<Vec<u8>, usize>,
}

impl Epilogues {
    /// Writes the address of its epilogue into each call.
    ///
    /// There is memory for `room` epilogues at `base`. Returns new epilogues with their offsets,
    /// which must be written first; `None` if there is no room for all.
    pub fn place(
        &mut self,
        calls: &mut [Call],
        room: usize,
        base: u64,
    ) -> Option<Vec<(usize, Vec<u8>)>> {
        let mut new = Vec::new();
        for call in calls {
            let Some(epilogue) = call.epilogue.take() else { continue };
            let next = self.places.len();
            let place = *self.places.entry(epilogue.bytes).or_insert_with_key(|bytes| {
                new.push((next * EPILOGUE_BYTES, bytes.clone()));
                next
            });
            call.push.set(epilogue.at, base + (place * EPILOGUE_BYTES) as u64);
        }
        if self.places.len() > room {
            // The caller does not write them.
            for (_, bytes) in &new {
                self.places.remove(bytes);
            }
            return None;
        }
        Some(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::kernels::{MatrixProbe, MatrixProbePush};

    fn call(epilogue: u8) -> Call {
        let epilogue = Some(Epilogue { bytes: vec![epilogue; 16], at: 0 });
        Call { epilogue, ..Call::apart(&MatrixProbe {}, &MatrixProbePush { out: 0 }, [1; 3]) }
    }

    #[test]
    fn equal_epilogues_share_a_place_and_a_full_buffer_keeps_none() {
        let mut epilogues = Epilogues::default();
        let mut calls = [call(1), call(2), call(1)];
        let new = epilogues.place(&mut calls, 3, 4096).unwrap();
        assert_eq!(new, [(0, vec![1; 16]), (EPILOGUE_BYTES, vec![2; 16])]);
        let addresses =
            calls.each_ref().map(|c| u64::from_le_bytes(c.push.bytes().try_into().unwrap()));
        assert_eq!(addresses, [4096, 4096 + EPILOGUE_BYTES as u64, 4096]);
        assert_eq!(epilogues.place(&mut [call(3), call(4)], 3, 4096), None);
        assert_eq!(
            epilogues.place(&mut [call(4), call(2)], 3, 4096),
            Some(vec![(2 * EPILOGUE_BYTES, vec![4; 16])])
        );
    }
}
