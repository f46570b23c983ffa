//! Rotation angles (RoPE): cosines and sines of each position, computed on the host with the crate
//! `libm`, so that every device and system rotates with the same bits.

use super::config::RopeSpec;
use gemma_base::util::threads;
use rayon::prelude::*;

/// Smallest number of positions for which waking the threads pays off.
const MANY: usize = 64;

/// The angles of layers with the same rotation.
#[derive(Clone, Debug)]
pub struct Angles {
    inv_freq: Vec<f32>, // [head_dim / 2]
}

impl Angles {
    /// Computes frequencies `theta^(-2i / head_dim) / factor`, rounded to f32 as in transformers; 0
    /// for channels that are not rotated.
    pub fn new(rope: RopeSpec, head_dim: usize) -> Self {
        let turning = rope.turning(head_dim);
        let frequency = |i: usize| match i < turning {
            true => {
                let power = (2 * i) as f32 / head_dim as f32;
                1.0 / libm::pow(rope.theta.into(), power.into()) as f32 / rope.factor
            }
            false => 0.0,
        };
        Angles { inv_freq: (0..head_dim / 2).map(frequency).collect() }
    }

    /// Fills `out` with the cosines, then the sines of each position: `[positions, head_dim]`. Uses
    /// all threads if there are many positions.
    pub fn fill(&self, positions: &[u32], out: &mut Vec<f32>) {
        let half = self.inv_freq.len();
        out.resize(positions.len() * 2 * half, 0.0);
        let fill = |(position, out): (&u32, &mut [f32])| {
            let (cosines, sines) = out.split_at_mut(half);
            for (i, f) in self.inv_freq.iter().enumerate() {
                let angle = (*position as f32 * f) as f64;
                (cosines[i], sines[i]) = (libm::cos(angle) as f32, libm::sin(angle) as f32);
            }
        };
        if positions.len() < MANY {
            positions.iter().zip(out.chunks_exact_mut(2 * half)).for_each(fill);
        } else {
            threads::prepare_common_pool();
            positions.par_iter().zip(out.par_chunks_exact_mut(2 * half)).for_each(fill);
        }
    }
}
