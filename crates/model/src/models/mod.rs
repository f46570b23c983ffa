//! A model: configuration, weights, forward pass, tokenizer and chat template. Independent of
//! devices. Start with [`architecture`] and the layer in [`gemma3`].

pub mod architecture;
pub mod chat;
pub mod config;
pub mod dialect;
pub mod forward;
pub mod gemma3;
pub mod gemma4;
pub mod generation;
pub mod gguf;
pub mod images;
mod progress;
pub(crate) mod reader;
pub mod reduced;
mod role;
pub mod rope;
mod synthetic;
pub mod tokenizer;
pub mod weights;

pub use architecture::{KeyNorms, Step, TensorSpec};
pub use chat::{ChatTemplate, ImageText, Message, MessageImage, ToolCall};
pub use config::{Config, ExpertSpec, LayerSpec, RopeSpec};
pub use dialect::Dialect;
pub use generation::Generation;
pub use images::{Image, ImageDigest, Images};
pub use reduced::{ReducedVocabulary, VocabMap};
pub use role::Role;
pub use rope::Angles;
pub use tokenizer::{Detokenizer, Special, Tokenizer};
pub use weights::Weights;
