//! Fictitious devices for tests.

use gemma_base::compute::DeviceInfo;

/// Returns an integrated GPU of a laptop with 32 GB.
pub fn laptop_gpu() -> DeviceInfo {
    gpu("AMD Radeon 780M", 21_000_000_000)
}

/// Returns a similar GPU with another name and memory size.
pub fn gpu(name: &str, memory: u64) -> DeviceInfo {
    DeviceInfo {
        backend: "vulkan",
        index: 0,
        name: name.into(),
        driver: "radv Mesa 25.2".into(),
        is_cpu: false,
        is_integrated: true,
        api: (1, 4),
        subgroup: 32,
        asks_subgroup: true,
        max_shared: 65536,
        max_workgroup: 1024,
        max_subgroups: 32,
        max_allocation: 4_000_000_000,
        memory,
        available: None,
        timestamp_ns: 10.0,
        busy: 16,
        divides_calls: true,
        offers_matrices: true,
        draws: false,
        identity: "made up".into(),
        missing: Vec::new(),
    }
}
