//! Stored models: values, tokenizers, checkpoints, hostile files.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/fuzz.rs"]
mod fuzz;
#[path = "../common/reference.rs"]
mod reference;

mod assistant;
mod checkpoint;
mod golden;
mod hostile_files;
mod images;
mod tokenizer;
mod toy;
