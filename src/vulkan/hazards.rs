//! Where a barrier must stand between the calls of a plan.

use super::call::{Call, Touch};
use crate::compute::BufferId;

/// Which buffers were touched since the last barrier.
#[derive(Default)]
pub struct Hazards {
    read: Vec<BufferId>,
    written: Vec<BufferId>,
}

impl Hazards {
    /// Takes note of a call; true if a barrier must stand before it.
    pub fn meets(&mut self, call: &Call) -> bool {
        let clash = call.touches.iter().any(|t| match t {
            Touch::Read(id) => self.written.contains(id),
            Touch::Write(id) => self.written.contains(id) || self.read.contains(id),
        });
        if clash {
            self.read.clear();
            self.written.clear();
        }
        for touch in &call.touches {
            match touch {
                Touch::Read(id) => self.read.push(*id),
                Touch::Write(id) => self.written.push(*id),
            }
        }
        clash
    }
}
