//! Attention on the AMD NPU (XDNA1: Phoenix, Hawk Point), as an executor that wraps another one.
//!
//! The NPU computes attention over sealed pages of global layers
//! ([`gemma_base::kv::OffloadedPages`]) and returns partial results. The inner executor keeps all
//! keys and values, so a run can continue without the NPU at any time. The modules, from the top
//! down:
//! ```text
//! assist     the executor: splits plans at global attention, merges partial results, fallback
//! bring_up   opens a device and decides whether it is used; mode has the values of --npu
//! gate       the self-test and the cost model
//! attention  flash_partial for a layer: sealed pages, jobs, checks of results
//! session    a device with the kernel loaded: heap, context, image, commands
//! stream     the instruction stream of a job; txn encodes it
//! command    the packet; xclbin and manifest read the file of a built array
//! accel      the interface of a device: raw (driver, by ioctl, uapi), host (a model of it)
//! layout     objects and results of the kernel; twin is the kernel in Rust
//! probe      the NPUs of a machine and the conditions for using them
//! ```
//! Without the feature `npu`, and on Windows, the crate has only the probe and the values of
//! `--npu`.
//!
//! This code has not run on a device, because the project has none. The host model shows that
//! streams, transfers, layouts, kernel and fallback agree with each other and with the driver's
//! published rules. It does not predict speed.

#[cfg(all(unix, feature = "npu"))]
pub mod accel;
#[cfg(all(unix, feature = "npu"))]
pub mod assist;
#[cfg(all(unix, feature = "npu"))]
pub mod attention;
#[cfg(all(unix, feature = "npu"))]
pub mod bring_up;
#[cfg(all(unix, feature = "npu"))]
pub mod command;
#[cfg(all(unix, feature = "npu"))]
pub mod gate;
#[cfg(all(unix, feature = "npu"))]
pub mod host;
#[cfg(all(unix, feature = "npu"))]
pub mod layout;
#[cfg(all(unix, feature = "npu"))]
pub mod manifest;
pub mod mode;
pub mod probe;
#[cfg(all(unix, feature = "npu"))]
pub mod raw;
#[cfg(all(unix, feature = "npu"))]
pub mod session;
#[cfg(all(unix, feature = "npu"))]
pub mod stream;
#[cfg(all(unix, feature = "npu"))]
pub mod twin;
#[cfg(all(unix, feature = "npu"))]
pub mod txn;
#[cfg(all(unix, feature = "npu"))]
pub mod uapi;
#[cfg(all(unix, feature = "npu"))]
pub mod xclbin;

#[cfg(all(unix, feature = "npu"))]
pub use assist::OffloadExecutor;
