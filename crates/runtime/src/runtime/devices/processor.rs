//! The processor and memory available to this process.

use super::memory_speed::memory_speed;
use anyhow::Result;
use gemma_base::compute::cpu::isa::Isa;
use gemma_base::compute::cpu::pool::Pool;
use gemma_base::os::machine;
use serde::Serialize;

/// The processor and its memory.
#[derive(Clone, Debug, Serialize)]
pub struct Cpu {
    pub name: String,
    /// Threads available here (respecting cgroup and affinity).
    pub threads: usize,
    /// Supported instruction sets with kernels, slowest first; the last is used.
    pub instruction_sets: Vec<String>,
    pub memory_bytes: Option<u64>,
    pub memory_available_bytes: Option<u64>,
    /// Measured read speed of all threads together in 1e9 bytes per second, which limits decoding.
    pub read_gb_per_s: f64,
    /// Origin of that speed.
    pub read_how: String,
}

impl Cpu {
    pub fn probe() -> Result<Cpu> {
        let threads = default_threads();
        let speed = memory_speed(&Pool::new(threads)?);
        Ok(Cpu {
            name: name(),
            threads,
            instruction_sets: Isa::all_supported().iter().map(Isa::to_string).collect(),
            memory_bytes: machine::memory(),
            memory_available_bytes: machine::available_memory(),
            read_gb_per_s: speed.gb_per_s,
            read_how: speed.origin(),
        })
    }
}

/// Returns the processor's name, or else its architecture.
pub fn name() -> String {
    machine::processor_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Returns the number of threads that this process may use.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}
