//! Devices: the instance, the list of devices with their properties, and the objects of an opened
//! device.
//!
//! A device is probed before it is opened, and no feature is used that the probe did not find.
//! Start with [`Vulkan`], then [`Gpu`].

pub mod barrier;
pub mod choose;
mod features;
mod gpu;
pub mod matrix;
pub mod memory;
pub mod pipeline;
pub mod queue;
pub mod validation;

use anyhow::{Context, Result};
use ash::{Entry, Instance, khr, vk};
use features::Features;
pub use gemma_base::compute::device::DeviceInfo;
use gemma_base::error::{Fault, Kind};
use gemma_base::os::remedies;
use gemma_base::util::hex;
pub use gpu::{Gpu, LOST, failed, is_lost};
use matrix::MatrixShape;
use sha2::{Digest, Sha256};
use std::ffi::{CStr, c_char};
use std::sync::{Mutex, PoisonError};
use validation::Validation;

/// Environment variable that allows a driver without a GPU (lavapipe) as a device. For tests.
pub const ALLOW_CPU_DRIVER: &str = "GEMMA_VULKAN_CPU";
/// Environment variable that limits the free bytes that a device reports. For tests.
pub const MEMORY: &str = "GEMMA_VULKAN_MEMORY";

/// An opened driver.
pub struct Vulkan {
    pub instance: &'static Instance,
    loaded: &'static LoadedLibrary,
}

/// The system's Vulkan library, and the one instance of this process.
struct LoadedLibrary {
    entry: Entry,
    instance: Instance,
    validation: Option<Validation>,
}

/// Kept until the process ends. Destroying the last instance unloads drivers and layers. Some of
/// them register a destructor with each thread, so a thread that used them would then crash at its
/// end. Creating an instance also takes a tenth of a second.
static LOADED: Mutex<Option<&'static LoadedLibrary>> = Mutex::new(None);

impl Drop for Vulkan {
    fn drop(&mut self) {
        // Every object of the instance is gone, because its owner holds the `Vulkan`.
        self.loaded.validation.iter().for_each(Validation::enforce);
    }
}

/// Returns the error if there is no driver, with a remedy.
fn no_driver(what: String) -> anyhow::Error {
    Fault::new(Kind::Device, what)
        .help(format!("{}, or use --device cpu", remedies::HERE.vulkan_driver))
        .into()
}

/// Returns whether an environment variable is set to a value other than 0.
fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|v| !v.is_empty() && v != "0")
}

impl LoadedLibrary {
    fn new() -> Result<LoadedLibrary> {
        // SAFETY: the loader is the system's own; loading it only runs its initialisers.
        let entry = unsafe { Entry::load() }
            .map_err(|e| no_driver(format!("no Vulkan library on this machine: {e}")))?;
        let name = c"gemma";
        let app = vk::ApplicationInfo::default()
            .application_name(name)
            .engine_name(name)
            .api_version(vk::API_VERSION_1_3);
        let mut wanted = validation::Wanted::of_environment();
        let mut extensions = wanted.extensions();
        let mut info = vk::InstanceCreateInfo::default().application_info(&app);
        // The loader lists drivers that lack a part of Vulkan, such as MoltenVK on macOS, only on
        // request.
        // SAFETY: the call is passed no pointer.
        let offered = unsafe { entry.enumerate_instance_extension_properties(None) };
        let partial = khr::portability_enumeration::NAME;
        if offered.unwrap_or_default().iter().any(|e| e.extension_name_as_c_str() == Ok(partial)) {
            extensions.push(partial.as_ptr());
            info = info.flags(vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR);
        }
        let info = info.enabled_extension_names(&extensions);
        // SAFETY: all pointers of `info` outlive the call.
        let instance = unsafe { entry.create_instance(&wanted.add_to(info), None) }
            .map_err(|e| no_driver(format!("Vulkan does not start: {e}")))?;
        let validation = wanted.watch(&entry, &instance);
        Ok(LoadedLibrary { entry, instance, validation })
    }
}

impl Vulkan {
    /// Loads the system's Vulkan library, unless it is already loaded.
    pub fn open() -> Result<Vulkan> {
        let mut kept = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = match *kept {
            Some(loaded) => loaded,
            None => *kept.insert(Box::leak(Box::new(LoadedLibrary::new()?))),
        };
        Ok(Vulkan { instance: &loaded.instance, loaded })
    }

    fn physical(&self) -> Result<Vec<vk::PhysicalDevice>> {
        // SAFETY: the instance is alive.
        unsafe { self.instance.enumerate_physical_devices() }
            .map_err(|e| no_driver(format!("no Vulkan device answers: {e}")))
    }

    /// Returns all devices, usable or not.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(self.physical()?.into_iter().enumerate().map(|(i, d)| self.probe(i, d)).collect())
    }

    fn probe(&self, index: usize, device: vk::PhysicalDevice) -> DeviceInfo {
        let mut subgroup = vk::PhysicalDeviceSubgroupSizeControlProperties::default();
        let mut basic = vk::PhysicalDeviceSubgroupProperties::default();
        let mut three = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut driver = vk::PhysicalDeviceDriverProperties::default();
        let mut p = vk::PhysicalDeviceProperties2::default()
            .push_next(&mut subgroup)
            .push_next(&mut basic)
            .push_next(&mut three)
            .push_next(&mut driver);
        // SAFETY: the chain holds only structs of Vulkan 1.3; drivers of 1.0 ignore them.
        unsafe { self.instance.get_physical_device_properties2(device, &mut p) };
        let limits = p.properties.limits;
        let kind = p.properties.device_type;
        let api = p.properties.api_version;
        let name = text(&p.properties.device_name);
        let [vendor, id, version] =
            [p.properties.vendor_id, p.properties.device_id, p.properties.driver_version];
        let driver_text = format!("{} {}", text(&driver.driver_name), text(&driver.driver_info));
        let extensions = self.extensions(device);
        let has = |name: &CStr| extensions.iter().any(|e| e == name);
        let missing = match api < vk::API_VERSION_1_3 {
            true => vec!["Vulkan 1.3"],
            false => [self.missing_features(device), missing_subgroups(&subgroup, &basic)].concat(),
        };
        let is_integrated = kind == vk::PhysicalDeviceType::INTEGRATED_GPU;
        let families = self.queue_families(device);
        let draws = |family: u32| families[family as usize].contains(vk::QueueFlags::GRAPHICS);
        let (memory, available) =
            self.memory(device, is_integrated, has(ash::ext::memory_budget::NAME));
        DeviceInfo {
            backend: "vulkan",
            index,
            name,
            driver: driver_text.trim().to_owned(),
            is_cpu: kind == vk::PhysicalDeviceType::CPU,
            is_integrated,
            api: (vk::api_version_major(api), vk::api_version_minor(api)),
            subgroup: 32
                .clamp(subgroup.min_subgroup_size.max(1), subgroup.max_subgroup_size.max(1)),
            asks_subgroup: asks_subgroup(&subgroup),
            max_shared: limits.max_compute_shared_memory_size,
            max_workgroup: limits
                .max_compute_work_group_invocations
                .min(limits.max_compute_work_group_size[0]),
            max_subgroups: subgroup.max_compute_workgroup_subgroups.max(1),
            max_allocation: three.max_memory_allocation_size,
            memory,
            available,
            timestamp_ns: if limits.timestamp_compute_and_graphics == vk::TRUE {
                limits.timestamp_period
            } else {
                0.0
            },
            // Vulkan does not report the number of compute units: discrete GPUs have tens to
            // hundreds, others a few.
            busy: if kind == vk::PhysicalDeviceType::DISCRETE_GPU { 256 } else { 16 },
            // NVIDIA's driver (580.159) numbers the workgroups of these dispatches from zero.
            divides_calls: driver.driver_id != vk::DriverId::NVIDIA_PROPRIETARY,
            offers_matrices: missing.is_empty() && has(khr::cooperative_matrix::NAME),
            draws: gpu::queue_family(&families).is_some_and(draws),
            identity: format!(
                "{vendor:x}:{id:x} driver {} version {version:x} {driver_text}, shaders {}",
                driver.driver_id.as_raw(),
                hex(&Sha256::digest(pipeline::SHADERS)[..8])
            ),
            missing,
        }
    }

    fn extensions(&self, device: vk::PhysicalDevice) -> Vec<std::ffi::CString> {
        // SAFETY: the device belongs to this instance.
        let list = unsafe { self.instance.enumerate_device_extension_properties(device) }
            .unwrap_or_default();
        list.iter().filter_map(|e| e.extension_name_as_c_str().ok().map(CStr::to_owned)).collect()
    }

    fn missing_features(&self, device: vk::PhysicalDevice) -> Vec<&'static str> {
        let Features { mut v11, mut v12, mut v13, .. } = Features::default();
        let mut f = vk::PhysicalDeviceFeatures2::default()
            .push_next(&mut v11)
            .push_next(&mut v12)
            .push_next(&mut v13);
        // SAFETY: the device supports Vulkan 1.3, which defines these structs.
        unsafe { self.instance.get_physical_device_features2(device, &mut f) };
        let core = f.features;
        Features { core, v11, v12, v13 }.missing()
    }

    /// Returns the capabilities of each queue family.
    fn queue_families(&self, device: vk::PhysicalDevice) -> Vec<vk::QueueFlags> {
        // SAFETY: the device belongs to this instance.
        let families = unsafe { self.instance.get_physical_device_queue_family_properties(device) };
        families.iter().map(|f| f.queue_flags).collect()
    }

    /// Returns the int8 matrix shapes that a device supports; empty without matrix instructions.
    pub fn matrix_shapes(&self, info: &DeviceInfo) -> Result<Vec<MatrixShape>> {
        let physical = self.physical()?;
        let device = physical
            .get(info.index)
            .with_context(|| no_driver(format!("{} is gone", info.name)))?;
        Ok(if info.offers_matrices { self.int8_shapes(*device) } else { Vec::new() })
    }

    fn int8_shapes(&self, device: vk::PhysicalDevice) -> Vec<MatrixShape> {
        let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut f =
            vk::PhysicalDeviceFeatures2::default().push_next(&mut v12).push_next(&mut matrices);
        // SAFETY: the device offers the extension.
        unsafe { self.instance.get_physical_device_features2(device, &mut f) };
        let wanted = [
            matrices.cooperative_matrix,
            v12.vulkan_memory_model,
            v12.vulkan_memory_model_device_scope,
        ];
        if wanted.contains(&vk::FALSE) {
            return Vec::new();
        }
        let query = khr::cooperative_matrix::Instance::new(&self.loaded.entry, self.instance);
        // SAFETY: the device offers the extension.
        let shapes = unsafe { query.get_physical_device_cooperative_matrix_properties(device) }
            .unwrap_or_default();
        matrix::int8_shapes(&shapes)
    }

    /// Returns the bytes of memory that is fast for kernels, and the free bytes if the driver
    /// reports them.
    fn memory(
        &self,
        device: vk::PhysicalDevice,
        is_integrated: bool,
        has_budget: bool,
    ) -> (u64, Option<u64>) {
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut p = vk::PhysicalDeviceMemoryProperties2::default();
        if has_budget {
            p = p.push_next(&mut budget);
        }
        // SAFETY: the budget struct is only chained if its extension is supported.
        unsafe { self.instance.get_physical_device_memory_properties2(device, &mut p) };
        let properties = p.memory_properties;
        let heaps: Vec<Heap> = (0..properties.memory_heap_count as usize)
            .map(|i| Heap {
                bytes: properties.memory_heaps[i].size,
                is_local: properties.memory_heaps[i]
                    .flags
                    .contains(vk::MemoryHeapFlags::DEVICE_LOCAL),
                free: has_budget
                    .then(|| budget.heap_budget[i].saturating_sub(budget.heap_usage[i])),
            })
            .collect();
        let (bytes, mut free) = fast_memory(&heaps, is_integrated);
        if let Some(most) = std::env::var(MEMORY).ok().and_then(|v| v.parse().ok()) {
            free = Some(free.unwrap_or(bytes).min(most));
        }
        (bytes, free)
    }
}

/// A memory heap of a device.
#[derive(Clone, Copy)]
struct Heap {
    bytes: u64,
    is_local: bool,
    /// Free bytes, if the driver reports them.
    free: Option<u64>,
}

/// Returns the bytes of memory that is fast for kernels, and the free bytes.
///
/// For an integrated GPU these are all heaps: they are parts of the same memory, whichever ones the
/// driver calls device-local. For a discrete GPU it is the largest device-local heap.
fn fast_memory(heaps: &[Heap], is_integrated: bool) -> (u64, Option<u64>) {
    if is_integrated {
        let free = heaps.iter().map(|h| h.free).sum::<Option<u64>>().filter(|_| !heaps.is_empty());
        return (heaps.iter().map(|h| h.bytes).sum(), free);
    }
    heaps
        .iter()
        .filter(|h| h.is_local)
        .max_by_key(|h| h.bytes)
        .map_or((0, None), |h| (h.bytes, h.free))
}

/// Returns whether compute shaders can require a subgroup size.
fn asks_subgroup(subgroup: &vk::PhysicalDeviceSubgroupSizeControlProperties<'_>) -> bool {
    subgroup.required_subgroup_size_stages.contains(vk::ShaderStageFlags::COMPUTE)
}

/// Returns the needed subgroup properties that a device lacks.
fn missing_subgroups(
    subgroup: &vk::PhysicalDeviceSubgroupSizeControlProperties<'_>,
    basic: &vk::PhysicalDeviceSubgroupProperties<'_>,
) -> Vec<&'static str> {
    let mut missing = Vec::new();
    let ops = vk::SubgroupFeatureFlags::BASIC | vk::SubgroupFeatureFlags::SHUFFLE;
    if !basic.supported_operations.contains(ops)
        || !basic.supported_stages.contains(vk::ShaderStageFlags::COMPUTE)
    {
        missing.push("subgroup shuffles");
    }
    if !asks_subgroup(subgroup) && subgroup.min_subgroup_size != subgroup.max_subgroup_size {
        missing.push("a choice of subgroup size");
    }
    missing
}

fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests;
