//! Tokens, weight formats and the codecs of their blocks. Knows nothing of models or
//! devices.

pub mod block;
pub mod encode;
pub mod format;
pub mod ggml;
pub mod hadamard;
pub mod math;
pub mod matrix;
pub mod quantize;
mod round;
pub mod side;
pub mod stored;
pub mod trellis;
pub mod viterbi;

pub use block::{BlockSpec, Code, CpuLayout, Group, Values};
pub use format::Format;
pub use ggml::GgmlType;
pub use matrix::Matrix;
pub use side::SideKind;
pub use stored::{Coding, Source, StoredMatrix};

/// A token id of the model's vocabulary.
pub type Token = u32;
