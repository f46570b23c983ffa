//! What a model takes, part by part, wherever its layers run: a dry run of the code that loads it.

use crate::compute::cpu::CpuFootprint;
use crate::compute::dry::{Dry, Pieces};
use crate::compute::split::{Side, SplitExecutor};
use crate::compute::{Executor, KvFormat, KvLayer};
use crate::gemma::forward::{self, Forward, ForwardOptions};
use crate::gemma::{Role, Weights};
use crate::vulkan::{DeviceInfo, STAGING, VulkanFootprint};
use anyhow::Result;
use serde::Serialize;

/// Bytes that one side takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Need {
    pub weights: u64,
    /// Keys and values, with the scratch rows of a pass.
    pub kv: u64,
    /// Every other buffer.
    pub activations: u64,
    /// While the weights are loaded.
    pub staging: u64,
}

impl Need {
    pub fn total(&self) -> u64 {
        [self.weights, self.kv, self.activations, self.staging].into_iter().fold(0, u64::saturating_add)
    }
}

/// What a pass over one row reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reads {
    pub weights: u64,
    /// Keys and values when the context is full; a sliding window is seen no further than it reaches.
    pub kv_when_full: u64,
}

/// One side of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    pub layers: usize,
    pub need: Need,
    pub reads: Reads,
}

/// A model spread over the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    pub gpu: Share,
    pub cpu: Share,
    /// The GPU's memory in the order in which it will be asked for.
    pub pieces: Pieces,
}

/// What is to be loaded.
#[derive(Clone, Copy)]
pub struct Task<'a> {
    pub weights: &'a Weights,
    pub context: usize,
    pub kv: KvFormat,
}

impl Task<'_> {
    pub fn layers(&self) -> usize {
        self.weights.config().n_layers
    }

    /// What it takes with the first `on_gpu` layers on `device`.
    pub fn measure(&self, device: Option<&DeviceInfo>, on_gpu: usize) -> Result<Layout> {
        let n = self.layers();
        let dry = |device| Box::new(Dry::new(VulkanFootprint::new(device)));
        let host = || Box::new(Dry::new(CpuFootprint));
        Ok(match device.filter(|_| on_gpu > 0) {
            None => {
                let mut exec = host();
                let model = self.load(exec.as_mut())?;
                Layout { cpu: self.share(&model, 0..n, exec.as_ref(), true), ..Layout::default() }
            }
            Some(device) if on_gpu >= n => {
                let mut exec = dry(device);
                let model = self.load(exec.as_mut())?;
                let gpu = self.share(&model, 0..n, exec.as_ref(), true);
                Layout { gpu: staged(gpu), pieces: exec.pieces(), ..Layout::default() }
            }
            Some(device) => {
                let mut exec = SplitExecutor::new(dry(device), host(), on_gpu as u16, n as u16);
                let model = self.load(&mut exec)?;
                let [gpu, cpu] = [exec.side(Side::Device), exec.side(Side::Host)];
                Layout {
                    gpu: staged(self.share(&model, 0..on_gpu, gpu, false)),
                    cpu: self.share(&model, on_gpu..n, cpu, true),
                    pieces: gpu.pieces(),
                }
            }
        })
    }

    fn load(&self, exec: &mut dyn Executor) -> Result<Forward> {
        let options = ForwardOptions { context: self.context, kv: self.kv, max_rows: exec.max_rows() };
        forward::load(self.weights, exec, options)
    }

    /// The share of the layers `layers`; `embeds` where a table that is only looked up would be.
    fn share(&self, model: &Forward, layers: std::ops::Range<usize>, exec: &dyn Executor, embeds: bool) -> Share {
        let (weights, buffers) = exec.memory();
        let kv: u64 = model.kv_bytes[layers.clone()].iter().sum();
        let table = match self.weights.format(Role::Embed, 0) {
            Ok(format) if embeds && self.weights.has_own_head() => {
                let [rows, cols] = Role::Embed.shape(self.weights.config());
                format.bytes(rows, cols) as u64
            }
            _ => 0,
        };
        let seen = |kv: &KvLayer| kv.pages.window.map_or(self.context, |w| w.min(self.context)) * kv.bytes_per_position();
        Share {
            layers: layers.len(),
            need: Need { weights, kv, activations: buffers.saturating_sub(kv), staging: 0 },
            reads: Reads {
                weights: weights.saturating_sub(table),
                kv_when_full: model.kv[layers].iter().map(|kv| seen(kv) as u64).sum(),
            },
        }
    }

    /// The most layers that fit into what is free on the device, and what they take; `None` if not even one does.
    pub fn most_layers(&self, device: &DeviceInfo) -> Result<Option<Layout>> {
        let fits = |n: usize| -> Result<Option<Layout>> {
            let layout = self.measure(Some(device), n)?;
            Ok((layout.gpu.need.total() <= device.free()).then_some(layout))
        };
        // What n layers take grows with n.
        let (mut best, mut low, mut high) = (None, 1, self.layers());
        while low <= high {
            let middle = high.midpoint(low);
            match fits(middle)? {
                Some(layout) => (best, low) = (Some(layout), middle + 1),
                None => high = middle - 1,
            }
        }
        Ok(best)
    }
}

fn staged(share: Share) -> Share {
    Share { need: Need { staging: STAGING, ..share.need }, ..share }
}
