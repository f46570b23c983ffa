//! The program as a shell or a terminal sees it.

// Some tests are for Unix only, with their imports and helpers.
#![cfg_attr(windows, allow(unused))]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/shell.rs"]
mod shell;
#[cfg(target_os = "linux")]
#[path = "../common/terminals.rs"]
mod terminals;

mod assistant;
mod eval;
mod files;
mod foreign;
mod grammar;
mod images;
mod models;
mod names;
mod newcomer;
mod options;
mod output;
mod presets;
mod prompt_cache;
mod pull;
mod settings;
mod signals;
#[cfg(target_os = "linux")]
mod talks;
mod terminal;
