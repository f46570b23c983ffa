//! Prepared activations: their format, their buffers, and how the linear kernels and their twins
//! read them.

use super::operand::BufferId;
use crate::tensor::{Code, Format, Group};

/// Scales that are tried for a group of columns. More of them no longer lower the KL divergence of
/// a model from the one without int8 activations (docs/MEASURED.md).
pub const TRIED: usize = 8;

/// Input of a linear layer: f32 rows, or int8 rows with one scale a row or a group, with or without
/// a Hadamard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ActFormat {
    pub int8: bool,
    /// Columns that share a scale; `Group::Row` for f32.
    pub group: Group,
    pub hadamard: bool,
}

impl ActFormat {
    /// The activations that weights of `format` are multiplied with.
    pub fn for_weights(format: Format) -> Self {
        let int8 = format.code.is_integer();
        ActFormat {
            int8,
            group: if int8 { format.group } else { Group::Row },
            hadamard: format.hadamard,
        }
    }

    /// Scales that are tried for a group, see `rows::quantize_group`. A row has too many columns
    /// for one rounding to be better than another.
    pub fn tried(self) -> usize {
        if self.group == Group::Row { 1 } else { TRIED }
    }

    /// Scales in one row of `cols` activations; 0 for f32.
    pub fn groups(self, cols: usize) -> usize {
        Format {
            code: if self.int8 { Code::I8 } else { Code::F32 },
            group: self.group,
            hadamard: self.hadamard,
        }
        .groups(cols)
    }
}

/// Prepared activations of one linear input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Act {
    pub format: ActFormat,
    pub cols: usize,
    /// f32 or i8, `[rows, cols]`.
    pub values: BufferId,
    /// f32 `[rows, groups]`: what an int8 value is multiplied by. Unused for f32.
    pub scales: BufferId,
    /// i32 `[rows, groups]`: sum of the int8 values of a group. Unused for f32.
    pub sums: BufferId,
}

/// Prepared activations: int8 with a scale a row or a group, or floats.
#[derive(Clone, Copy, Debug)]
pub struct ActView<'a> {
    pub rows: usize,
    pub cols: usize,
    pub values: ActValues<'a>,
    /// `[rows, groups]`: what an int8 value is multiplied by. Empty for floats.
    pub scales: &'a [f32],
    /// `[rows, groups]`: sum of the int8 values of the group. Empty for floats.
    pub sums: &'a [i32],
}

/// `[rows, cols]`; int8 values lie in -127..=127.
#[derive(Clone, Copy, Debug)]
pub enum ActValues<'a> {
    I8(&'a [i8]),
    F32(&'a [f32]),
}
