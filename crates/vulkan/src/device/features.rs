//! Vulkan features that the kernels need. Each one is checked when a device is probed, and enabled
//! when the device is opened.

use ash::vk;

/// Features by the version of Vulkan that introduced them.
#[derive(Clone, Copy, Default)]
pub struct Features {
    pub core: vk::PhysicalDeviceFeatures,
    pub v11: vk::PhysicalDeviceVulkan11Features<'static>,
    pub v12: vk::PhysicalDeviceVulkan12Features<'static>,
    pub v13: vk::PhysicalDeviceVulkan13Features<'static>,
}

macro_rules! needed {
    ($($name:literal $version:ident.$feature:ident,)*) => {
        impl Features {
            /// Returns the features that the kernels need.
            pub fn needed() -> Features {
                let mut features = Features::default();
                $(features.$version.$feature = vk::TRUE;)*
                features
            }

            /// Returns the names of the needed features that are missing here.
            pub fn missing(&self) -> Vec<&'static str> {
                let all = [$(($name, self.$version.$feature)),*];
                all.into_iter().filter(|(_, has)| *has == vk::FALSE).map(|(name, _)| name).collect()
            }
        }
    };
}

needed! {
    "64-bit integers in shaders" core.shader_int64,
    "16-bit integers in shaders" core.shader_int16,
    "16-bit storage" v11.storage_buffer16_bit_access,
    "8-bit storage" v12.storage_buffer8_bit_access,
    "int8 in shaders" v12.shader_int8,
    "f16 in shaders" v12.shader_float16,
    "buffer addresses" v12.buffer_device_address,
    "scalar layouts" v12.scalar_block_layout,
    "timeline semaphores" v12.timeline_semaphore,
    "host query reset" v12.host_query_reset,
    "integer dot products" v13.shader_integer_dot_product,
    "synchronization2" v13.synchronization2,
    "subgroup size control" v13.subgroup_size_control,
    "full subgroups" v13.compute_full_subgroups,
    "maintenance4" v13.maintenance4,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_missing_feature_is_named() {
        let mut features = Features::needed();
        assert_eq!(features.missing(), [""; 0]);
        features.v12.shader_int8 = vk::FALSE;
        features.v11.storage_buffer16_bit_access = vk::FALSE;
        assert_eq!(features.missing(), ["16-bit storage", "int8 in shaders"]);
        assert_eq!(Features::default().missing().len(), 15);
    }
}
