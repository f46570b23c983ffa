//! The device for quantisation: search for trellis codes, and products. It finds the same states as
//! the processor, because all costs are integers.

use super::VulkanExecutor;
use super::commands::dispatch;
use super::product::{self, Products, takes};
use crate::device::barrier::{barrier, host_barrier};
use crate::device::memory::{Block, Place};
use crate::lower::Call;
use crate::lower::kernels::{self, ViterbiPush, word};
use anyhow::{Context, Result, anyhow, bail};
use gemma_base::compute::{BufferId, Executor};
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::product::{View, multiply};
use gemma_base::tensor::trellis::{OFFSET, STATES, TILE, Trellis};
use gemma_base::tensor::viterbi::{STEPS, WEIGHTS, quarters};
use rayon::prelude::*;
use std::fmt;
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most tiles per submission.
const TILES: usize = 16_384;
/// Tiles of the first submission. Later ones double in size until one takes [`LONG`], because
/// drivers treat a submission of seconds as a device loss.
const FIRST_TILES: usize = 256;
const LONG: Duration = Duration::from_millis(100);
/// Candidate sizes in bytes for the costs of all workgroups, largest first; the first that fits is
/// used. A tile needs 64 KB for t4, and 1 MB for t2.
const COSTS: [usize; 3] = [512 << 20, 128 << 20, 32 << 20];
/// Weights that a device encodes within seconds: discrete GPUs, and others. 24,000 rows of 27B's
/// table are 1,500 tiles per block of columns, which fill a large device.
const AT_ONCE: usize = 128 << 20;
const AT_ONCE_SMALL: usize = 32 << 20;
/// A device that searches for codes and multiplies. Tiles of waiting callers are searched together;
/// products take turns.
pub struct VulkanCoding {
    at_once: usize,
    queue: Mutex<SearchQueue>,
    served: Condvar,
    state: Mutex<SearchState>,
}

/// Callers that wait for the search, and whether one of them is serving all.
#[derive(Default)]
struct SearchQueue {
    requests: Vec<SearchRequest>,
    busy: bool,
}

/// Tiles of one caller, and the channel for their rows.
struct SearchRequest {
    trellis: Trellis,
    wanted: Vec<u8>,
    answer: mpsc::Sender<Result<Vec<[u64; TILE]>>>,
}

/// Allows another caller to serve after it is dropped.
struct Service<'a>(&'a VulkanCoding);

impl Drop for Service<'_> {
    fn drop(&mut self) {
        lock(&self.0.queue).busy = false;
        self.0.served.notify_all();
    }
}

struct SearchState {
    device: VulkanExecutor,
    targets: Block, // int8 [TILES, 256], in quarters
    rows: Block,    // u64 [TILES, 16]
    costs: (BufferId, usize),
    /// Tables of the codes used so far.
    states: Vec<(Trellis, BufferId)>,
    batch: usize,
    /// Buffers for products, and whether these have the processor's bits.
    products: Option<(Products, bool)>,
}

/// Locks a mutex. The state stays usable after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VulkanCoding {
    pub fn new(mut device: VulkanExecutor) -> Result<VulkanCoding> {
        let shared = |what, bytes: usize, place| Block::new(&device.gpu, what, bytes as u64, place);
        let targets = shared("targets of tiles", TILES * WEIGHTS, Place::Upload)?;
        let rows = shared("rows of tiles", TILES * TILE * 8, Place::Readback)?;
        let info = device.info();
        let is_large = !info.is_integrated && !info.is_cpu;
        let at_once = if is_large { AT_ONCE } else { AT_ONCE_SMALL };
        let mut alloc = |bytes| device.alloc("costs of tiles", bytes).map(|id| (id, bytes));
        let [large, small, least] = COSTS;
        let costs = alloc(large).or_else(|_| alloc(small)).or_else(|_| alloc(least))?;
        let (states, batch) = (Vec::new(), FIRST_TILES);
        let products = None;
        let state = SearchState { device, targets, rows, costs, states, batch, products };
        let (queue, served) = (Mutex::default(), Condvar::new());
        Ok(VulkanCoding { at_once, queue, served, state: Mutex::new(state) })
    }

    /// Answers all requests with the first one's trellis, in submissions as large as possible.
    fn serve(&self) {
        let mut queue = lock(&self.queue);
        let Some(trellis) = queue.requests.first().map(|r| r.trellis) else { return };
        let requests: Vec<SearchRequest> =
            queue.requests.extract_if(.., |r| r.trellis == trellis).collect();
        drop(queue);
        let wanted: Vec<&[u8]> = requests.iter().map(|r| &r.wanted[..]).collect();
        let mut found = lock(&self.state).encode_all(trellis, &wanted.concat());
        for request in &requests {
            let count = request.wanted.len() / WEIGHTS;
            let answer = match &mut found {
                Ok(rows) => Ok(rows.drain(..count).collect()),
                Err(e) => Err(std::mem::replace(e, anyhow!("the device failed"))),
            };
            // A caller that has gone needs no answer.
            let _ = request.answer.send(answer);
        }
    }

    /// Computes `c = keep * c + a b` on the device even if its bits differ from the processor's.
    pub fn multiply_inexactly(
        &self,
        c: &mut [f32],
        stride: usize,
        keep: bool,
        a: View<'_>,
        b: View<'_>,
    ) -> Result<()> {
        product::multiply(c, stride, keep, a, b, &mut |run| {
            let mut state = lock(&self.state);
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
        self.at_once
    }

    fn encode(&self, trellis: Trellis, wanted: &[f32], rows: &mut [[u64; TILE]]) -> Result<()> {
        let wanted: Vec<u8> = wanted.par_iter().map(|t| quarters(*t) as u8).collect();
        let (answer, mine) = mpsc::channel();
        let mut queue = lock(&self.queue);
        queue.requests.push(SearchRequest { trellis, wanted, answer });
        // The caller that finds the device free serves all waiting callers. It must not wait for
        // the pool, because it might be given work that needs the device.
        loop {
            match mine.try_recv() {
                Ok(found) => {
                    rows.copy_from_slice(&found?);
                    return Ok(());
                }
                Err(TryRecvError::Disconnected) => bail!("the search on the device panicked"),
                Err(TryRecvError::Empty) if queue.busy => {
                    queue = self.served.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                Err(TryRecvError::Empty) => {
                    queue.busy = true;
                    drop(queue);
                    let service = Service(self);
                    self.serve();
                    drop(service);
                    queue = lock(&self.queue);
                }
            }
        }
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
        // If the device has no room for products, the processor computes them.
        let exact = || lock(&self.state).products().is_ok_and(|(_, _, exact)| exact);
        if takes(factor, keep, a, b) && exact() {
            return self.multiply_inexactly(c, stride, keep == 1.0, a, b);
        }
        multiply(c, stride, keep, factor, a, b);
        Ok(())
    }
}

/// Returns the integers of each state in the form that the device multiplies: both plus [`OFFSET`],
/// then twice the sum of their squares as two digits with the values 1 and 127.
fn table(trellis: Trellis) -> Vec<u8> {
    let word = |state| {
        let [x, y] = trellis.integers(state);
        let squares = 2 * (x * x + y * y);
        [x + OFFSET, y + OFFSET, squares % 127, squares / 127].map(|byte| byte as u8)
    };
    (0..STATES as u32).flat_map(word).collect()
}

impl SearchState {
    /// Returns the device, its buffers for products, and whether these have the processor's bits.
    fn products(&mut self) -> Result<(&mut VulkanExecutor, &Products, bool)> {
        if self.products.is_none() {
            let products = Products::new(&self.device)?;
            let exact = products.are_exact(&mut self.device)?;
            self.products = Some((products, exact));
        }
        let (products, exact) = self.products.as_ref().context("made above")?;
        Ok((&mut self.device, products, *exact))
    }

    /// Returns the table of a trellis, uploading a new one.
    fn states(&mut self, trellis: Trellis) -> Result<BufferId> {
        if let Some((_, states)) = self.states.iter().find(|(known, _)| *known == trellis) {
            return Ok(*states);
        }
        let states = self.device.alloc("states of codes", 4 * STATES)?;
        self.device.write(states, 0, &table(trellis))?;
        self.device.stage(None)?;
        self.states.push((trellis, states));
        Ok(states)
    }

    /// Encodes tiles in submissions that fit the buffers.
    fn encode_all(&mut self, trellis: Trellis, wanted: &[u8]) -> Result<Vec<[u64; TILE]>> {
        let mut rows = vec![[0; TILE]; wanted.len() / WEIGHTS];
        let (mut left, mut wanted) = (&mut rows[..], wanted);
        while !left.is_empty() {
            let n = left.len().min(self.batch);
            let (some_wanted, some_rows);
            (some_wanted, wanted) = wanted.split_at(n * WEIGHTS);
            (some_rows, left) = left.split_at_mut(n);
            self.encode(trellis, some_wanted, some_rows)?;
        }
        Ok(rows)
    }

    /// Encodes as many tiles as fit the buffers.
    fn encode(&mut self, trellis: Trellis, wanted: &[u8], rows: &mut [[u64; TILE]]) -> Result<()> {
        let states = self.states(trellis)?;
        let SearchState { device, targets, costs: (costs, room), rows: found, .. } = self;
        let heads = STATES >> trellis.step;
        let shared = |together: usize| together * (4 * heads + 8 * STEPS + 20);
        let fits = shared(2) <= device.info().max_shared as usize;
        // Two tiles share reads of the table, which is faster even if one would fill the device.
        let together = if fits { 2 } else { 1 };
        let groups = (*room / (together * STEPS * heads * 2)).min(rows.len().div_ceil(together));
        // A thread processes four heads at once.
        let info = device.info();
        let most = info.max_workgroup.min(info.subgroup.saturating_mul(info.max_subgroups));
        let threads = word(heads / 4).min(512).min(most);
        let push = ViterbiPush {
            targets: targets.address,
            states: device.address(states),
            costs: device.address(*costs),
            rows: found.address,
            tiles: word(rows.len()),
            _gap: 0,
        };
        let kernel = kernels::Viterbi { threads, together: word(together), step: trellis.step };
        let call = Call::apart(&kernel, &push, [groups, 1, 1]);
        let (layout, pipelines) = device.kernels(std::slice::from_ref(&call))?;
        // SAFETY: every call waits below for the kernel, so none is running.
        unsafe { targets.bytes(0, wanted.len()) }.copy_from_slice(wanted);
        let start = Instant::now();
        let done = device.queue.once(|device, commands| {
            barrier(device, commands);
            dispatch(device, commands, layout, pipelines[0], &call);
            host_barrier(device, commands);
        })?;
        device.queue.wait(done)?;
        if rows.len() == self.batch && start.elapsed() < LONG {
            self.batch = TILES.min(2 * self.batch);
        }
        let rows: &mut [u8] = bytemuck::cast_slice_mut(rows);
        // SAFETY: the wait above ended the kernel.
        rows.copy_from_slice(unsafe { found.bytes(0, rows.len()) });
        Ok(())
    }
}
