//! Matrix shapes that a device supports.

use ash::vk;

/// A matrix product of a subgroup: int8 `[m, k]` times int8 `[k, n]` into int32 `[m, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

/// The shape with elements in the lanes that `linear_few` and `linear_many` expect.
pub const SHAPE: MatrixShape = MatrixShape { m: 16, n: 8, k: 32 };

impl std::fmt::Display for MatrixShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}

/// Returns the distinct shapes in a driver's list that multiply signed int8 exactly.
pub fn int8_shapes(list: &[vk::CooperativeMatrixPropertiesKHR<'_>]) -> Vec<MatrixShape> {
    let mut shapes = Vec::new();
    for s in list {
        let types =
            [(s.a_type, vk::ComponentTypeKHR::SINT8), (s.b_type, vk::ComponentTypeKHR::SINT8)];
        let sums = [
            (s.c_type, vk::ComponentTypeKHR::SINT32),
            (s.result_type, vk::ComponentTypeKHR::SINT32),
        ];
        let shape = MatrixShape { m: s.m_size, n: s.n_size, k: s.k_size };
        let fits = types.iter().chain(&sums).all(|(has, wanted)| has == wanted)
            && s.scope == vk::ScopeKHR::SUBGROUP;
        if fits && !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

/// Returns the shape that kernels use on a device: [`SHAPE`] if supported, else the largest shape
/// that divides 16 matrix rows and a chunk of columns.
pub fn best_shape(shapes: &[MatrixShape]) -> Option<MatrixShape> {
    let usable = |s: &&MatrixShape| {
        [8, 16].contains(&s.m) && [8, 16].contains(&s.n) && [8, 16, 32].contains(&s.k)
    };
    shapes
        .iter()
        .copied()
        .find(|s| *s == SHAPE)
        .or_else(|| shapes.iter().filter(usable).max_by_key(|s| s.m * s.n * s.k).copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_of_other_types_are_passed_over() {
        use vk::ComponentTypeKHR as T;
        let shape = |m, a, c| vk::CooperativeMatrixPropertiesKHR {
            m_size: m,
            n_size: 8,
            k_size: 32,
            a_type: a,
            b_type: a,
            c_type: c,
            result_type: c,
            scope: vk::ScopeKHR::SUBGROUP,
            ..Default::default()
        };
        let block = vk::CooperativeMatrixPropertiesKHR {
            scope: vk::ScopeKHR::WORKGROUP,
            ..shape(64, T::SINT8, T::SINT32)
        };
        let list = [
            shape(16, T::FLOAT16, T::FLOAT32),
            shape(16, T::SINT8, T::SINT32),
            shape(16, T::SINT8, T::SINT32),
            block,
        ];
        assert_eq!(int8_shapes(&list), [SHAPE]);
        assert_eq!(SHAPE.to_string(), "16x8x32");
        assert_eq!(int8_shapes(&[shape(16, T::UINT8, T::SINT32)]), []);
    }

    #[test]
    fn the_best_of_a_devices_shapes_is_taken() {
        let shape = |(m, n, k)| MatrixShape { m, n, k };
        let best = |list: &[(u32, u32, u32)]| {
            best_shape(&list.iter().map(|s| shape(*s)).collect::<Vec<_>>())
        };
        assert_eq!(best(&[(16, 16, 32), (16, 8, 32)]), Some(SHAPE));
        assert_eq!(best(&[(8, 8, 8), (16, 16, 16)]), Some(shape((16, 16, 16))));
        assert_eq!(best(&[(8, 16, 32), (32, 32, 32)]), Some(shape((8, 16, 32))));
        assert_eq!(best(&[(32, 8, 16)]), None);
    }
}
