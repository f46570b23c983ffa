//! The 128-wide orthonormal Hadamard transform (Sylvester order), applied to consecutive blocks of a row.
//!
//! `H[i][j] = (-1)^popcount(i & j) / sqrt(128)`: symmetric and its own inverse. Weights and inputs that both pass through it
//! keep their dot product and look Gaussian, so one scale a row serves nearly as well as one a group.

/// Columns in one block.
pub const WIDTH: usize = 128;

/// 1 / sqrt(128).
pub const SCALE: f32 = 0.088_388_35;

/// Transforms every 128-wide block of `row` in place. `row.len()` must be a multiple of 128.
///
/// The butterfly order is part of the format: every version of this kernel adds in this order, so results are bit-identical.
#[inline(always)]
pub fn transform(row: &mut [f32]) {
    assert!(row.len().is_multiple_of(WIDTH));
    for block in row.as_chunks_mut::<WIDTH>().0 {
        let mut half = 64;
        while half > 0 {
            let mut start = 0;
            while start < WIDTH {
                for i in start..start + half {
                    let (a, b) = (block[i], block[i + half]);
                    block[i] = a + b;
                    block[i + half] = a - b;
                }
                start += 2 * half;
            }
            half /= 2;
        }
        for v in block {
            *v *= SCALE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_definition_and_is_its_own_inverse() {
        let x: Vec<f32> = (0..WIDTH).map(|i| ((i * 37 % 101) as f32 - 50.0) / 10.0).collect();
        let mut y = x.clone();
        transform(&mut y);
        for (i, got) in y.iter().enumerate() {
            let want: f64 =
                (0..WIDTH).map(|j| if (i & j).count_ones() % 2 == 0 { x[j] as f64 } else { -x[j] as f64 }).sum::<f64>()
                    / 128f64.sqrt();
            assert!((*got as f64 - want).abs() < 1e-4, "{i}: {got} vs {want}");
        }
        transform(&mut y);
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}
