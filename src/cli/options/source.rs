//! The source of an option's value.

use std::fmt;
use std::path::PathBuf;

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Environment(String),
    File(PathBuf),
    /// The model's generation_config.json.
    Model,
    BuiltIn,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Flag => f.write_str("command line"),
            Origin::Environment(name) => write!(f, "environment {name}"),
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Model => f.write_str("the model's generation_config.json"),
            Origin::BuiltIn => f.write_str("built in"),
        }
    }
}
