//! Helpers that any program could use: spelling of figures, bytes and shell words, the user's
//! directories, files that are written whole, child processes under limits, threads and what they
//! share.

pub mod child;
pub mod files;
pub mod json;
pub mod shell;
pub mod sync;
pub mod threads;
pub mod units;
pub mod xdg;

pub use ::hex::encode as hex;
