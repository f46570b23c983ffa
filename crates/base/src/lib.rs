//! Number formats, CPU kernels and operating-system access: the base of all other crates.

pub mod compute;
pub mod error;
pub mod kv;
pub mod os;
pub mod tensor;
pub mod testing;
pub mod util;
