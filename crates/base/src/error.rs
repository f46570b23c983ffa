//! Failures as the command line reports them: an exit code, a message and a remedy.
//!
//! A failure that the user can fix carries a [`Fault`] in its `anyhow` chain. Every other failure
//! is a runtime failure (exit 1).

use serde::{Deserialize, Serialize};
use std::fmt;

/// Kinds of failure with their own exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Wrong use of the command line: exit 2.
    Usage,
    /// A model, tokenizer or input file is invalid or missing: exit 3.
    Model,
    /// The device is absent or was lost: exit 4.
    Device,
    /// The model or request does not fit in memory: exit 5.
    Memory,
    /// The prompt exceeds the context: exit 7.
    Context,
    /// The text ended before its grammar was complete: exit 8.
    Incomplete,
    /// Another failure with a remedy, such as a full disk: exit 1.
    Failure,
}

impl Kind {
    pub const fn exit_code(self) -> u8 {
        match self {
            Kind::Usage => 2,
            Kind::Model => 3,
            Kind::Device => 4,
            Kind::Memory => 5,
            Kind::Context => 7,
            Kind::Incomplete => 8,
            Kind::Failure => 1,
        }
    }
}

/// A failure with an exit code and an optional remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub kind: Kind,
    pub what: String,
    /// Remedy, printed as `help: ...`.
    pub help: Option<String>,
}

impl Fault {
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Fault { kind, what: what.into(), help: None }
    }

    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Kind::Usage, what)
    }

    pub fn model(what: impl Into<String>) -> Self {
        Self::new(Kind::Model, what)
    }

    /// Returns the fault of a model that computed non-finite numbers.
    pub fn damaged(what: impl Into<String>) -> Self {
        let fault = Self::new(Kind::Failure, what);
        fault.help(
            "a weight is damaged: gemma inspect --verify finds most, or fetch the model again",
        )
    }

    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

/// Returns the error if a required thread cannot be started.
pub fn no_thread() -> Fault {
    let help = match cfg!(windows) {
        true => "--threads 1 needs fewer",
        false => {
            "--threads 1 needs fewer; ulimit -u shows how many processes and threads you may have"
        }
    };
    Fault::new(Kind::Failure, "no thread can be started").help(help)
}

/// Returns the error if no process can be started for work that must run within limits.
pub fn no_process() -> Fault {
    let help = match cfg!(windows) {
        true => "close other programs: there is too little memory",
        false => "a limit on processes (ulimit -u) or on memory (ulimit -v) is too low",
    };
    Fault::new(Kind::Memory, "no process can be started for what must run within limits").help(help)
}

/// Returns the fault on a system where a child process cannot be limited.
pub fn no_limits(what: &str) -> Fault {
    let why = format!("{what} runs only in a process with limits, and the system sets none");
    Fault::new(Kind::Failure, why).help("on Linux, mount /proc; see docs/SECURITY.md")
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Fault {}

/// Returns the first fault in a chain of causes, including one added by `.context(Fault)`.
pub fn fault_of(error: &anyhow::Error) -> Option<&Fault> {
    error
        .downcast_ref::<Fault>()
        .or_else(|| error.chain().find_map(|cause| cause.downcast_ref::<Fault>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_fault_is_found_under_and_as_context() {
        let below = anyhow::Error::new(Fault::model("bad header")).context("opening x");
        assert_eq!(fault_of(&below).unwrap().kind.exit_code(), 3);
        let above = std::fs::read("/nonexistent")
            .context(Fault::usage("no such file").help("check the path"))
            .unwrap_err();
        assert_eq!(fault_of(&above).unwrap().help.as_deref(), Some("check the path"));
        assert!(fault_of(&anyhow::anyhow!("plain")).is_none());
    }
}
