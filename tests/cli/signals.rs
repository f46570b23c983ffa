//! Ctrl-C and termination, as a shell sees them. The signals exist on Unix only.
#![cfg(unix)]

use crate::shell;
use serde_json::Value;
use shell::{BINARY, code, command, gemma_in};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

/// A text that takes far longer than a signal.
const LONG: [&str; 9] =
    ["generate", "Hello there", "--ignore-eos", "-n", "1000", "--seed", "5", "-q", "--draft=off"];

fn start(dir: &Path, more: &[&str]) -> Child {
    let mut command = command(BINARY, dir);
    command.args(LONG).args(more);
    command.spawn().unwrap()
}

fn send(child: &Child, signal: i32) {
    // SAFETY: a signal to a child that has not been waited for, so the id is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

/// Sends `signal` after the first text. Returns the exit code, all text, and the statistics.
fn stopped_while_decoding(signal: i32) -> (i32, Vec<u8>, Value) {
    let dir = tempfile::tempdir().unwrap();
    let mut child = start(dir.path(), &["--stats-file", "s.json"]);
    let mut pipe = child.stdout.take().unwrap();
    let mut text = vec![0];
    pipe.read_exact(&mut text).unwrap();
    send(&child, signal);
    pipe.read_to_end(&mut text).unwrap();
    let code = code(child.wait().unwrap());
    (code, text, serde_json::from_slice(&fs::read(dir.path().join("s.json")).unwrap()).unwrap())
}

#[test]
fn the_first_signal_while_decoding_keeps_the_text_so_far() {
    let dir = tempfile::tempdir().unwrap();
    let whole = gemma_in(dir.path(), &LONG, b"").ok().out;
    for (signal, expected) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let (code, text, stats) = stopped_while_decoding(signal);
        assert_eq!(code, expected);
        assert!(
            whole.starts_with(&text) && text.len() < whole.len(),
            "{}",
            String::from_utf8_lossy(&text)
        );
        assert_eq!(stats["finish_reason"], "interrupted");
        let tokens = stats["usage"]["completion_tokens"].as_u64().unwrap();
        assert!((1..1000).contains(&tokens), "{tokens}");
    }
}

#[test]
fn an_interrupted_file_and_record_are_complete() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = start(dir.path(), &["--format", "stream-json"]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|l| l.unwrap());
    let first = lines.next().unwrap();
    send(&child, libc::SIGINT);
    let lines: Vec<Value> =
        std::iter::once(first).chain(lines).map(|l| serde_json::from_str(&l).unwrap()).collect();
    assert_eq!(code(child.wait().unwrap()), 130);
    let (last, pieces) = lines.split_last().unwrap();
    assert_eq!((&last["type"], &last["finish_reason"]), (&"result".into(), &"interrupted".into()));
    assert_eq!(
        last["text"],
        pieces.iter().map(|l| l["text"].as_str().unwrap()).collect::<String>()
    );
}

/// Returns the number of bytes in a pipe.
fn waiting(pipe: &impl AsRawFd) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int to the address given.
    assert_eq!(unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &mut count) }, 0);
    count as usize
}

/// The reader of the output does not read, so the process hangs in a write. Only the second signal
/// ends it.
#[test]
#[cfg(target_os = "linux")]
fn the_second_signal_ends_at_once() {
    const PIPE: usize = 4096;
    for (signal, expected) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let dir = tempfile::tempdir().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        // SAFETY: sets the size of a pipe that this test owns.
        let size =
            unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE as libc::c_int) };
        assert_eq!(size, PIPE as i32);
        let mut command = command(BINARY, dir.path());
        let mut child =
            command.args(LONG).args(["--format", "stream-json"]).stdout(writer).spawn().unwrap();
        drop(command);
        // A line has under 100 bytes and the result more than 500, so the next write blocks here in
        // any case.
        while waiting(&reader) < PIPE - 200 {
            assert_eq!(child.try_wait().unwrap(), None);
            std::thread::sleep(Duration::from_millis(1));
        }
        send(&child, signal);
        // The second signal may only be sent after the first was handled. Since that cannot be
        // observed, it is sent repeatedly.
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            send(&child, signal);
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(code(status), expected);
    }
}

/// On a busy machine a signal may come late. If the text has already begun, the test tries again.
#[test]
fn a_signal_while_reading_the_prompt_ends_with_130_and_no_text() {
    let dir = tempfile::tempdir().unwrap();
    // As long as the context allows.
    let words: String = (0..1990).map(|i| ["river ", "stone ", "yellow "][i % 3]).collect();
    fs::write(dir.path().join("long.txt"), words).unwrap();
    let without_text = |_| {
        let mut command = command(BINARY, dir.path());
        command.args([
            "generate",
            "-f",
            "long.txt",
            "--raw",
            "-t",
            "1",
            "-n",
            "50",
            "--ignore-eos",
            "-v",
            "--draft=off",
        ]);
        let mut child = command.args(["-o", "out.txt"]).spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        // The last output before the prompt is read.
        let mut line = String::new();
        while !line.contains("loaded in") {
            line.clear();
            assert_ne!(said.read_line(&mut line).unwrap(), 0, "it ended too soon");
        }
        send(&child, libc::SIGINT);
        let code = code(child.wait().unwrap());
        let text = fs::read_to_string(dir.path().join("out.txt")).unwrap_or_default();
        let _ = fs::remove_file(dir.path().join("out.txt"));
        assert!(code == 130 || !text.is_empty());
        code == 130 && text.is_empty()
    };
    assert!((0..8).any(without_text), "no signal ended it before there was text");
    assert_eq!(
        fs::read_dir(dir.path())
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with(".gemma"))
            .count(),
        0
    );
}
