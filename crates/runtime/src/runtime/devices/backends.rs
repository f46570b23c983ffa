//! Registry of backends: the only file outside `vulkan` and `npu` that names them.
//!
//! A [`Backend`] lists devices that can hold layers of a model. The processor is not a backend: it
//! is always available and runs the layers that no device runs. An NPU is not one either: it takes
//! over operations of another executor, see [`super::npu`].

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
    gate::StepMemory,
};
pub use gemma_vulkan::{choose, ranked};

/// A kind of device that can hold layers of a model.
pub trait Backend: Sync {
    /// Name of the kind, as in `--device NAME:N` and [`DeviceInfo::backend`].
    fn name(&self) -> &'static str;
    /// Lists the devices of this kind, usable or not. The error explains why there are none.
    fn probe(&self) -> Result<Vec<DeviceInfo>>;
    /// Returns how far a device's driver may be used, from a trial in a child process that runs now
    /// or ran earlier.
    fn diagnose(&self, device: &DeviceInfo, listener: &dyn Listener) -> DriverVerdict;
    /// Opens a device, using its driver as far as allowed.
    ///
    /// `expected` lists the allocations to come, if known. With `check`, every result is compared
    /// with its scalar twin.
    fn open(
        &self,
        device: &DeviceInfo,
        expected: Option<&Pieces>,
        check: bool,
        listener: &dyn Listener,
    ) -> Result<Box<dyn Executor>>;
    /// Returns the allocation rules of a device, for plans.
    fn footprint(&self, device: &DeviceInfo) -> Box<dyn Footprint>;
}

/// All backends, in the order of preference for `--device auto`.
static BACKENDS: [&dyn Backend; 1] = [&VulkanBackend];

/// Returns the backend that listed a device.
pub fn backend_of(device: &DeviceInfo) -> &'static dyn Backend {
    let found = BACKENDS.iter().find(|backend| backend.name() == device.backend);
    *found.expect("only backends list devices")
}

/// Lists the devices of all backends. If there are none, returns the error of the last backend.
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

/// Opens a device for a run without a memory plan.
pub fn open(device: &DeviceInfo, listener: &dyn Listener) -> Result<Box<dyn Executor>> {
    backend_of(device).open(device, None, false, listener)
}

/// Returns the allocation rules of a device, or of the processor (`None`).
pub fn footprint(device: Option<&DeviceInfo>) -> Box<dyn Footprint> {
    match device {
        Some(device) => backend_of(device).footprint(device),
        None => Box::new(CpuFootprint),
    }
}

/// Devices with a Vulkan driver.
struct VulkanBackend;

impl Backend for VulkanBackend {
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

/// Opens a device, using its driver as far as the trial allows.
fn open_tried(device: &DeviceInfo, listener: &dyn Listener) -> Result<VulkanExecutor> {
    let verdict = driver::verdict(device, listener);
    if let (DriverUse::NotAtAll, Some(what)) = (verdict.allows, verdict.note(device)) {
        let help = format!("{}; or use --device cpu", verdict.remedy());
        return Err(Fault::new(Kind::Device, what).help(help).into());
    }
    VulkanExecutor::open_for(Choice::Index(device.index), verdict.allows == DriverUse::Whole)
}

/// Returns the sizes of the device allocations for these pieces.
pub fn allocations(pieces: &Pieces, device: &DeviceInfo) -> Vec<u64> {
    blocks(pieces, device).concat()
}

/// Opens a device for quantisation.
pub fn coding_device(choice: Choice, listener: &dyn Listener) -> Result<Arc<dyn CodingDevice>> {
    let executor = open_tried(choose(&VulkanBackend.probe()?, choice)?, listener)?;
    Ok(Arc::new(VulkanCoding::new(executor)?))
}

/// Opens a device for image towers, and locks it for this process. A model on the same device
/// shares it.
pub fn dense_device(
    choice: Choice,
    how: DeviceLock,
    listener: &dyn Listener,
) -> Result<Arc<dyn DenseDevice>> {
    let devices = VulkanBackend.probe()?;
    let device = choose(&devices, choice)?;
    lock::acquire(how, &device.name, device.index, listener)?;
    Ok(Arc::new(VulkanDense::new(open_tried(device, listener)?)?))
}

/// Returns whether a device has int8 matrix instructions; `None` before the trial of its driver.
pub fn multiplies_matrices(device: &DeviceInfo) -> Option<bool> {
    if !device.offers_matrices {
        return Some(false);
    }
    let verdict = driver::known(device)?;
    Some(verdict.allows == DriverUse::Whole && verdict.shapes.contains(&SHAPE.to_string()))
}

/// Runs the trial of a driver if this process was started for one, and returns its output;
/// otherwise `None`.
pub fn as_child(argv: &[OsString]) -> Option<Result<String>> {
    let (index, whole) = driver::trial_of(argv)?;
    Some(try_driver(index, whole).map(|shapes| serde_json::json!(shapes).to_string()))
}

/// Queries a device's matrix shapes, if `whole`, and runs passes of a small model on it. Returns
/// the shapes.
///
/// Its kernels exchange values between subgroup lanes, use shared memory, count workgroups, and
/// multiply matrices if there are instructions for it.
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
