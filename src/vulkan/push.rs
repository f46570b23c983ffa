//! Push constants, field after field as the shaders declare them: addresses first, then words.

use super::pipeline::PUSH;
use bytemuck::{Pod, Zeroable};

/// Arguments of `linear.comp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct LinearPush {
    pub main: MatrixPush,
    pub act: ActPush,
    pub step: u64,
    /// Rows of the matrix.
    pub n: u32,
    /// Steps of a matrix row; of floats, columns.
    pub steps: u32,
    /// Bytes from row to row of the activations.
    pub stride: u32,
    /// Rows of the matrices beside it; 0: there is none.
    pub more_n: [u16; 2],
    pub more: [MatrixPush; 2],
    /// Arguments of what the last workgroups do; see `finish.rs`.
    pub tail: u64,
}

/// A matrix of `linear.comp` and where its product goes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct MatrixPush {
    pub codes: u64,
    pub scales: u64,
    pub out: u64,
}

/// Activations of `linear.comp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ActPush {
    pub values: u64,
    pub scales: u64,
    pub sums: u64,
}

impl LinearPush {
    /// Takes in the matrix of another call on the same activations, if there is room.
    pub fn put_beside(&mut self, other: &LinearPush) -> bool {
        let same = (self.act, self.step, self.steps, self.stride)
            == (other.act, other.step, other.steps, other.stride);
        let free = self.more_n.iter().position(|n| *n == 0);
        let (true, Some(i), Ok(n), [0, 0]) = (same, free, u16::try_from(other.n), other.more_n)
        else {
            return false;
        };
        self.more_n[i] = n;
        self.more[i] = other.main;
        true
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Push {
    bytes: [u8; PUSH],
    len: usize,
}

impl Push {
    pub fn new() -> Push {
        Push { bytes: [0; PUSH], len: 0 }
    }

    /// All arguments at once.
    pub fn of(arguments: &impl Pod) -> Push {
        let mut push = Push::new();
        let from = bytemuck::bytes_of(arguments);
        push.bytes[..from.len()].copy_from_slice(from);
        push.len = from.len();
        push
    }

    fn put<const N: usize>(mut self, value: [u8; N]) -> Push {
        assert!(
            self.len.is_multiple_of(N) && self.len + N <= PUSH,
            "push constants: {N} bytes at {}",
            self.len
        );
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

    /// Overwrites the address at byte `at`.
    pub fn set(&mut self, at: usize, address: u64) {
        assert!(at + 8 <= self.len, "push constants: no address at {at}");
        self.bytes[at..][..8].copy_from_slice(&address.to_le_bytes());
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
