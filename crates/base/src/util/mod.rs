//! General helpers: formatting of numbers and shell words, the user's directories, atomic file
//! writes, child processes under limits, threads and their shared types.

pub mod child;
pub mod files;
pub mod json;
pub mod shell;
pub mod sync;
pub mod threads;
pub mod units;
pub mod xdg;

pub use ::hex::encode as hex;
