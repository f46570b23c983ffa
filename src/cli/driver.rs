//! The child process that tries a GPU's driver for another process of this program.

use super::output::print;
use super::ui::Ui;
use crate::runtime::driver;
use std::ffi::OsString;
use std::process::ExitCode;

/// Tries a driver if this process was started for that, and says how to exit; `None` if it was not.
pub fn as_child(argv: &[OsString]) -> Option<ExitCode> {
    let found = driver::as_child(argv)?;
    Some(match found {
        Ok(shapes) => {
            print(&format!("{shapes}\n")).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
        }
        Err(error) => {
            Ui::plain().error(&error);
            ExitCode::FAILURE
        }
    })
}
