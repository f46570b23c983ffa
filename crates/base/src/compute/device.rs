//! Devices that a backend lists, and the user's choice of one.

/// Properties of one device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name of the backend that lists the device, as in `--device vulkan:N`.
    pub backend: &'static str,
    /// Index in the backend's list.
    pub index: usize,
    pub name: String,
    pub driver: String,
    /// Whether the driver computes on the processor.
    pub is_cpu: bool,
    /// Whether the device shares the processor's memory.
    pub is_integrated: bool,
    /// Version of the driver's interface, major and minor.
    pub api: (u32, u32),
    /// Subgroup size that kernels are compiled for.
    pub subgroup: u32,
    /// Whether a kernel can require that subgroup size. Devices with a single size, such as AMD's
    /// GCN, need no requirement.
    pub asks_subgroup: bool,
    pub max_shared: u32,
    pub max_workgroup: u32,
    /// Most subgroups of a workgroup.
    pub max_subgroups: u32,
    /// Largest single allocation, bytes.
    pub max_allocation: u64,
    /// Memory of the device, bytes.
    pub memory: u64,
    /// Free bytes of `memory`, if the driver reports them.
    pub available: Option<u64>,
    /// Nanoseconds per timestamp tick; 0 without timestamps.
    pub timestamp_ns: f32,
    /// Number of workgroups that keeps the device busy.
    pub busy: usize,
    /// Whether a dispatch may start at a workgroup other than the first.
    pub divides_calls: bool,
    /// Whether the device has matrix instructions. Their shapes are queried only when the device is
    /// opened for them, since some drivers crash in that query.
    pub offers_matrices: bool,
    /// Whether the compute queue also serves graphics.
    pub draws: bool,
    /// Versions of device, driver and kernels. Results may depend on any of them.
    pub identity: String,
    /// Names of missing features; empty for a usable device.
    pub missing: Vec<&'static str>,
}

impl DeviceInfo {
    /// Returns the number of bytes that can be allocated now.
    pub fn free(&self) -> u64 {
        self.available.unwrap_or(self.memory)
    }

    /// Returns the rows per prefill pass. Integrated devices get fewer, since their passes are
    /// slow.
    pub fn max_rows(&self) -> usize {
        if self.is_integrated || self.is_cpu { 128 } else { 512 }
    }
}

/// A user's choice of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The best GPU, not counting drivers that compute on the processor.
    Best,
    /// The device with this index, of any kind.
    Index(usize),
}
