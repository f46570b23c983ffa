//! The CPU executor: packed weights, one thread pool, and kernels for the instruction set that is
//! detected at run time.

pub mod attention;
pub mod bandwidth;
pub mod dense;
mod each_isa;
pub mod executor;
mod experts;
mod footprint;
mod idle;
pub mod ints;
pub mod isa;
pub mod linear;
mod lines;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod pool;
pub mod rows;
pub mod simd;
#[cfg(test)]
mod toy;

pub use executor::{CpuExecutor, CpuOptions};
pub use footprint::CpuFootprint;
pub use isa::Isa;
pub use pool::Pool;
