//! Faults that the model is told to have, one kind from one command on.

use super::Buffers;
use super::array::Memory;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The command ends in the state ABORT.
    Abort,
    /// The command does not end in time.
    Timeout,
    /// Handing in a command fails.
    Eio,
    /// The device is gone, for good.
    Enodev,
    /// COMPLETED, and numbers in the result that are wrong but look right.
    Wrong,
    /// COMPLETED, and nothing was written.
    Stale,
}

impl FaultKind {
    pub const ALL: [(&'static str, FaultKind); 6] = [
        ("abort", FaultKind::Abort),
        ("timeout", FaultKind::Timeout),
        ("eio", FaultKind::Eio),
        ("enodev", FaultKind::Enodev),
        ("wrong", FaultKind::Wrong),
        ("stale", FaultKind::Stale),
    ];
}

/// A kind of fault, and the first command that has it; the self-test's commands count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    pub from: u64,
}

impl Fault {
    pub(super) fn hits(self, command: u64) -> bool {
        command >= self.from
    }
}

/// `abort@3`: from the fourth command on.
impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let (name, from) = text.split_once('@').unwrap_or((text, "0"));
        let kind = FaultKind::ALL.iter().find(|(n, _)| *n == name).map(|(_, kind)| *kind);
        match (kind, from.parse()) {
            (Some(kind), Ok(from)) => Ok(Fault { kind, from }),
            _ => Err(format!(
                "expected KIND or KIND@COMMAND, a kind being one of {}",
                FaultKind::ALL.map(|k| k.0).join(", ")
            )),
        }
    }
}

/// Makes every eleventh output of the first core a quarter larger.
pub(super) fn damage(buffers: &mut Buffers, results: u64) {
    for i in (0..4096u64).step_by(11) {
        let at = results + 4 * i;
        let Some(value) =
            buffers.read(at, 4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")))
        else {
            return;
        };
        let _ = buffers.write(at, &(1.25 * value).to_le_bytes());
    }
}
