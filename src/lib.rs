//! Speculative decoding for Gemma 3: a small draft proposes a tree of tokens, the quantised target checks it in one pass.

pub mod compute;
pub mod engine;
pub mod error;
pub mod kv;
pub mod tensor;
