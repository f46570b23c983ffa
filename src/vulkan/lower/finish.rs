//! What the last workgroups of a call do beside it, so that a dispatch is saved: rotation of heads,
//! joining of pages, norms.
//!
//! A dispatch that waits for the one before costs some microseconds whatever it does, several times
//! a layer. Where a piece of work needs a piece of the output only (a head, a block of rows of
//! attention), the last workgroup to store into that piece goes on with it. The norm of a row needs
//! all of the row: where there are one or two, the last workgroup of all does it. Gate times up is
//! left out, since it slows the products by more than a dispatch (docs/NOTES.md).

use super::kernels::{AttentionPush, Heads, Join, LinearPush, NextNorm, Specialise, word};
use super::sizes::COUNTS;
use super::{Access, Bucket, Call, Lowering, kv_code, preparation, prepared, reads_before_write};
use crate::compute::{Act, BufferId, Dispatch, LinearJob, Norm, Op, Rope, RowSet};
use crate::tensor::Group;
use crate::vulkan::device::pipeline::Shader;
use std::collections::HashMap;
use std::mem::offset_of;

/// Most rows of a pass that this pays for: with more, a dispatch is worth its price.
const ROWS: usize = 32;
/// The same for work on whole rows, which one workgroup does.
const WHOLE_ROWS: usize = 2;
/// Bytes of shared memory beside a row that is normalised.
const NORM_SHARED: usize = 8 << 10;
/// Channels that `row.comp` works on at a time.
const BLOCK: usize = 128;
/// Bytes of the arguments of what is finished, and of the counters' address behind them.
pub const EPILOGUE_BYTES: usize = 128;

/// Where linear layers and attention are told where their epilogues lie.
const LINEAR_EPILOGUE: usize = offset_of!(LinearPush, epilogue);
const ATTENTION_EPILOGUE: usize = offset_of!(AttentionPush, epilogue);

/// What a call's last workgroups do: lies in memory of the executor's own, and the call is told
/// where.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Arguments of the call that is saved, then the address of the counters.
    pub bytes: Vec<u8>,
    /// Where in the push constants of the call the address of these bytes belongs.
    pub at: usize,
}

/// A norm that the last workgroup of a linear layer may do.
pub struct NormBehind {
    /// The call that would do it otherwise.
    call: Call,
    constants: NextNorm,
    /// What it does of the plan: the norm, and the preparation of its result.
    pub dispatches: usize,
}

impl Lowering<'_> {
    /// The arguments of `saved` as what follows a call that takes their address at byte `at` of its
    /// push constants.
    fn epilogue(&self, saved: &Call, at: usize) -> Epilogue {
        let mut bytes = saved.push.bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes.extend(self.at(self.own.counts).to_le_bytes());
        assert!(bytes.len() <= EPILOGUE_BYTES, "arguments of {} bytes", bytes.len());
        Epilogue { bytes, at }
    }

    fn take_over(&self, call: &mut Call, saved: Call, at: usize) {
        call.epilogue = Some(self.epilogue(&saved, at));
        call.accesses.extend(saved.accesses);
        call.accesses.push(Access::Write(self.own.counts));
    }

    /// Lets the linear layers `calls`, of `jobs`, do the rotation `next` too, if that is what
    /// follows and they can: each of them that of its own heads.
    pub(super) fn finish_rope(
        &self,
        calls: &mut [Call],
        jobs: &[LinearJob],
        next: Option<&Dispatch>,
        bucket: Bucket,
    ) -> bool {
        let Some(Dispatch { op: Op::Rope(op), .. }) = next else { return false };
        let Rope { q, k, v, n_heads, kv, .. } = op;
        let outs: Vec<BufferId> = jobs.iter().map(|job| job.out).collect();
        let fits = |call: &Call| {
            let units = call.groups[0] as usize * (n_heads + 2 * kv.n_kv_heads);
            let whole = call.linear.is_some_and(|(_, rows)| kv.head_dim.is_multiple_of(rows));
            whole && call.shader != Shader::LinearMany && units <= COUNTS
        };
        if !(self.finish && bucket.rows <= ROWS && outs == [*q, *k, *v] && calls.iter().all(fits)) {
            return false;
        }
        let rope = self.rope(op, bucket);
        let mut first = 0;
        for call in calls {
            let heads = Heads {
                on: true,
                head_dim: word(kv.head_dim),
                kv: kv_code(kv),
                first_matrix: word(first),
            };
            call.constants.extend(heads.constants());
            call.epilogue = Some(self.epilogue(&rope, LINEAR_EPILOGUE));
            let written =
                outs.iter().enumerate().filter(|(_, out)| call.writes(**out)).map(|(i, _)| i);
            let written: Vec<usize> = written.collect();
            first += written.len();
            let kept = [None, Some(kv.scratch_k), Some(kv.scratch_v)];
            call.accesses.extend(written.iter().filter_map(|i| kept[*i]).map(Access::Write));
            // A head has a counter of its own.
            call.accesses.push(Access::Share(self.own.counts));
        }
        true
    }

    /// The norm of what `jobs` give and the preparation of its result, if that is what follows and
    /// a workgroup of theirs may do it.
    pub(super) fn norm_behind(
        &self,
        jobs: &[LinearJob],
        rows: RowSet,
        rest: &[Dispatch],
        bucket: Bucket,
    ) -> Option<NormBehind> {
        let ([job], [Dispatch { op, .. }, rest @ ..]) = (jobs, rest) else { return None };
        let Op::Norm(norm @ Norm { add: Some((added, _)), dim, out, rows: RowSet::All, .. }) = op
        else {
            return None;
        };
        // The row lies in shared memory, beside what the workgroup has there anyway.
        let fits =
            dim * 4 + NORM_SHARED <= self.info.max_shared as usize && bucket.rows <= WHOLE_ROWS;
        if !(self.finish && fits && *added == job.out && rows == RowSet::All) {
            return None;
        }
        let prepare = prepared(op, rest);
        let rest = &rest[prepare.is_some() as usize..];
        let read_later = reads_before_write(rest.iter(), Some(*out));
        let (hadamard, int8, group) = preparation(prepare.as_ref());
        let constants = NextNorm {
            on: true,
            dim: word(*dim),
            prepare: prepare.is_some(),
            hadamard,
            int8,
            group,
        };
        Some(NormBehind {
            call: self.norm(norm, prepare, read_later, bucket),
            constants,
            dispatches: 1 + prepare.is_some() as usize,
        })
    }

    /// Lets the linear layer `call` do `norm` too, if it can.
    pub(super) fn finish_norm(&self, call: &mut Call, norm: NormBehind) -> bool {
        // Its workgroups take all rows.
        let kernels = [Shader::Linear, Shader::LinearFloat, Shader::LinearTrellis];
        if !kernels.contains(&call.shader) || call.groups[0] != 1 {
            return false;
        }
        call.constants.extend(norm.constants.constants());
        self.take_over(call, norm.call, LINEAR_EPILOGUE);
        true
    }

    /// Whether attention over split pages, in these workgroups of `rows` rows, can do the join too,
    /// and the preparation of `act` if there is one; `width` channels belong to a kv head.
    pub(super) fn can_join(
        &self,
        act: Option<&Act>,
        groups: [usize; 3],
        rows: usize,
        width: usize,
        bucket: Bucket,
    ) -> bool {
        // A scale of the whole row wants all heads, and the last workgroup of all rounds its rows.
        let few = rows <= WHOLE_ROWS
            || !act.is_some_and(|a| a.format.int8 && a.format.group == Group::Row);
        let counters = groups[1] * (groups[0] + 1);
        self.finish
            && few
            && width.is_multiple_of(BLOCK)
            && bucket.rows <= ROWS
            && counters <= COUNTS
    }

    /// Lets attention `call` do the join `merge` too, whose `slots` the call itself is told.
    pub(super) fn finish_join(&self, call: &mut Call, join: Join, merge: Call) {
        call.constants.extend(join.constants());
        self.take_over(call, merge, ATTENTION_EPILOGUE);
    }
}

/// The epilogues that lie on the device, by what they say, and which of the places for them each has.
#[derive(Default)]
pub struct Epilogues {
    places: HashMap<Vec<u8>, usize>,
}

impl Epilogues {
    /// Tells each call where its epilogue lies, in memory for `room` of them at `base`. Returns what
    /// has to be written there first, with its offset; `None` if there is no room for all.
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
            // Not written, so not there.
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
    use crate::vulkan::lower::kernels::{MatrixProbe, MatrixProbePush};

    fn call(epilogue: u8) -> Call {
        let epilogue = Some(Epilogue { bytes: vec![epilogue; 16], at: 0 });
        Call { epilogue, ..Call::apart(&MatrixProbe {}, &MatrixProbePush { out: 0 }, [1; 3]) }
    }

    #[test]
    fn a_tail_has_one_place_and_what_finds_none_leaves_none_behind() {
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
