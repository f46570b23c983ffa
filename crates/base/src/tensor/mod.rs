//! Tokens, weight formats and the codecs of their blocks. Independent of models and devices.

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

/// An item of a history: a token id, or a placeholder of an image's soft token.
///
/// A history is the key of every cache, so equal contents must have equal items. An image is a run
/// of numbers from [`FIRST_PLACE`] upwards, one per soft token. A registry assigns each number once
/// and identifies the image by its digest. Prefix caches and drafts then compare images like text.
/// Samplers never return these numbers, and only the embedding looks them up.
pub type Token = u32;

/// The first number of image placeholders. Vocabularies are smaller.
pub const FIRST_PLACE: Token = 1 << 24;

/// Returns whether an item of a history is an image placeholder.
#[inline(always)]
pub fn is_place(item: Token) -> bool {
    item >= FIRST_PLACE
}
