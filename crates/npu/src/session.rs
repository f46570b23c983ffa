//! A device with the kernel loaded: heap, context, image, streams and commands. Dropping a session
//! closes all of them.

use super::accel::{Accel, Bo, BoKind, HEAP_BYTES, Info, Sync};
use super::command::{self, Command, State};
use super::host::CORE_ROWS;
use super::layout::KernelShape;
use super::stream::{Job, columns};
use super::xclbin;
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::time::Duration;

/// Time limit of a command. The longest command, 128 pages of all heads, takes 10 ms at the speed
/// of memory.
const LIMIT: Duration = Duration::from_millis(50);
/// Function of compute unit 0, which runs instructions for the array.
const FUNCTION: u8 = 0;

/// An open device with the kernel loaded.
pub struct NpuSession {
    accel: Box<dyn Accel>,
    pub info: Info,
    context: Option<u32>,
    open: Vec<Bo>,
    streams: HashMap<Job, (Bo, u32)>,
    /// Columns of the array that the image uses.
    columns: usize,
}

/// The buffers of a command that is in flight.
#[derive(Clone, Debug)]
pub struct Slot {
    pub queries: Bo,
    pub results: Bo,
    command: Bo,
    number: Option<u64>,
}

impl NpuSession {
    /// Opens the device and loads the kernel. `xclbin` is the content of a whole file.
    pub fn open(mut accel: Box<dyn Accel>, xclbin: &[u8]) -> Result<NpuSession> {
        let info = accel.info().context("querying the properties of the NPU")?;
        let rows = info.metadata.core.row_count as usize;
        ensure!(
            rows == CORE_ROWS,
            "the NPU has {rows} rows of cores: \
                only NPU1 (Phoenix, Hawk Point), with {CORE_ROWS}, is known"
        );
        let mut session = NpuSession {
            accel,
            info,
            context: None,
            open: Vec::new(),
            streams: HashMap::new(),
            columns: 0,
        };
        let partition = xclbin::parse(xclbin).context("reading the NPU's array")?;
        session.columns = partition.columns;
        // Device buffers are inside the heap, so the heap is created first.
        session.buffer(BoKind::Heap, HEAP_BYTES)?;
        let context = session.accel.create_context((partition.columns * rows) as u32)?;
        session.context = Some(context);
        let image = session.buffer(BoKind::Device, partition.image.len())?;
        session.bytes(&image).copy_from_slice(partition.image);
        session.accel.sync(&image, Sync::ToDevice, 0, image.bytes)?;
        session.accel.configure(context, &image, FUNCTION)?;
        Ok(session)
    }

    pub fn describe(&self) -> String {
        self.accel.describe()
    }

    pub fn is_real_device(&self) -> bool {
        self.accel.is_real_device()
    }

    /// Creates a zeroed buffer that exists until the session ends or is closed by
    /// [`NpuSession::close`].
    pub fn buffer(&mut self, kind: BoKind, bytes: usize) -> Result<Bo> {
        let bo = self.accel.create_bo(kind, bytes)?;
        self.open.push(bo);
        Ok(bo)
    }

    /// Closes a buffer before the session ends.
    pub fn close(&mut self, bo: Bo) {
        self.open.retain(|b| b.handle != bo.handle);
        self.accel.close_bo(bo);
    }

    /// Returns the bytes of all buffers except the heap, which is only address space.
    pub fn memory(&self) -> u64 {
        self.open.iter().filter(|b| b.kind != BoKind::Heap).map(|b| b.bytes as u64).sum()
    }

    pub fn bytes(&mut self, bo: &Bo) -> &mut [u8] {
        self.accel.bytes(bo)
    }

    /// Makes a part of a buffer visible to the device.
    pub fn publish(&mut self, bo: &Bo, offset: usize, bytes: usize) -> Result<()> {
        Ok(self.accel.sync(bo, Sync::ToDevice, offset, bytes)?)
    }

    /// Creates the buffers of a command for `pairs` pairs of heads.
    pub fn slot(&mut self, shape: KernelShape, pairs: usize) -> Result<Slot> {
        let [queries, _, results] = Job { shape, pairs, capacity: 0, pages: 0 }.sizes();
        Ok(Slot {
            queries: self.buffer(BoKind::Share, queries)?,
            results: self.buffer(BoKind::Share, results)?,
            command: self.buffer(BoKind::Command, command::BYTES)?,
            number: None,
        })
    }

    fn stream(&mut self, job: Job) -> Result<(Bo, u32)> {
        if let Some(known) = self.streams.get(&job) {
            return Ok(*known);
        }
        ensure!(
            columns(job.pairs) <= self.columns,
            "{} pairs of heads on {} columns",
            job.pairs,
            self.columns
        );
        let words = job.stream()?;
        let bo = self.buffer(BoKind::Device, 4 * words.len())?;
        self.bytes(&bo).copy_from_slice(bytemuck::cast_slice(&words));
        self.publish(&bo, 0, bo.bytes)?;
        self.streams.insert(job, (bo, words.len() as u32));
        Ok((bo, words.len() as u32))
    }

    /// Submits a job. Its queries must be in the slot's buffer.
    pub fn submit(&mut self, job: Job, arena: &Bo, slot: &mut Slot) -> Result<()> {
        let (stream, words) = self.stream(job)?;
        self.publish(&slot.queries, 0, slot.queries.bytes)?;
        let buffers = [slot.queries, *arena, slot.results];
        let arguments = buffers.map(|b| b.address).to_vec();
        let packet = Command { stream: stream.address, words, arguments }.start_cu()?;
        self.bytes(&slot.command)[..4 * packet.len()]
            .copy_from_slice(bytemuck::cast_slice(&packet));
        let context = self.context.context("the NPU has no context")?;
        let handles = [slot.queries.handle, arena.handle, slot.results.handle, stream.handle];
        slot.number = Some(self.accel.execute(context, &slot.command, &handles)?);
        Ok(())
    }

    /// Waits for a job and makes its results visible to the host.
    pub fn finish(&mut self, slot: &mut Slot) -> Result<()> {
        let number = slot.number.take().context("nothing was submitted")?;
        let context = self.context.context("the NPU has no context")?;
        self.accel.wait(context, number, LIMIT)?;
        let head = super::layout::word(self.bytes(&slot.command), 0);
        let state = State::of(head);
        ensure!(state == State::Completed, "a command ended in the state {state:?}");
        self.accel.sync(&slot.results, Sync::FromDevice, 0, slot.results.bytes)?;
        Ok(())
    }
}

impl Drop for NpuSession {
    fn drop(&mut self) {
        // The context is destroyed first, because it may still use the buffers.
        if let Some(context) = self.context.take() {
            self.accel.destroy_context(context);
        }
        for bo in std::mem::take(&mut self.open).into_iter().rev() {
            self.accel.close_bo(bo);
        }
    }
}
