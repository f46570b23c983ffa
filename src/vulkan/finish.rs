//! What the last workgroups of a call do beside it, so that a dispatch is saved: rotation of heads, joining of pages.
//!
//! A dispatch that waits for the one before costs some microseconds whatever it does, ten times a layer. Where a piece of work needs a
//! piece of the output only (a head, a block of rows of attention), the last workgroup to store into that piece goes on with it.
//! Gate times up is left out: tried both ways on an H200 (the last workgroup of a block, or one workgroup a group of both matrices), it
//! slowed the products by more than the dispatch that it saved.

use super::call::{Bucket, Call, Places, Touch};
use super::footprint::COUNTS;
use super::pipeline::Shader;
use crate::compute::{Act, BufferId, Dispatch, LinearJob, Op};
use crate::tensor::Group;
use anyhow::Result;

/// Most rows of a pass that this pays for: with more, a dispatch is worth its price.
const ROWS: usize = 32;
/// Channels that `row.comp` works on at a time.
const BLOCK: usize = 128;
/// Bytes of the arguments of what is finished, and of the counters' address behind them.
pub const TAIL: usize = 128;

/// Where `linear.comp` and `attention.comp` are told where their tails lie.
const LINEAR_TAIL: usize = 120;
const ATTENTION_TAIL: usize = 88;

/// What a call's last workgroups do: lies in memory of the executor's own, and the call is told where.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tail {
    /// Arguments of the call that is saved, then the address of the counters.
    pub bytes: Vec<u8>,
    /// Where in the push constants of the call the address of these bytes belongs.
    pub at: usize,
}

impl Places<'_> {
    /// The arguments of `saved` as what follows a call that takes their address at byte `at` of its push constants.
    fn tail(&self, saved: &Call, at: usize) -> Tail {
        let mut bytes = saved.push.bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes.extend(self.at(self.own.counts).to_le_bytes());
        assert!(bytes.len() <= TAIL, "arguments of {} bytes", bytes.len());
        Tail { bytes, at }
    }

    fn take_over(&self, call: &mut Call, saved: Call, at: usize) {
        call.tail = Some(self.tail(&saved, at));
        call.touches.extend(saved.touches);
        call.touches.push(Touch::Write(self.own.counts));
    }

    /// Lets the linear layers `calls`, of `jobs`, do the rotation `next` too, if that is what follows and they can.
    pub(super) fn finish_rope(
        &self,
        calls: &mut [Call],
        jobs: &[LinearJob],
        next: Option<&Dispatch>,
        bucket: Bucket,
    ) -> Result<bool> {
        let Some(Dispatch { op: op @ Op::Rope { q, k, v, n_heads, kv, .. }, .. }) = next else { return Ok(false) };
        // All three side by side in one call.
        let [call] = calls else { return Ok(false) };
        let (Some((_, rows)), Shader::Linear | Shader::LinearFew) = (&call.linear, call.shader) else { return Ok(false) };
        let outs: Vec<BufferId> = jobs.iter().map(|job| job.out).collect();
        let units = call.groups[0] as usize * (n_heads + 2 * kv.n_kv_heads);
        let fits = kv.head_dim.is_multiple_of(*rows) && units <= COUNTS && bucket.rows <= ROWS;
        if !(self.finish && fits && outs == [*q, *k, *v]) {
            return Ok(false);
        }
        let rope = self.rope(op, bucket)?;
        call.constants.push((11, 1));
        call.constants.extend([(12, 2), (13, 3)].map(|(id, of)| (id, rope.constant(of).unwrap_or(0))));
        self.take_over(call, rope, LINEAR_TAIL);
        Ok(true)
    }

    /// Whether attention over split pages, in these workgroups, can do the join and the preparation of `act` too; `width` channels belong to
    /// a kv head.
    pub(super) fn can_join(&self, act: Option<&Act>, groups: [usize; 3], width: usize, bucket: Bucket) -> bool {
        // A scale of the whole row wants all heads.
        let spread = act.is_some_and(|a| !(a.format.int8 && a.format.group == Group::Row));
        self.finish && spread && width.is_multiple_of(BLOCK) && bucket.rows <= ROWS && groups[0] * groups[1] <= COUNTS
    }

    /// Lets attention `call` do the join `merge` too, whose `slots` the call itself is told.
    pub(super) fn finish_join(&self, call: &mut Call, merge: Call) {
        call.constants.push((7, 1));
        call.constants.extend([8, 9, 10].map(|id| (id, merge.constant(id).unwrap_or(0))));
        self.take_over(call, merge, ATTENTION_TAIL);
    }
}
