//! Specialisation constants and push constants of each kernel, by the names of the shaders.
//!
//! The tests hold every struct here to the committed SPIR-V: names, numbers of constants, offsets
//! and types of arguments, and completeness.

use crate::device::pipeline::{Constants, PUSH, Shader};
use bytemuck::{Pod, Zeroable};

/// A specialisation constant as a struct here declares it.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    pub id: u32,
    /// Name in the shader, where `local_size_x` has none.
    pub name: &'static str,
    pub is_bool: bool,
}

/// Type of an argument in SPIR-V. Addresses are 64-bit words.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    U32,
    F32,
    Address,
}

/// An argument as a struct here declares it.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub at: usize,
    /// Innermost name. The shaders write `out_` and `step_`, since GLSL reserves the plain names.
    pub name: &'static str,
    pub kind: Kind,
}

/// A group of specialisation constants.
pub trait Specialise {
    #[cfg(test)]
    const DECLARED: &'static [Constant];

    fn constants(&self) -> Constants;
}

/// A kernel's specialisation constants, which name the shader and the arguments of its calls.
pub trait Kernel: Specialise {
    type Push: Arguments;

    const SHADER: Shader;

    /// Groups of constants that a call may add.
    #[cfg(test)]
    const OPTIONS: &'static [&'static [Constant]];

    fn shader(&self) -> Shader {
        Self::SHADER
    }

    /// Returns the shader and constants of its pipeline.
    fn specialised(&self) -> (Shader, Constants) {
        (self.shader(), self.constants())
    }
}

/// Push constants, field after field. A field of 8 bytes stands at a multiple of 8.
pub trait Arguments: Pod {}

/// Push constants as bytes.
#[derive(Clone, Copy, Debug)]
pub struct Push {
    bytes: [u8; PUSH],
    len: usize,
}

impl Push {
    pub fn of(arguments: &impl Arguments) -> Push {
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

/// Returns a count as the 32-bit word that the shaders take.
pub fn word(n: usize) -> u32 {
    u32::try_from(n).expect("sizes fit 32 bits")
}

/// Type of a constant.
trait Value: Copy {
    #[cfg(test)]
    const IS_BOOL: bool;

    fn word(self) -> u32;
}

impl Value for u32 {
    #[cfg(test)]
    const IS_BOOL: bool = false;

    fn word(self) -> u32 {
        self
    }
}

impl Value for bool {
    #[cfg(test)]
    const IS_BOOL: bool = true;

    fn word(self) -> u32 {
        self as u32
    }
}

/// Type of an argument: a word, or a struct of words.
#[cfg(test)]
pub trait Field {
    /// Appends the members at byte `at`.
    fn list(name: &'static str, at: usize, out: &mut Vec<Member>);
}

macro_rules! constants {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$about:meta])* $id:literal $named:ident => $field:ident: $ty:ty,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$about])* pub $field: $ty,)*
        }

        impl Specialise for $name {
            #[cfg(test)]
            const DECLARED: &'static [Constant] = &[$(Constant {
                id: $id,
                name: stringify!($named),
                is_bool: <$ty as Value>::IS_BOOL,
            }),*];

            fn constants(&self) -> Constants {
                vec![$(($id, self.$field.word())),*]
            }
        }
    };
}

/// Declares push constants. A field whose name begins with an underscore fills a gap.
macro_rules! arguments {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$about:meta])* $field:ident: $ty:ty,)*
    }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
        pub struct $name {
            $($(#[$about])* pub $field: $ty,)*
        }

        impl Arguments for $name {}

        #[cfg(test)]
        impl Field for $name {
            fn list(_: &'static str, at: usize, out: &mut Vec<Member>) {
                $(if !stringify!($field).starts_with('_') {
                    let at = at + std::mem::offset_of!($name, $field);
                    <$ty as Field>::list(stringify!($field), at, out);
                })*
            }
        }
    };
}

macro_rules! kernels {
    ($($constants:ident, $push:ident, $shader:ident, [$($option:ident),*];)*) => {
        $(impl Kernel for $constants {
            type Push = $push;
            const SHADER: Shader = Shader::$shader;
            #[cfg(test)]
            const OPTIONS: &'static [&'static [Constant]] = &[$($option::DECLARED),*];
        })*
    };
}

mod linear;
mod others;
#[cfg(test)]
mod tests;

pub use linear::*;
pub use others::*;
