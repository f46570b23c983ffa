//! The NPU: its kernel against its twin, and the modelled device.

#![cfg(all(unix, feature = "npu"))]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/fuzz.rs"]
mod fuzz;
#[path = "../common/invariance.rs"]
mod invariance;
#[path = "../common/shell.rs"]
mod shell;

mod assist;
mod kernel;
mod library;
