//! Attention on the AMD NPU (XDNA1: Phoenix, Hawk Point), as an executor around another
//! one.
//!
//! The NPU attends sealed pages of global layers ([`crate::kv::OffloadedPages`]) and returns partial
//! results. The inner executor keeps all keys and values, so the NPU can be given up at any time.
//! From the top down:
//! ```text
//! assist     an executor: cuts plans at global attention, joins partials, gives up at the first trouble
//! attention  flash_partial for a layer: pages into the kernel's layout, jobs, checks of what comes back
//! session    the device brought up: heap, context, image, commands         gate      whether it pays; the self-test
//! stream     the instruction stream of a job      txn   its words           command   the packet      xclbin  the array's file
//! accel      what a device offers: raw (the driver, by ioctl) or host (a model of driver, firmware and array)
//! layout     what host and kernel agree on        twin  the kernel in Rust   uapi      the driver's structures
//! ```
//! Without the feature `npu` the room has only the probe and the values of `--npu`.
//!
//! None of this has run on a device, since the project has none. The host model shows that
//! streams, transfers, layouts, kernel and fallback agree with each other and with the driver's
//! published rules. It does not predict speed.

#[cfg(feature = "npu")]
pub mod accel;
#[cfg(feature = "npu")]
pub mod assist;
#[cfg(feature = "npu")]
pub mod attention;
#[cfg(feature = "npu")]
pub mod bring_up;
#[cfg(feature = "npu")]
pub mod command;
#[cfg(feature = "npu")]
pub mod gate;
#[cfg(feature = "npu")]
pub mod host;
#[cfg(feature = "npu")]
pub mod layout;
#[cfg(feature = "npu")]
pub mod manifest;
pub mod mode;
pub mod probe;
#[cfg(feature = "npu")]
pub mod raw;
#[cfg(feature = "npu")]
pub mod session;
#[cfg(feature = "npu")]
pub mod stream;
#[cfg(feature = "npu")]
pub mod twin;
#[cfg(feature = "npu")]
pub mod txn;
#[cfg(feature = "npu")]
pub mod uapi;
#[cfg(feature = "npu")]
pub mod xclbin;

#[cfg(feature = "npu")]
pub use assist::OffloadExecutor;
