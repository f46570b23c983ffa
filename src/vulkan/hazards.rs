//! Where a barrier must stand between the calls of a plan.

use super::call::{Call, Touch};
use crate::compute::BufferId;

/// Which buffers were touched since the last barrier.
#[derive(Default)]
pub struct Hazards {
    read: Vec<BufferId>,
    written: Vec<BufferId>,
    shared: Vec<BufferId>,
}

impl Hazards {
    /// Takes note of a call; true if a barrier must stand before it.
    pub fn meets(&mut self, call: &Call) -> bool {
        let clash = call.touches.iter().any(|t| match t {
            Touch::Read(id) => self.written.contains(id) || self.shared.contains(id),
            Touch::Share(id) => self.written.contains(id) || self.read.contains(id),
            Touch::Write(id) => {
                [&self.written, &self.read, &self.shared].iter().any(|ids| ids.contains(id))
            }
        });
        if clash {
            self.read.clear();
            self.written.clear();
            self.shared.clear();
        }
        for touch in &call.touches {
            match touch {
                Touch::Read(id) => self.read.push(*id),
                Touch::Write(id) => self.written.push(*id),
                Touch::Share(id) => self.shared.push(*id),
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
        let call = |touches: &[Touch]| {
            let call = Call::apart(&MatrixProbe {}, &MatrixProbePush { out: 0 }, [1; 3]);
            Call { touches: touches.to_vec(), ..call }
        };
        let steps: [(&[Touch], bool); 8] = [
            (&[Touch::Write(a)], false),
            (&[Touch::Share(a), Touch::Read(b)], true),
            (&[Touch::Share(a), Touch::Read(b)], false),
            (&[Touch::Write(a)], true),
            (&[Touch::Share(b)], false),
            (&[Touch::Read(b)], true),
            (&[Touch::Read(b)], false),
            (&[Touch::Share(b)], true),
        ];
        let mut hazards = Hazards::default();
        for (i, (touches, barrier)) in steps.into_iter().enumerate() {
            assert_eq!(hazards.meets(&call(touches)), barrier, "call {i}");
        }
    }
}
