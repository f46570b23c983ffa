//! Rotation angles: cosines and sines of each position, computed on the host by the crate `libm`.
//! Every device and every system rotates by the same bits.

use super::config::RopeSpec;
use gemma_base::util::threads;
use rayon::prelude::*;

/// Positions from which on waking the threads pays.
const MANY: usize = 64;

/// The angles of layers that rotate alike.
#[derive(Clone, Debug)]
pub struct Angles {
    inv_freq: Vec<f32>, // [head_dim / 2]
}

impl Angles {
    /// `theta^(-2i / head_dim) / factor`, rounded to f32 as transformers does; 0 for the channels
    /// that do not turn.
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

    /// Makes `out` the cosines, then the sines of each position: `[positions, head_dim]`. All
    /// threads compute those of many positions.
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
