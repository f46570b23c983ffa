//! Records calls completely or in parts. Tests record the parts in another order: a GPU runs
//! workgroups in any order, but a driver on the processor in one.

use super::VulkanExecutor;
use super::commands::bind;
use crate::lower::Call;
use ash::vk;
use gemma_base::compute::BufferId;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use std::ops::Range;

/// Most parts along an axis of a shuffled call.
const PARTS: u32 = 4;

/// Workgroups of a call: `count` along each axis, starting at `base`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workgroups {
    base: [u32; 3],
    count: [u32; 3],
}

impl Workgroups {
    /// Returns all workgroups of a call.
    pub fn all(call: &Call) -> Workgroups {
        Workgroups { base: [0; 3], count: call.groups }
    }

    /// Returns the workgroups `parts` along the longest axis of a call.
    pub fn part(call: &Call, parts: Range<u32>) -> Workgroups {
        let (mut groups, along) = (Workgroups::all(call), axis(call.groups));
        (groups.base[along], groups.count[along]) = (parts.start, parts.end - parts.start);
        groups
    }

    /// Divides them into at most [`PARTS`] parts along an axis.
    fn cut(self, axis: usize) -> impl Iterator<Item = Workgroups> {
        let n = self.count[axis];
        let parts = n.min(PARTS);
        (0..parts).map(move |i| {
            let (from, to) = (n * i / parts, n * (i + 1) / parts);
            let mut part = self;
            (part.base[axis], part.count[axis]) = (self.base[axis] + from, to - from);
            part
        })
    }
}

/// Returns the axis with most workgroups of a call.
pub fn axis(groups: [u32; 3]) -> usize {
    (0..3).rev().max_by_key(|i| groups[*i]).expect("there are three")
}

/// Calls and parts of calls between two barriers.
pub struct Unordered<'a> {
    /// Seed of their order; `None` keeps the order of insertion.
    shuffle: Option<u64>,
    parts: Vec<(vk::Pipeline, &'a Call, Workgroups)>,
}

impl<'a> Unordered<'a> {
    pub fn new(shuffle: Option<u64>) -> Unordered<'a> {
        Unordered { shuffle, parts: Vec::new() }
    }

    /// Adds workgroups. The kernel must be divisible unless these are all workgroups of an
    /// unshuffled call.
    pub fn add(&mut self, kernel: vk::Pipeline, call: &'a Call, groups: Workgroups) {
        if self.shuffle.is_none() {
            self.parts.push((kernel, call, groups));
            return;
        }
        let parts = groups.cut(0).flat_map(|g| g.cut(1)).flat_map(|g| g.cut(2));
        self.parts.extend(parts.map(|part| (kernel, call, part)));
    }

    /// Records the added workgroups.
    pub fn record(
        &mut self,
        device: &ash::Device,
        commands: vk::CommandBuffer,
        layout: vk::PipelineLayout,
    ) {
        if let Some(seed) = self.shuffle {
            self.parts.shuffle(&mut SmallRng::seed_from_u64(seed));
        }
        for (kernel, call, groups) in self.parts.drain(..) {
            bind(device, commands, layout, kernel, &call.push);
            let (Workgroups { base: [x, y, z], count: [nx, ny, nz] }, all) =
                (groups, Workgroups::all(call));
            // SAFETY: the addresses in a call are those of live buffers, and all workgroups are
            // within the call.
            unsafe {
                match groups == all {
                    true => device.cmd_dispatch(commands, nx, ny, nz),
                    false => device.cmd_dispatch_base(commands, x, y, z, nx, ny, nz),
                }
            }
        }
    }
}

/// Faults and orders for tests.
impl VulkanExecutor {
    /// Runs workgroups in another order, and also the calls between two barriers, if the driver can
    /// divide calls.
    pub fn shuffled(self, seed: u64) -> Self {
        VulkanExecutor { shuffle: self.gpu.info.divides_calls.then_some(seed), ..self }
    }

    /// Shifts a buffer's address in kernels recorded later by `bytes` before its memory. This
    /// simulates a cache with only its last pages in memory.
    pub fn extend_backwards(&mut self, id: BufferId, bytes: u64) {
        let address = &mut self.addresses[id.0 as usize];
        *address = address.wrapping_sub(bytes);
    }

    /// Skips the last workgroups of calls with this label.
    pub fn cut_work(&mut self, label: Option<&str>) {
        self.cut = label.map(str::to_owned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::kernels::{MatrixProbe, MatrixProbePush};
    use std::collections::HashSet;

    #[test]
    fn parts_have_each_workgroup_once() {
        for groups in [[1, 1, 1], [4, 1, 2], [9, 5, 3], [2, 70, 1]] {
            let call = Call::apart(&MatrixProbe {}, &MatrixProbePush { out: 0 }, groups);
            let groups = call.groups;
            let mut unordered = Unordered::new(Some(1));
            unordered.add(vk::Pipeline::null(), &call, Workgroups::all(&call));
            let mut seen = HashSet::new();
            for (_, _, Workgroups { base, count }) in &unordered.parts {
                let [x, y, z] = [0, 1, 2].map(|i| base[i]..base[i] + count[i]);
                for x in x {
                    for y in y.clone() {
                        assert!(z.clone().all(|z| seen.insert([x, y, z])), "{groups:?}");
                    }
                }
            }
            assert_eq!(seen.len() as u32, groups.iter().product::<u32>());
            assert!(seen.iter().all(|at| (0..3).all(|i| at[i] < groups[i])), "{groups:?}");
        }
    }
}
