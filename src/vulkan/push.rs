//! Push constants, field after field as the shaders declare them: addresses first, then words.

use super::pipeline::PUSH;

#[derive(Clone, Copy, Debug)]
pub struct Push {
    bytes: [u8; PUSH],
    len: usize,
}

impl Push {
    pub fn new() -> Push {
        Push { bytes: [0; PUSH], len: 0 }
    }

    fn put<const N: usize>(mut self, value: [u8; N]) -> Push {
        assert!(self.len.is_multiple_of(N) && self.len + N <= PUSH, "push constants: {N} bytes at {}", self.len);
        self.bytes[self.len..][..N].copy_from_slice(&value);
        self.len += N;
        self
    }

    /// A 64-bit address.
    pub fn at(self, address: u64) -> Push {
        self.put(address.to_le_bytes())
    }

    pub fn word(self, value: usize) -> Push {
        let value = u32::try_from(value).expect("sizes fit 32 bits");
        self.put(value.to_le_bytes())
    }

    pub fn float(self, value: f32) -> Push {
        self.put(value.to_le_bytes())
    }

    /// With zeros up to a length.
    pub fn padded(mut self, len: usize) -> Push {
        self.len = self.len.max(len);
        self
    }

    /// The word at a byte offset.
    pub fn word_at(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.bytes[offset..][..4].try_into().expect("four bytes"))
    }

    /// Writes the word at a byte offset.
    pub fn set_word(&mut self, offset: usize, value: u32) {
        self.bytes[offset..][..4].copy_from_slice(&value.to_le_bytes());
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
