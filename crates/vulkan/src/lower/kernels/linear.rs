//! Kernels of linear layers.

use super::*;

kernels! {
    Linear, LinearPush, Linear, [Heads, NextNorm];
    LinearFew, LinearPush, LinearFew, [Heads];
    LinearFloat, LinearPush, LinearFloat, [Heads, NextNorm];
    LinearMany, LinearPush, LinearMany, [];
    LinearTrellis, LinearPush, LinearTrellis, [PathTrellis, Heads, NextNorm];
}

impl Kernel for LinearMatrix {
    type Push = LinearPush;
    const SHADER: Shader = Shader::LinearMatrix;
    #[cfg(test)]
    const OPTIONS: &'static [&'static [Constant]] = &[PathTrellis::DECLARED, Heads::DECLARED];

    /// Returns the shader. Matrix shapes with k = 8 have a shader of their own.
    fn shader(&self) -> Shader {
        if self.shape_k == 8 { Shader::LinearMatrixK8 } else { Self::SHADER }
    }
}

constants! {
    /// `linear.comp`
    Linear {
        0 local_size_x => local: u32,
        1 SG => subgroup: u32,
        /// Rows of activations.
        2 M => rows: u32,
        /// Matrix rows of a team.
        3 NR => matrix_rows: u32,
        4 CODE => code: u32,
        /// Columns of a step.
        5 W => width: u32,
        6 GROUPED => grouped: bool,
        /// Rounds whose loads are in flight together.
        7 U => rounds: u32,
        8 SELECTED => selected: bool,
        9 T => threads: u32,
        /// See `side.glsl`.
        27 SIDE => side: u32,
    }
}

constants! {
    /// `linear_few.comp`
    LinearFew {
        0 local_size_x => local: u32,
        /// Tiles of 8 rows of activations.
        2 NT => tiles: u32,
        /// Tiles of 16 matrix rows.
        3 RT => matrix_tiles: u32,
        4 CODE => code: u32,
        6 GROUPED => grouped: bool,
        /// Rounds whose codes are on their way.
        7 U => ahead: u32,
        8 SELECTED => selected: bool,
        9 T => threads: u32,
        /// See `side.glsl`.
        27 SIDE => side: u32,
    }
}

constants! {
    /// `linear_float.comp`
    LinearFloat {
        0 local_size_x => local: u32,
        1 SG => subgroup: u32,
        /// Rows of activations.
        2 M => rows: u32,
        3 BF16 => bf16: bool,
        8 SELECTED => selected: bool,
        9 T => threads: u32,
    }
}

constants! {
    /// `linear_many.comp`
    LinearMany {
        0 local_size_x => local: u32,
        /// Tiles of 8 rows of activations of a subgroup.
        2 NT => tiles: u32,
        /// Tiles of 16 matrix rows of a subgroup.
        3 RT => matrix_tiles: u32,
        4 CODE => code: u32,
        /// Columns of a step.
        5 W => width: u32,
        /// Subgroups beside each other over the matrix rows.
        7 WR => beside: u32,
        8 SELECTED => selected: bool,
        9 T => threads: u32,
        /// See `side.glsl`.
        27 SIDE => side: u32,
    }
}

constants! {
    /// `linear_matrix.comp` and `linear_matrix_k8.comp`
    LinearMatrix {
        0 local_size_x => local: u32,
        1 SG => subgroup: u32,
        /// Tiles of `shape_n` rows of activations.
        2 NT => tiles: u32,
        4 CODE => code: u32,
        /// Columns of a step.
        5 W => width: u32,
        6 GROUPED => grouped: bool,
        7 MANY => many: bool,
        8 SELECTED => selected: bool,
        9 T => threads: u32,
        /// The device's shape: m x k times k x n.
        14 MM => shape_m: u32,
        15 NN => shape_n: u32,
        16 KK => shape_k: u32,
    }
}

constants! {
    /// `linear_trellis.comp`
    LinearTrellis {
        0 local_size_x => local: u32,
        1 SG => subgroup: u32,
        2 T => threads: u32,
        /// Rows of activations.
        3 M => rows: u32,
        8 SELECTED => selected: bool,
    }
}

constants! {
    /// Constants of trellis codes.
    PathTrellis {
        /// New bits of a state.
        17 STEP => step: u32,
        19 MULTIPLIER => multiplier: u32,
    }
}

constants! {
    /// Epilogue of a linear layer: the rotation of its heads.
    Heads {
        11 HEADS => on: bool,
        12 HEAD_DIM => head_dim: u32,
        13 KV => kv: u32,
        /// The first matrix of this call: 0 for queries, 1 for keys, 2 for values.
        26 FIRST_MATRIX => first_matrix: u32,
        28 V_NORM => v_norm: bool,
    }
}

constants! {
    /// Epilogue of a linear layer: the norm after it.
    NextNorm {
        20 NORM => on: bool,
        21 DIM => dim: u32,
        22 NEXT_PREPARE => prepare: bool,
        23 NEXT_HADAMARD => hadamard: bool,
        24 NEXT_INT8 => int8: bool,
        /// Columns that share a scale; 0: all.
        25 NEXT_GROUP => group: u32,
    }
}

arguments! {
    /// A matrix of a linear layer and the buffer of its product.
    MatrixPush {
        codes: u64,
        side: u64,
        out: u64,
    }
}

arguments! {
    /// Arguments of all linear layers.
    LinearPush {
        matrix: MatrixPush,
        /// Activations, their scales and sums.
        x: u64,
        sx: u64,
        sums: u64,
        step: u64,
        /// Rows of the matrix.
        n: u32,
        /// Steps of a matrix row. A step of floats is a column.
        steps: u32,
        /// Bytes from row to row of the activations.
        stride: u32,
        /// Rows of the matrices beside the first one; 0 without one.
        more_n: [u16; 2],
        more: Beside,
        /// Address of the epilogue, see `finish.rs`.
        epilogue: u64,
    }
}

/// The matrices beside the first one.
pub type Beside = [MatrixPush; 2];

#[cfg(test)]
impl Field for Beside {
    fn list(name: &'static str, at: usize, out: &mut Vec<Member>) {
        (0..2).for_each(|i| MatrixPush::list(name, at + i * size_of::<MatrixPush>(), out));
    }
}
