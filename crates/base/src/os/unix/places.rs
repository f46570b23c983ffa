//! Directories of the user, as the XDG Base Directory Specification names them.

use std::path::PathBuf;

/// Returns the home directory.
pub fn home() -> Option<PathBuf> {
    std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from)
}

/// Returns the directory of files that only save time, where no variable names another.
pub fn cache() -> Option<PathBuf> {
    home().map(|home| home.join(".cache/gemma"))
}

/// Returns the directory of files that the user made, where no variable names another.
pub fn data() -> Option<PathBuf> {
    home().map(|home| home.join(".local/share/gemma"))
}

/// Returns the directory of settings, where no variable names another.
pub fn config() -> Option<PathBuf> {
    home().map(|home| home.join(".config/gemma"))
}
