//! Runs the program as a shell would, without this machine's settings.

// Each test binary uses only a part of this module.
#![allow(dead_code)]

use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

pub const BINARY: &str = env!("CARGO_BIN_EXE_gemma");

/// Output and exit code of a run.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub out: Vec<u8>,
    pub err: String,
}

impl Run {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Asserts success.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// Asserts a failure with this code, an empty standard output, and messages that contain all of
    /// `words`.
    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) -> Self {
        assert_eq!((self.code, self.text()), (code, ""), "{}", self.err);
        assert!(self.err.contains("error: "), "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in: {}", self.err);
        }
        self
    }
}

/// Returns the exit code that a shell would report: 128 + n after signal n.
pub fn code(status: ExitStatus) -> i32 {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(windows)]
    let signal = None;
    status.code().unwrap_or_else(|| 128 + signal.unwrap_or(0))
}

/// Returns the command of an emulator that runs the program here. `scripts/cross.sh` sets it.
pub fn emulator() -> Option<String> {
    std::env::var("TEST_EMULATOR").ok()
}

/// Returns a command in `dir` without this machine's settings, caches and terminal.
///
/// Texts get no added line break.
pub fn command(program: &str, dir: &Path) -> Command {
    let emulator = emulator().filter(|_| program == BINARY).unwrap_or_default();
    let mut words = emulator.split_whitespace().chain([program]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env(if cfg!(windows) { "USERPROFILE" } else { "HOME" }, dir)
        .env("TERM", "xterm")
        .env("GEMMA_NO_NEWLINE", "1");
    // Mesa's driver on the processor compiles kernels for many seconds. Runs share its cache.
    command.env("MESA_SHADER_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/mesa"));
    // Runs of other tests may use the same driver at the same time.
    command.env("XDG_RUNTIME_DIR", dir);
    // On Windows, sockets need the first of these and temporary files the second.
    for name in ["SystemRoot", "TEMP"] {
        command.envs(std::env::var_os(name).map(|value| (name, value)));
    }
    #[cfg(windows)]
    command.env("LOCALAPPDATA", dir.join("local"));
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    #[cfg(unix)]
    hear_interrupts(&mut command);
    command
}

/// Shells ignore Ctrl-C in background jobs, and child processes inherit that. This restores it.
#[cfg(unix)]
fn hear_interrupts(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: `signal` may be called between fork and exec; SIG_DFL installs no code.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
}

/// Makes a symbolic link to a file, or a copy of it on Windows.
pub fn link(to: &Path, path: &Path) {
    #[cfg(unix)]
    std::os::unix::fs::symlink(to, path).unwrap();
    #[cfg(windows)]
    fs::copy(to, path).unwrap();
}

/// Writes `input` and waits for the end. The process may end before it has read everything.
pub fn wait(mut command: Command, input: &[u8]) -> Run {
    if !input.is_empty() {
        command.stdin(Stdio::piped());
    }
    let mut child = command.spawn().unwrap();
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.map(|mut pipe| pipe.write_all(input)));
        child.wait_with_output().unwrap()
    });
    Run {
        code: code(output.status),
        out: output.stdout,
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs the program in `dir` with these arguments and this standard input (empty means
/// `</dev/null`).
pub fn gemma_in(dir: &Path, args: &[&str], input: &[u8]) -> Run {
    let mut command = command(BINARY, dir);
    command.args(args);
    wait(command, input)
}

/// The same in an empty directory.
pub fn gemma(args: &[&str], input: &[u8]) -> Run {
    gemma_in(tempfile::tempdir().unwrap().path(), args, input)
}

/// Runs `bash -c script` in `dir`. `$G` is the program.
pub fn bash(dir: &Path, script: &str) -> Run {
    let mut command = command("bash", dir);
    command.env("G", BINARY).args(["-c", script]);
    wait(command, b"")
}

/// Writes the bundled target as a directory `m` in `dir`, with these files added or replaced.
///
/// It has no template: Gemma's own shows the model all messages, the demo's only the last one.
pub fn with_model(dir: &Path, own: &[(&str, &[u8])]) {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/demo-target");
    fs::create_dir(dir.join("m")).unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        link(&bundled.join(name), &dir.join("m").join(name));
    }
    for (name, bytes) in own {
        let _ = fs::remove_file(dir.join("m").join(name));
        fs::write(dir.join("m").join(name), bytes).unwrap();
    }
}
