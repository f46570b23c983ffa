//! The queue: submissions, and a timeline semaphore that counts them.

use super::{Gpu, failed};
use anyhow::Result;
use ash::vk;
use gemma_base::testing::{self, Point};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Number of command buffers for commands that change between runs. One is recorded while others
/// wait or run. A round needs three: the writes for a commit, the writes for a pass, and the copy
/// of its results.
const RING: usize = 8;
/// Longest wait for one submission. Each submission is sized to take far less, but a driver on the
/// processor compiles kernels in their first run.
const PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE_WITH_CPU: Duration = Duration::from_secs(900);

/// Counter of completed submissions. Any thread may wait for one.
pub struct TimelineSemaphore {
    gpu: Arc<Gpu>,
    semaphore: vk::Semaphore,
    /// Whether a test has simulated the loss of the device.
    is_lost: AtomicBool,
}

impl TimelineSemaphore {
    /// Fails if a test simulates a device loss at this call, or did so before.
    fn lose_on_request(&self, point: Point) -> Result<()> {
        if self.is_lost.load(Ordering::Relaxed) || testing::fails(point) {
            self.is_lost.store(true, Ordering::Relaxed);
            return Err(failed("running kernels", vk::Result::ERROR_DEVICE_LOST));
        }
        Ok(())
    }

    /// Waits for a submission to complete.
    pub fn wait(&self, submission: u64) -> Result<()> {
        let (semaphores, values) = ([self.semaphore], [submission]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let patience = if self.gpu.info.is_cpu { PATIENCE_WITH_CPU } else { PATIENCE };
        // SAFETY: the semaphore lives as long as `self`.
        unsafe { self.gpu.device.wait_semaphores(&info, patience.as_nanos() as u64) }.map_err(
            |e| match e {
                vk::Result::TIMEOUT => {
                    failed("waiting for one pass", vk::Result::ERROR_DEVICE_LOST)
                }
                e => failed("running kernels", e),
            },
        )?;
        // A lost device runs nothing, so a simulated loss waits first.
        self.lose_on_request(Point::Fence)
    }
}

impl Drop for TimelineSemaphore {
    fn drop(&mut self) {
        // SAFETY: the queue holds the timeline until it has waited for all submissions.
        unsafe { self.gpu.device.destroy_semaphore(self.semaphore, None) };
    }
}

/// Queue of one executor: recorded and submitted by one thread.
pub struct Queue {
    gpu: Arc<Gpu>,
    pool: vk::CommandPool,
    ring: [vk::CommandBuffer; RING],
    /// Last submission that used each ring entry.
    used: [u64; RING],
    next: usize,
    timeline: Arc<TimelineSemaphore>,
    /// Number of submissions so far.
    count: u64,
    /// Commands of the next submission, in order.
    staged: Vec<vk::CommandBuffer>,
}

impl Queue {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Queue> {
        let device = &gpu.device;
        let what = "preparing the queue";
        // SAFETY: plain objects of this device that `drop` destroys.
        unsafe {
            let info = vk::CommandPoolCreateInfo::default()
                .queue_family_index(gpu.family)
                .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
            let pool = device.create_command_pool(&info, None).map_err(|e| failed(what, e))?;
            let mut kind =
                vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
            let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
            let semaphore = device.create_semaphore(&info, None).map_err(|e| failed(what, e))?;
            let timeline = Arc::new(TimelineSemaphore {
                gpu: gpu.clone(),
                semaphore,
                is_lost: AtomicBool::new(false),
            });
            let mut queue = Queue {
                gpu: gpu.clone(),
                pool,
                ring: Default::default(),
                used: [0; RING],
                next: 0,
                timeline,
                count: 0,
                staged: Vec::new(),
            };
            for i in 0..RING {
                queue.ring[i] = queue.allocate()?;
            }
            Ok(queue)
        }
    }

    /// Allocates a command buffer that lives as long as the queue.
    pub fn allocate(&self) -> Result<vk::CommandBuffer> {
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.pool)
            .command_buffer_count(1);
        // SAFETY: only the executor's thread uses the pool.
        let made = unsafe { self.gpu.device.allocate_command_buffers(&info) }
            .map_err(|e| failed("recording", e))?;
        Ok(made[0])
    }

    /// Frees a command buffer.
    pub fn free(&self, commands: vk::CommandBuffer) {
        // SAFETY: the caller waited for the submission that used it.
        unsafe { self.gpu.device.free_command_buffers(self.pool, &[commands]) };
    }

    /// Records the commands of `record` into `commands`.
    pub fn record(
        &self,
        commands: vk::CommandBuffer,
        record: impl FnOnce(&ash::Device, vk::CommandBuffer),
    ) -> Result<()> {
        let device = &self.gpu.device;
        // SAFETY: the caller has waited for the buffer, and the objects that `record` uses outlive
        // it.
        unsafe {
            device
                .begin_command_buffer(commands, &vk::CommandBufferBeginInfo::default())
                .map_err(|e| failed("recording", e))?;
            record(device, commands);
            device.end_command_buffer(commands).map_err(|e| failed("recording", e))
        }
    }

    /// Records and submits commands that run once.
    pub fn once(&mut self, record: impl FnOnce(&ash::Device, vk::CommandBuffer)) -> Result<u64> {
        self.stage(record, None)?;
        self.flush()
    }

    /// Stages the commands of `record`, followed by `then`, for the next submission. Earlier
    /// submissions may still run.
    pub fn stage(
        &mut self,
        record: impl FnOnce(&ash::Device, vk::CommandBuffer),
        then: Option<vk::CommandBuffer>,
    ) -> Result<()> {
        let slot = self.next;
        if self.used[slot] > self.count {
            self.flush()?;
        }
        self.wait(self.used[slot])?;
        self.next = (slot + 1) % RING;
        let commands = self.ring[slot];
        self.record(commands, record)?;
        self.used[slot] = self.count + 1;
        self.staged.push(commands);
        self.staged.extend(then);
        Ok(())
    }

    /// Stages recorded commands for the next submission.
    pub fn append(&mut self, commands: vk::CommandBuffer) {
        self.staged.push(commands);
    }

    /// Returns the number of the next submission.
    pub fn upcoming(&self) -> u64 {
        self.count + 1
    }

    /// Submits staged commands, if any. Returns the number of the last submission.
    pub fn flush(&mut self) -> Result<u64> {
        if self.staged.is_empty() {
            return Ok(self.count);
        }
        self.timeline.lose_on_request(Point::Submit)?;
        let list: Vec<_> = self
            .staged
            .drain(..)
            .map(|commands| vk::CommandBufferSubmitInfo::default().command_buffer(commands))
            .collect();
        let signal = [vk::SemaphoreSubmitInfo::default()
            .semaphore(self.timeline.semaphore)
            .value(self.count + 1)
            .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)];
        let submit = [vk::SubmitInfo2::default()
            .command_buffer_infos(&list)
            .signal_semaphore_infos(&signal)];
        let queue = self.gpu.queue();
        // SAFETY: the command buffers are recorded and not in use, and the queue is locked.
        unsafe { self.gpu.device.queue_submit2(*queue, &submit, vk::Fence::null()) }
            .map_err(|e| failed("running kernels", e))?;
        self.count += 1;
        Ok(self.count)
    }

    /// Returns whether a submission is complete, or the device is lost.
    pub fn is_done(&self, submission: u64) -> bool {
        // SAFETY: the semaphore lives as long as `self`.
        unsafe { self.gpu.device.get_semaphore_counter_value(self.timeline.semaphore) }
            .map_or(true, |count| count >= submission)
    }

    /// Waits for a submission to complete.
    pub fn wait(&self, submission: u64) -> Result<()> {
        self.timeline.wait(submission)
    }

    /// Returns the timeline, so that other threads can wait on it.
    pub fn timeline(&self) -> Arc<TimelineSemaphore> {
        self.timeline.clone()
    }

    /// Waits for all submitted and staged commands.
    pub fn wait_all(&mut self) -> Result<()> {
        let last = self.flush()?;
        self.wait(last)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _queue = self.gpu.queue();
        // SAFETY: the queue is locked, and no command runs after the wait or on a lost device.
        unsafe {
            let _ = self.gpu.device.device_wait_idle();
            self.gpu.device.destroy_command_pool(self.pool, None);
        }
    }
}
