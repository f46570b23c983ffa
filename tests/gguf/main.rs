//! GGUF files: read, written, hostile, described.

#[path = "../common/mod.rs"]
mod common;

mod hostile;
mod read;
mod said;
mod write;
