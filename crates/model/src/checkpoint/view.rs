//! A tensor as stored in a file: dtype, shape, bytes.

use anyhow::{Result, bail};
use half::{bf16, f16};
pub use safetensors::Dtype;

/// Returns whether model weights may have this dtype.
pub fn is_weight(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32)
}

/// One stored tensor. `data` holds the elements of `shape`, little-endian, row-major.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub data: &'a [u8],
}

impl TensorView<'_> {
    /// Appends elements `range` (flat indices, row-major) as f32.
    ///
    /// Fails for dtypes other than f16, bf16 and f32.
    pub fn read_f32(&self, range: std::ops::Range<usize>, out: &mut Vec<f32>) -> Result<()> {
        let width = self.dtype.bitsize() / 8;
        let Some(data) = self.data.get(range.start * width..range.end * width) else {
            bail!("elements {range:?} lie outside a tensor of shape {:?}", self.shape);
        };
        let pairs = || data.as_chunks().0.iter().copied();
        match self.dtype {
            Dtype::F32 => out.extend(data.as_chunks().0.iter().copied().map(f32::from_le_bytes)),
            Dtype::F16 => out.extend(pairs().map(|b| f16::from_le_bytes(b).to_f32())),
            Dtype::BF16 => out.extend(pairs().map(|b| bf16::from_le_bytes(b).to_f32())),
            other => bail!("{other} is not a dtype of weights"),
        }
        Ok(())
    }

    /// Returns the whole tensor as f32.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let n = self.shape.iter().product();
        let mut out = Vec::with_capacity(n);
        self.read_f32(0..n, &mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_of_weights_is_read_exactly() {
        let values = [1.5f32, -0.0, 6.1e-5, f32::INFINITY];
        let bytes = |dtype| -> Vec<u8> {
            values
                .iter()
                .flat_map(|v| match dtype {
                    Dtype::F32 => v.to_le_bytes().to_vec(),
                    Dtype::F16 => f16::from_f32(*v).to_le_bytes().to_vec(),
                    _ => bf16::from_f32(*v).to_le_bytes().to_vec(),
                })
                .collect()
        };
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            // One byte before the data makes it unaligned.
            let data = [vec![0], bytes(dtype)].concat();
            let view = TensorView { dtype, shape: &[4], data: &data[1..] };
            let want = values.map(|v| match dtype {
                Dtype::F32 => v,
                Dtype::F16 => f16::from_f32(v).to_f32(),
                _ => bf16::from_f32(v).to_f32(),
            });
            let read = view.to_f32().unwrap();
            assert_eq!(
                read.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
                want.map(f32::to_bits)
            );
            let mut part = Vec::new();
            view.read_f32(1..3, &mut part).unwrap();
            assert_eq!(part, want[1..3]);
            assert!(view.read_f32(1..5, &mut part).is_err());
        }
        assert!(TensorView { dtype: Dtype::U8, shape: &[1], data: &[1] }.to_f32().is_err());
    }
}
