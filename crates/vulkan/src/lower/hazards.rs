//! Barriers between the calls of a plan.

use super::{Access, Call};
use gemma_base::compute::BufferId;

/// Buffers that were accessed since the last barrier.
#[derive(Default)]
pub struct Hazards {
    read: Vec<BufferId>,
    written: Vec<BufferId>,
    shared: Vec<BufferId>,
}

impl Hazards {
    /// Records the accesses of a call. Returns whether a barrier must stand before it.
    pub fn meets(&mut self, call: &Call) -> bool {
        let clash = call.accesses.iter().any(|t| match t {
            Access::Read(id) => self.written.contains(id) || self.shared.contains(id),
            Access::Share(id) => self.written.contains(id) || self.read.contains(id),
            Access::Write(id) => {
                [&self.written, &self.read, &self.shared].iter().any(|ids| ids.contains(id))
            }
        });
        if clash {
            self.read.clear();
            self.written.clear();
            self.shared.clear();
        }
        for touch in &call.accesses {
            match touch {
                Access::Read(id) => self.read.push(*id),
                Access::Write(id) => self.written.push(*id),
                Access::Share(id) => self.shared.push(*id),
            }
        }
        clash
    }
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
}
