//! Gemma 3: its GGUF files and the draft models that this program brings along.

pub mod bundled;
pub mod gguf;
