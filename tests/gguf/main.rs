//! GGUF files: reading, writing, hostile files, descriptions.

#[path = "../common/mod.rs"]
mod common;

mod gemma4;
mod gemma4_assistant;
mod gemma4_weights;
mod hostile;
mod read;
mod said;
mod write;
