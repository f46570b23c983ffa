//! Messages and exit codes for crashes that the program cannot recover from. See
//! [`crate::os::crash`].

use super::ui::clean;
use crate::error::Kind;
use crate::os::crash::{Crash, say};

/// Prints the error of a crash and returns its exit code.
pub fn report(crash: &Crash) -> u8 {
    match crash {
        Crash::Unreadable(file) => {
            let file = file.as_ref().map_or("a file that is in use".into(), |file| clean(file));
            say(&[
                "error: ",
                &file,
                " became shorter while it was read, or its disk failed\n",
                "help: fetch the file again, and do not change it while it is used\n",
            ]);
            Kind::Model.exit_code()
        }
        Crash::OutOfMemory => {
            say(&[
                "error: there is not enough memory",
                if cfg!(windows) { "" } else { ", or a limit such as ulimit -v was reached" },
                "\n",
                "help: gemma plan shows what a model needs; a smaller --ctx-size needs less\n",
            ]);
            Kind::Memory.exit_code()
        }
    }
}
