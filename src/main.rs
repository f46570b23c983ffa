//! Parses the command line, runs the command, prints the error chain, and exits.

use gemma::cli;
use gemma::os::{crash, signals};
use gemma::util::child;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: crash::Allocator = crash::Allocator;

/// Runs before main and before Rust's runtime.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the loader calls every address in this section as a function without results. It passes
// arguments that this function does not read.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = signals::mark_closed_stdout;

fn main() -> ExitCode {
    gemma::testing::prepare();
    signals::prepare_writes();
    let argv: Vec<_> = std::env::args_os().collect();
    if let Some(code) = cli::child::run(&argv) {
        return code;
    }
    child::require();
    crash::watch(cli::io::crash::report);
    let (command, typed) = match cli::commands::parse(&argv) {
        Ok(parsed) => parsed,
        // Help and version end here with 0, wrong usage with 2.
        Err(early) => return cli::hints::report(early, &argv),
    };
    match cli::commands::run(&command, &typed) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            typed.ui.error(&error);
            ExitCode::from(gemma::error::fault_of(&error).map_or(1, |fault| fault.kind.exit_code()))
        }
    }
}
