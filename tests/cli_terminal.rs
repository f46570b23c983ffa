//! What a terminal is sent: colour where it is wanted, a final line break, figures, and no question.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::Command;

/// Runs on a terminal of its own: standard input, output and error. Returns the exit code and what the terminal was sent.
fn on_terminal(args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String) {
    let (mut master, mut slave) = (0, 0);
    // SAFETY: both numbers are written by the call; the other arguments may be null.
    let made = unsafe { libc::openpty(&mut master, &mut slave, std::ptr::null_mut(), std::ptr::null(), std::ptr::null()) };
    assert_eq!(made, 0);
    // SAFETY: fresh descriptors that nobody else owns.
    let (mut master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gemma"));
    command
        .args(args)
        .current_dir(&dir)
        .env_clear()
        .env("HOME", dir.path())
        .env("TERM", "xterm")
        .env("GEMMA_DRAFT_MEMORY", "off")
        .envs(env.iter().copied());
    command.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap()).stderr(slave);
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut sent = Vec::new();
    // Reading a terminal that everyone has left fails; until then it gives all there is.
    let _ = master.read_to_end(&mut sent);
    (child.wait().unwrap().code(), String::from_utf8(sent).unwrap())
}

#[test]
fn a_terminal_gets_colour_a_final_line_break_and_figures() {
    let args = ["generate", "Hi.", "-n", "4", "--seed", "3"];
    let (code, text) = on_terminal(&args, &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("\x1b[1;33mnote:\x1b[0m") && text.contains("seed 3"), "{text:?}");
    for env in [("NO_COLOR", "1"), ("CLICOLOR", "0"), ("TERM", "dumb")] {
        let (_, text) = on_terminal(&args, &[env]);
        assert!(!text.contains("\x1b[1;33m") && !text.contains("\x1b[2m"), "{env:?}: {text:?}");
        assert!(text.contains("\r\nprompt "), "the text ends in a line break: {text:?}");
    }
    let (_, never) = on_terminal(&[&args[..], &["--color", "never", "--progress", "off"]].concat(), &[]);
    assert!(!never.contains('\x1b'), "{never:?}");
    let (_, dumb) = on_terminal(&args, &[("TERM", "dumb")]);
    assert!(!dumb.contains('\x1b'), "a dumb terminal gets no bars either: {dumb:?}");
    let (_, quiet) = on_terminal(&[&args[..], &["-q"]].concat(), &[]);
    assert!(!quiet.contains('\x1b') && !quiet.contains("note") && quiet.ends_with("\r\n"), "{quiet:?}");
}

#[test]
fn a_terminal_is_never_asked_for_input() {
    for args in [&["generate"][..], &["generate", "-"], &["tokenize"]] {
        let (code, text) = on_terminal(args, &[]);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("help:"), "{text}");
    }
}
