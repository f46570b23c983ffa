//! Submissions of a pass: recorded in pieces from an estimate, or probed piece by piece.

use super::cut::{self, CallSize, Cut, Probe};
use super::workgroups::{Unordered, Workgroups, axis};
use super::{RecordedPass, VulkanExecutor};
use crate::device::barrier::{barrier, kernel_barrier};
use crate::device::pipeline;
use crate::device::{LOST, is_lost};
use crate::lower::hazards::{Hazards, in_waves};
use crate::lower::{Bucket, Call};
use anyhow::Result;
use ash::vk;
use gemma_base::compute::PlanId;
use gemma_base::error::{Fault, Kind};
use gemma_base::os::remedies::{self, Remedies};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Simulated device for tests: it takes a fixed time per multiply-add, and counts its submissions.
#[derive(Clone, Debug, Default)]
pub struct MadeUp {
    /// Seconds per multiply-add.
    each: f64,
    /// Multiply-adds of the next submission.
    staged: f64,
    /// Seconds of the longest submission, and number of submissions.
    pub longest: f64,
    pub submissions: usize,
}

impl MadeUp {
    /// Returns a device with `each` seconds per multiply-add.
    pub fn taking(each: f64) -> MadeUp {
        MadeUp { each, ..MadeUp::default() }
    }
}

/// State while a pass is recorded.
struct Recording {
    calls: Vec<Call>,
    sizes: Vec<CallSize>,
    layout: vk::PipelineLayout,
    kernels: Vec<vk::Pipeline>,
    hazards: Hazards,
}

impl VulkanExecutor {
    /// Uses the times of `device` instead of the clock. For tests.
    pub fn pretending(self, device: &Arc<Mutex<MadeUp>>) -> Self {
        VulkanExecutor { made_up: Some(device.clone()), ..self }
    }

    /// Returns the simulated device of a test.
    fn made_up(&self) -> Option<MutexGuard<'_, MadeUp>> {
        self.made_up.as_ref().map(|m| m.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records the commands of a plan for one bucket, unless commands for the current estimate
    /// exist. Waits until they are not in use. A pass without an estimate runs here, except for its
    /// last piece.
    pub(super) fn prepare(&mut self, plan: PlanId, bucket: Bucket, rows: usize) -> Result<()> {
        let at = plan.0 as usize;
        // A driver on the processor has no watchdog.
        let watched = !self.gpu.info.is_cpu || self.made_up.is_some();
        let mut seconds = None;
        if let Some(pass) = self.plans[at].passes.get(&bucket) {
            if pass.submission == self.queue.upcoming() {
                self.queue.flush()?;
            }
            self.queue.wait(pass.submission)?;
            seconds = pass.seconds;
            let is_stale = |s: f64| {
                watched && cut::is_stale(&pass.ends, &cut::cut(&pass.sizes, s), &pass.sizes, s)
            };
            if !seconds.map_or(pass.ends.is_empty(), is_stale) {
                return Ok(());
            }
        }
        if let Some(old) = self.plans[at].passes.remove(&bucket) {
            old.pieces.into_iter().for_each(|commands| self.queue.free(commands));
        }
        let calls = in_waves(self.calls_of(plan, bucket)?);
        let (layout, kernels) = self.kernels(&calls)?;
        let parts_of = |groups: [u32; 3]| match self.gpu.info.divides_calls {
            true => groups[axis(groups)],
            false => 1,
        };
        let sizes: Vec<CallSize> = calls
            .iter()
            .map(|call| CallSize { work: call.work, parts: parts_of(call.groups) })
            .collect();
        let mut recording =
            Recording { calls, sizes, layout, kernels, hazards: Hazards::default() };
        let pass = match seconds {
            _ if !watched => self.record_all(&mut recording, 0.0)?,
            Some(seconds) => self.record_all(&mut recording, seconds)?,
            // Timestamps require that the whole pass is recorded before it runs.
            None if self.timing.is_some() => {
                let guess = self.slowest.unwrap_or(0.0).max(cut::UNKNOWN);
                let work = recording.sizes.iter().map(|s| s.work as f64).sum::<f64>();
                self.record_all(&mut recording, work * guess)?
            }
            None => self.probe(&mut recording, rows)?,
        };
        self.plans[at]
            .passes
            .insert(bucket, RecordedPass { sizes: recording.sizes, seconds, ..pass });
        Ok(())
    }

    /// Records a pass with an estimated time of `seconds`.
    fn record_all(&mut self, recording: &mut Recording, seconds: f64) -> Result<RecordedPass> {
        let ends = cut::cut(&recording.sizes, seconds);
        let works = cut::pieces(&ends)
            .map(|(from, to)| cut::work_between(&recording.sizes, from, to))
            .collect();
        let pieces = cut::pieces(&ends)
            .map(|(from, to)| self.record_piece(recording, from, to))
            .collect::<Result<_>>()?;
        Ok(RecordedPass { pieces, works, ends, ..RecordedPass::default() })
    }

    /// Runs a pass piece by piece, except for the last piece, which it only records. The times of
    /// earlier pieces set the size of the next.
    fn probe(&mut self, recording: &mut Recording, rows: usize) -> Result<RecordedPass> {
        let (mut probe, mut from, mut spent) = (Probe::new(self.slowest), Cut::default(), 0.0);
        loop {
            let to = cut::end(&recording.sizes, from, probe.room());
            let piece = self.record_piece(recording, from, to)?;
            let work = cut::work_between(&recording.sizes, from, to);
            if to.call == recording.calls.len() {
                // A probed pass is recorded completely on its next run.
                let ends = if from == Cut::default() { vec![to] } else { Vec::new() };
                return Ok(RecordedPass {
                    pieces: vec![piece],
                    works: vec![work],
                    ends,
                    spent,
                    ..RecordedPass::default()
                });
            }
            let start = Instant::now();
            self.stage(Some(piece))?;
            let done = self.submit(work).and_then(|submission| self.queue.wait(submission));
            done.map_err(|e| explained(e, rows))?;
            self.queue.free(piece);
            let seconds = self.made_up().map_or(start.elapsed().as_secs_f64(), |m| m.each * work);
            probe.learn(work, seconds);
            (from, spent) = (to, spent + seconds);
        }
    }

    /// Submits the staged commands. The last of them have `work` multiply-adds.
    pub(super) fn submit(&mut self, work: f64) -> Result<u64> {
        if let Some(mut made_up) = self.made_up() {
            let seconds = (std::mem::take(&mut made_up.staged) + work) * made_up.each;
            made_up.longest = made_up.longest.max(seconds);
            made_up.submissions += 1;
        }
        self.queue.flush()
    }

    /// Leaves `work` staged multiply-adds to the next submission.
    pub(super) fn put_off(&mut self, work: f64) {
        self.made_up().iter_mut().for_each(|m| m.staged += work);
    }

    /// Returns the seconds of a finished pass, from the clock or from a simulated device.
    pub(super) fn seconds(&self, pass: &RecordedPass, by_the_clock: f64) -> f64 {
        let work: f64 = pass.sizes.iter().map(|s| s.work as f64).sum();
        self.made_up().map_or(pass.spent + by_the_clock, |m| m.each * work)
    }

    fn record_piece(
        &mut self,
        recording: &mut Recording,
        from: Cut,
        to: Cut,
    ) -> Result<vk::CommandBuffer> {
        let Recording { calls, sizes, layout, kernels, hazards } = recording;
        let divided = |i: usize| {
            let first = if i == from.call { from.part } else { 0 };
            let end = if i == to.call { to.part } else { sizes[i].parts };
            (first, end)
        };
        let range = from.call..(to.call + usize::from(to.part > 0));
        let mut parts = Vec::new();
        for i in range.clone() {
            let (first, end) = divided(i);
            let whole = (first, end) == (0, sizes[i].parts);
            let kernel = match whole {
                true => kernels[i],
                false => pipeline::lock(&self.pipelines)
                    .get_divisible(calls[i].shader, &calls[i].constants)?,
            };
            let groups = match whole {
                true => Workgroups::all(&calls[i]),
                false => Workgroups::part(&calls[i], first..end),
            };
            parts.push((kernel, first, end, groups));
        }
        let commands = self.queue.allocate()?;
        let (timing, mut unordered) = (&mut self.timing, Unordered::new(self.shuffle));
        self.queue.record(commands, |device, commands| {
            if let Some(timing) = timing.as_mut().filter(|_| from == Cut::default()) {
                timing.begin(commands, calls);
            }
            for (i, (kernel, first, end, groups)) in range.zip(parts) {
                if first == 0 && hazards.meets(&calls[i]) {
                    unordered.record(device, commands, *layout);
                    kernel_barrier(device, commands);
                }
                unordered.add(kernel, &calls[i], groups);
                if let Some(timing) = timing.as_ref().filter(|_| end == sizes[i].parts) {
                    unordered.record(device, commands, *layout);
                    timing.stamp(commands, i + 1);
                }
            }
            unordered.record(device, commands, *layout);
            barrier(device, commands);
        })?;
        Ok(commands)
    }
}

/// Adds an explanation to the error if the device was lost in a pass over `rows` rows.
pub fn explained(error: anyhow::Error, rows: usize) -> anyhow::Error {
    if !is_lost(&error) {
        return error;
    }
    let s = if rows == 1 { "" } else { "s" };
    let estimate = format!("its submissions were estimated to take at most {} s each", cut::LIMIT);
    let what = format!("{LOST} in a pass over {rows} token{s} ({estimate})");
    let Remedies { system_log, longer_passes, .. } = remedies::HERE;
    let help = format!(
        "if the system's log ({system_log}) says `timeout`, \
        the driver took the pass for a hang: \
        close what else uses the GPU, or let it take longer ({longer_passes}); \
        if it says something else, update the driver; \
        --device cpu does without the GPU"
    );
    error.context(Fault::new(Kind::Device, what).help(help))
}
