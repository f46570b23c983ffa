//! Rotation angles: cosines and sines of each position, computed on the host by the crate `libm`.
//! Every device and every system rotates by the same bits.

use super::config::RopeSpec;

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

    /// Appends `[cos, sin]` of a position, `head_dim` values.
    pub fn push(&self, position: usize, out: &mut Vec<f32>) {
        let angles = self.inv_freq.iter().map(|f| (position as f32 * f) as f64);
        out.extend(angles.clone().map(|a| libm::cos(a) as f32));
        out.extend(angles.map(|a| libm::sin(a) as f32));
    }
}
