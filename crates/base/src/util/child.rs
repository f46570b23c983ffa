//! Child processes of this program that handle untrusted input under system limits.
//!
//! A grammar or a chat template is a program: its author determines how much memory, stack and time
//! it uses. A child process limits all three, and its failure is an error of one request.
//!
//! Parent and child exchange frames over the child's standard input and output. A frame is a JSON
//! header followed by raw bytes. The child's standard error is discarded.
//!
//! Start reading at [`Child`] (parent) and [`confined`] (child).

use crate::os::process::{self, Exit};
use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ffi::OsString;
use std::io::{Error, ErrorKind, Read, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// Most bytes of each part of a frame.
const LONGEST: u64 = 1 << 30;
/// Interval at which a waiting parent checks whether the answer is still wanted.
const LOOK: Duration = Duration::from_millis(50);

/// Exit code of a child if the system cannot set limits.
const UNLIMITED: u8 = 71;

/// The program's own file, or `None` if the system does not report it. Unset if children are not
/// required.
static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Requires that children of this program handle all untrusted input.
///
/// A process that never calls this, such as a test of the library, handles it without limits.
pub fn require() {
    let _ = PROGRAM.set(process::own_program());
}

/// Returns whether a child must handle untrusted input.
pub fn is_required() -> bool {
    PROGRAM.get().is_some()
}

/// Returns the command that starts this program as a child with these arguments.
pub fn command(args: &[&str]) -> Result<Command> {
    let program = PROGRAM.get().and_then(Option::as_ref);
    let program = program.context("the system does not tell the program its own file (/proc)")?;
    let mut command = Command::new(program);
    command.args(args);
    Ok(command)
}

/// Limits of a child.
#[derive(Clone, Copy, Debug)]
pub struct ChildLimits {
    /// Bytes of address space in addition to the program itself and `stack`.
    pub memory: u64,
    /// Stack size for the work, in bytes.
    pub stack: usize,
}

/// Reason why a child ended before it answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildFailure {
    /// It used up its processor time.
    Time,
    /// It exceeded its memory or stack limit.
    Memory,
    /// The parent no longer wants the answer.
    Unwanted,
    /// The system cannot set limits, so the child did nothing.
    Unlimited,
    /// It panicked, or a signal from outside ended it.
    Failed,
}

/// Parent's handle of a running child. Dropping it kills the process.
pub struct Child {
    process: std::process::Child,
    input: ChildStdin,
    output: ChildStdout,
}

impl Child {
    /// Starts a child with this role, see [`role`].
    pub fn start(role: &str) -> Result<Child> {
        // A second arena of the allocator would reserve address space that counts towards the
        // limit.
        let mut command = command(&[role])?;
        command.env("MALLOC_ARENA_MAX", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        process::shield_from_terminal(&mut command);
        let mut process = command.spawn()?;
        let input = process.stdin.take().expect("it is piped");
        let output = process.stdout.take().expect("it is piped");
        Ok(Child { process, input, output })
    }

    /// Sends a frame. [`receive`](Self::receive) reports a child that has ended.
    pub fn send(&mut self, header: &impl Serialize, raw: &[u8]) {
        let _ = write_frame(&mut self.input, header, raw);
    }

    /// Waits for a frame. Calls `is_wanted` regularly while there is none.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<(T, Vec<u8>), ChildFailure> {
        while !process::wait_for_output(&self.output, LOOK) {
            if !is_wanted() {
                let _ = self.process.kill();
                return Err(ChildFailure::Unwanted);
            }
        }
        match read_frame(&mut self.output) {
            Ok(Some(frame)) => Ok(frame),
            _ => Err(self.end()),
        }
    }

    /// Returns why the process ended. Kills it if it still runs.
    fn end(&mut self) -> ChildFailure {
        let status = match self.process.try_wait() {
            Ok(Some(status)) => Some(status),
            // The output closes just before the process ends.
            _ => {
                std::thread::sleep(LOOK);
                let _ = self.process.kill();
                self.process.wait().ok()
            }
        };
        match status.map(Exit::of_status) {
            Some(Exit::ProcessorTime) => ChildFailure::Time,
            Some(Exit::Memory) => ChildFailure::Memory,
            Some(Exit::Code(code)) if code == i32::from(UNLIMITED) => ChildFailure::Unlimited,
            _ => ChildFailure::Failed,
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Waits in a child for a frame of its parent; `None` if the parent is gone.
pub fn receive<T: DeserializeOwned>() -> Option<(T, Vec<u8>)> {
    read_frame(&mut std::io::stdin().lock()).ok().flatten()
}

/// Sends a frame from a child to its parent. Ends the child if the parent is gone.
pub fn send(header: &impl Serialize, raw: &[u8]) {
    if write_frame(&mut std::io::stdout().lock(), header, raw).is_err() {
        std::process::exit(1);
    }
}

/// Returns the role that this process was started with as a child, if any.
pub fn role(argv: &[OsString]) -> Option<&str> {
    match argv {
        [_, role] => role.to_str(),
        _ => None,
    }
}

/// Sets this process's limits and runs `work` with a stack of the given size.
///
/// Returns the exit code; a panic is silent. Does not run `work` if limits cannot be set.
pub fn confined(limits: ChildLimits, work: impl FnOnce() + Send) -> u8 {
    std::panic::set_hook(Box::new(|_| {}));
    if !process::limit_memory(limits.memory + limits.stack as u64) {
        return UNLIMITED;
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(limits.stack);
        let is_done = thread.spawn_scoped(scope, work).is_ok_and(|thread| thread.join().is_ok());
        u8::from(!is_done)
    })
}

/// Sets a limit of `more` processor time, after which this child ends; zero removes the limit. If
/// the system has no such limit, the child ends at once.
pub fn limit_time(more: Duration) {
    if !process::limit_processor_time(more) {
        std::process::exit(UNLIMITED.into());
    }
}

fn write_frame(out: &mut impl Write, header: &impl Serialize, raw: &[u8]) -> Result<()> {
    let header = serde_json::to_vec(header)?;
    let mut bytes = Vec::with_capacity(16 + header.len() + raw.len());
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend((raw.len() as u64).to_le_bytes());
    bytes.extend(header);
    bytes.extend(raw);
    out.write_all(&bytes)?;
    Ok(out.flush()?)
}

/// Reads a frame; `None` at the end of the stream.
fn read_frame<T: DeserializeOwned>(from: &mut impl Read) -> Result<Option<(T, Vec<u8>)>> {
    let mut lengths = [0; 16];
    match from.read_exact(&mut lengths) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = |at: usize| u64::from_le_bytes(lengths[at..at + 8].try_into().expect("8 bytes"));
    let mut part = |length: u64| {
        if length > LONGEST {
            return Err(Error::from(ErrorKind::InvalidData));
        }
        let mut bytes = vec![0; length as usize];
        from.read_exact(&mut bytes).map(|()| bytes)
    };
    let (header, raw) = (part(length(0))?, part(length(8))?);
    Ok(Some((serde_json::from_slice(&header)?, raw)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &("a", 7), b"raw").unwrap();
        write_frame(&mut bytes, &("b", 8), b"").unwrap();
        let mut from = &bytes[..];
        let mut next = || read_frame::<(String, u8)>(&mut from);
        assert_eq!(next().unwrap(), Some((("a".into(), 7), b"raw".to_vec())));
        assert_eq!(next().unwrap(), Some((("b".into(), 8), Vec::new())));
        assert_eq!(next().unwrap(), None);
        assert!(read_frame::<u8>(&mut &bytes[..20]).is_err());
        let huge = [&u64::MAX.to_le_bytes()[..], &[0; 8]].concat();
        assert!(read_frame::<u8>(&mut &huge[..]).is_err());
    }
}
