//! Directories of the user: `%USERPROFILE%` and `%LOCALAPPDATA%`.

use std::path::PathBuf;

/// Returns the home directory.
pub fn home() -> Option<PathBuf> {
    variable("USERPROFILE")
}

/// Returns the default directory of cache files.
pub fn cache() -> Option<PathBuf> {
    variable("LOCALAPPDATA").map(|local| local.join(r"gemma\cache"))
}

/// Returns the default directory of the user's data files.
pub fn data() -> Option<PathBuf> {
    variable("LOCALAPPDATA").map(|local| local.join(r"gemma\data"))
}

/// Returns the default directory of settings.
pub fn config() -> Option<PathBuf> {
    variable("LOCALAPPDATA").map(|local| local.join("gemma"))
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from)
}
