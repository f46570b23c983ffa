//! GGUF, the files of llama.cpp: container and block types. `models/gguf` gives keys and
//! tensors their meaning.

pub mod container;
mod files;
pub mod metadata;
pub mod types;
mod view;
pub mod write;

pub use files::GgufNames;
pub(super) use files::find;
pub use metadata::{Metadata, Value};
pub(super) use view::Gguf;
pub use view::{Make, Presentation};
