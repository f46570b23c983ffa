//! Directories of the user, as defined by the XDG Base Directory Specification.

use std::path::PathBuf;

/// Returns the home directory.
pub fn home() -> Option<PathBuf> {
    std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from)
}

/// Returns the default directory of cache files.
pub fn cache() -> Option<PathBuf> {
    home().map(|home| home.join(".cache/gemma"))
}

/// Returns the default directory of the user's data files.
pub fn data() -> Option<PathBuf> {
    home().map(|home| home.join(".local/share/gemma"))
}

/// Returns the default directory of settings.
pub fn config() -> Option<PathBuf> {
    home().map(|home| home.join(".config/gemma"))
}
