//! Messages and exit codes of ends that no code returns from, see [`crate::os::crash`].

use super::ui::clean;
use crate::error::Kind;
use crate::os::crash::{Crash, say};

/// Prints an error like any other, and returns its exit code.
pub fn report(crash: &Crash) -> u8 {
    match crash {
        Crash::Unreadable(file) => {
            let file = file.as_ref().map_or("a file that is in use".into(), |file| clean(file));
            say(&[
                "error: ",
                &file,
                " became shorter while it was read, or its disk failed\n",
                "help: fetch the file again, and let nothing write to it while it is used\n",
            ]);
            Kind::Model.exit_code()
        }
        Crash::OutOfMemory => {
            say(&[
                "error: there is not enough memory",
                if cfg!(windows) { "" } else { ", or a limit such as ulimit -v forbids more" },
                "\n",
                "help: gemma plan shows what a model needs; a smaller --ctx-size needs less\n",
            ]);
            Kind::Memory.exit_code()
        }
    }
}
