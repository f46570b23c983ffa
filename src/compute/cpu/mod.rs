//! The CPU executor's parts: instruction sets, threads, linear kernels.

pub mod bandwidth;
pub mod isa;
pub mod linear;
mod lines;
pub mod pool;
