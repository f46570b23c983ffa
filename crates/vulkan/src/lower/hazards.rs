//! Inserts barriers between the calls of a plan.

use super::{Access, Call};
use gemma_base::compute::BufferId;
use std::collections::VecDeque;

/// Buffers accessed since the last barrier.
#[derive(Default)]
pub struct Hazards {
    read: Vec<BufferId>,
    written: Vec<BufferId>,
    shared: Vec<BufferId>,
}

impl Hazards {
    /// Records the accesses of a call. Returns whether a barrier is needed before it.
    pub fn meets(&mut self, call: &Call) -> bool {
        let clash = self.clashes(call);
        if clash {
            *self = Hazards::default();
        }
        self.add(call);
        clash
    }

    /// Returns whether a call must not run concurrently with the recorded ones.
    fn clashes(&self, call: &Call) -> bool {
        call.accesses.iter().any(|t| match t {
            Access::Read(id) => self.written.contains(id) || self.shared.contains(id),
            Access::Share(id) => self.written.contains(id) || self.read.contains(id),
            Access::Write(id) => {
                [&self.written, &self.read, &self.shared].iter().any(|ids| ids.contains(id))
            }
        })
    }

    fn add(&mut self, call: &Call) {
        for touch in &call.accesses {
            match touch {
                Access::Read(id) => self.read.push(*id),
                Access::Write(id) => self.written.push(*id),
                Access::Share(id) => self.shared.push(*id),
            }
        }
    }
}

/// Number of later calls that are considered for earlier execution.
const AHEAD: usize = 12;

/// Reorders calls to need fewer barriers. After each barrier come all of the next calls that do not
/// depend on each other.
pub fn in_waves(calls: Vec<Call>) -> Vec<Call> {
    let (mut rest, mut out) = (VecDeque::from(calls), Vec::new());
    while !rest.is_empty() {
        let (mut wave, mut left) = (Hazards::default(), Hazards::default());
        let mut at = 0;
        while at < rest.len().min(AHEAD) {
            let call = &rest[at];
            if wave.clashes(call) || left.clashes(call) {
                left.add(call);
                at += 1;
            } else {
                wave.add(call);
                out.extend(rest.remove(at));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::kernels::{MatrixProbe, MatrixProbePush};
    use super::*;

    #[test]
    fn calls_that_share_a_buffer_need_no_barrier_but_before_and_behind_others() {
        let (a, b) = (BufferId(1), BufferId(2));
        let call = |accesses: &[Access]| {
            let call = Call::apart(&MatrixProbe {}, &MatrixProbePush { out: 0 }, [1; 3]);
            Call { accesses: accesses.to_vec(), ..call }
        };
        let steps: [(&[Access], bool); 8] = [
            (&[Access::Write(a)], false),
            (&[Access::Share(a), Access::Read(b)], true),
            (&[Access::Share(a), Access::Read(b)], false),
            (&[Access::Write(a)], true),
            (&[Access::Share(b)], false),
            (&[Access::Read(b)], true),
            (&[Access::Read(b)], false),
            (&[Access::Share(b)], true),
        ];
        let mut hazards = Hazards::default();
        for (i, (accesses, barrier)) in steps.into_iter().enumerate() {
            assert_eq!(hazards.meets(&call(accesses)), barrier, "call {i}");
        }
    }

    #[test]
    fn calls_of_a_wave_wait_for_nothing_in_it_and_overtake_nothing_that_they_wait_for() {
        let [a, b, c, d] = [0, 1, 2, 3].map(BufferId);
        let (read, write) = (Access::Read, Access::Write);
        let steps = [
            vec![write(a)],
            vec![read(a), write(b)],
            vec![read(b), write(c)],
            // Depends only on the first call.
            vec![read(a), write(d)],
            // Writes the buffer that the second call reads.
            vec![write(a)],
        ];
        let call = |(i, accesses): (usize, Vec<Access>)| {
            let call = Call::apart(&MatrixProbe {}, &MatrixProbePush { out: 0 }, [1; 3]);
            Call { accesses, work: i as u64, ..call }
        };
        let order = in_waves(steps.into_iter().enumerate().map(call).collect());
        let order: Vec<u64> = order.iter().map(|call| call.work).collect();
        assert_eq!(order, [0, 1, 3, 2, 4]);
    }
}
