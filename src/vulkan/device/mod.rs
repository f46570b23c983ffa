//! Devices: what there is, what each can do, which one is taken. Probed once; nothing is used that
//! was not asked about.

pub mod barrier;
pub mod choose;
pub mod matrix;
pub mod memory;
pub mod pipeline;
pub mod queue;
pub mod validation;

use crate::error::{Fault, Kind};
use anyhow::{Context, Result};
use ash::{Device, Entry, Instance, khr, vk};
use choose::{Choice, choose};
use matrix::MatrixShape;
use memory::Requested;
use std::ffi::{CStr, c_char};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use validation::Validation;

/// Environment variable that lets a driver without a GPU (lavapipe) count as a device: for tests.
pub const ALLOW_CPU_DRIVER: &str = "GEMMA_VULKAN_CPU";
/// Environment variable that caps the bytes that a device says are free: for tests.
pub const MEMORY: &str = "GEMMA_VULKAN_MEMORY";

/// What one device is and can do.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Place in the driver's list: `--device vulkan:N`.
    pub index: usize,
    pub name: String,
    pub driver: String,
    /// A driver that computes on the processor.
    pub is_cpu: bool,
    /// Shares the processor's memory.
    pub is_integrated: bool,
    /// Vulkan version, major and minor.
    pub api: (u32, u32),
    /// Lanes of a subgroup, as kernels will be told.
    pub subgroup: u32,
    /// Whether kernels can ask for that number; where there is no other, as on AMD's GCN, they need
    /// not.
    pub asks_subgroup: bool,
    pub max_shared: u32,
    pub max_workgroup: u32,
    /// Subgroups of a workgroup, at most.
    pub max_subgroups: u32,
    /// Largest single allocation, bytes.
    pub max_allocation: u64,
    /// Memory of the device, bytes.
    pub memory: u64,
    /// What of it is free now, where the driver says.
    pub available: Option<u64>,
    /// Nanoseconds of a timestamp's unit; 0 where there are none.
    pub timestamp_ns: f32,
    /// Workgroups that keep it busy.
    pub busy: usize,
    /// Whether a call may be divided into dispatches that begin at other workgroups than the first.
    pub divides_calls: bool,
    /// Says that it has instructions for matrices. Which shapes it has is asked only when it is
    /// opened for them: there are drivers that die of that question.
    pub offers_matrices: bool,
    /// The queue that is taken also draws.
    pub draws: bool,
    /// What the driver's behaviour may depend on: device and driver by number and version.
    pub identity: String,
    /// Why it cannot be used; empty if it can.
    pub missing: Vec<&'static str>,
}

impl DeviceInfo {
    /// Bytes that may be taken now.
    pub fn free(&self) -> u64 {
        self.available.unwrap_or(self.memory)
    }

    /// Rows of one prefill pass: fewer where the memory is the processor's too, and where a pass
    /// would take long.
    pub fn max_rows(&self) -> usize {
        if self.is_integrated || self.is_cpu { 128 } else { 512 }
    }
}

/// An opened driver.
pub struct Vulkan {
    pub instance: &'static Instance,
    loaded: &'static Loaded,
}

/// The system's library, and the one instance of this process.
struct Loaded {
    entry: Entry,
    instance: Instance,
    validation: Option<Validation>,
}

/// Kept until the process ends. With the last instance its drivers and layers would be unloaded,
/// and threads that used them crash at their end: some leave a destructor with each. An instance
/// also takes a tenth of a second to make.
static LOADED: Mutex<Option<&'static Loaded>> = Mutex::new(None);

impl Drop for Vulkan {
    fn drop(&mut self) {
        // What was made from it is gone: owners hold the `Vulkan` to the last.
        self.loaded.validation.iter().for_each(Validation::enforce);
    }
}

fn no_driver(what: String) -> anyhow::Error {
    Fault::new(Kind::Device, what)
        .help(
            "install a Vulkan driver (Debian: mesa-vulkan-drivers and libvulkan1), or use \
            --device cpu",
        )
        .into()
}

/// True where an environment variable is set to something but 0.
fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|v| !v.is_empty() && v != "0")
}

impl Loaded {
    fn new() -> Result<Loaded> {
        // SAFETY: loading the system's own Vulkan loader runs its initialisers, nothing else.
        let entry = unsafe { Entry::load() }
            .map_err(|e| no_driver(format!("no Vulkan library on this machine: {e}")))?;
        let name = c"gemma";
        let app = vk::ApplicationInfo::default()
            .application_name(name)
            .engine_name(name)
            .api_version(vk::API_VERSION_1_3);
        let mut wanted = validation::Wanted::of_environment();
        let info = vk::InstanceCreateInfo::default().application_info(&app);
        // SAFETY: all pointers of `info` outlive the call.
        let instance = unsafe { entry.create_instance(&wanted.add_to(info), None) }
            .map_err(|e| no_driver(format!("Vulkan does not start: {e}")))?;
        let validation = wanted.watch(&entry, &instance);
        Ok(Loaded { entry, instance, validation })
    }
}

impl Vulkan {
    /// Loads the system's Vulkan library, unless that was done already.
    pub fn open() -> Result<Vulkan> {
        let mut kept = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = match *kept {
            Some(loaded) => loaded,
            None => *kept.insert(Box::leak(Box::new(Loaded::new()?))),
        };
        Ok(Vulkan { instance: &loaded.instance, loaded })
    }

    fn physical(&self) -> Result<Vec<vk::PhysicalDevice>> {
        // SAFETY: the instance is alive.
        unsafe { self.instance.enumerate_physical_devices() }
            .map_err(|e| no_driver(format!("no Vulkan device answers: {e}")))
    }

    /// All devices, usable or not.
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
        // SAFETY: the chain holds only structs that Vulkan 1.3 knows; drivers of 1.0 ignore them.
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
        let mut missing = Vec::new();
        let asks_subgroup =
            subgroup.required_subgroup_size_stages.contains(vk::ShaderStageFlags::COMPUTE);
        if api < vk::API_VERSION_1_3 {
            missing.push("Vulkan 1.3");
        } else {
            missing = self.missing_features(device);
            let ops = vk::SubgroupFeatureFlags::BASIC | vk::SubgroupFeatureFlags::SHUFFLE;
            if !basic.supported_operations.contains(ops)
                || !basic.supported_stages.contains(vk::ShaderStageFlags::COMPUTE)
            {
                missing.push("subgroup shuffles");
            }
            if !asks_subgroup && subgroup.min_subgroup_size != subgroup.max_subgroup_size {
                missing.push("a choice of subgroup size");
            }
        }
        let is_integrated = kind == vk::PhysicalDeviceType::INTEGRATED_GPU;
        let families = self.queue_families(device);
        let draws = |family: u32| families[family as usize].contains(vk::QueueFlags::GRAPHICS);
        let (memory, available) =
            self.memory(device, is_integrated, has(ash::ext::memory_budget::NAME));
        DeviceInfo {
            index,
            name,
            driver: driver_text.trim().to_owned(),
            is_cpu: kind == vk::PhysicalDeviceType::CPU,
            is_integrated,
            api: (vk::api_version_major(api), vk::api_version_minor(api)),
            subgroup: 32
                .clamp(subgroup.min_subgroup_size.max(1), subgroup.max_subgroup_size.max(1)),
            asks_subgroup,
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
            // Vulkan does not count processors: boards have tens to hundreds, the others a few.
            busy: if kind == vk::PhysicalDeviceType::DISCRETE_GPU { 256 } else { 16 },
            // NVIDIA's driver (580.159) numbers the workgroups of such dispatches from zero.
            divides_calls: driver.driver_id != vk::DriverId::NVIDIA_PROPRIETARY,
            offers_matrices: missing.is_empty() && has(khr::cooperative_matrix::NAME),
            draws: queue_family(&families).is_some_and(draws),
            identity: format!(
                "{vendor:x}:{id:x} driver {} version {version:x} {driver_text}",
                driver.driver_id.as_raw()
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
        let mut v11 = vk::PhysicalDeviceVulkan11Features::default();
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut v13 = vk::PhysicalDeviceVulkan13Features::default();
        let mut f = vk::PhysicalDeviceFeatures2::default()
            .push_next(&mut v11)
            .push_next(&mut v12)
            .push_next(&mut v13);
        // SAFETY: the device is one of 1.3, which knows these structs.
        unsafe { self.instance.get_physical_device_features2(device, &mut f) };
        lacking_features(&f.features, &v11, &v12, &v13)
    }

    /// What each family of queues can do.
    fn queue_families(&self, device: vk::PhysicalDevice) -> Vec<vk::QueueFlags> {
        // SAFETY: the device belongs to this instance.
        let families = unsafe { self.instance.get_physical_device_queue_family_properties(device) };
        families.iter().map(|f| f.queue_flags).collect()
    }

    /// Shapes of the int8 matrices that a device multiplies; none where it offers no matrices.
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

    /// Bytes that kernels read fast, and what of them is free, where the driver says.
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
        // SAFETY: the budget struct is chained only where its extension is there.
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

/// One of a device's heaps.
#[derive(Clone, Copy)]
struct Heap {
    bytes: u64,
    is_local: bool,
    /// What of it is free, where the driver says.
    free: Option<u64>,
}

/// Bytes that kernels read fast, and what of them is free: of a GPU in the processor all heaps,
/// which are parts of the same memory whatever their driver calls local to the device; of a board
/// the largest heap of its own.
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

type Features = (
    vk::PhysicalDeviceFeatures,
    vk::PhysicalDeviceVulkan11Features<'static>,
    vk::PhysicalDeviceVulkan12Features<'static>,
    vk::PhysicalDeviceVulkan13Features<'static>,
);

/// What kernels need: asked for when a device is opened, and looked for before.
fn needed() -> Features {
    let core = vk::PhysicalDeviceFeatures::default().shader_int64(true).shader_int16(true);
    let v11 = vk::PhysicalDeviceVulkan11Features::default().storage_buffer16_bit_access(true);
    let v12 = vk::PhysicalDeviceVulkan12Features::default()
        .storage_buffer8_bit_access(true)
        .shader_int8(true)
        .shader_float16(true)
        .buffer_device_address(true)
        .scalar_block_layout(true)
        .timeline_semaphore(true)
        .host_query_reset(true);
    let v13 = vk::PhysicalDeviceVulkan13Features::default()
        .shader_integer_dot_product(true)
        .synchronization2(true)
        .subgroup_size_control(true)
        .compute_full_subgroups(true)
        .maintenance4(true);
    (core, v11, v12, v13)
}

/// The features that kernels need and a driver does not have, by name.
fn lacking_features(
    core: &vk::PhysicalDeviceFeatures,
    v11: &vk::PhysicalDeviceVulkan11Features<'_>,
    v12: &vk::PhysicalDeviceVulkan12Features<'_>,
    v13: &vk::PhysicalDeviceVulkan13Features<'_>,
) -> Vec<&'static str> {
    [
        ("64-bit integers in shaders", core.shader_int64),
        ("16-bit integers in shaders", core.shader_int16),
        ("16-bit storage", v11.storage_buffer16_bit_access),
        ("8-bit storage", v12.storage_buffer8_bit_access),
        ("int8 in shaders", v12.shader_int8),
        ("f16 in shaders", v12.shader_float16),
        ("buffer addresses", v12.buffer_device_address),
        ("scalar layouts", v12.scalar_block_layout),
        ("timeline semaphores", v12.timeline_semaphore),
        ("host query reset", v12.host_query_reset),
        ("integer dot products", v13.shader_integer_dot_product),
        ("synchronization2", v13.synchronization2),
        ("subgroup size control", v13.subgroup_size_control),
        ("full subgroups", v13.compute_full_subgroups),
        ("maintenance4", v13.maintenance4),
    ]
    .into_iter()
    .filter(|(_, has)| *has == vk::FALSE)
    .map(|(name, _)| name)
    .collect()
}

fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A logical device with one queue, which several threads may submit to.
pub struct Gpu {
    pub device: Device,
    pub physical: vk::PhysicalDevice,
    pub info: DeviceInfo,
    /// The shape of matrices that it is opened for.
    pub matrices: Option<MatrixShape>,
    queue: Mutex<vk::Queue>,
    pub family: u32,
    pub memory_types: vk::PhysicalDeviceMemoryProperties,
    /// Memory asked of it.
    pub requested: Requested,
    // Dropped last.
    pub vulkan: Vulkan,
}

impl Gpu {
    /// Opens the device that `choice` names, or takes the one of them in `open`; without `matrices`
    /// it is not even asked about its instructions for them.
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
        let (core, mut v11, mut v12, mut v13) = needed();
        let shapes = if matrices { vulkan.matrix_shapes(&info)? } else { Vec::new() };
        let matrices = matrix::best_shape(&shapes);
        let mut feature =
            vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let extensions = [khr::cooperative_matrix::NAME.as_ptr()];
        let mut create = vk::DeviceCreateInfo::default();
        if matrices.is_some() {
            // Workgroups that count one another's results reach beyond themselves.
            v12 = v12.vulkan_memory_model(true).vulkan_memory_model_device_scope(true);
            create = create.enabled_extension_names(&extensions).push_next(&mut feature);
        }
        let create = create
            .queue_create_infos(&queues)
            .enabled_features(&core)
            .push_next(&mut v11)
            .push_next(&mut v12)
            .push_next(&mut v13);
        // SAFETY: every pointer of `create` outlives the call; the features were found present.
        let device =
            unsafe { instance.create_device(physical, &create, None) }.with_context(|| {
                Fault::new(Kind::Device, format!("{} cannot be opened", info.name))
                    .help("use --device cpu")
            })?;
        // SAFETY: the queue was asked for above.
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

    /// The queue, while nobody else submits.
    pub fn queue(&self) -> MutexGuard<'_, vk::Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: owners of things made from the device hold the `Gpu` in an `Arc` and are gone.
        unsafe {
            let _ = self.device.device_wait_idle();
            self.device.destroy_device(None);
        }
    }
}

/// Returns the first queue family that only computes, which the desktop disturbs less, else the
/// first that computes.
fn queue_family(families: &[vk::QueueFlags]) -> Option<u32> {
    let computes = |f: &vk::QueueFlags| f.contains(vk::QueueFlags::COMPUTE);
    let alone = |f: &vk::QueueFlags| computes(f) && !f.contains(vk::QueueFlags::GRAPHICS);
    let found = families.iter().position(alone).or_else(|| families.iter().position(computes));
    found.map(|i| i as u32)
}

/// How an error begins that says that a device was lost.
pub const LOST: &str = "the GPU was lost";

/// Whether an error says that a device was lost.
pub fn is_lost(error: &anyhow::Error) -> bool {
    error.to_string().starts_with(LOST)
}

/// A Vulkan failure as what the user should read.
pub fn failed(what: &str, error: vk::Result) -> anyhow::Error {
    match error {
        vk::Result::ERROR_DEVICE_LOST => Fault::new(Kind::Device, format!("{LOST} while {what}"))
            .help(
                "try again; if it happens again, the system's log says why (sudo dmesg; `timeout` \
                 means that the driver took a long pass for a hang): update the driver, or use \
                 --device cpu",
            )
            .into(),
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
            Fault::new(Kind::Memory, format!("out of memory while {what}"))
                .help(
                    "lower --ctx-size, use a smaller model (gemma quantize --target-size), or \
                    --device cpu",
                )
                .into()
        }
        other => Fault::new(
            Kind::Device,
            format!(
                "the GPU driver failed while {what}: \
            {other}"
            ),
        )
        .help(
            "use \
            --device cpu",
        )
        .into(),
    }
}

#[cfg(test)]
mod tests;
