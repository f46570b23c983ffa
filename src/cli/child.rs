//! Jobs of this program as a child process of itself; see [`crate::util::child`].

use crate::cli::io::output::print;
use crate::cli::io::ui::Ui;
use crate::grammar;
use crate::models::chat;
use crate::runtime::devices::backends;
use crate::util::child::role;
use std::ffi::OsString;
use std::process::ExitCode;

/// Does the work of a child process and returns its exit code; `None` if this process is not a
/// child.
pub fn run(argv: &[OsString]) -> Option<ExitCode> {
    let done = |well| Some(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    match role(argv) {
        Some(grammar::ROLE) => return Some(grammar::serve_parent().into()),
        Some(chat::ROLE) => return Some(chat::serve_parent().into()),
        _ => {}
    }
    match backends::as_child(argv)? {
        Ok(shapes) => done(print(&format!("{shapes}\n")).is_ok()),
        Err(error) => {
            Ui::plain().error(&error);
            done(false)
        }
    }
}
