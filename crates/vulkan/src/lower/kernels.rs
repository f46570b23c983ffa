//! Specialisation constants and push constants of each kernel, by their names in the shaders.
//!
//! `build.rs` declares them with the macros in this file, from the committed SPIR-V. The comments
//! in the shaders have the shapes and units.

use crate::device::pipeline::{Constants, PUSH, Shader};
use bytemuck::{Pod, Zeroable};

/// A group of specialisation constants.
pub trait Specialise {
    fn constants(&self) -> Constants;
}

/// A kernel's specialisation constants. The type determines the shader and the arguments of its
/// calls.
pub trait Kernel: Specialise {
    type Push: Pod;

    const SHADER: Shader;

    /// Returns the shader and constants of its pipeline.
    fn specialised(&self) -> (Shader, Constants) {
        (Self::SHADER, self.constants())
    }
}

/// Push constants as bytes.
#[derive(Clone, Copy, Debug)]
pub struct Push {
    bytes: [u8; PUSH],
    len: usize,
}

impl Push {
    pub fn of(arguments: &impl Pod) -> Push {
        let mut push = Push { bytes: [0; PUSH], len: size_of_val(arguments) };
        push.bytes[..push.len].copy_from_slice(bytemuck::bytes_of(arguments));
        push
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

/// Converts a count to the 32-bit word that shaders read.
pub fn word(n: usize) -> u32 {
    u32::try_from(n).expect("sizes fit 32 bits")
}

/// Declares specialisation constants, each with its number.
macro_rules! constants {
    ($name:ident { $($id:literal $field:ident: $ty:ty,)* }) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $(pub $field: $ty,)*
        }

        impl Specialise for $name {
            fn constants(&self) -> Constants {
                vec![$(($id, u32::from(self.$field))),*]
            }
        }
    };
}

/// Declares push constants, or a struct in them.
macro_rules! arguments {
    ($name:ident { $($field:ident: $ty:ty,)* }) => {
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
        pub struct $name {
            $(pub $field: $ty,)*
        }
    };
}

macro_rules! kernel {
    ($constants:ident, $push:ident) => {
        impl Kernel for $constants {
            type Push = $push;
            const SHADER: Shader = Shader::$constants;
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
