//! Tokens, weight formats and the codecs of their blocks. Knows nothing of models or
//! devices.

pub mod block;
pub mod encode;
pub mod format;
pub mod ggml;
pub mod grid;
mod grids;
pub mod hadamard;
pub mod integer;
pub mod math;
pub mod matrix;
pub mod product;
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
pub use stored::{Source, StoredMatrix};

/// An item of a history: the id of a token.
///
/// A history identifies every cache, so equal contents must give equal items. Images, which no
/// model here reads yet, fit without another type: an image becomes a run of ids above the
/// vocabulary, one for each soft token, assigned by the hash of the image. Prefix caches and drafts
/// then compare images as they compare text, samplers never pick such ids, and only the embedding
/// looks them up.
pub type Token = u32;
