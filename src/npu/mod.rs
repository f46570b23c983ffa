//! Attention on the AMD NPU (XDNA1: Phoenix, Hawk Point), as an executor around another
//! one.
//!
//! The NPU takes sealed pages of global layers ([`crate::kv::OffloadedPages`]) and gives back partials;
//! everything else stays where it is, the keys and values too, so that the NPU can be given up at
//! any time. From the top down:
//! ```text
//! assist     an executor: cuts plans at global attention, joins partials, gives up at the first trouble
//! attention  flash_partial for a layer: pages into the kernel's layout, jobs, checks of what comes back
//! session    the device brought up: heap, context, image, commands         gate      whether it pays; the self-test
//! stream     the instruction stream of a job      txn   its words           command   the packet      xclbin  the array's file
//! accel      what a device offers: raw (the driver, by ioctl) or host (a model of driver, firmware and array)
//! layout     what host and kernel agree on        twin  the kernel in Rust   uapi      the driver's structures
//! ```
//! Nothing here has run on a device: nobody on this project has one. The host model proves that
//! streams, transfers, layouts, kernel and fallback agree with each other and with the driver's
//! published rules. It says nothing of speed.

pub mod accel;
pub mod assist;
pub mod attention;
pub mod bring_up;
pub mod command;
pub mod gate;
pub mod host;
pub mod layout;
pub mod manifest;
pub mod probe;
pub mod raw;
pub mod session;
pub mod stream;
pub mod twin;
pub mod txn;
pub mod uapi;
pub mod xclbin;

pub use assist::OffloadExecutor;
