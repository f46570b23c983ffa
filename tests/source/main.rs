//! The source tree itself: floors, seams, shaders, types that threads share.

mod features;
mod layering;
mod lexer;
mod names;
mod prose;
mod shaders;
mod traits;
