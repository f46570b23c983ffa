//! Runs the program on a pseudo-terminal.

// Each test binary uses only a part of this module.
#![allow(dead_code)]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// A process on a pseudo-terminal: standard input, output and error.
pub struct Terminal {
    pub master: File,
    pub child: Child,
    /// All bytes that the terminal received, the complete characters of them, and the length of the
    /// part that was already searched.
    pub raw: Vec<u8>,
    pub sent: String,
    pub seen: usize,
}

impl Terminal {
    pub fn open(args: &[&str], env: &[(&str, &str)], dir: &Path) -> Terminal {
        Terminal::of_columns(80, args, env, dir)
    }

    /// The same as [`open`](Self::open), on a terminal of another width.
    pub fn of_columns(columns: u16, args: &[&str], env: &[(&str, &str)], dir: &Path) -> Terminal {
        let (mut master, mut slave) = (0, 0);
        let size = libc::winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: both numbers are written by the call, the size is read; the other arguments may
        // be null.
        let made = unsafe {
            libc::openpty(&mut master, &mut slave, std::ptr::null_mut(), std::ptr::null(), &size)
        };
        assert_eq!(made, 0);
        // SAFETY: new descriptors without another owner.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        let mut command = Command::new(env!("CARGO_BIN_EXE_gemma"));
        command.args(args).current_dir(dir).env_clear().env("HOME", dir).env("TERM", "xterm");
        command.envs(env.iter().copied());
        command.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap()).stderr(slave);
        // SAFETY: these may be called between fork and exec. The terminal on standard input becomes
        // the controlling terminal, which sends Ctrl-C.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 });
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        Terminal { master, child, raw: Vec::new(), sent: String::new(), seen: 0 }
    }

    /// Reads until the terminal shows `text` after the part that was already searched.
    ///
    /// Returns the output before it; `None` if the process ends first.
    #[track_caller]
    pub fn find(&mut self, text: &str) -> Option<String> {
        let patience = Instant::now() + Duration::from_secs(120);
        let mut bytes = [0; 4096];
        loop {
            if let Some(at) = self.sent[self.seen..].find(text) {
                let before = self.sent[self.seen..][..at].to_owned();
                self.seen += at + text.len();
                return Some(before);
            }
            let left = &self.sent[self.seen..];
            assert!(Instant::now() < patience, "no {text:?} in {left:?}");
            let n = self.master.read(&mut bytes).unwrap_or(0);
            if n == 0 {
                return None;
            }
            self.raw.extend_from_slice(&bytes[..n]);
            let whole = std::str::from_utf8(&self.raw).map_or_else(|e| e.valid_up_to(), str::len);
            self.sent = std::str::from_utf8(&self.raw[..whole]).unwrap().to_owned();
        }
    }

    /// The same as [`find`](Self::find), for a process that must not end.
    #[track_caller]
    pub fn until(&mut self, text: &str) -> String {
        let Some(before) = self.find(text) else {
            panic!("it ended without {text:?}: {:?}", &self.sent[self.seen..])
        };
        before
    }

    /// Waits for the prompt, which the line editor starts with these bytes.
    ///
    /// Returns the output before it.
    #[track_caller]
    pub fn prompt(&mut self) -> String {
        self.until("\x1b[?2004h")
    }

    /// Types a line and waits until the editor has accepted it.
    #[track_caller]
    pub fn line(&mut self, keys: &str) {
        self.keys(keys);
        self.until("\x1b[?2004l");
    }

    /// Types a line and returns the output up to the next prompt.
    #[track_caller]
    pub fn ask(&mut self, keys: &str) -> String {
        self.line(keys);
        self.prompt()
    }

    pub fn keys(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Sets the width of the window.
    pub fn resize(&self, columns: u16) {
        let size = libc::winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the size is read by the call.
        assert_eq!(unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &size) }, 0);
    }

    /// Returns whether the terminal echoes input and delivers it by lines, as a shell leaves it.
    pub fn is_as_it_was(&self) -> bool {
        // SAFETY: a structure of numbers, which the call writes.
        let (modes, got) = unsafe {
            let mut modes: libc::termios = std::mem::zeroed();
            let got = libc::tcgetattr(self.master.as_raw_fd(), &mut modes);
            (modes, got)
        };
        got == 0
            && modes.c_lflag & (libc::ECHO | libc::ICANON | libc::ISIG)
                == libc::ECHO | libc::ICANON | libc::ISIG
    }

    /// Waits for that state. A chat that ends restores it as its last action.
    pub fn becomes_as_it_was(&self) -> bool {
        let until = Instant::now() + Duration::from_secs(120);
        while !self.is_as_it_was() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.is_as_it_was()
    }

    /// Returns the exit code and all output.
    pub fn end(mut self) -> (Option<i32>, String) {
        // Reading fails once no process has the terminal open. Until then it returns all output.
        let _ = self.master.read_to_end(&mut self.raw);
        (
            self.child.wait().unwrap().code(),
            String::from_utf8(std::mem::take(&mut self.raw)).unwrap(),
        )
    }
}

/// A failing test must not leave a process running.
impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
