//! Sizes of the layout that all kernels of linear layers read.

/// Output rows of a tile: two vectors of 16 lanes.
pub const TILE: usize = 32;
/// Bytes of a vector and of a line of scales.
pub const LINE: usize = 64;
