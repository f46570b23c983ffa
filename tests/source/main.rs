//! Tests of the source tree: floors, seams, names, prose, shaders.

mod features;
mod layering;
mod lexer;
mod names;
mod prose;
mod shaders;
mod traits;
