//! Rotation angles: cosines and sines of each position, computed on the host so that every device
//! rotates by the same bits.

use super::config::Rope;

/// The angles of one kind of layer.
#[derive(Clone, Debug)]
pub struct Angles {
    inv_freq: Vec<f32>, // [head_dim / 2]
}

impl Angles {
    /// `theta^(-2i / head_dim) / factor`, in f32 as transformers computes it.
    pub fn new(rope: Rope, head_dim: usize) -> Self {
        let inv_freq = (0..head_dim / 2)
            .map(|i| 1.0 / rope.theta.powf((2 * i) as f32 / head_dim as f32) / rope.factor)
            .collect();
        Angles { inv_freq }
    }

    /// Appends `[cos, sin]` of a position, `head_dim` values.
    pub fn push(&self, position: usize, out: &mut Vec<f32>) {
        let angles = self.inv_freq.iter().map(|f| (position as f32 * f) as f64);
        out.extend(angles.clone().map(|a| a.cos() as f32));
        out.extend(angles.map(|a| a.sin() as f32));
    }
}
