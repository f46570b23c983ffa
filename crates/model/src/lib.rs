//! A model: its files, its forward pass, its tokenizer, and sampling.

pub mod checkpoint;
pub mod engine;
pub mod eval;
pub mod models;
pub mod sampler;
pub mod vision;
