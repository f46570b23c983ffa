//! The device as quantising needs it: its search for trellis codes, and products. It finds the same
//! states as the processor, because all costs are integers.

use super::VulkanExecutor;
use super::product::{self, Products, takes};
use crate::compute::{BufferId, Executor};
use crate::tensor::encode::CodingDevice;
use crate::tensor::product::{View, multiply};
use crate::tensor::trellis::{OFFSET, STATES, TILE, Trellis};
use crate::tensor::viterbi::{STEPS, WEIGHTS, quarters};
use crate::vulkan::lower::Call;
use crate::vulkan::lower::kernels::{self, ViterbiPush, word};
use anyhow::{Context, Result};
use rayon::prelude::*;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most tiles of a submission.
const TILES: usize = 16_384;
/// Tiles of the first submission. Later ones are twice as large as long as none takes [`LONG`]:
/// drivers take a device for lost that takes seconds.
const FIRST_TILES: usize = 256;
const LONG: Duration = Duration::from_millis(100);
/// Bytes of the costs of all workgroups, largest first: what the device has room for. A tile needs
/// 64 KB for t4, and 1 MB for t2.
const COSTS: [usize; 3] = [512 << 20, 128 << 20, 32 << 20];
/// Weights of a second on a large device: 6,000 rows of 27B's table, which are 380 tiles of each
/// block of columns.
const AT_ONCE: usize = 32 << 20;
/// Tiles from which a workgroup takes two at a time. Fewer fill a device better one by one.
const MANY: usize = 512;

/// A device that searches for codes and multiplies. Callers take turns.
pub struct VulkanCoding {
    state: Mutex<State>,
}

struct State {
    device: VulkanExecutor,
    targets: BufferId, // int8 [TILES, 256], in quarters
    rows: BufferId,    // u64 [TILES, 16]
    costs: (BufferId, usize),
    /// Tables of the codes that were searched for.
    states: Vec<(Trellis, BufferId)>,
    batch: usize,
    many: usize,
    /// Room for products, and whether they have the processor's bits.
    products: Option<(Products, bool)>,
}

impl VulkanCoding {
    pub fn new(device: VulkanExecutor) -> Result<VulkanCoding> {
        VulkanCoding::with_many(device, MANY)
    }

    /// Returns the same encoder, whose workgroups take two tiles at a time from `many` tiles on.
    pub fn with_many(mut device: VulkanExecutor, many: usize) -> Result<VulkanCoding> {
        let targets = device.alloc("targets of tiles", TILES * WEIGHTS)?;
        let rows = device.alloc("rows of tiles", TILES * TILE * 8)?;
        let mut alloc = |bytes| device.alloc("costs of tiles", bytes).map(|id| (id, bytes));
        let [large, small, least] = COSTS;
        let costs = alloc(large).or_else(|_| alloc(small)).or_else(|_| alloc(least))?;
        let (states, batch) = (Vec::new(), FIRST_TILES);
        let products = None;
        let state = State { device, targets, rows, costs, states, batch, many, products };
        Ok(VulkanCoding { state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes `c = keep * c + a b` on the device even if its bits are not the processor's.
    pub fn multiply_inexactly(
        &self,
        c: &mut [f32],
        stride: usize,
        keep: bool,
        a: View<'_>,
        b: View<'_>,
    ) -> Result<()> {
        product::multiply(c, stride, keep, a, b, &mut |run| {
            let mut state = self.state();
            let (device, products, _) = state.products()?;
            run(device, products)
        })
    }
}

impl fmt::Debug for VulkanCoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VulkanCoding")
    }
}

impl CodingDevice for VulkanCoding {
    fn at_once(&self, _threads: usize) -> usize {
        AT_ONCE
    }

    fn encode(&self, trellis: Trellis, wanted: &[f32], rows: &mut [[u64; TILE]]) -> Result<()> {
        let wanted: Vec<u8> = wanted.par_iter().map(|t| quarters(*t) as u8).collect();
        // A panic of another caller leaves no state that is read here. A thread of the pool that
        // has the lock must not wait for the pool: it might be given work that wants the lock.
        let state = &mut *self.state();
        let (mut wanted, mut rows) = (&wanted[..], rows);
        while !rows.is_empty() {
            let n = rows.len().min(state.batch);
            let (some_wanted, some_rows);
            (some_wanted, wanted) = wanted.split_at(n * WEIGHTS);
            (some_rows, rows) = rows.split_at_mut(n);
            state.encode(trellis, some_wanted, some_rows)?;
        }
        Ok(())
    }

    fn multiply(
        &self,
        c: &mut [f32],
        stride: usize,
        keep: f32,
        factor: f32,
        a: View<'_>,
        b: View<'_>,
    ) -> Result<()> {
        // A device without room for products leaves them to the processor.
        let exact = || self.state().products().is_ok_and(|(_, _, exact)| exact);
        if takes(factor, keep, a, b) && exact() {
            return self.multiply_inexactly(c, stride, keep == 1.0, a, b);
        }
        multiply(c, stride, keep, factor, a, b);
        Ok(())
    }
}

/// Returns the integers of each state as the device multiplies them: both with [`OFFSET`], then two
/// digits of twice the sum of their squares, of 1 and of 127.
fn table(trellis: Trellis) -> Vec<u8> {
    let word = |state| {
        let [x, y] = trellis.integers(state);
        let squares = 2 * (x * x + y * y);
        [x + OFFSET, y + OFFSET, squares % 127, squares / 127].map(|byte| byte as u8)
    };
    (0..STATES as u32).flat_map(word).collect()
}

impl State {
    /// Returns the device, its room for products, and whether these have the processor's bits.
    fn products(&mut self) -> Result<(&mut VulkanExecutor, &Products, bool)> {
        if self.products.is_none() {
            let products = Products::new(&self.device)?;
            let exact = products.are_exact(&mut self.device)?;
            self.products = Some((products, exact));
        }
        let (products, exact) = self.products.as_ref().context("made above")?;
        Ok((&mut self.device, products, *exact))
    }

    /// Returns the table of a code. A new one is uploaded.
    fn states(&mut self, trellis: Trellis) -> Result<BufferId> {
        if let Some((_, states)) = self.states.iter().find(|(known, _)| *known == trellis) {
            return Ok(*states);
        }
        let states = self.device.alloc("states of codes", 4 * STATES)?;
        self.device.write(states, 0, &table(trellis))?;
        self.states.push((trellis, states));
        Ok(states)
    }

    /// Encodes as many tiles as the buffers hold.
    fn encode(&mut self, trellis: Trellis, wanted: &[u8], rows: &mut [[u64; TILE]]) -> Result<()> {
        let states = self.states(trellis)?;
        let State { device, targets, costs: (costs, room), rows: found, .. } = self;
        device.write(*targets, 0, wanted)?;
        let heads = STATES >> trellis.step;
        let shared = |together: usize| together * (4 * heads + 8 * STEPS + 20);
        let fits = shared(2) <= device.info().max_shared as usize;
        let together = if fits && rows.len() >= self.many { 2 } else { 1 };
        let groups = (*room / (together * STEPS * heads * 2)).min(rows.len().div_ceil(together));
        // A thread takes four heads at a time.
        let info = device.info();
        let most = info.max_workgroup.min(info.subgroup.saturating_mul(info.max_subgroups));
        let threads = word(heads / 4).min(512).min(most);
        let push = ViterbiPush {
            targets: device.address(*targets),
            states: device.address(states),
            costs: device.address(*costs),
            rows: device.address(*found),
            tiles: word(rows.len()),
            _gap: 0,
        };
        let kernel = kernels::Viterbi { threads, together: word(together), step: trellis.step };
        let start = Instant::now();
        device.run_calls(&[Call::apart(&kernel, &push, [groups, 1, 1])])?;
        if rows.len() == self.batch && start.elapsed() < LONG {
            self.batch = TILES.min(2 * self.batch);
        }
        device.read(*found, 0, bytemuck::cast_slice_mut(rows))
    }
}
