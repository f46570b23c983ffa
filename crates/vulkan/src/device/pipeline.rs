//! Pipelines: committed SPIR-V, specialised for shape and device, compiled on first use and cached
//! on disk.

use super::choose::Choice;
use super::{Gpu, failed};
use anyhow::Result;
use ash::vk;
use gemma_base::util::files::{read_regular, write_whole};
use gemma_base::util::{hex, threads, xdg};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

macro_rules! shaders {
    ($($name:ident $file:literal,)*) => {
        /// The shaders of `shaders/`, by file. `build.rs` lists them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Shader {
            $($name,)*
        }

        impl Shader {
            /// Returns the file in `shaders/`, without the extension.
            pub fn file(self) -> &'static str {
                match self {
                    $(Shader::$name => $file,)*
                }
            }

            pub fn code(self) -> &'static [u8] {
                match self {
                    $(Shader::$name => include_bytes!(concat!(
                        env!("CARGO_MANIFEST_DIR"), "/../../shaders/spirv/", $file, ".spv"
                    )),)*
                }
            }
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

/// Specialisation constants, as (id, value); booleans are 0 or 1.
pub type Constants = Vec<(u32, u32)>;

/// Bytes of push constants that every kernel may use, as guaranteed by Vulkan.
pub const PUSH: usize = 128;

/// Shader and constants of a pipeline, and whether it may be dispatched in parts.
type PipelineKey = (Shader, Constants, bool);

/// Compiled kernels of a device, shared by its executors.
pub struct Pipelines {
    gpu: Arc<Gpu>,
    pub layout: vk::PipelineLayout,
    modules: HashMap<Shader, vk::ShaderModule>,
    made: HashMap<PipelineKey, vk::Pipeline>,
    cache: vk::PipelineCache,
    file: Option<PathBuf>,
    /// Whether the cache has a kernel that its file lacks.
    is_fresh: bool,
}

/// Kernels of the open devices. A draft model shares its target's device and kernels.
static OPEN: Mutex<Vec<Weak<Mutex<Pipelines>>>> = Mutex::new(Vec::new());

/// Manifest of this build's shaders, with the SHA-256 of each.
pub const SHADERS: &str = include_str!("../../../../shaders/manifest.txt");

/// Opens a device, or returns it if this process has it open. For `matrices` see [`Gpu::open`].
pub fn open(choice: Choice, matrices: bool) -> Result<(Arc<Gpu>, Arc<Mutex<Pipelines>>)> {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let here: Vec<_> = open.iter().filter_map(Weak::upgrade).collect();
    let gpus: Vec<_> = here.iter().map(|p| lock(p).gpu.clone()).collect();
    let gpu = Gpu::open(choice, matrices, &gpus)?;
    if let Some(i) = gpus.iter().position(|g| Arc::ptr_eq(g, &gpu)) {
        return Ok((gpu, here[i].clone()));
    }
    let pipelines = Arc::new(Mutex::new(Pipelines::new(&gpu)?));
    open.retain(|p| p.strong_count() > 0);
    open.push(Arc::downgrade(&pipelines));
    Ok((gpu, pipelines))
}

/// Locks the kernels. They stay usable after another thread's panic, because entries are inserted
/// atomically.
pub fn lock(pipelines: &Mutex<Pipelines>) -> MutexGuard<'_, Pipelines> {
    pipelines.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pipelines {
    fn new(gpu: &Arc<Gpu>) -> Result<Pipelines> {
        let push = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size(PUSH as u32)];
        let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&push);
        let file = cache_file(gpu);
        let old = file.as_deref().and_then(read_cache).unwrap_or_default();
        let cache_info = vk::PipelineCacheCreateInfo::default().initial_data(&old);
        let device = &gpu.device;
        // SAFETY: plain objects of this device that `drop` destroys.
        unsafe {
            let layout = device
                .create_pipeline_layout(&info, None)
                .map_err(|e| failed("preparing kernels", e))?;
            let cache = device
                .create_pipeline_cache(&cache_info, None)
                .or_else(|_| {
                    device.create_pipeline_cache(&vk::PipelineCacheCreateInfo::default(), None)
                })
                .map_err(|e| failed("preparing kernels", e))?;
            Ok(Pipelines {
                gpu: gpu.clone(),
                layout,
                modules: HashMap::new(),
                made: HashMap::new(),
                cache,
                file,
                is_fresh: false,
            })
        }
    }

    /// Returns the kernel with these constants.
    pub fn get(&mut self, shader: Shader, constants: &Constants) -> Result<vk::Pipeline> {
        self.get_or_compile((shader, constants.clone(), false))
    }

    /// Returns the kernel with these constants, for calls that are dispatched in parts.
    pub fn get_divisible(&mut self, shader: Shader, constants: &Constants) -> Result<vk::Pipeline> {
        self.get_or_compile((shader, constants.clone(), true))
    }

    fn get_or_compile(&mut self, key: PipelineKey) -> Result<vk::Pipeline> {
        if let Some(pipeline) = self.made.get(&key) {
            return Ok(*pipeline);
        }
        let module = self.module(key.0)?;
        let pipeline = self.compile(module, &key)?;
        self.made.insert(key, pipeline);
        self.is_fresh = true;
        Ok(pipeline)
    }

    /// Compiles the missing kernels on all threads, because the first start on a device compiles
    /// dozens.
    pub fn prepare<'a>(
        &mut self,
        kernels: impl Iterator<Item = (Shader, &'a Constants)>,
        are_divisible: bool,
    ) -> Result<()> {
        let missing: HashSet<PipelineKey> = kernels
            .map(|(shader, constants)| (shader, constants.clone(), are_divisible))
            .filter(|key| !self.made.contains_key(key))
            .collect();
        let missing = missing
            .into_iter()
            .map(|key| Ok((self.module(key.0)?, key)))
            .collect::<Result<Vec<_>>>()?;
        threads::prepare_common_pool();
        let made: Vec<_> = missing
            .into_par_iter()
            .map(|(module, key)| self.compile(module, &key).map(|pipeline| (key, pipeline)))
            .collect();
        for result in made {
            let (key, pipeline) = result?;
            self.made.insert(key, pipeline);
            self.is_fresh = true;
        }
        Ok(())
    }

    fn module(&mut self, shader: Shader) -> Result<vk::ShaderModule> {
        if let Some(module) = self.modules.get(&shader) {
            return Ok(*module);
        }
        let words: Vec<u32> =
            shader.code().as_chunks().0.iter().map(|w| u32::from_le_bytes(*w)).collect();
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: scripts/build-shaders.sh compiled and validated the SPIR-V.
        let module = unsafe { self.gpu.device.create_shader_module(&info, None) }
            .map_err(|e| failed("loading a kernel", e))?;
        self.modules.insert(shader, module);
        Ok(module)
    }

    fn compile(
        &self,
        module: vk::ShaderModule,
        (shader, constants, is_divisible): &PipelineKey,
    ) -> Result<vk::Pipeline> {
        let flags = match is_divisible {
            true => vk::PipelineCreateFlags::DISPATCH_BASE,
            false => vk::PipelineCreateFlags::empty(),
        };
        let entries: Vec<vk::SpecializationMapEntry> = constants
            .iter()
            .enumerate()
            .map(|(i, (id, _))| vk::SpecializationMapEntry {
                constant_id: *id,
                offset: 4 * i as u32,
                size: 4,
            })
            .collect();
        let values: Vec<u32> = constants.iter().map(|(_, value)| *value).collect();
        let special = vk::SpecializationInfo::default()
            .map_entries(&entries)
            .data(bytemuck::cast_slice(&values));
        let mut subgroup = vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::default()
            .required_subgroup_size(self.gpu.info.subgroup);
        let mut stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .flags(vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS)
            .module(module)
            .name(c"main")
            .specialization_info(&special);
        if self.gpu.info.asks_subgroup {
            stage = stage.push_next(&mut subgroup);
        }
        let info = [vk::ComputePipelineCreateInfo::default()
            .flags(flags)
            .stage(stage)
            .layout(self.layout)];
        // SAFETY: module, layout and cache live as long as `self`, the driver locks the cache, and
        // the pointers in `info` outlive the call.
        let made = unsafe { self.gpu.device.create_compute_pipelines(self.cache, &info, None) };
        Ok(made.map_err(|(_, e)| failed(&format!("compiling the kernel {shader:?}"), e))?[0])
    }

    /// Writes the cache file atomically. Errors are ignored; the next start then compiles again.
    pub fn save(&mut self) {
        let Some(file) = self.file.as_ref().filter(|_| self.is_fresh) else { return };
        self.is_fresh = false;
        // SAFETY: the cache lives as long as `self`.
        let Ok(bytes) = (unsafe { self.gpu.device.get_pipeline_cache_data(self.cache) }) else {
            return;
        };
        let _ = write_whole(file, &sealed(bytes));
    }
}

impl Drop for Pipelines {
    fn drop(&mut self) {
        self.save();
        let device = &self.gpu.device;
        // SAFETY: an executor waits for the device before it drops its kernels.
        unsafe {
            self.made.values().for_each(|p| device.destroy_pipeline(*p, None));
            self.modules.values().for_each(|m| device.destroy_shader_module(*m, None));
            device.destroy_pipeline_cache(self.cache, None);
            device.destroy_pipeline_layout(self.layout, None);
        }
    }
}

/// Largest cache file in bytes that this program reads.
const LARGEST_CACHE: u64 = 1 << 30;

/// Appends the SHA-256 of the driver's cache data. A driver only checks the header of a cache, so
/// this program checks the rest.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&digest);
    bytes
}

/// Returns the bytes that were passed to [`sealed`]; `None` if any byte has changed.
fn unsealed(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let (body, digest) = bytes.split_last_chunk::<32>()?;
    let (is_whole, length) = (Sha256::digest(body).as_slice() == digest, body.len());
    bytes.truncate(length);
    is_whole.then_some(bytes)
}

fn read_cache(path: &Path) -> Option<Vec<u8>> {
    unsealed(read_regular(path, LARGEST_CACHE).ok()?)
}

/// Returns the path of `pipelines-<device and driver>.bin` in the cache; `None` without a home
/// directory.
fn cache_file(gpu: &Gpu) -> Option<PathBuf> {
    // SAFETY: the device belongs to the instance.
    let p = unsafe { gpu.vulkan.instance.get_physical_device_properties(gpu.physical) };
    let uuid = hex(p.pipeline_cache_uuid);
    Some(xdg::cache()?.join(format!("pipelines-{:x}-{:x}-{uuid}.bin", p.vendor_id, p.device_id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_changed_is_not_given_to_the_driver() {
        let bytes: Vec<u8> = (0..100).collect();
        let whole = sealed(bytes.clone());
        assert_eq!(unsealed(whole.clone()), Some(bytes.clone()));
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert_eq!(unsealed(changed), None, "{at}");
            assert_eq!(unsealed(whole[..at].to_vec()), None, "{at}");
        }
        // Bytes without a valid checksum.
        assert_eq!(unsealed(bytes), None);
    }
}
