//! `gemma quantize`: its output, plans and measurements, and the effect of an interruption.

// Some tests are for Unix only, with their imports and helpers.
#![cfg_attr(windows, allow(unused))]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/reference.rs"]
mod reference;
#[path = "../common/shell.rs"]
mod shell;

mod calibrated;
mod command;
mod formats;
mod plan;
mod resume;
mod solver;
