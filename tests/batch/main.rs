//! `gemma generate --batch`: records, and batches that are resumed.

#[path = "../common/shell.rs"]
mod shell;

mod records;
mod resume;
