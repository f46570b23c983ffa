//! Measures a model's memory by purpose for any placement, with a dry run of the loading code.

use crate::runtime::devices::backends;
use crate::runtime::devices::npu;
use anyhow::Result;
use gemma_base::compute::dry::{Dry, Pieces};
use gemma_base::compute::split::SplitExecutor;
use gemma_base::compute::{DeviceInfo, Executor, Held, KvFormat, KvLayer};
use gemma_base::kv::PAGE;
use gemma_model::models::forward::{self, Forward, ForwardOptions, SparePages};
use gemma_model::models::{ExpertSpec, Role, TensorSpec, Weights};
use serde::Serialize;

/// Bytes of one side (GPU or processor).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Need {
    pub weights: u64,
    /// Keys and values, including the scratch rows of a pass.
    pub kv: u64,
    /// All other buffers.
    pub activations: u64,
    /// Buffers that only exist while weights are loaded.
    pub staging: u64,
}

impl Need {
    pub fn total(&self) -> u64 {
        [self.weights, self.kv, self.activations, self.staging]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

/// Bytes that a pass over one row per sequence reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reads {
    pub weights: u64,
    /// Keys and values with a full context; sliding windows are read only as far as they reach.
    pub kv_when_full: u64,
}

/// Bytes of keys and values by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvParts {
    /// Positions visible to queries, over all sequences: the whole context in global layers, and
    /// the window in the others.
    pub global: u64,
    pub window: u64,
    /// Pages for prefixes, in addition to those of the sequences.
    pub prefixes: u64,
    /// Rounding to whole pages, and ring space for a pass and for rollbacks.
    pub slack: u64,
    /// Rows of a pass that are not committed yet.
    pub scratch: u64,
}

impl KvParts {
    /// Counts the bytes of layers with room for `context` positions per sequence, in passes of
    /// `rows` rows.
    fn of<'a>(
        layers: impl Iterator<Item = &'a KvLayer>,
        (sequences, context): (usize, usize),
        rows: usize,
    ) -> KvParts {
        let mut parts = KvParts::default();
        for kv in layers {
            let bytes = |positions: usize| (positions * kv.bytes_per_position()) as u64;
            let seen = kv.pages.window.map_or(context, |window| window.min(context));
            let part =
                if kv.pages.window.is_some() { &mut parts.window } else { &mut parts.global };
            *part += bytes(sequences * seen);
            let own = sequences * kv.pages.count;
            parts.prefixes += bytes((kv.all_pages - own) * PAGE);
            parts.slack += bytes(own * PAGE - sequences * seen);
            parts.scratch += bytes(rows);
        }
        parts
    }
}

/// The part of a model on one side of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    pub layers: usize,
    pub need: Need,
    pub kv: KvParts,
    pub reads: Reads,
}

/// Memory of a model spread over the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryLayout {
    pub gpu: Share,
    pub cpu: Share,
    /// Bytes of main memory for an NPU: its own copy of the global layers' keys and values, queries
    /// and results.
    pub npu: u64,
    /// GPU allocations in the order in which they are made.
    pub pieces: Pieces,
}

/// Returns the bytes of these layers' experts that a pass over one row does not read.
pub fn idle_experts(weights: &Weights, layers: std::ops::Range<usize>) -> u64 {
    let Some(ExpertSpec { count, used, .. }) = weights.config().experts else { return 0 };
    let tensors = weights.matrices().filter(|t| t.role.is_of_experts());
    let bytes = |t: &TensorSpec| -> u64 {
        let format = weights.format(t.role, t.layer);
        format.map_or(0, |format| format.bytes(t.rows, t.cols) as u64)
    };
    let all: u64 = tensors.filter(|t| layers.contains(&t.layer)).map(bytes).sum();
    all / count as u64 * (count - used) as u64
}

/// A model to load, and its capacity.
#[derive(Clone, Copy)]
pub struct Task<'a> {
    pub weights: &'a Weights,
    /// Positions of each sequence.
    pub context: usize,
    pub kv: KvFormat,
    /// Texts that share a pass, each with its own keys and values.
    pub sequences: usize,
    /// Bytes for prefixes, in addition to the sequences.
    pub prefixes: u64,
    /// Whether an NPU was requested.
    pub npu: bool,
}

impl Task<'_> {
    pub fn layers(&self) -> usize {
        self.weights.config().layers.len()
    }

    /// Returns the pages for prefixes.
    pub fn spare(&self) -> SparePages {
        SparePages::within(self.prefixes, self.weights.config(), self.kv, self.context)
    }

    /// Measures the memory with the first `on_gpu` layers on `device`.
    pub fn measure(&self, device: Option<&DeviceInfo>, on_gpu: usize) -> Result<MemoryLayout> {
        let n = self.layers();
        let dry = |device| Box::new(Dry::new(backends::footprint(device)));
        let device = device.filter(|_| on_gpu > 0);
        let staging = device.map_or(0, |d| backends::footprint(Some(d)).staging());
        let staged = |share: Share| Share { need: Need { staging, ..share.need }, ..share };
        if device.is_some() && on_gpu < n {
            let (device, host) = (dry(device), dry(None));
            let (gpu, cpu) = (device.counted(), host.counted());
            let mut exec = SplitExecutor::new(device, host, on_gpu as u16, n as u16);
            let model = self.load(&mut exec)?;
            return Ok(MemoryLayout {
                gpu: staged(self.share(&model, 0..on_gpu, gpu.held(), false)),
                cpu: self.share(&model, on_gpu..n, cpu.held(), true),
                npu: 0, // An NPU only works with a single device.
                pieces: gpu.pieces(),
            });
        }
        let place = dry(device);
        let counted = place.counted();
        let mut exec: Box<dyn Executor> = place;
        if self.npu {
            exec = npu::counted(exec, self.weights.config());
        }
        let model = self.load(exec.as_mut())?;
        let (pieces, held) = (counted.pieces(), counted.held());
        let share = self.share(&model, 0..n, held, true);
        let npu = exec.report().held.buffers - held.buffers;
        Ok(match device {
            Some(_) => MemoryLayout { gpu: staged(share), npu, pieces, ..MemoryLayout::default() },
            None => MemoryLayout { cpu: share, npu, ..MemoryLayout::default() },
        })
    }

    fn load(&self, exec: &mut dyn Executor) -> Result<Forward> {
        let Task { context, kv, sequences, .. } = *self;
        let options = ForwardOptions {
            context,
            kv,
            max_rows: exec.caps().max_rows,
            sequences,
            spare: self.spare(),
        };
        forward::load(self.weights, exec, options)
    }

    /// Returns the share of `layers` with these bytes of weights and buffers. `embeds` says whether
    /// the embedding table is on this side.
    fn share(
        &self,
        model: &Forward,
        layers: std::ops::Range<usize>,
        Held { weights, buffers }: Held,
        embeds: bool,
    ) -> Share {
        let kv: u64 = model.kv_bytes[layers.clone()].iter().sum();
        let parts = KvParts::of(
            model.kv[layers.clone()].iter(),
            (self.sequences, self.context),
            model.layout.max_rows,
        );
        let table = match self.weights.format(Role::Embed, 0) {
            Ok(format) if embeds && self.weights.has_own_head() => {
                let TensorSpec { rows, cols, .. } = self.weights.tensor(Role::Embed, 0);
                format.bytes(rows, cols) as u64
            }
            _ => 0,
        };
        Share {
            layers: layers.len(),
            need: Need { weights, kv, activations: buffers.saturating_sub(kv), staging: 0 },
            kv: parts,
            reads: Reads {
                weights: weights.saturating_sub(table + idle_experts(self.weights, layers)),
                kv_when_full: parts.global + parts.window,
            },
        }
    }

    /// Returns the layout with the most layers that fit in the device's free memory; `None` if not
    /// even one does.
    pub fn most_layers(&self, device: &DeviceInfo) -> Result<Option<MemoryLayout>> {
        let fits = |n: usize| -> Result<Option<MemoryLayout>> {
            let layout = self.measure(Some(device), n)?;
            Ok((layout.gpu.need.total() <= device.free()).then_some(layout))
        };
        // Memory increases with the number of layers, so a binary search finds the largest number.
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
