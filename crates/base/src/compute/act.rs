//! Prepared activations: their format, their buffers, and the view that kernels and twins read.

use super::operand::BufferId;
use crate::tensor::{Code, Format, Group};

/// Number of candidate scales per group of columns.
///
/// More candidates do not lower the KL divergence from the model without int8 activations
/// (docs/MEASURED.md).
pub const TRIED: usize = 8;

/// Format of a linear layer's input.
///
/// Either f32 rows, or int8 rows with one scale per row or per group, with or without a Hadamard
/// transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ActFormat {
    pub int8: bool,
    /// Columns that share a scale; `Group::Row` for f32.
    pub group: Group,
    pub hadamard: bool,
}

impl ActFormat {
    /// Returns the activation format that weights of `format` are multiplied with.
    pub fn for_weights(format: Format) -> Self {
        let int8 = format.code.is_integer();
        ActFormat {
            int8,
            group: if int8 { format.group } else { Group::Row },
            hadamard: format.hadamard,
        }
    }

    /// Returns the number of candidate scales per group, see `rows::quantize_group`.
    ///
    /// A scale per row covers too many columns for the choice of rounding to matter.
    pub fn tried(self) -> usize {
        if self.group == Group::Row { 1 } else { TRIED }
    }

    /// Returns the number of scales in one row of `cols` activations; 0 for f32.
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
    /// f32 `[rows, groups]`: scale of the int8 values of a group. Unused for f32.
    pub scales: BufferId,
    /// i32 `[rows, groups]`: sum of the int8 values of a group. Unused for f32.
    pub sums: BufferId,
}

/// View of prepared activations: int8 with a scale per row or group, or floats.
#[derive(Clone, Copy, Debug)]
pub struct ActView<'a> {
    pub rows: usize,
    pub cols: usize,
    pub values: ActValues<'a>,
    /// `[rows, groups]`: scale of the int8 values of a group. Empty for floats.
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
