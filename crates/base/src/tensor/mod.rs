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

/// An item of a history: the id of a token, or the number of a place of an image.
///
/// A history identifies every cache, so equal contents must give equal items. An image is a run of
/// numbers from [`FIRST_PLACE`] on, one for each of its soft tokens. A registry gives out each
/// number once and names the image by its digest. Prefix caches and drafts then compare images as
/// they compare text, samplers never pick such numbers, and only the embedding looks them up.
pub type Token = u32;

/// The first number that is a place of an image. Vocabularies are smaller.
pub const FIRST_PLACE: Token = 1 << 24;

/// Returns whether an item of a history is a place of an image.
#[inline(always)]
pub fn is_place(item: Token) -> bool {
    item >= FIRST_PLACE
}
