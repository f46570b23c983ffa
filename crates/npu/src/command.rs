//! The packet in a command buffer: the instruction stream, its buffers, and the state, which the
//! driver writes.

use anyhow::{Result, bail, ensure};

/// Opcode that runs one compute unit. The payload is its registers.
const START_CU: u32 = 0;
/// Limit for the payload words of a firmware message.
const MAX_WORDS: usize = 19;
/// Payload words before the buffers' addresses.
const HEAD_WORDS: usize = 5;
/// First argument of a unit that was built with mlir-aie: run instructions.
const RUN_INSTRUCTIONS: u64 = 3;
/// Bytes of a command buffer.
pub const BYTES: usize = 4096;

/// State of a command, in the low bits of the packet's first word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    New,
    Completed,
    Error,
    Abort,
    Timeout,
    /// Running, or an unknown state.
    Other(u32),
}

impl State {
    pub fn of(word: u32) -> State {
        match word & 0xf {
            1 => State::New,
            4 => State::Completed,
            5 => State::Error,
            6 => State::Abort,
            8 => State::Timeout,
            other => State::Other(other),
        }
    }

    /// Returns the packet's first word with this state.
    pub fn put(self, word: u32) -> u32 {
        let code = match self {
            State::New => 1,
            State::Completed => 4,
            State::Error => 5,
            State::Abort => 6,
            State::Timeout => 8,
            State::Other(other) => other & 0xf,
        };
        word & !0xf | code
    }
}

/// Content of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Device address of the stream, and its length in words.
    pub stream: u64,
    pub words: u32,
    /// Device addresses of the buffers.
    pub arguments: Vec<u64>,
}

fn split(v: u64) -> [u32; 2] {
    [v as u32, (v >> 32) as u32]
}

fn join(words: &[u32]) -> u64 {
    words[0] as u64 | (words[1] as u64) << 32
}

impl Command {
    /// Returns the packet for compute unit 0.
    pub fn start_cu(&self) -> Result<Vec<u32>> {
        let mut payload = [split(RUN_INSTRUCTIONS), split(self.stream)].concat();
        payload.push(self.words);
        payload.extend(self.arguments.iter().flat_map(|a| split(*a)));
        ensure!(
            payload.len() <= MAX_WORDS,
            "{} payload words: a message holds {MAX_WORDS}, which is 7 buffers",
            payload.len()
        );
        let head = START_CU << 23 | (payload.len() as u32 + 1) << 12;
        let mut packet = vec![State::New.put(head), 1];
        packet.extend(payload);
        Ok(packet)
    }

    /// Parses a packet as the driver and the firmware do.
    pub fn decode(packet: &[u32]) -> Result<Command> {
        let [head, mask, ref rest @ ..] = *packet else {
            bail!("a packet of {} words", packet.len())
        };
        let (count, opcode) = ((head >> 12 & 0x7ff) as usize, head >> 23 & 0x1f);
        ensure!(State::of(head) == State::New, "the packet's state is {:?}", State::of(head));
        ensure!(head >> 10 & 3 == 0 && mask == 1, "compute units {mask:#x}: there is one");
        ensure!(count >= 1 && count - 1 <= rest.len(), "the packet says {count} words");
        let payload = &rest[..count - 1];
        ensure!(opcode == START_CU, "unknown opcode {opcode}");
        ensure!(
            (HEAD_WORDS..=MAX_WORDS).contains(&payload.len())
                && (payload.len() - HEAD_WORDS).is_multiple_of(2),
            "{} payload words: a message holds {MAX_WORDS}",
            payload.len()
        );
        ensure!(
            join(payload) == RUN_INSTRUCTIONS,
            "the first argument is {}, not {RUN_INSTRUCTIONS}",
            join(payload)
        );
        Ok(Command {
            stream: join(&payload[2..]),
            words: payload[4],
            arguments: payload[HEAD_WORDS..].chunks_exact(2).map(join).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(arguments: usize) -> Command {
        Command {
            stream: 0x1_2345_6780,
            words: 77,
            arguments: (0..arguments as u64).map(|i| 0xabc_0000_0000 + i).collect(),
        }
    }

    #[test]
    fn packets_survive_the_round_trip_up_to_their_limits() {
        for n in [0, 1, 3, 7] {
            assert_eq!(Command::decode(&command(n).start_cu().unwrap()).unwrap(), command(n));
        }
        assert!(command(8).start_cu().is_err());
    }

    #[test]
    fn bad_packets_are_refused() {
        let good = command(3).start_cu().unwrap();
        for (at, value) in [
            (0, 4),
            (0, good[0] | 3 << 10),
            (0, good[0] ^ 1 << 23),
            (1, 2),
            (2, 4),
            (0, good[0] + (1 << 12)),
        ] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(Command::decode(&bad).is_err(), "word {at} = {value:#x}");
        }
        (0..good.len()).for_each(|n| assert!(Command::decode(&good[..n]).is_err()));
        // A message that the firmware would truncate.
        let mut long = command(7).start_cu().unwrap();
        long.extend([0, 0]);
        long[0] += 2 << 12;
        assert!(Command::decode(&long).is_err());
    }
}
