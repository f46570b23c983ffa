//! GGUF files: read, written, hostile.

#[path = "../common/mod.rs"]
mod common;

mod hostile;
mod read;
mod write;
