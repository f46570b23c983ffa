//! A tensor as a file stores it: dtype, shape, bytes.

use anyhow::{Result, bail};
use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

/// Element types of the safetensors format, by their spelling there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

const NAMES: [(Dtype, &str, usize); 15] = [
    (Dtype::Bool, "BOOL", 1),
    (Dtype::U8, "U8", 1),
    (Dtype::I8, "I8", 1),
    (Dtype::F8E4M3, "F8_E4M3", 1),
    (Dtype::F8E5M2, "F8_E5M2", 1),
    (Dtype::U16, "U16", 2),
    (Dtype::I16, "I16", 2),
    (Dtype::F16, "F16", 2),
    (Dtype::Bf16, "BF16", 2),
    (Dtype::U32, "U32", 4),
    (Dtype::I32, "I32", 4),
    (Dtype::F32, "F32", 4),
    (Dtype::U64, "U64", 8),
    (Dtype::I64, "I64", 8),
    (Dtype::F64, "F64", 8),
];

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        NAMES[self as usize].2
    }

    /// Whether model weights may have it.
    pub fn is_weight(self) -> bool {
        matches!(self, Dtype::F16 | Dtype::Bf16 | Dtype::F32)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(NAMES[*self as usize].1)
    }
}

impl FromStr for Dtype {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Self> {
        match NAMES.iter().find(|(_, name, _)| *name == s) {
            Some((dtype, _, _)) => Ok(*dtype),
            None => bail!("unknown dtype `{s}`"),
        }
    }
}

/// One stored tensor; `data` holds the product of `shape` elements, little-endian, row-major.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub data: &'a [u8],
}

impl TensorView<'_> {
    /// Appends elements `range` (flat, row-major) as f32. Only f16, bf16 and f32 tensors can be
    /// read so.
    pub fn read_f32(&self, range: std::ops::Range<usize>, out: &mut Vec<f32>) -> Result<()> {
        let width = self.dtype.bytes();
        let Some(data) = self.data.get(range.start * width..range.end * width) else {
            bail!("elements {range:?} lie outside a tensor of shape {:?}", self.shape);
        };
        match self.dtype {
            Dtype::F32 => {
                out.extend(data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)))
            }
            Dtype::F16 => {
                out.extend(data.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()))
            }
            Dtype::Bf16 => {
                out.extend(data.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()))
            }
            other => bail!("{other} is not a dtype of weights"),
        }
        Ok(())
    }

    /// The whole tensor as f32.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let n = self.data.len() / self.dtype.bytes();
        let mut out = Vec::with_capacity(n);
        self.read_f32(0..n, &mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, (dtype, name, _)) in NAMES.iter().enumerate() {
            assert_eq!(*dtype as usize, i);
            assert_eq!(name.parse::<Dtype>().unwrap(), *dtype);
        }
        assert!("F4".parse::<Dtype>().is_err());
    }
}
