//! The processor and its memory, as this process may use them.

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
    /// Threads that may run here (cgroup and affinity counted).
    pub threads: usize,
    /// Instruction sets that kernels exist for, slowest first; the last is chosen.
    pub instruction_sets: Vec<String>,
    pub memory_bytes: Option<u64>,
    pub memory_available_bytes: Option<u64>,
    /// Measured reading speed of all threads together, 1e9 bytes a second: the roof of decoding.
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

/// Returns the processor's name, or that of its architecture.
pub fn name() -> String {
    machine::processor_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Returns all threads that this process may use.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}
