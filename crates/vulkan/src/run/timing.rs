//! Times of kernels, from timestamps of the device.

use crate::device::{Gpu, failed};
use crate::lower::Call;
use anyhow::Result;
use ash::vk;
use gemma_base::compute::KernelTime;
use std::sync::Arc;

/// Most calls of one pass.
const MOST: u32 = 8192;

/// Timestamps of one pass, and the sums over passes.
pub struct Timing {
    gpu: Arc<Gpu>,
    pool: vk::QueryPool,
    pub times: Vec<KernelTime>,
}

impl Timing {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Timing> {
        let info = vk::QueryPoolCreateInfo::default()
            .query_type(vk::QueryType::TIMESTAMP)
            .query_count(MOST);
        // SAFETY: a plain object of this device that `drop` destroys.
        let pool = unsafe { gpu.device.create_query_pool(&info, None) }
            .map_err(|e| failed("preparing time stamps", e))?;
        Ok(Timing { gpu: gpu.clone(), pool, times: Vec::new() })
    }

    pub fn reset(&self) {
        // SAFETY: the caller waited for all submissions, so the pool is not in use.
        unsafe { self.gpu.device.reset_query_pool(self.pool, 0, MOST) };
    }

    pub fn begin(&mut self, commands: vk::CommandBuffer, calls: &[Call]) {
        assert!(calls.len() < MOST as usize, "more calls than time stamps");
        self.stamp(commands, 0);
    }

    /// Records timestamp `i`, which the device writes after all earlier commands.
    pub fn stamp(&self, commands: vk::CommandBuffer, i: usize) {
        // SAFETY: `commands` is being recorded.
        unsafe {
            self.gpu.device.cmd_write_timestamp2(
                commands,
                vk::PipelineStageFlags2::ALL_COMMANDS,
                self.pool,
                i as u32,
            );
        }
    }

    /// Adds the times of the last run.
    pub fn gather(&mut self, calls: &[Call]) -> Result<()> {
        let mut stamps = vec![0u64; calls.len() + 1];
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT;
        // SAFETY: the caller waited for the run that wrote these timestamps.
        unsafe { self.gpu.device.get_query_pool_results(self.pool, 0, &mut stamps, flags) }
            .map_err(|e| failed("reading time stamps", e))?;
        for (call, pair) in calls.iter().zip(stamps.windows(2)) {
            let seconds =
                pair[1].saturating_sub(pair[0]) as f64 * self.gpu.info.timestamp_ns as f64 * 1e-9;
            // Only the work of linear layers is counted as multiply-adds.
            let macs = if call.linear.is_some() { call.work } else { 0 };
            KernelTime { label: call.label, calls: 1, seconds, bytes: call.bytes, macs }
                .add_to(&mut self.times);
        }
        Ok(())
    }
}

impl Drop for Timing {
    fn drop(&mut self) {
        // SAFETY: the executor waits for the device before it drops its parts.
        unsafe { self.gpu.device.destroy_query_pool(self.pool, None) };
    }
}
