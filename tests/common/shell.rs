//! Runs the binary as a shell would, undisturbed by this machine's settings.

// Each test binary uses its own part of this.
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

    /// Asserts a failure with this code, nothing on standard output, and messages that name all of
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

/// The exit code as a shell counts it: death by signal n is 128 + n.
pub fn code(status: ExitStatus) -> i32 {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(windows)]
    let signal = None;
    status.code().unwrap_or_else(|| 128 + signal.unwrap_or(0))
}

/// The command line that runs a program for another processor here, from `scripts/cross.sh`.
pub fn emulator() -> Option<String> {
    std::env::var("TEST_EMULATOR").ok()
}

/// `program` in `dir`, without this machine's settings, caches and terminal. Texts end as the model
/// ended them.
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
    // Mesa's driver on the processor compiles kernels for many seconds: those may be shared.
    command.env("MESA_SHADER_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/mesa"));
    // Runs of other tests may use the same driver meanwhile.
    command.env("XDG_RUNTIME_DIR", dir);
    // Sockets need the first of these on Windows, and temporary files the second.
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

/// Shells start what runs in the background with Ctrl-C ignored, and processes below inherit that.
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

/// Feeds `input` and waits. A process that ends before it has read everything is no error here.
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

/// The binary in `dir` with these arguments and this on standard input (nothing: `</dev/null`).
pub fn gemma_in(dir: &Path, args: &[&str], input: &[u8]) -> Run {
    let mut command = command(BINARY, dir);
    command.args(args);
    wait(command, input)
}

/// The same in an empty directory.
pub fn gemma(args: &[&str], input: &[u8]) -> Run {
    gemma_in(tempfile::tempdir().unwrap().path(), args, input)
}

/// `bash -c script` in `dir`, where `$G` is the binary.
pub fn bash(dir: &Path, script: &str) -> Run {
    let mut command = command("bash", dir);
    command.env("G", BINARY).args(["-c", script]);
    wait(command, b"")
}

/// Makes the bundled target a directory `m` in `dir`, with these files beside or in the place of
/// its own. It has no template: Gemma's own shows the model all messages, the demo's the last one.
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
