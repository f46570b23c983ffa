//! Fills staging blocks: the parts of matrices in each block, and the threads that read them.

use crate::device::memory::Block;
use crate::device::queue::TimelineSemaphore;
use anyhow::{Result, anyhow, ensure};
use gemma_base::tensor::Source;
use gemma_base::util::sync::{Condvar, Mutex, MutexGuard};
use std::sync::{OnceLock, PoisonError};
use std::time::Instant;

/// Number of staging blocks and their size. The device reads some while threads fill others.
pub const RING: usize = 3;
pub const STAGE: usize = 16 << 20;
/// Bytes that a thread reads at once, and the smallest part that is cut off to fill a block.
const READ: usize = 1 << 20;
/// Alignment of a part in its block.
const ALIGN: usize = 256;

/// A source of `bytes` bytes that is read in order and only cut at multiples of `unit`.
#[derive(Clone, Copy)]
pub struct Stream<'a> {
    /// Index of its matrix, and whether it is the side or the codes.
    pub job: usize,
    pub is_side: bool,
    /// Destination offset in the codes or side.
    pub to: usize,
    pub source: &'a dyn Source,
    pub bytes: usize,
    pub unit: usize,
}

/// A part of a stream in a staging block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPart {
    pub stream: usize,
    /// Offset in the stream, and length.
    pub from: usize,
    pub bytes: usize,
    /// Offset in the block.
    pub at: usize,
}

/// Returns the parts of each staging block, in order.
pub fn cut(streams: &[Stream<'_>]) -> Result<Vec<Vec<StreamPart>>> {
    let (mut fills, mut fill, mut at) = (Vec::new(), Vec::new(), 0);
    for (stream, s) in streams.iter().enumerate() {
        ensure!(s.unit <= STAGE, "a row of {} bytes is longer than what is sent at a time", s.unit);
        let mut from = 0;
        while from < s.bytes {
            let left = s.bytes - from;
            let bytes = left.min((STAGE - at) / s.unit * s.unit);
            if bytes == 0 || (bytes < left.min(READ) && at > 0) {
                fills.push(std::mem::take(&mut fill));
                at = 0;
                continue;
            }
            fill.push(StreamPart { stream, from, bytes, at });
            from += bytes;
            at = (at + bytes).next_multiple_of(ALIGN).min(STAGE);
        }
    }
    fills.push(fill);
    fills.retain(|fill| !fill.is_empty());
    Ok(fills)
}

/// One read: a piece of a part, and the fill that it belongs to.
struct ReadTask {
    fill: usize,
    part: StreamPart,
}

struct FillState {
    /// Number of started tasks.
    next: usize,
    /// Number of unfinished tasks of each fill.
    left: Vec<usize>,
    /// Submissions that used each fill so far, and the number of completed ones.
    taken: Vec<u64>,
    done: usize,
    /// Number of allocated staging blocks.
    blocks: usize,
    failed: Option<anyhow::Error>,
    stop: bool,
}

/// State shared between the reader threads and the thread that submits the blocks.
pub struct Filling<'a> {
    streams: &'a [Stream<'a>],
    tasks: Vec<ReadTask>,
    blocks: &'a [OnceLock<Block>; RING],
    timeline: &'a TimelineSemaphore,
    /// Number of earlier fills.
    first: usize,
    state: Mutex<FillState>,
    /// Signals room to read into, or the end.
    room: Condvar,
    /// Signals a complete fill, or a failure.
    complete: Condvar,
    /// Signals a new submission to wait for, or the end.
    sent: Condvar,
}

impl<'a> Filling<'a> {
    /// Prepares the reads of `fills`. `taken` holds the submissions of all earlier fills.
    pub fn new(
        streams: &'a [Stream<'a>],
        fills: &[Vec<StreamPart>],
        blocks: &'a [OnceLock<Block>; RING],
        timeline: &'a TimelineSemaphore,
        taken: Vec<u64>,
    ) -> Filling<'a> {
        let (mut tasks, mut left) = (Vec::new(), Vec::new());
        for (fill, parts) in fills.iter().enumerate() {
            let before = tasks.len();
            for part in parts {
                for start in (0..part.bytes).step_by(READ) {
                    let (from, at, bytes) =
                        (part.from + start, part.at + start, READ.min(part.bytes - start));
                    tasks.push(ReadTask {
                        fill,
                        part: StreamPart { stream: part.stream, from, bytes, at },
                    });
                }
            }
            left.push(tasks.len() - before);
        }
        let there = blocks.iter().filter(|b| b.get().is_some()).count();
        let first = taken.len();
        let done = first.saturating_sub(RING);
        let state = Mutex::new(FillState {
            next: 0,
            left,
            taken,
            done,
            blocks: there,
            failed: None,
            stop: false,
        });
        let [room, complete, sent] = [(); 3].map(|()| Condvar::new());
        Filling { streams, tasks, blocks, timeline, first, state, room, complete, sent }
    }

    /// Returns the number of earlier fills.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Returns the number of threads worth starting.
    pub fn threads(&self) -> usize {
        std::thread::available_parallelism().map_or(1, |n| n.get()).min(self.tasks.len())
    }

    fn lock(&self) -> MutexGuard<'_, FillState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next task after there is room for it; `None` after the last one.
    fn begin(&self) -> Option<&ReadTask> {
        let mut state = self.lock();
        loop {
            let task = self.tasks.get(state.next).filter(|_| !state.stop)?;
            let fill = self.first + task.fill;
            if fill % RING < state.blocks && fill < state.done + RING {
                state.next += 1;
                return Some(task);
            }
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads until no task is left. Returns the seconds spent reading, and waiting for room.
    pub fn read(&self) -> [f64; 2] {
        let _last = Stop { filling: self, only_panics: true };
        let [mut reading, mut waiting] = [0.0; 2];
        let mut start = Instant::now();
        let mut lap = move || std::mem::replace(&mut start, Instant::now()).elapsed().as_secs_f64();
        while let Some(task) = self.begin() {
            waiting += lap();
            let read = self.read_one(task);
            reading += lap();
            let mut state = self.lock();
            match read {
                Ok(()) => state.left[task.fill] -= 1,
                Err(e) => {
                    state.failed.get_or_insert(e);
                }
            }
            if state.failed.is_some() || state.left[task.fill] == 0 {
                self.complete.notify_all();
            }
        }
        [reading, waiting + lap()]
    }

    /// Waits for one submission after the other, and makes room as each completes. Only one thread
    /// does this, because drivers are slow if many threads wait.
    pub fn release(&self) {
        let _last = Stop { filling: self, only_panics: true };
        let mut state = self.lock();
        while !state.stop {
            let Some(submission) = state.taken.get(state.done).copied() else {
                state = self.sent.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let done = self.timeline.wait(submission);
            state = self.lock();
            match done {
                Ok(()) => state.done += 1,
                Err(e) => {
                    state.failed.get_or_insert(e);
                    self.complete.notify_all();
                    return;
                }
            }
            self.room.notify_all();
        }
    }

    fn read_one(&self, task: &ReadTask) -> Result<()> {
        let block = self.blocks[(self.first + task.fill) % RING]
            .get()
            .expect("begun once its block was there");
        // SAFETY: `begin` waited for the submission that used these bytes, the next submission
        // follows only when the fill is complete, and tasks share no bytes.
        let to = unsafe { block.bytes(task.part.at as u64, task.part.bytes) };
        self.streams[task.part.stream].source.read_at(task.part.from, to)
    }

    /// Reports a new staging block.
    pub fn add_block(&self) {
        self.lock().blocks += 1;
        self.room.notify_all();
    }

    /// Waits until a fill is complete.
    pub fn wait(&self, fill: usize) -> Result<()> {
        let mut state = self.lock();
        while state.left[fill] > 0 {
            if let Some(e) = state.failed.take() {
                return Err(e);
            }
            ensure!(!state.stop, "a thread that reads weights has stopped");
            state = self.complete.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Reports the submission that uses the next fill. There is room again when it completes.
    pub fn taken(&self, submission: u64) {
        self.lock().taken.push(submission);
        self.sent.notify_all();
    }

    /// Returns a guard that stops the threads when it is dropped.
    pub fn stop_at_end(&self) -> Stop<'_> {
        Stop { filling: self, only_panics: false }
    }

    /// Returns the submissions of all fills.
    pub fn into_taken(self) -> Vec<u64> {
        self.state.into_inner().unwrap_or_else(PoisonError::into_inner).taken
    }
}

/// Guard that wakes all waiting threads and stops them.
pub struct Stop<'a> {
    filling: &'a Filling<'a>,
    only_panics: bool,
}

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        if self.only_panics && !std::thread::panicking() {
            return;
        }
        let mut state = self.filling.lock();
        state.stop = true;
        if self.only_panics {
            state.failed.get_or_insert_with(|| anyhow!("a thread that reads weights has stopped"));
        }
        self.filling.room.notify_all();
        self.filling.complete.notify_all();
        self.filling.sent.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_hold_whole_units_of_every_stream_in_order() {
        let source: &dyn Source = &&[][..];
        let sizes = [
            (3 * STAGE + 500, 100),
            (12, 12),
            (0, 1),
            (STAGE - 1000, 1),
            (5 << 20, 5 << 20),
            (700, 7),
            (STAGE, STAGE),
        ];
        let streams: Vec<Stream<'_>> = sizes
            .iter()
            .enumerate()
            .map(|(job, (bytes, unit))| Stream {
                job,
                is_side: false,
                to: 0,
                source,
                bytes: *bytes / unit * unit,
                unit: *unit,
            })
            .collect();
        let fills = cut(&streams).unwrap();
        let mut read = vec![0; streams.len()];
        for fill in &fills {
            let mut end = 0;
            for part in fill {
                assert!(part.at >= end && part.at % ALIGN == 0 && part.at + part.bytes <= STAGE);
                assert!(part.bytes % streams[part.stream].unit == 0 && part.bytes > 0);
                assert_eq!(part.from, read[part.stream]);
                assert!(
                    read[part.stream + 1..].iter().all(|n| *n == 0),
                    "streams come one after the other"
                );
                read[part.stream] += part.bytes;
                end = part.at + part.bytes;
            }
        }
        assert_eq!(read, streams.iter().map(|s| s.bytes).collect::<Vec<_>>());
        assert!(fills.len() <= 8, "{} blocks", fills.len());
        let long = Stream { bytes: STAGE + 1, unit: STAGE + 1, ..streams[0] };
        assert!(cut(&[long]).is_err());
    }
}
