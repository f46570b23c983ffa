//! Injected faults of the host model: one kind of fault, from a given command on.

use super::AccelBuffers;
use super::array::Memory;

/// Kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The command ends in the state ABORT.
    Abort,
    /// The command exceeds its time limit.
    Timeout,
    /// Submitting a command fails.
    Eio,
    /// The device is gone for the rest of the run.
    Enodev,
    /// The state is COMPLETED, and some numbers of the result are wrong but plausible.
    Wrong,
    /// The state is COMPLETED, and no result was written.
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

/// A kind of fault and the number of the first command with it. Commands of the self-test count
/// too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NpuFault {
    pub kind: FaultKind,
    pub from: u64,
}

impl NpuFault {
    pub(super) fn hits(self, command: u64) -> bool {
        command >= self.from
    }
}

/// Parses `abort@3`, which means ABORT from the fourth command on.
impl std::str::FromStr for NpuFault {
    type Err = String;

    fn from_str(text: &str) -> Result<NpuFault, String> {
        let (name, from) = text.split_once('@').unwrap_or((text, "0"));
        let kind = FaultKind::ALL.iter().find(|(n, _)| *n == name).map(|(_, kind)| *kind);
        match (kind, from.parse()) {
            (Some(kind), Ok(from)) => Ok(NpuFault { kind, from }),
            _ => Err(format!(
                "expected KIND or KIND@COMMAND, a kind being one of {}",
                FaultKind::ALL.map(|k| k.0).join(", ")
            )),
        }
    }
}

/// Multiplies every eleventh output of the first core by 1.25.
pub(super) fn damage(buffers: &mut AccelBuffers, results: u64) {
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
