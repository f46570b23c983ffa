//! Uploads weights. Threads read them into a ring of staging blocks, and the device unpacks one
//! block while threads fill others. A discrete GPU first copies a block to its own memory, because
//! the unpacking kernels would read over the bus in small pieces.

use super::commands::bind;
use super::fill::{Filling, RING, STAGE, Stream, StreamPart, cut};
use crate::device::Gpu;
use crate::device::barrier::{barrier, copied_barrier};
use crate::device::memory::{Arena, Block, Place, Span};
use crate::device::pipeline::{self, Pipelines, Shader};
use crate::device::queue::Queue;
use crate::lower::kernels::{self, Kernel, Push, RepackPush, word};
use crate::lower::layout::{
    DeviceMatrix, DeviceSide, Packing, SideLayout, code_number, points, sizes,
};
use anyhow::{Context, Result};
use ash::vk;
use gemma_base::compute::{LoadJob, Loading};
use gemma_base::error::no_thread;
use gemma_base::tensor::StoredMatrix;
use gemma_base::util::threads;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Instant;

/// Bytes of all staging blocks and of their copies on the device.
pub const STAGING: u64 = (2 * RING * STAGE) as u64;

/// Staging blocks of a device, and the submissions that use them.
pub struct Uploader {
    gpu: Arc<Gpu>,
    stages: [OnceLock<Block>; RING],
    /// A copy per stage, for a discrete GPU.
    copies: [Option<Block>; RING],
    /// Submission that used each fill so far.
    taken: Vec<u64>,
}

/// A matrix to upload, with its kernel.
struct Upload<'a> {
    label: String,
    matrix: StoredMatrix<'a>,
    packing: Option<Packing>,
    side: Option<DeviceSide<'a>>,
    kernel: Option<(Shader, pipeline::Constants)>,
    /// Bytes of a stored row (of tiles).
    row_bytes: usize,
    /// Data after the codes, see [`points`].
    points: &'static [u8],
}

/// Location of a matrix's codes, or of its side, on the device.
#[derive(Clone, Copy)]
struct DevicePlace {
    buffer: vk::Buffer,
    offset: u64,
    address: u64,
}

impl<'a> Upload<'a> {
    fn of(job: LoadJob<'a>) -> Result<Upload<'a>> {
        let LoadJob { label, mut matrix, .. } = job;
        let stored = matrix.side.take();
        let m = &matrix;
        m.format.check_cols(m.cols).with_context(|| format!("loading {label}"))?;
        let packing =
            Packing::of(m.format, m.rows, m.cols).with_context(|| format!("loading {label}"))?;
        let kernel = packing
            .filter(|packing| packing.step_words > 0)
            .map(|_| kernels::Repack { code: code_number(m.format.code) }.specialised());
        let layout = SideLayout::of(m.format, m.rows, m.cols)?;
        let side = stored.map(|stored| DeviceSide { layout, stored });
        let row_bytes = packing.map_or(m.format.row_bytes(m.cols), |p| p.from_bytes);
        let points = points(m.format.code);
        Ok(Upload { label, packing, side, kernel, row_bytes, points, matrix })
    }

    fn streams(&self, job: usize) -> impl Iterator<Item = Stream<'_>> {
        let m = &self.matrix;
        // A stream without a kernel is only copied, so it may be cut anywhere.
        // A kernel writes rows that are interleaved at once.
        let unit = match &self.packing {
            Some(p) if self.kernel.is_some() => (p.together * self.row_bytes).max(1),
            _ if m.code_bytes().is_multiple_of(4) => 4,
            _ => 1,
        };
        let bytes = m.code_bytes();
        let codes = Stream { job, is_side: false, to: 0, source: &*m.codes, bytes, unit };
        let points =
            Stream { to: bytes, source: &self.points, bytes: self.points.len(), unit: 4, ..codes };
        let side = self.side.as_ref().map(|source| {
            let bytes = source.layout.bytes();
            Stream { job, is_side: true, to: 0, source, bytes, unit: 2 }
        });
        [Some(codes), Some(points), side].into_iter().flatten()
    }

    /// Allocates its codes and side on the device.
    fn place(&self, arena: &mut Arena) -> Result<[DevicePlace; 2]> {
        let [codes, side] = sizes(self.matrix.format, self.matrix.rows, self.matrix.cols)?;
        let mut room = |bytes| -> Result<DevicePlace> {
            let Span { block, offset, address, .. } = arena.alloc(&self.label, bytes)?;
            Ok(DevicePlace { buffer: arena.blocks[block].buffer, offset, address })
        };
        Ok([room(codes)?, room(side)?])
    }

    fn loaded(&self, [codes, side]: [DevicePlace; 2]) -> DeviceMatrix {
        let StoredMatrix { format, rows, cols, .. } = self.matrix;
        let code_bytes =
            self.packing.map_or(format.stored_rows(rows) * format.row_bytes(cols), |p| p.bytes());
        let side_bytes = self.side.as_ref().map_or(0, |side| side.layout.bytes());
        DeviceMatrix {
            format,
            rows,
            cols,
            codes: codes.address,
            side: side.address,
            bytes: (code_bytes + side_bytes) as u64,
        }
    }

    /// Returns the arguments of the kernel that packs the rows at `from`, and its number of
    /// invocations.
    fn push(&self, p: &Packing, part: &StreamPart, from: u64, codes: DevicePlace) -> (Push, usize) {
        let (first, rows) = (part.from / p.from_bytes, part.bytes / p.from_bytes);
        let at = |words: usize| codes.address + 4 * words as u64;
        let ([low, high], [all_low, _], [part_low, part_high]) =
            (p.words(first), p.words(p.rows), p.words(rows));
        let words = part_low + part_high;
        let push = RepackPush {
            from,
            to: at(low),
            high: at(all_low + high),
            words: word(words),
            low_words: word(part_low),
            rows: word(rows),
            cols: word(self.matrix.cols),
            steps: word(p.steps),
            chunk: word(p.chunk()),
            step_words: word(p.step_words),
            high_words: word(p.high_words),
        };
        (Push::of(&push), words)
    }
}

impl Uploader {
    pub fn new(gpu: &Arc<Gpu>) -> Uploader {
        Uploader {
            gpu: gpu.clone(),
            stages: Default::default(),
            copies: Default::default(),
            taken: Vec::new(),
        }
    }

    /// Loads matrices in the layout of the kernels. The last submissions may still run on return.
    pub fn load(
        &mut self,
        jobs: Vec<LoadJob<'_>>,
        arena: &mut Arena,
        queue: &mut Queue,
        pipelines: &Mutex<Pipelines>,
        times: &mut Loading,
    ) -> Result<Vec<DeviceMatrix>> {
        let start = Instant::now();
        let plans = jobs.into_iter().map(Upload::of).collect::<Result<Vec<_>>>()?;
        let streams: Vec<Stream<'_>> =
            plans.iter().enumerate().flat_map(|(job, plan)| plan.streams(job)).collect();
        let fills = cut(&streams)?;
        let timeline = queue.timeline();
        let filling = Filling::new(
            &streams,
            &fills,
            &self.stages,
            &timeline,
            std::mem::take(&mut self.taken),
        );
        let first = filling.first();
        let (gpu, stages, copies) = (&self.gpu, &self.stages, &mut self.copies);
        let matrices = std::thread::scope(|scope| {
            // Ends the started threads if another one cannot be started.
            let stop = filling.stop_at_end();
            let readers = (0..filling.threads())
                .map(|_| threads::start(scope, || filling.read()))
                .collect::<std::io::Result<Vec<_>>>()
                .with_context(no_thread)?;
            threads::start(scope, || filling.release()).with_context(no_thread)?;
            // Drivers are slow to allocate gigabytes, so another thread does it.
            let (places, placed) = mpsc::channel();
            let plans = &plans;
            threads::start(scope, move || place_all(plans, arena, &places))
                .with_context(no_thread)?;
            let place =
                || placed.recv().context("the thread that takes device memory has stopped")?;
            let prepare = Instant::now();
            add_blocks(gpu, stages, copies, &filling)?;
            let kernels = UploadKernels::of(plans, pipelines)?;
            times.preparing += prepare.elapsed().as_secs_f64();
            let mut rooms: Vec<[DevicePlace; 2]> = Vec::with_capacity(plans.len());
            for (i, fill) in fills.iter().enumerate() {
                let prepare = Instant::now();
                let last = fill.last().map_or(0, |part| streams[part.stream].job);
                while rooms.len() <= last {
                    rooms.push(place()?);
                }
                times.preparing += prepare.elapsed().as_secs_f64();
                filling.wait(i)?;
                let at = (first + i) % RING;
                let stage = stages[at].get().expect("made above");
                let send =
                    Sending { plans, streams: &streams, rooms: &rooms, kernels: &kernels, stage };
                let is_last = i + 1 == fills.len();
                filling.taken(send.submit(queue, fill, copies[at].as_ref(), is_last)?);
            }
            // Matrices without bytes at the end.
            while rooms.len() < plans.len() {
                rooms.push(place()?);
            }
            drop(stop);
            let threads = readers.len().max(1) as f64;
            for reader in readers {
                let [reading, waiting] = reader.join().unwrap_or_default();
                times.reading += reading / threads;
                times.waiting += waiting / threads;
            }
            Ok::<_, anyhow::Error>(
                plans.iter().zip(rooms).map(|(plan, rooms)| plan.loaded(rooms)).collect(),
            )
        })?;
        self.taken = filling.into_taken();
        times.moving += start.elapsed().as_secs_f64();
        Ok(matrices)
    }
}

/// Places matrices in order and sends their locations, until one has no room.
fn place_all(
    plans: &[Upload<'_>],
    arena: &mut Arena,
    places: &mpsc::Sender<Result<[DevicePlace; 2]>>,
) {
    for plan in plans {
        let rooms = plan.place(arena);
        let is_last = rooms.is_err();
        if places.send(rooms).is_err() || is_last {
            return;
        }
    }
}

/// Allocates the missing staging blocks and their copies.
fn add_blocks(
    gpu: &Arc<Gpu>,
    stages: &[OnceLock<Block>; RING],
    copies: &mut [Option<Block>; RING],
    filling: &Filling<'_>,
) -> Result<()> {
    for (stage, copy) in stages.iter().zip(copies) {
        if stage.get().is_none() {
            let _ = stage.set(Block::new(gpu, "staging", STAGE as u64, Place::Upload)?);
            filling.add_block();
        }
        if copy.is_none() && !gpu.info.is_integrated {
            *copy = Some(Block::new(gpu, "staging", STAGE as u64, Place::Device)?);
        }
    }
    Ok(())
}

/// Kernels of all matrices.
struct UploadKernels {
    layout: vk::PipelineLayout,
    pipelines: Vec<Option<vk::Pipeline>>,
}

impl UploadKernels {
    fn of(plans: &[Upload<'_>], pipelines: &Mutex<Pipelines>) -> Result<UploadKernels> {
        let mut made = pipeline::lock(pipelines);
        made.prepare(
            plans
                .iter()
                .filter_map(|plan| plan.kernel.as_ref())
                .map(|(shader, constants)| (*shader, constants)),
            false,
        )?;
        let get = |plan: &Upload<'_>| {
            plan.kernel.as_ref().map(|(shader, constants)| made.get(*shader, constants)).transpose()
        };
        Ok(UploadKernels {
            pipelines: plans.iter().map(get).collect::<Result<_>>()?,
            layout: made.layout,
        })
    }
}

/// State for submitting a staging block.
struct Sending<'a> {
    plans: &'a [Upload<'a>],
    streams: &'a [Stream<'a>],
    /// Codes and sides of the matrices so far.
    rooms: &'a [[DevicePlace; 2]],
    kernels: &'a UploadKernels,
    stage: &'a Block,
}

impl Sending<'_> {
    /// Submits a staging block. Returns the submission's number.
    fn submit(
        &self,
        queue: &mut Queue,
        fill: &[StreamPart],
        copy: Option<&Block>,
        is_last: bool,
    ) -> Result<u64> {
        queue.once(|device, commands| {
            self.record(device, commands, fill, copy);
            if is_last {
                barrier(device, commands);
            }
        })
    }

    /// Records the copies and kernels of a staging block. Its parts share no bytes, so a kernel
    /// only waits for the copy of its input.
    fn record(
        &self,
        device: &ash::Device,
        commands: vk::CommandBuffer,
        fill: &[StreamPart],
        copy: Option<&Block>,
    ) {
        let mut regions = Vec::new();
        for part in fill {
            let stream = &self.streams[part.stream];
            let (plan, rooms) = (&self.plans[stream.job], &self.rooms[stream.job]);
            if plan.kernel.is_some() && !stream.is_side {
                let at = part.at as u64;
                regions.push(vk::BufferCopy {
                    src_offset: at,
                    dst_offset: at,
                    size: part.bytes as u64,
                });
                continue;
            }
            let to = &rooms[stream.is_side as usize];
            let dst_offset = to.offset + (stream.to + part.from) as u64;
            let region = [vk::BufferCopy {
                src_offset: part.at as u64,
                dst_offset,
                size: part.bytes as u64,
            }];
            // SAFETY: the span has room for the stream, and the stage for the part.
            unsafe { device.cmd_copy_buffer(commands, self.stage.buffer, to.buffer, &region) };
        }
        if regions.is_empty() {
            return;
        }
        if let Some(copy) = copy {
            // SAFETY: both blocks have equal sizes, and the submission that used the copy is
            // complete, because its stage is free.
            unsafe { device.cmd_copy_buffer(commands, self.stage.buffer, copy.buffer, &regions) };
            copied_barrier(device, commands);
        }
        let base = copy.unwrap_or(self.stage).address;
        for part in fill {
            let stream = &self.streams[part.stream];
            let plan = &self.plans[stream.job];
            let (Some(pipeline), Some(packing), false) =
                (self.kernels.pipelines[stream.job], &plan.packing, stream.is_side)
            else {
                continue;
            };
            let codes = self.rooms[stream.job][0];
            let (push, invocations) = plan.push(packing, part, base + part.at as u64, codes);
            let groups = invocations.div_ceil(256) as u32;
            let across = groups.min(4096);
            bind(device, commands, self.kernels.layout, pipeline, &push);
            // SAFETY: the memory lives as long as the executor, which waits before it drops it.
            unsafe { device.cmd_dispatch(commands, across, groups.div_ceil(across), 1) };
        }
    }
}
