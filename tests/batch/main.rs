//! `gemma generate --batch`: records, and batches that are resumed.

// Some tests are for Unix only, with their imports and helpers.
#![cfg_attr(windows, allow(unused))]

#[path = "../common/shell.rs"]
mod shell;

mod records;
mod resume;
