//! The source tree itself: floors, seams, shaders, types that threads share.

mod layering;
mod shaders;
mod traits;
