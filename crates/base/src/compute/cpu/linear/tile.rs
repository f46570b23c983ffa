//! Sizes of the layout that all kernels of linear layers use.

/// Output rows of a tile: two vectors of 16 lanes.
pub const TILE: usize = 32;
/// Bytes in a vector and in a line of scales.
pub const LINE: usize = 64;
