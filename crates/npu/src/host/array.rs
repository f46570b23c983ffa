//! The array of the host model: shim channels that transfer bytes by descriptors, and cores that
//! read objects.
//!
//! The array does not know what a command is for. As on the device, a stream that transfers the
//! wrong bytes yields wrong results, one that transfers too few bytes hangs, and surplus bytes
//! remain for the next command.

use super::Core;
use crate::layout::{KernelShape, OBJECT, PAIR, PAIRS};
use crate::txn::{BDS, Channel, Descriptor, Direction, MAX_COLUMNS, TransactionOp};

/// Memory that the device can access.
pub trait Memory {
    /// Returns the bytes at a device address. Returns `None` outside of buffers.
    fn read(&self, address: u64, bytes: usize) -> Option<&[u8]>;
    fn write(&mut self, address: u64, bytes: &[u8]) -> Option<()>;
}

/// Failure of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The device would report an error.
    Abort(String),
    /// The device would wait forever.
    Hang(String),
}

use Trouble::{Abort, Hang};

/// The object that a core expects next.
enum Expects {
    Header,
    Queries { tiles: usize },
    Tiles(usize),
}

struct CoreState {
    core: Box<dyn Core>,
    expects: Expects,
    results: Vec<Vec<u8>>,
}

impl CoreState {
    fn consume(&mut self, object: &[u8], out_bytes: usize) {
        self.expects = match self.expects {
            Expects::Header => Expects::Queries { tiles: self.core.begin(object) },
            Expects::Queries { tiles } => {
                self.core.query(object);
                Expects::Tiles(tiles)
            }
            Expects::Tiles(left) => {
                self.core.tile(object);
                Expects::Tiles(left.saturating_sub(1))
            }
        };
        if let Expects::Tiles(0) = self.expects {
            let mut out = vec![0; out_bytes];
            self.core.end(&mut out);
            self.results.push(out);
            self.expects = Expects::Header;
        }
    }
}

/// A pair of cores with its two channels.
struct CorePair {
    cores: [CoreState; PAIR],
    /// Input bytes that no core has read yet.
    input: Vec<u8>,
    /// Results of both cores in alternation that are not in memory yet.
    output: Vec<u8>,
}

#[derive(Clone, Copy, Default)]
struct DescriptorSlot {
    descriptor: Option<Descriptor>,
    address: Option<u64>,
}

#[derive(Clone, Copy)]
struct QueuedTask {
    id: u8,
    descriptor: Descriptor,
    address: u64,
    runs: usize,
}

/// The array, with the kernel on its cores.
pub struct Array {
    shape: KernelShape,
    lanes: Vec<CorePair>, // [PAIRS]
    slots: [[DescriptorSlot; BDS]; MAX_COLUMNS],
    /// Tasks with completion tokens that were not waited for, in order.
    flying: Vec<(Channel, QueuedTask)>,
}

impl Array {
    pub fn new(shape: KernelShape, core: &mut dyn FnMut() -> Box<dyn Core>) -> Array {
        let mut state =
            || CoreState { core: core(), expects: Expects::Header, results: Vec::new() };
        let lanes = (0..PAIRS)
            .map(|_| CorePair { cores: [state(), state()], input: Vec::new(), output: Vec::new() })
            .collect();
        Array { shape, lanes, slots: Default::default(), flying: Vec::new() }
    }

    /// Runs a stream. `arguments` has the device addresses of the command's buffers.
    pub fn run(
        &mut self,
        columns: usize,
        ops: &[TransactionOp],
        arguments: &[u64],
        memory: &mut dyn Memory,
    ) -> Result<(), Trouble> {
        for op in ops {
            match *op {
                TransactionOp::Tokens(channel) => within(channel.column, columns)?,
                TransactionOp::Write(descriptor) => {
                    within(descriptor.column, columns)?;
                    let busy = |(c, t): &(Channel, QueuedTask)| {
                        c.column == descriptor.column && t.id == descriptor.id
                    };
                    if self.flying.iter().any(busy) {
                        return Err(Abort(format!(
                            "descriptor {} is written while its task is in flight",
                            descriptor.id
                        )));
                    }
                    *self.slot(descriptor.column, descriptor.id) =
                        DescriptorSlot { descriptor: Some(descriptor), address: None };
                }
                TransactionOp::Patch { column, id, argument, offset } => {
                    within(column, columns)?;
                    let Some(base) = arguments.get(argument as usize) else {
                        return Err(Abort(format!("argument {argument} of {}", arguments.len())));
                    };
                    self.slot(column, id).address = base.checked_add(offset as u64);
                }
                TransactionOp::Push { channel, id, runs } => {
                    within(channel.column, columns)?;
                    self.push(channel, id, runs, memory)?;
                }
                TransactionOp::Wait(channel) => self.wait(channel, memory)?,
            }
        }
        Ok(())
    }

    fn slot(&mut self, column: u8, id: u8) -> &mut DescriptorSlot {
        &mut self.slots[column as usize][id as usize]
    }

    fn lane(&mut self, channel: Channel) -> &mut CorePair {
        &mut self.lanes[channel.column as usize * 2 + channel.index as usize]
    }

    fn push(
        &mut self,
        channel: Channel,
        id: u8,
        runs: usize,
        memory: &mut dyn Memory,
    ) -> Result<(), Trouble> {
        let DescriptorSlot { descriptor: Some(descriptor), address: Some(address) } =
            *self.slot(channel.column, id)
        else {
            return Err(Abort(format!("descriptor {id} has no length or no address")));
        };
        if self.flying.iter().filter(|(c, _)| *c == channel).count() == 4 {
            return Err(Abort("the queue holds four tasks".into()));
        }
        let task = QueuedTask { id, descriptor, address, runs };
        if channel.direction == Direction::FromMemory {
            for at in task.addresses() {
                let Some(bytes) = memory.read(at, descriptor.length) else {
                    return Err(Abort(format!(
                        "{} bytes read at {at:#x}, where no buffer is",
                        descriptor.length
                    )));
                };
                self.lane(channel).input.extend_from_slice(bytes);
            }
            let shape = self.shape;
            self.lane(channel).consume(shape);
        }
        self.flying.push((channel, task));
        Ok(())
    }

    fn wait(&mut self, channel: Channel, memory: &mut dyn Memory) -> Result<(), Trouble> {
        let Some(at) = self.flying.iter().position(|(c, _)| *c == channel) else {
            return Err(Hang(format!("no task of {channel:?} will end")));
        };
        let task = self.flying[at].1;
        if channel.direction == Direction::ToMemory {
            for at in task.addresses() {
                let lane = self.lane(channel);
                if lane.output.len() < task.descriptor.length {
                    return Err(Hang(format!("{channel:?} waits for results")));
                }
                let bytes: Vec<u8> = lane.output.drain(..task.descriptor.length).collect();
                if memory.write(at, &bytes).is_none() {
                    return Err(Abort(format!(
                        "{} bytes written at {at:#x}, where no buffer is",
                        bytes.len()
                    )));
                }
            }
        }
        self.flying.remove(at);
        Ok(())
    }
}

impl QueuedTask {
    /// Returns the address of each run. After the last iteration, addresses start from the first
    /// again.
    fn addresses(self) -> impl Iterator<Item = u64> {
        let d = self.descriptor;
        (0..self.runs)
            .map(move |run| self.address.wrapping_add(((run % d.iterations) * d.step) as u64))
    }
}

impl CorePair {
    /// Passes whole objects to the cores in alternation.
    fn consume(&mut self, shape: KernelShape) {
        let pairs = self.input.len() / (PAIR * OBJECT);
        for (i, object) in self.input[..pairs * PAIR * OBJECT].chunks_exact(OBJECT).enumerate() {
            self.cores[i % PAIR].consume(object, shape.out_bytes());
        }
        self.input.drain(..pairs * PAIR * OBJECT);
        while self.cores.iter().all(|s| !s.results.is_empty()) {
            for core in &mut self.cores {
                self.output.extend(core.results.remove(0));
            }
        }
    }
}

fn within(column: u8, columns: usize) -> Result<(), Trouble> {
    if (column as usize) < columns {
        return Ok(());
    }
    Err(Abort(format!("column {column} of a context of {columns}")))
}
