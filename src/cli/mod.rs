//! The command line. Results go to standard output, everything else to standard error.
//!
//! `commands/` has one file or folder for each command. `options/` has the options that several
//! commands take, `io/` the code that reads and writes, `api/` the forms of HTTP APIs.

pub mod api;
pub mod child;
pub mod commands;
pub mod help;
pub mod hints;
pub mod io;
pub mod options;
pub mod settings;
pub mod sizes;
