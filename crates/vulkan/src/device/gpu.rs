//! The logical device, opened with the features that kernels need and shared by the executors of
//! this process.

use super::choose::{Choice, choose};
use super::features::Features;
use super::matrix::{MatrixShape, best_shape};
use super::memory::Requested;
use super::{DeviceInfo, Vulkan};
use anyhow::{Context, Result};
use ash::{Device, khr, vk};
use gemma_base::error::{Fault, Kind};
use gemma_base::os::remedies;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A logical device with one queue. Several threads may submit to it.
pub struct Gpu {
    pub device: Device,
    pub physical: vk::PhysicalDevice,
    pub info: DeviceInfo,
    /// Matrix shape that it was opened for.
    pub matrices: Option<MatrixShape>,
    queue: Mutex<vk::Queue>,
    pub family: u32,
    pub memory_types: vk::PhysicalDeviceMemoryProperties,
    /// Bytes of memory requested from it.
    pub requested: Requested,
    // Dropped last.
    pub vulkan: Vulkan,
}

impl Gpu {
    /// Opens the device that `choice` selects, or returns it if it is in `open`. Without
    /// `matrices`, the driver is not queried for its matrix instructions.
    pub fn open(choice: Choice, matrices: bool, open: &[Arc<Gpu>]) -> Result<Arc<Gpu>> {
        let vulkan = Vulkan::open()?;
        let devices = vulkan.devices()?;
        let info = choose(&devices, choice)?.clone();
        if let Some(gpu) = open.iter().find(|gpu| gpu.info.index == info.index) {
            return Ok(gpu.clone());
        }
        let physical = vulkan.physical()?[info.index];
        let instance = &vulkan.instance;
        let family = queue_family(&vulkan.queue_families(physical)).ok_or_else(|| {
            Fault::new(Kind::Device, format!("{} has no compute queue", info.name))
        })?;
        let priority = [1.0];
        let queues = [vk::DeviceQueueCreateInfo::default()
            .queue_family_index(family)
            .queue_priorities(&priority)];
        let Features { core, mut v11, mut v12, mut v13 } = Features::needed();
        let shapes = if matrices { vulkan.matrix_shapes(&info)? } else { Vec::new() };
        let matrices = best_shape(&shapes);
        let mut feature =
            vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let mut extensions = Vec::new();
        let mut create = vk::DeviceCreateInfo::default();
        if matrices.is_some() {
            // Counters of results are shared between workgroups.
            v12 = v12.vulkan_memory_model(true).vulkan_memory_model_device_scope(true);
            extensions.push(khr::cooperative_matrix::NAME.as_ptr());
            create = create.push_next(&mut feature);
        }
        // A driver with this extension lacks a part of Vulkan, and Vulkan requires programs to
        // enable it.
        let partial = c"VK_KHR_portability_subset";
        if vulkan.extensions(physical).iter().any(|name| name.as_c_str() == partial) {
            extensions.push(partial.as_ptr());
        }
        let create = create
            .enabled_extension_names(&extensions)
            .queue_create_infos(&queues)
            .enabled_features(&core)
            .push_next(&mut v11)
            .push_next(&mut v12)
            .push_next(&mut v13);
        // SAFETY: every pointer in `create` outlives the call; the features were checked before.
        let device =
            unsafe { instance.create_device(physical, &create, None) }.with_context(|| {
                Fault::new(Kind::Device, format!("{} cannot be opened", info.name))
                    .help("use --device cpu")
            })?;
        // SAFETY: the queue was requested above.
        let queue = unsafe { device.get_device_queue(family, 0) };
        // SAFETY: the device belongs to this instance.
        let memory_types = unsafe { instance.get_physical_device_memory_properties(physical) };
        let queue = Mutex::new(queue);
        let requested = Requested::default();
        Ok(Arc::new(Gpu {
            device,
            physical,
            info,
            matrices,
            queue,
            family,
            memory_types,
            requested,
            vulkan,
        }))
    }

    /// Locks the queue for a submission.
    pub fn queue(&self) -> MutexGuard<'_, vk::Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: each owner of an object of the device holds the `Gpu` in an `Arc`, so no object
        // is left.
        unsafe {
            let _ = self.device.device_wait_idle();
            self.device.destroy_device(None);
        }
    }
}

/// Returns the first queue family with compute but without graphics, because the desktop disturbs
/// it less. Otherwise returns the first one with compute.
pub fn queue_family(families: &[vk::QueueFlags]) -> Option<u32> {
    let computes = |f: &vk::QueueFlags| f.contains(vk::QueueFlags::COMPUTE);
    let alone = |f: &vk::QueueFlags| computes(f) && !f.contains(vk::QueueFlags::GRAPHICS);
    let found = families.iter().position(alone).or_else(|| families.iter().position(computes));
    found.map(|i| i as u32)
}

/// Prefix of the error of a lost device.
pub const LOST: &str = "the GPU was lost";

/// Returns whether an error is that of a lost device.
pub fn is_lost(error: &anyhow::Error) -> bool {
    error.to_string().starts_with(LOST)
}

/// Returns the error of a failed Vulkan call, with a remedy.
pub fn failed(what: &str, error: vk::Result) -> anyhow::Error {
    let fault = match error {
        vk::Result::ERROR_DEVICE_LOST => Fault::new(Kind::Device, format!("{LOST} while {what}"))
            .help(format!(
                "try again; if it happens again, \
                the system's log says why ({}; \
                `timeout` means that the driver took a long pass for a hang): \
                update the driver, or use --device cpu",
                remedies::HERE.system_log
            )),
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
            Fault::new(Kind::Memory, format!("out of memory while {what}")).help(
                "lower --ctx-size, use a smaller model (gemma quantize --target-size), \
                or --device cpu",
            )
        }
        other => Fault::new(Kind::Device, format!("the GPU driver failed while {what}: {other}"))
            .help("use --device cpu"),
    };
    fault.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_for_computing_alone_is_preferred() {
        let [graphics, compute, copies] = [
            vk::QueueFlags::GRAPHICS | vk::QueueFlags::COMPUTE,
            vk::QueueFlags::COMPUTE,
            vk::QueueFlags::TRANSFER,
        ];
        assert_eq!(queue_family(&[copies, graphics, compute]), Some(2));
        assert_eq!(queue_family(&[copies, graphics]), Some(1));
        assert_eq!(queue_family(&[copies]), None);
    }
}
