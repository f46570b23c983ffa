//! Checks a device: runs a small random model on it and compares each kernel with its scalar twin.

use crate::runtime::Listener;
use crate::runtime::devices::backends::Npu;
use crate::runtime::devices::lock::DeviceLock;
use crate::runtime::devices::made_up;
use crate::runtime::load::{Room, load, pool};
use crate::runtime::options::Device;
use crate::runtime::options::{AutoOr, GpuLayers, Kv, RunOptions};
use anyhow::Result;
use gemma_base::compute::{Choice, DeviceInfo};

/// Loads the small model as `generate --check` would, and runs passes of it.
pub fn run(
    options: &RunOptions,
    device: Option<&DeviceInfo>,
    listener: &dyn Listener,
) -> Result<String> {
    let weights = made_up::model()?;
    let place = device.map_or(Device::Cpu, |d| Device::Vulkan(Choice::Index(d.index)));
    let options = RunOptions {
        device: place,
        gpu_layers: if device.is_some() { GpuLayers::All } else { GpuLayers::Auto },
        context: AutoOr::N(made_up::CONTEXT),
        kv: Kv::F16,
        npu: Npu::Off,
        check: true,
        // A check need not wait for other processes that use the device.
        lock: DeviceLock::Off,
        ..options.clone()
    };
    let threads = pool(&options)?;
    let mut loaded = load(
        &weights,
        "a small made-up model",
        &options,
        Room::of(made_up::CONTEXT),
        &threads,
        listener,
    )?;
    made_up::run_passes(loaded.engine.as_mut())?;
    Ok(format!(
        "a small model computes what the reference kernels compute ({})",
        loaded.engine.report().device
    ))
}
