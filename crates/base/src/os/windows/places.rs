//! Directories of the user: `%USERPROFILE%` and `%LOCALAPPDATA%`.

use std::path::PathBuf;

/// Returns the home directory.
pub fn home() -> Option<PathBuf> {
    variable("USERPROFILE")
}

/// Returns the directory of files that only save time, where no variable names another.
pub fn cache() -> Option<PathBuf> {
    variable("LOCALAPPDATA").map(|local| local.join(r"gemma\cache"))
}

/// Returns the directory of files that the user made, where no variable names another.
pub fn data() -> Option<PathBuf> {
    variable("LOCALAPPDATA").map(|local| local.join(r"gemma\data"))
}

/// Returns the directory of settings, where no variable names another.
pub fn config() -> Option<PathBuf> {
    variable("LOCALAPPDATA").map(|local| local.join("gemma"))
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from)
}
