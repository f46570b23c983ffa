//! GGUF, the file format of llama.cpp: container and block types. `models/gguf` interprets keys and
//! tensors.

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
