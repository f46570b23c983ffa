//! The user's directories, as the XDG Base Directory Specification names them. As it asks, a path
//! that is not absolute counts as none: it would depend on the working directory.

use std::path::PathBuf;

/// Files that only save time: `$XDG_CACHE_HOME/gemma`, or `~/.cache/gemma`; `None` without a home.
/// Every file of it may be deleted.
pub fn cache() -> Option<PathBuf> {
    of_program("XDG_CACHE_HOME", ".cache")
}

/// Settings: `$XDG_CONFIG_HOME/gemma`, or `~/.config/gemma`.
pub fn config() -> Option<PathBuf> {
    of_program("XDG_CONFIG_HOME", ".config")
}

/// Files that live as long as the user is logged in: `$XDG_RUNTIME_DIR`, if there is one.
pub fn runtime() -> Option<PathBuf> {
    absolute("XDG_RUNTIME_DIR").filter(|path| path.is_dir())
}

fn of_program(variable: &str, below_home: &str) -> Option<PathBuf> {
    let base = absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(below_home)));
    base.map(|base| base.join("gemma"))
}

fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}
