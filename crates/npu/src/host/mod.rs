//! Model of the device that runs on the host. It has the rules of the driver (heap, buffer types,
//! contexts, packets, states), of the firmware, which decodes the stream, and of the array
//! ([`array`]).
//!
//! The model tests the host's code. It does not predict the speed or the last bits of real
//! hardware. Memory is not coherent: each side sees the other's writes only after a sync.

pub mod array;
pub mod fault;

pub use fault::{FaultKind, NpuFault};

use super::accel::{Accel, Bo, BoKind, Errno, HEAP_BYTES, Info, Outcome, Sync};
use super::command::{self, Command, State};
use super::layout::{ABI, KernelShape};
pub use super::twin::Core;
use super::twin::Twin;
use super::txn::{self, MAX_COLUMNS};
use super::uapi::{AieMetadata, FirmwareVersion, TileMetadata};
use super::xclbin;
use array::{Array, Memory, Trouble};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Limit for the contexts of NPU1.
const MAX_CONTEXTS: usize = 6;
/// Cores in a column.
pub const CORE_ROWS: usize = 4;
/// Device addresses of the heap and of shared memory.
const HEAP_ADDRESS: u64 = 0x0400_0000;
const SHARE_ADDRESS: u64 = 0x7000_0000_0000;
/// First bytes of an image that the model accepts.
const IMAGE: &[u8; 16] = b"gemma-host-model";

/// Counts of open buffers and contexts, for tests that look for leaks.
#[derive(Debug, Default)]
pub struct OpenHandles {
    pub buffers: AtomicUsize,
    pub contexts: AtomicUsize,
}

impl OpenHandles {
    pub fn total(&self) -> usize {
        self.buffers.load(Ordering::SeqCst) + self.contexts.load(Ordering::SeqCst)
    }
}

struct AccelBuffer {
    kind: BoKind,
    address: u64,
    /// Content as the host sees it, and content as the device sees it.
    host: Vec<u8>,
    device: Vec<u8>,
}

#[derive(Default)]
struct AccelBuffers {
    list: BTreeMap<u32, AccelBuffer>,
    next: u32,
    next_share: u64,
    heap_used: usize,
}

impl AccelBuffers {
    /// Returns the buffer that contains these bytes, and their offset in it. Command packets are
    /// excluded, because the array cannot access them.
    fn find(&self, address: u64, bytes: usize) -> Option<(u32, usize)> {
        self.list.iter().find_map(|(handle, b)| {
            let at = address.checked_sub(b.address)? as usize;
            let seen = !matches!(b.kind, BoKind::Command | BoKind::Heap);
            (seen && at.checked_add(bytes)? <= b.device.len()).then_some((*handle, at))
        })
    }
}

impl Memory for AccelBuffers {
    fn read(&self, address: u64, bytes: usize) -> Option<&[u8]> {
        let (handle, at) = self.find(address, bytes)?;
        Some(&self.list[&handle].device[at..at + bytes])
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Option<()> {
        let (handle, at) = self.find(address, bytes.len())?;
        self.list.get_mut(&handle)?.device[at..at + bytes.len()].copy_from_slice(bytes);
        Some(())
    }
}

struct Context {
    columns: usize,
    array: Option<Array>,
    /// Number of the last command, and the commands that will run at the next wait.
    last: u64,
    waiting: Vec<(u64, u32)>,
}

/// Creates the kernel of one core.
pub type CoreMaker = Arc<dyn Fn(KernelShape) -> Box<dyn Core> + Send + std::marker::Sync>;

/// Options of the model.
#[derive(Clone, Default)]
pub struct HostModelOptions {
    /// The kernel of each core; `None` for the Rust twin.
    pub core: Option<CoreMaker>,
    pub fault: Option<NpuFault>,
    /// Runs a command during the wait instead of the submission. A device may do either.
    pub late: bool,
    /// Counts shared buffers without allocating their bytes, for plans.
    pub is_dry: bool,
}

/// The model of a device.
pub struct HostModelAccel {
    options: HostModelOptions,
    buffers: AccelBuffers,
    contexts: BTreeMap<u32, Context>,
    next_context: u32,
    commands: u64,
    gone: bool,
    open: Arc<OpenHandles>,
    trouble: Option<Trouble>,
}

impl HostModelAccel {
    pub fn new(options: HostModelOptions) -> HostModelAccel {
        HostModelAccel {
            options,
            buffers: AccelBuffers { next: 1, next_share: SHARE_ADDRESS, ..AccelBuffers::default() },
            contexts: BTreeMap::new(),
            next_context: 1,
            commands: 0,
            gone: false,
            open: Arc::default(),
            trouble: None,
        }
    }

    /// Returns an xclbin file for the model, with the kernel of this shape on all columns.
    pub fn xclbin(shape: KernelShape) -> Vec<u8> {
        let image =
            [IMAGE.as_slice(), &ABI.to_le_bytes(), &(shape.head_dim as u32).to_le_bytes()].concat();
        xclbin::build(&xclbin::Partition { columns: MAX_COLUMNS, image: &image, kernel_id: 0x901 })
    }

    /// Returns the counters of open handles, which remain valid after the device is closed.
    pub fn open_handles(&self) -> Arc<OpenHandles> {
        self.open.clone()
    }

    /// Returns the error of the last command that failed.
    pub fn trouble(&self) -> Option<&Trouble> {
        self.trouble.as_ref()
    }

    fn here(&self, what: &'static str) -> Outcome<()> {
        if self.gone { Err(Errno::new(libc::ENODEV, what)) } else { Ok(()) }
    }

    /// Runs a command and writes its state to the packet.
    fn run(&mut self, context: u32, command: u32) {
        self.commands += 1;
        let fault = self.options.fault.filter(|f| f.hits(self.commands - 1)).map(|f| f.kind);
        let state = match fault {
            Some(FaultKind::Abort) => State::Abort,
            Some(FaultKind::Timeout) => State::Timeout,
            Some(FaultKind::Stale) => State::Completed,
            _ => match self.run_stream(context, command, fault == Some(FaultKind::Wrong)) {
                Ok(()) => State::Completed,
                Err(trouble) => {
                    let state = if matches!(trouble, Trouble::Hang(_)) {
                        State::Timeout
                    } else {
                        State::Abort
                    };
                    self.trouble = Some(trouble);
                    state
                }
            },
        };
        if let Some(buffer) = self.buffers.list.get_mut(&command) {
            let head = u32::from_le_bytes(buffer.host[..4].try_into().expect("four bytes"));
            buffer.host[..4].copy_from_slice(&state.put(head).to_le_bytes());
        }
    }

    fn run_stream(&mut self, context: u32, command: u32, damage: bool) -> Result<(), Trouble> {
        let abort = |what: String| Trouble::Abort(what);
        let packet: Vec<u32> = words(&self.buffers.list[&command].host);
        let command = Command::decode(&packet).map_err(|e| abort(e.to_string()))?;
        let stream = self.buffers.read(command.stream, 4 * command.words as usize);
        let stream =
            words(stream.ok_or_else(|| abort("the stream lies in no device buffer".into()))?);
        let (columns, ops) = txn::decode(&stream).map_err(|e| abort(e.to_string()))?;
        let context = self.contexts.get_mut(&context).expect("checked when it was handed in");
        if columns > context.columns {
            return Err(abort(format!("a stream for {columns} columns on {}", context.columns)));
        }
        let array = context.array.as_mut().ok_or_else(|| abort("no image was loaded".into()))?;
        array.run(columns, &ops, &command.arguments, &mut self.buffers)?;
        if damage && let Some(results) = command.arguments.get(super::stream::ARG_RESULTS as usize)
        {
            fault::damage(&mut self.buffers, *results);
        }
        Ok(())
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

impl Accel for HostModelAccel {
    fn describe(&self) -> String {
        "host model".into()
    }

    fn is_real_device(&self) -> bool {
        false
    }

    fn info(&mut self) -> Outcome<Info> {
        self.here("asking for the array")?;
        let tile =
            |row_start, row_count| TileMetadata { row_start, row_count, ..TileMetadata::default() };
        let (shim, mem, core) = (tile(0, 1), tile(1, 1), tile(2, CORE_ROWS as u16));
        let metadata = AieMetadata { cols: 5, rows: 6, shim, mem, core, ..AieMetadata::default() };
        Ok(Info { metadata, firmware: FirmwareVersion { major: 1, minor: 5, patch: 0, build: 0 } })
    }

    fn create_bo(&mut self, kind: BoKind, bytes: usize) -> Outcome<Bo> {
        self.here("creating a buffer")?;
        let refuse = |code| Err(Errno::new(code, "creating a buffer"));
        let heap = self.buffers.list.values().any(|b| b.kind == BoKind::Heap);
        let size = bytes.next_multiple_of(4096);
        let address = match kind {
            _ if bytes == 0 => return refuse(libc::EINVAL),
            BoKind::Heap if heap || bytes > HEAP_BYTES => return refuse(libc::EBUSY),
            BoKind::Heap => HEAP_ADDRESS,
            BoKind::Device if !heap => return refuse(libc::EINVAL),
            BoKind::Device if self.buffers.heap_used + size > HEAP_BYTES => {
                return refuse(libc::ENOMEM);
            }
            BoKind::Device => {
                self.buffers.heap_used += size;
                HEAP_ADDRESS + (self.buffers.heap_used - size) as u64
            }
            BoKind::Share | BoKind::Command => {
                self.buffers.next_share += size as u64 + (1 << 20);
                self.buffers.next_share - size as u64
            }
        };
        let handle = self.buffers.next;
        self.buffers.next += 1;
        // The heap is only address space: device buffers have their own bytes.
        let is_empty = kind == BoKind::Heap || kind == BoKind::Share && self.options.is_dry;
        let held = if is_empty { 0 } else { size };
        self.buffers.list.insert(
            handle,
            AccelBuffer { kind, address, host: vec![0; held], device: vec![0; held] },
        );
        self.open.buffers.fetch_add(1, Ordering::SeqCst);
        Ok(Bo { handle, kind, bytes, address })
    }

    fn close_bo(&mut self, bo: Bo) {
        if self.buffers.list.remove(&bo.handle).is_some() {
            self.open.buffers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn bytes(&mut self, bo: &Bo) -> &mut [u8] {
        self.buffers.list.get_mut(&bo.handle).map_or(&mut [], |b| &mut b.host[..bo.bytes])
    }

    fn sync(&mut self, bo: &Bo, direction: Sync, offset: usize, bytes: usize) -> Outcome<()> {
        self.here("syncing a buffer")?;
        if self.options.is_dry && bo.kind == BoKind::Share {
            return Ok(()); // It has no bytes.
        }
        let Some(buffer) =
            self.buffers.list.get_mut(&bo.handle).filter(|b| offset + bytes <= b.host.len())
        else {
            return Err(Errno::new(libc::EINVAL, "syncing a buffer"));
        };
        let range = offset..offset + bytes;
        match direction {
            Sync::ToDevice => buffer.device[range.clone()].copy_from_slice(&buffer.host[range]),
            Sync::FromDevice => buffer.host[range.clone()].copy_from_slice(&buffer.device[range]),
        }
        Ok(())
    }

    fn create_context(&mut self, tiles: u32) -> Outcome<u32> {
        self.here("creating a context")?;
        let refuse = |code| Err(Errno::new(code, "creating a context"));
        if !self.buffers.list.values().any(|b| b.kind == BoKind::Heap)
            || !(tiles as usize).is_multiple_of(CORE_ROWS)
        {
            return refuse(libc::EINVAL);
        }
        let columns = tiles as usize / CORE_ROWS;
        if !(1..=MAX_COLUMNS).contains(&columns) {
            return refuse(libc::EINVAL);
        }
        if self.contexts.len() == MAX_CONTEXTS {
            return refuse(libc::ENOSPC);
        }
        let handle = self.next_context;
        self.next_context += 1;
        self.contexts
            .insert(handle, Context { columns, array: None, last: 0, waiting: Vec::new() });
        self.open.contexts.fetch_add(1, Ordering::SeqCst);
        Ok(handle)
    }

    fn configure(&mut self, context: u32, image: &Bo, _function: u8) -> Outcome<()> {
        self.here("loading the image")?;
        let refused = || Errno::new(libc::EINVAL, "loading the image");
        let buffer = self
            .buffers
            .list
            .get(&image.handle)
            .filter(|b| b.kind == BoKind::Device)
            .ok_or_else(refused)?;
        let context = self.contexts.get_mut(&context).ok_or_else(refused)?;
        let (name, rest) = buffer.device.split_at_checked(IMAGE.len()).ok_or_else(refused)?;
        let [abi, head_dim] =
            [0, 4].map(|at| u32::from_le_bytes(rest[at..at + 4].try_into().expect("four bytes")));
        let shape = KernelShape::new(head_dim as usize)
            .filter(|_| name == IMAGE && abi == ABI)
            .ok_or_else(refused)?;
        context.array = Some(Array::new(shape, &mut || match &self.options.core {
            Some(core) => core(shape),
            None => Box::new(Twin::new(shape)),
        }));
        Ok(())
    }

    fn destroy_context(&mut self, context: u32) {
        if self.contexts.remove(&context).is_some() {
            self.open.contexts.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn execute(&mut self, context: u32, command: &Bo, buffers: &[u32]) -> Outcome<u64> {
        let next =
            self.commands + self.contexts.values().map(|c| c.waiting.len() as u64).sum::<u64>();
        match self.options.fault.filter(|f| f.hits(next)).map(|f| f.kind) {
            Some(FaultKind::Eio) => return Err(Errno::new(libc::EIO, "submitting a command")),
            Some(FaultKind::Enodev) => self.gone = true,
            _ => {}
        }
        self.here("submitting a command")?;
        let refused = || Errno::new(libc::EINVAL, "submitting a command");
        let kind = self.buffers.list.get(&command.handle).map(|b| b.kind);
        let known = buffers
            .iter()
            .all(|h| self.buffers.list.get(h).is_some_and(|b| b.kind != BoKind::Command));
        if kind != Some(BoKind::Command) || !known || command.bytes < command::BYTES {
            return Err(refused());
        }
        let held = self.contexts.get_mut(&context).ok_or_else(refused)?;
        held.last += 1;
        let number = held.last;
        if self.options.late {
            held.waiting.push((number, command.handle));
        } else {
            self.run(context, command.handle);
        }
        Ok(number)
    }

    fn wait(&mut self, context: u32, number: u64, _limit: Duration) -> Outcome<()> {
        self.here("waiting for a command")?;
        let refused = || Errno::new(libc::EINVAL, "waiting for a command");
        let held = self.contexts.get_mut(&context).ok_or_else(refused)?;
        if number == 0 || number > held.last {
            return Err(refused());
        }
        // Commands of a context run in order.
        let due: Vec<u32> = held
            .waiting
            .iter()
            .filter(|(n, _)| *n <= number)
            .map(|(_, command)| *command)
            .collect();
        held.waiting.retain(|(n, _)| *n > number);
        due.into_iter().for_each(|command| self.run(context, command));
        Ok(())
    }
}
