//! Faults that tests inject by environment variables. They exist only with the feature `testing`,
//! which the package's own entry among its dev-dependencies turns on.

/// Makes all reads of a file after the n-th fail, as those of a dying disk do.
pub const FAIL_READS_AFTER: &str = "GEMMA_FAIL_READS_AFTER";
/// Makes the n-th submission to a GPU fail with a lost device. Several numbers, as in `60,9,-`,
/// take turns: after each lost device the next one counts, the last one for good; `-` loses none.
pub const LOSE_AFTER: &str = "GEMMA_VULKAN_LOSE_AFTER";
/// Makes a kernel's result wrong: the four numbers of an `InjectedFault` of `vulkan`.
pub const WRONG_RESULT: &str = "GEMMA_VULKAN_FAULT";
/// Multiplies matrices without `linear_few` and `linear_many`, to measure what these two gain.
pub const GENERAL_KERNELS: &str = "GEMMA_VULKAN_GENERAL_KERNELS";
/// Makes commands of the NPU's model fail: a kind and the first command, as in `abort@3`, see
/// `NpuFault` of `npu::host`.
pub const NPU_FAULT: &str = "GEMMA_FAIL_NPU";
/// Makes the child process that tries a driver die (`abort`), die if it asks about matrices
/// (`abort-whole`), fail (`fail`) or never end (`hang`).
pub const TRIAL: &str = "GEMMA_VULKAN_TRIAL";
/// Seconds that such a child may take.
pub const PATIENCE: &str = "GEMMA_VULKAN_PATIENCE";
/// Makes the kernel of a label, such as `qkv`, leave out the last part of its work.
pub const CUT_WORK: &str = "GEMMA_CUT_WORK";
/// Shuffles the workgroups of kernels, by this seed.
pub const SHUFFLE: &str = "GEMMA_VULKAN_SHUFFLE";
/// Leaves out memory barriers.
pub const NO_BARRIERS: &str = "GEMMA_VULKAN_NO_BARRIERS";

/// Returns the value of one of these variables.
pub fn fault(variable: &str) -> Option<String> {
    if cfg!(feature = "testing") { std::env::var(variable).ok() } else { None }
}
