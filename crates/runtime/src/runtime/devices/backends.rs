//! Registry of backends: the only file outside `vulkan` and `npu` that names them.
//!
//! A [`Backend`] lists devices that hold layers of a model. The processor is no backend: it is
//! always there and takes the layers that no device takes. An NPU is none either: it takes
//! operations off the executor beside it, see [`super::npu`].

use crate::runtime::Listener;
use crate::runtime::devices::driver::{self, DriverUse, DriverVerdict};
use crate::runtime::devices::lock::{self, DeviceLock};
use crate::runtime::devices::made_up;
use anyhow::{Context, Result, bail};
use gemma_base::compute::cpu::CpuFootprint;
use gemma_base::compute::dry::{Footprint, Pieces};
use gemma_base::compute::{Choice, DenseDevice, DeviceInfo, Executor, KvFormat};
use gemma_base::error::{Fault, Kind};
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::testing;
use gemma_model::engine::planned::{EngineOptions, PlannedEngine};
use gemma_vulkan::{
    CheckedExecutor, SHAPE, VulkanCoding, VulkanDense, VulkanExecutor, VulkanFootprint, blocks,
};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

pub use gemma_npu::mode::Npu;
pub use gemma_npu::probe::{Finding as NpuFinding, NpuProbe, NpuSystem};
#[cfg(all(unix, feature = "npu"))]
pub use gemma_npu::{
    OffloadExecutor,
    attention::{Dims as NpuDims, FlashPartial},
    bring_up::bring_up as bring_up_npu,
    gate::Work as NpuWork,
};
pub use gemma_vulkan::{choose, ranked};

/// A kind of device that holds layers of a model.
pub trait Backend: Sync {
    /// Name of the kind, as in `--device NAME:N` and [`DeviceInfo::backend`].
    fn name(&self) -> &'static str;
    /// Lists the devices of this kind, usable or not. The error says why there are none.
    fn probe(&self) -> Result<Vec<DeviceInfo>>;
    /// Returns how far a device's driver may be used, from a trial in a child process now or in an
    /// earlier run.
    fn diagnose(&self, device: &DeviceInfo, listener: &dyn Listener) -> DriverVerdict;
    /// Opens a device as far as its driver may be used. `expected` lists the memory that will be
    /// allocated, where that is known. With `check`, each result is compared with its scalar twin.
    fn open(
        &self,
        device: &DeviceInfo,
        expected: Option<&Pieces>,
        check: bool,
        listener: &dyn Listener,
    ) -> Result<Box<dyn Executor>>;
    /// Returns the rules by which a device takes memory, for plans.
    fn footprint(&self, device: &DeviceInfo) -> Box<dyn Footprint>;
}

/// All backends, in the order in which `--device auto` prefers their devices.
static BACKENDS: [&dyn Backend; 1] = [&Vulkan];

/// Returns the backend that listed a device.
pub fn backend_of(device: &DeviceInfo) -> &'static dyn Backend {
    let found = BACKENDS.iter().find(|backend| backend.name() == device.backend);
    *found.expect("only backends list devices")
}

/// Lists the devices of all backends. The error is that of the last backend, if none has a device.
pub fn probe() -> Result<Vec<DeviceInfo>> {
    let mut devices = Vec::new();
    let mut failed = None;
    for backend in BACKENDS {
        match backend.probe() {
            Ok(found) => devices.extend(found),
            Err(why) => failed = Some(why),
        }
    }
    match failed {
        Some(why) if devices.is_empty() => Err(why),
        _ => Ok(devices),
    }
}

/// Opens a device for a run without a plan of its memory.
pub fn open(device: &DeviceInfo, listener: &dyn Listener) -> Result<Box<dyn Executor>> {
    backend_of(device).open(device, None, false, listener)
}

/// Returns the rules by which a device, or the processor (`None`), takes memory.
pub fn footprint(device: Option<&DeviceInfo>) -> Box<dyn Footprint> {
    match device {
        Some(device) => backend_of(device).footprint(device),
        None => Box::new(CpuFootprint),
    }
}

/// Devices with a Vulkan driver.
struct Vulkan;

impl Backend for Vulkan {
    fn name(&self) -> &'static str {
        "vulkan"
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        gemma_vulkan::Vulkan::open()?.devices()
    }

    fn diagnose(&self, device: &DeviceInfo, listener: &dyn Listener) -> DriverVerdict {
        driver::verdict(device, listener)
    }

    fn open(
        &self,
        device: &DeviceInfo,
        expected: Option<&Pieces>,
        check: bool,
        listener: &dyn Listener,
    ) -> Result<Box<dyn Executor>> {
        let mut executor = open_tried(device, listener)?;
        if let Some(pieces) = expected {
            executor.expect(pieces);
        }
        Ok(if check { Box::new(CheckedExecutor::new(executor)) } else { Box::new(executor) })
    }

    fn footprint(&self, device: &DeviceInfo) -> Box<dyn Footprint> {
        Box::new(VulkanFootprint::new(device))
    }
}

/// Opens a device as far as its driver came through a trial.
fn open_tried(device: &DeviceInfo, listener: &dyn Listener) -> Result<VulkanExecutor> {
    let verdict = driver::verdict(device, listener);
    if let (DriverUse::NotAtAll, Some(what)) = (verdict.allows, verdict.note(device)) {
        let help = format!("{}; or use --device cpu", verdict.remedy());
        return Err(Fault::new(Kind::Device, what).help(help).into());
    }
    VulkanExecutor::open_for(Choice::Index(device.index), verdict.allows == DriverUse::Whole)
}

/// Returns the sizes of the allocations that hold these pieces on a device.
pub fn allocations(pieces: &Pieces, device: &DeviceInfo) -> Vec<u64> {
    blocks(pieces, device).concat()
}

/// Opens a device to quantise with.
pub fn coding_device(choice: Choice, listener: &dyn Listener) -> Result<Arc<dyn CodingDevice>> {
    let executor = open_tried(choose(&Vulkan.probe()?, choice)?, listener)?;
    Ok(Arc::new(VulkanCoding::new(executor)?))
}

/// Opens a device for image towers, and locks it for this process. A model on it shares it.
pub fn dense_device(
    choice: Choice,
    how: DeviceLock,
    listener: &dyn Listener,
) -> Result<Arc<dyn DenseDevice>> {
    let devices = Vulkan.probe()?;
    let device = choose(&devices, choice)?;
    lock::acquire(how, &device.name, device.index, listener)?;
    Ok(Arc::new(VulkanDense::new(open_tried(device, listener)?)?))
}

/// Returns whether a device multiplies matrices of int8; `None` before the trial of its driver.
pub fn multiplies_matrices(device: &DeviceInfo) -> Option<bool> {
    if !device.offers_matrices {
        return Some(false);
    }
    let verdict = driver::known(device)?;
    Some(verdict.allows == DriverUse::Whole && verdict.shapes.contains(&SHAPE.to_string()))
}

/// Runs the trial of a driver if this process was started for one, and returns its output; `None`
/// otherwise.
pub fn as_child(argv: &[OsString]) -> Option<Result<String>> {
    let (index, whole) = driver::trial_of(argv)?;
    Some(try_driver(index, whole).map(|shapes| serde_json::json!(shapes).to_string()))
}

/// Queries a device's matrix shapes, if `whole`, and computes passes of a small model on it. Its
/// kernels move values between the lanes of a subgroup, share memory, count workgroups, and
/// multiply matrices where there are instructions for that. Returns the shapes.
fn try_driver(index: usize, whole: bool) -> Result<Vec<String>> {
    match testing::fault(testing::TRIAL).as_deref() {
        Some("abort") => std::process::abort(),
        Some("abort-whole") if whole => std::process::abort(),
        Some("fail") => bail!("a failure for a test"),
        Some("hang") => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        _ => {}
    }
    let vulkan = gemma_vulkan::Vulkan::open()?;
    let devices = vulkan.devices()?;
    let info = devices.get(index).context("the device is gone")?;
    let shapes = if whole { vulkan.matrix_shapes(info)? } else { Vec::new() };
    let exec = VulkanExecutor::open_for(Choice::Index(index), whole)?;
    let options = EngineOptions { context: made_up::CONTEXT, kv: KvFormat::F16 };
    let mut engine = PlannedEngine::new(&made_up::model()?, Box::new(exec), options)?;
    made_up::run_passes(&mut engine)?;
    Ok(shapes.iter().map(ToString::to_string).collect())
}
