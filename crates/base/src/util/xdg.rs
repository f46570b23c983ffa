//! Directories of the user, as defined by the XDG Base Directory Specification, with the system's
//! defaults. A relative path in a variable is ignored, as the specification requires.

use crate::os::places;
use std::path::PathBuf;

/// Returns the directory of cache files. Users may delete any of them.
///
/// `$XDG_CACHE_HOME/gemma`, or `~/.cache/gemma` (Windows: `%LOCALAPPDATA%\gemma\cache`); `None`
/// without a home.
pub fn cache() -> Option<PathBuf> {
    of_program("XDG_CACHE_HOME", places::cache())
}

/// Returns the directory of settings: `$XDG_CONFIG_HOME/gemma`, or `~/.config/gemma` (Windows:
/// `%LOCALAPPDATA%\gemma`).
pub fn config() -> Option<PathBuf> {
    of_program("XDG_CONFIG_HOME", places::config())
}

/// Returns the directory of the user's data files: `$XDG_DATA_HOME/gemma`, or
/// `~/.local/share/gemma` (Windows: `%LOCALAPPDATA%\gemma\data`).
pub fn data() -> Option<PathBuf> {
    of_program("XDG_DATA_HOME", places::data())
}

/// Returns the directory of files that last until the user logs out: `$XDG_RUNTIME_DIR`, if it
/// exists.
pub fn runtime() -> Option<PathBuf> {
    absolute("XDG_RUNTIME_DIR").filter(|path| path.is_dir())
}

fn of_program(variable: &str, usual: Option<PathBuf>) -> Option<PathBuf> {
    let chosen = absolute(variable).map(|base| base.join("gemma"));
    chosen.or(usual).filter(|path| path.is_absolute())
}

fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}
