//! Format of the instruction stream ("ctrlcode") that the NPU's firmware runs for one command.
//!
//! It has a header of four words, then writes of buffer descriptors, patches of addresses, pushes
//! to DMA queues, and waits.
//!
//! It is the format of mlir-aie's runtime sequences for AIE2. The repository lightvector/KataGo
//! documents it and has checked it on devices (`python/ryzenai_kernels/INSTS_FORMAT.md`). The
//! decoder refuses operations that [`super::stream`] does not write.

use anyhow::{Result, bail, ensure};

/// Rows of the array, including shim tiles and memory tiles.
const ROWS: u32 = 6;
/// Number of NPU1's generation in the header.
const GENERATION: u32 = 3;
/// Limit for the columns of a context.
pub const MAX_COLUMNS: usize = 4;
/// Buffer descriptors of a shim tile.
pub const BDS: usize = 16;
/// Limit for the bytes of a descriptor: 14 bits of words. The field of a shim tile is wider, but
/// other tiles on the path have this limit.
pub const MAX_LENGTH: usize = 65_532;
/// Limit for the words from one iteration of a descriptor to the next: 20 bits.
pub const MAX_STEP: usize = 1 << 20;
/// Limit for the iterations before the address starts from the first again.
pub const MAX_ITERATIONS: usize = 64;
/// Limit for the repetitions of a descriptor in one push.
pub const MAX_REPEAT: usize = 255;
/// Limit for the buffers of a command.
pub const MAX_ARGUMENTS: usize = 7;
/// Address of a shim tile's first descriptor, and words of a descriptor.
const BD_BASE: u32 = 0x1d000;
const BD_WORDS: usize = 8;
/// Control and queue registers of the first S2MM channel. Channels are 8 bytes apart, directions
/// 16.
const CONTROL: u32 = 0x1d200;
const QUEUE: u32 = 0x1d204;
/// Burst length field of a shim descriptor on NPU1.
const BURST: u32 = 0x8000_0000;
const VALID: u32 = 1 << 25;

/// Direction of a transfer, as seen from the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the array into memory (S2MM).
    ToMemory,
    /// From memory into the array (MM2S).
    FromMemory,
}

/// A DMA channel of a shim tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Channel {
    pub column: u8,
    pub direction: Direction,
    /// Index of the channel, 0 or 1.
    pub index: u8,
}

impl Channel {
    fn register(self, base: u32) -> u32 {
        let direction = if self.direction == Direction::FromMemory { 0x10 } else { 0 };
        location(self.column, base + direction + 8 * self.index as u32)
    }
}

/// A linear transfer that is repeated with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pub column: u8,
    /// Index among the 16 descriptors of the tile.
    pub id: u8,
    /// Bytes, a multiple of 4.
    pub length: usize,
    /// Distance between iterations in bytes, a multiple of 4.
    pub step: usize,
    pub iterations: usize,
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactionOp {
    /// Sets the receiver of a channel's completion tokens.
    Tokens(Channel),
    Write(Descriptor),
    /// Sets a descriptor's address to a place in one of the command's buffers.
    Patch {
        column: u8,
        id: u8,
        argument: u8,
        offset: u32,
    },
    /// Starts a descriptor, which runs `runs` times and then sends a completion token.
    Push {
        channel: Channel,
        id: u8,
        runs: usize,
    },
    /// Waits for one completion token of a channel.
    Wait(Channel),
}

fn location(column: u8, register: u32) -> u32 {
    (column as u32) << 25 | register
}

fn check_column(column: u8) -> Result<()> {
    ensure!((column as usize) < MAX_COLUMNS, "column {column}: a context has {MAX_COLUMNS}");
    Ok(())
}

impl Descriptor {
    fn check(&self) -> Result<()> {
        check_column(self.column)?;
        ensure!((self.id as usize) < BDS, "descriptor {}: a shim tile has {BDS}", self.id);
        ensure!(
            self.length > 0 && self.length <= MAX_LENGTH && self.length.is_multiple_of(4),
            "a transfer of {} bytes: 4 to {MAX_LENGTH}, by words",
            self.length
        );
        ensure!(
            (1..=MAX_ITERATIONS).contains(&self.iterations),
            "{} iterations: 1 to {MAX_ITERATIONS}",
            self.iterations
        );
        let words = self.step / 4;
        ensure!(
            self.step.is_multiple_of(4) && (1..=MAX_STEP).contains(&words),
            "a step of {} bytes: 4 to {}, by words",
            self.step,
            4 * MAX_STEP
        );
        Ok(())
    }

    fn words(&self) -> [u32; BD_WORDS] {
        let iteration = (self.iterations as u32 - 1) << 20 | (self.step / 4 - 1) as u32;
        [self.length as u32 / 4, 0, 0, 0, BURST, 0, iteration, VALID]
    }
}

impl TransactionOp {
    /// Refuses values that do not fit the hardware's fields.
    fn check(&self) -> Result<()> {
        match self {
            TransactionOp::Tokens(c) | TransactionOp::Wait(c) => check_channel(*c),
            TransactionOp::Write(d) => d.check(),
            TransactionOp::Patch { column, id, argument, offset } => {
                check_column(*column)?;
                ensure!((*id as usize) < BDS, "descriptor {id}: a shim tile has {BDS}");
                ensure!(
                    (*argument as usize) < MAX_ARGUMENTS,
                    "argument {argument}: a command names {MAX_ARGUMENTS}"
                );
                ensure!(
                    offset.is_multiple_of(4),
                    "an offset of {offset} bytes is not a multiple of a word"
                );
                Ok(())
            }
            TransactionOp::Push { channel, id, runs } => {
                check_channel(*channel)?;
                ensure!((*id as usize) < BDS, "descriptor {id}: a shim tile has {BDS}");
                ensure!(
                    (1..=MAX_REPEAT + 1).contains(runs),
                    "{runs} runs: 1 to {}",
                    MAX_REPEAT + 1
                );
                Ok(())
            }
        }
    }

    fn encode(&self, out: &mut Vec<u32>) {
        match self {
            TransactionOp::Tokens(c) => out.extend([3, 0, c.register(CONTROL), 0, 0, 0x1f00, 28]),
            TransactionOp::Write(d) => {
                out.extend([1, 0, location(d.column, BD_BASE + 0x20 * d.id as u32), 48]);
                out.extend(d.words());
            }
            TransactionOp::Patch { column, id, argument, offset } => {
                let address = location(*column, BD_BASE + 0x20 * *id as u32 + 4);
                out.extend([0x81, 48, 0, 0, 0, 0, address, 0, *argument as u32, 0, *offset, 0]);
            }
            TransactionOp::Push { channel, id, runs } => {
                let value = 1 << 31 | (*runs as u32 - 1) << 16 | *id as u32;
                out.extend([0, 0, channel.register(QUEUE), 0, value, 24]);
            }
            TransactionOp::Wait(c) => {
                let direction = (c.direction == Direction::FromMemory) as u32;
                out.extend([
                    0x80,
                    16,
                    (c.column as u32) << 16 | direction,
                    (c.index as u32) << 24 | 0x0001_0100,
                ]);
            }
        }
    }
}

fn check_channel(channel: Channel) -> Result<()> {
    check_column(channel.column)?;
    ensure!(channel.index < 2, "channel {}: a shim tile has two each way", channel.index);
    Ok(())
}

/// Returns the words of a stream for a context of `columns` columns.
pub fn encode(columns: usize, ops: &[TransactionOp]) -> Result<Vec<u32>> {
    ensure!((1..=MAX_COLUMNS).contains(&columns), "{columns} columns: 1 to {MAX_COLUMNS}");
    let mut out =
        vec![ROWS << 24 | GENERATION << 16 | 1 << 8, 1 << 8 | columns as u32, ops.len() as u32, 0];
    for op in ops {
        op.check()?;
        op.encode(&mut out);
    }
    out[3] = 4 * out.len() as u32;
    Ok(out)
}

/// Returns the column of a register and its address in the shim tile.
fn register(word: u32) -> Result<(u8, u32)> {
    let (column, row) = (word >> 25, word >> 20 & 0x1f);
    ensure!(row == 0, "row {row}: only shim tiles are known");
    check_column(column as u8)?;
    Ok((column as u8, word & 0xf_ffff))
}

fn descriptor_at(word: u32, offset: u32) -> Result<(u8, u8)> {
    let (column, address) = register(word)?;
    let at = address
        .checked_sub(BD_BASE + offset)
        .filter(|at| at.is_multiple_of(0x20) && at / 0x20 < BDS as u32);
    let Some(at) = at else { bail!("{address:#x} is not a descriptor") };
    Ok((column, (at / 0x20) as u8))
}

fn channel_at(word: u32, base: u32) -> Result<Channel> {
    let (column, address) = register(word)?;
    let Some(at) = address.checked_sub(base).filter(|at| at.is_multiple_of(8) && *at < 0x20) else {
        bail!("{address:#x} is not a channel")
    };
    let direction = if at & 0x10 != 0 { Direction::FromMemory } else { Direction::ToMemory };
    Ok(Channel { column, direction, index: (at >> 3 & 1) as u8 })
}

/// Parses a stream into its number of columns and its operations. Invalid words are errors.
pub fn decode(words: &[u32]) -> Result<(usize, Vec<TransactionOp>)> {
    let [first, second, count, bytes, ref rest @ ..] = *words else {
        bail!("a stream of {} words has no header", words.len())
    };
    ensure!(
        first == ROWS << 24 | GENERATION << 16 | 1 << 8,
        "header {first:#010x} is not that of an NPU1 stream"
    );
    let columns = (second & 0xff) as usize;
    ensure!(second >> 8 == 1 && (1..=MAX_COLUMNS).contains(&columns), "header word {second:#010x}");
    ensure!(
        bytes as usize == 4 * words.len(),
        "the header says {bytes} bytes, there are {}",
        4 * words.len()
    );
    let (mut ops, mut rest) = (Vec::new(), rest);
    while !rest.is_empty() {
        let (op, used) = decode_one(rest)?;
        op.check()?;
        ops.push(op);
        rest = &rest[used..];
    }
    ensure!(
        ops.len() == count as usize,
        "the header says {count} operations, there are {}",
        ops.len()
    );
    Ok((columns, ops))
}

fn decode_one(words: &[u32]) -> Result<(TransactionOp, usize)> {
    Ok(match *words {
        [3, 0, at, 0, 0, 0x1f00, 28, ..] => (TransactionOp::Tokens(channel_at(at, CONTROL)?), 7),
        [1, 0, at, 48, length, 0, 0, 0, BURST, 0, iteration, VALID, ..] => {
            let (column, id) = descriptor_at(at, 0)?;
            ensure!(length <= MAX_LENGTH as u32 / 4, "a transfer of {length} words");
            ensure!(iteration >> 26 == 0, "the iteration counter is not 0");
            let step = 4 * ((iteration & 0xf_ffff) as usize + 1);
            let iterations = (iteration >> 20) as usize + 1;
            (
                TransactionOp::Write(Descriptor {
                    column,
                    id,
                    length: 4 * length as usize,
                    step,
                    iterations,
                }),
                12,
            )
        }
        [0x81, 48, 0, 0, 0, 0, at, 0, argument, 0, offset, 0, ..] => {
            let (column, id) = descriptor_at(at, 4)?;
            let argument = u8::try_from(argument).unwrap_or(u8::MAX);
            (TransactionOp::Patch { column, id, argument, offset }, 12)
        }
        [0, 0, at, 0, value, 24, ..] => {
            ensure!(value >> 31 == 1 && value & 0x7f00_fff0 == 0, "queue value {value:#010x}");
            let runs = (value >> 16 & 0xff) as usize + 1;
            (
                TransactionOp::Push {
                    channel: channel_at(at, QUEUE)?,
                    id: (value & 0xf) as u8,
                    runs,
                },
                6,
            )
        }
        [0x80, 16, at, which, ..] => {
            ensure!(
                at & 0xff00_fffe == 0 && which & 0x00ff_ffff == 0x0001_0100,
                "wait {at:#010x} {which:#010x}"
            );
            let direction = if at & 1 == 1 { Direction::FromMemory } else { Direction::ToMemory };
            (
                TransactionOp::Wait(Channel {
                    column: (at >> 16) as u8,
                    direction,
                    index: (which >> 24) as u8,
                }),
                4,
            )
        }
        [op, ..] => bail!("operation {op:#x} is truncated or unknown"),
        [] => bail!("no operation"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: Descriptor = Descriptor {
        column: 3,
        id: 15,
        length: MAX_LENGTH,
        step: 4 * MAX_STEP,
        iterations: MAX_ITERATIONS,
    };
    const C: Channel = Channel { column: 2, direction: Direction::FromMemory, index: 1 };

    fn refused(op: TransactionOp) -> bool {
        encode(4, &[op]).is_err()
    }

    #[test]
    fn limits_are_the_last_that_pass() {
        let write = |d: Descriptor| TransactionOp::Write(d);
        assert!(!refused(write(D)));
        for bad in [
            Descriptor { length: MAX_LENGTH + 4, ..D },
            Descriptor { length: 6, ..D },
            Descriptor { length: 0, ..D },
            Descriptor { step: 4 * MAX_STEP + 4, ..D },
            Descriptor { step: 0, ..D },
            Descriptor { step: 6, ..D },
            Descriptor { iterations: MAX_ITERATIONS + 1, ..D },
            Descriptor { iterations: 0, ..D },
            Descriptor { id: BDS as u8, ..D },
            Descriptor { column: MAX_COLUMNS as u8, ..D },
        ] {
            assert!(refused(write(bad)), "{bad:?}");
        }
        let push = |runs, id| TransactionOp::Push { channel: C, id, runs };
        assert!(!refused(push(MAX_REPEAT + 1, 15)) && !refused(push(1, 0)));
        assert!(refused(push(MAX_REPEAT + 2, 15)) && refused(push(0, 0)) && refused(push(1, 16)));
        let patch = |argument, offset| TransactionOp::Patch { column: 0, id: 0, argument, offset };
        assert!(!refused(patch(MAX_ARGUMENTS as u8 - 1, u32::MAX - 3)));
        assert!(refused(patch(MAX_ARGUMENTS as u8, 0)) && refused(patch(0, 2)));
        assert!(
            refused(TransactionOp::Wait(Channel { index: 2, ..C }))
                && refused(TransactionOp::Tokens(Channel { column: 4, ..C }))
        );
        assert!(encode(0, &[]).is_err() && encode(5, &[]).is_err());
    }

    /// One operation of each kind must have the words of INSTS_FORMAT.md and parse_insts.py.
    #[test]
    fn the_words_are_those_of_the_format() {
        let d = Descriptor { column: 1, id: 2, length: 4 * 0x1234, step: 4 * 0x56, iterations: 3 };
        let out = Channel { column: 1, direction: Direction::ToMemory, index: 0 };
        let words = encode(
            4,
            &[
                TransactionOp::Tokens(out),
                TransactionOp::Write(d),
                TransactionOp::Patch { column: 1, id: 2, argument: 5, offset: 0x800 },
                TransactionOp::Push { channel: C, id: 2, runs: 9 },
                TransactionOp::Wait(C),
            ],
        )
        .unwrap();
        let want = [
            [0x0603_0100, 0x0000_0104, 5, 4 * (4 + 7 + 12 + 12 + 6 + 4)].as_slice(),
            &[3, 0, 1 << 25 | 0x1d200, 0, 0, 0x1f00, 28],
            &[
                1,
                0,
                1 << 25 | 0x1d040,
                48,
                0x1234,
                0,
                0,
                0,
                0x8000_0000,
                0,
                2 << 20 | 0x55,
                1 << 25,
            ],
            &[0x81, 48, 0, 0, 0, 0, 1 << 25 | 0x1d044, 0, 5, 0, 0x800, 0],
            &[0, 0, 2 << 25 | 0x1d21c, 0, 0x8008_0002, 24],
            &[0x80, 16, 2 << 16 | 1, 1 << 24 | 0x10100],
        ]
        .concat();
        assert_eq!(words, want);
    }
}
