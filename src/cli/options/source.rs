//! The source of an option's value.

use std::fmt;
use std::path::PathBuf;

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Flag,
    Environment(String),
    File(PathBuf),
    /// The model's generation_config.json.
    Model,
    BuiltIn,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Flag => f.write_str("command line"),
            Source::Environment(name) => write!(f, "environment {name}"),
            Source::File(path) => write!(f, "{}", path.display()),
            Source::Model => f.write_str("the model's generation_config.json"),
            Source::BuiltIn => f.write_str("built in"),
        }
    }
}
