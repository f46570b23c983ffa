//! Tokens, weight formats and the codecs of their blocks. Knows nothing of models or
//! devices.

pub mod code;
pub mod encode;
pub mod format;
pub mod hadamard;
pub mod math;
pub mod matrix;
pub mod quantize;
pub mod stored;
pub mod trellis;
pub mod viterbi;

pub use code::{Code, CpuLayout, FormatSpec, Values};
pub use format::{Format, Group};
pub use matrix::Matrix;
pub use stored::{Coding, Source, StoredMatrix};

/// A token id of the model's vocabulary.
pub type Token = u32;
