//! Numbers, kernels of the processor, and the operating system: the floor that all crates stand
//! on.

pub mod compute;
pub mod error;
pub mod kv;
pub mod os;
pub mod tensor;
pub mod testing;
pub mod util;
