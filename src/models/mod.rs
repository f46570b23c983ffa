//! What Gemma 3 is. Configuration and weights here; nothing knows a device.

pub mod chat;
pub mod config;
pub mod forward;
pub mod gemma3;
pub mod generation;
mod progress;
pub mod reduced;
pub mod rope;
mod synthetic;
pub mod tokenizer;
pub mod weights;

pub use chat::{ChatTemplate, Message};
pub use config::{Config, Rope};
pub use generation::Generation;
pub use reduced::{ReducedVocabulary, VocabMap};
pub use rope::Angles;
pub use tokenizer::{Detokenizer, Special, Tokenizer};
pub use weights::{Role, Weights};
