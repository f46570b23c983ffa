//! The instruction stream of one `flash_partial` command. It transfers queries and pages to all
//! pairs of cores that have heads, and their results to memory.
//!
//! The queue of a channel has room for four tasks. A descriptor is written again only after a wait
//! for its task's completion token.

use super::layout::{KernelShape, OBJECT, PAIR, PAIRS};
use super::txn::{
    Channel, Descriptor, Direction, MAX_COLUMNS, MAX_ITERATIONS, TransactionOp, encode,
};
use anyhow::{Result, ensure};

/// Limit for the tasks in a channel's queue.
const QUEUE_DEPTH: usize = 4;
/// Bytes of one iteration of a descriptor: two objects for each core of the pair.
const RUN: usize = 2 * PAIR * OBJECT;

/// Buffers of a command, in the order of its arguments.
pub const ARG_QUERIES: u8 = 0;
pub const ARG_PAGES: u8 = 1;
pub const ARG_RESULTS: u8 = 2;

/// The work of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Job {
    pub shape: KernelShape,
    /// Pairs of kv heads.
    pub pairs: usize,
    /// Pages for which the arena has room, for each pair.
    pub capacity: usize,
    /// Number of pages that are read, counted from the first.
    pub pages: usize,
}

/// Returns the number of columns for `pairs` pairs. A column has two pairs.
pub fn columns(pairs: usize) -> usize {
    pairs.div_ceil(2)
}

/// Returns the channel of a pair.
fn channel(pair: usize, direction: Direction) -> Channel {
    Channel { column: (pair / 2) as u8, direction, index: (pair % 2) as u8 }
}

/// A transfer for one pair: `runs` times `length` contiguous bytes.
struct Transfer {
    direction: Direction,
    argument: u8,
    offset: usize,
    length: usize,
    runs: usize,
}

/// Progress of the transfers of one pair.
struct PairProgress {
    pair: usize,
    /// Tasks in the queue.
    flying: usize,
    pushed: usize,
}

impl PairProgress {
    fn push(&mut self, transfer: &Transfer, ops: &mut Vec<TransactionOp>) -> Result<()> {
        let channel = channel(self.pair, transfer.direction);
        // A channel pair has eight descriptors: one for results, and four in rotation for inputs.
        let first = (8 * channel.index) as usize;
        let id = match transfer.direction {
            Direction::ToMemory => first,
            Direction::FromMemory => {
                if self.flying == QUEUE_DEPTH {
                    ops.push(TransactionOp::Wait(channel));
                    self.flying -= 1;
                }
                self.flying += 1;
                self.pushed += 1;
                first + 1 + (self.pushed - 1) % QUEUE_DEPTH
            }
        } as u8;
        let offset = u32::try_from(transfer.offset)?;
        let column = channel.column;
        let (length, step, iterations) = (transfer.length, transfer.length, transfer.runs);
        ops.push(TransactionOp::Write(Descriptor { column, id, length, step, iterations }));
        ops.push(TransactionOp::Patch { column, id, argument: transfer.argument, offset });
        ops.push(TransactionOp::Push { channel, id, runs: transfer.runs });
        Ok(())
    }
}

impl Job {
    /// Returns the bytes of the buffer of queries, of the arena and of the buffer of results.
    pub fn sizes(&self) -> [usize; 3] {
        let s = self.shape;
        [s.query_bytes(), self.capacity * s.page_bytes(), PAIR * s.out_bytes()]
            .map(|bytes| self.pairs * bytes)
    }

    /// Returns the operations, in order.
    pub fn ops(&self) -> Result<Vec<TransactionOp>> {
        ensure!(
            (1..=PAIRS).contains(&self.pairs),
            "{} pairs of heads: the array has {PAIRS}",
            self.pairs
        );
        ensure!(self.pages <= self.capacity, "{} pages of {}", self.pages, self.capacity);
        ensure!(columns(self.pairs) <= MAX_COLUMNS);
        let shape = self.shape;
        let runs = self.pages * shape.page_bytes() / RUN;
        let mut ops = Vec::new();
        let mut lanes: Vec<PairProgress> =
            (0..self.pairs).map(|pair| PairProgress { pair, flying: 0, pushed: 0 }).collect();
        for lane in &mut lanes {
            ops.push(TransactionOp::Tokens(channel(lane.pair, Direction::ToMemory)));
            ops.push(TransactionOp::Tokens(channel(lane.pair, Direction::FromMemory)));
            let bytes = PAIR * shape.out_bytes();
            let (direction, argument, offset) =
                (Direction::ToMemory, ARG_RESULTS, lane.pair * bytes);
            lane.push(&Transfer { direction, argument, offset, length: bytes, runs: 1 }, &mut ops)?;
            let bytes = shape.query_bytes();
            let (direction, argument, offset) =
                (Direction::FromMemory, ARG_QUERIES, lane.pair * bytes);
            lane.push(&Transfer { direction, argument, offset, length: bytes, runs: 1 }, &mut ops)?;
        }
        // The pairs advance together, so that they share memory bandwidth evenly.
        for first in (0..runs).step_by(MAX_ITERATIONS) {
            for lane in &mut lanes {
                let offset = lane.pair * self.capacity * shape.page_bytes() + first * RUN;
                let (direction, argument, runs) =
                    (Direction::FromMemory, ARG_PAGES, (runs - first).min(MAX_ITERATIONS));
                lane.push(&Transfer { direction, argument, offset, length: RUN, runs }, &mut ops)?;
            }
        }
        for lane in &mut lanes {
            ops.extend(
                (0..lane.flying)
                    .map(|_| TransactionOp::Wait(channel(lane.pair, Direction::FromMemory))),
            );
            ops.push(TransactionOp::Wait(channel(lane.pair, Direction::ToMemory)));
        }
        Ok(ops)
    }

    /// Returns the encoded stream.
    pub fn stream(&self) -> Result<Vec<u32>> {
        encode(columns(self.pairs), &self.ops()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::txn::decode;
    use std::collections::HashMap;

    fn jobs() -> impl Iterator<Item = Job> {
        // At least two values of each dimension.
        let shapes = [128, 256].map(|d| KernelShape::new(d).unwrap());
        shapes.into_iter().flat_map(|shape| {
            [1, 2, 3, 8].into_iter().flat_map(move |pairs| {
                [(0, 5), (1, 1), (1, 7), (7, 9), (8, 8), (9, 40), (33, 64), (128, 128)]
                    .into_iter()
                    .map(move |(pages, capacity)| Job { shape, pairs, capacity, pages })
            })
        })
    }

    #[test]
    fn streams_survive_the_round_trip() {
        for job in jobs() {
            let ops = job.ops().unwrap();
            assert_eq!(
                decode(&job.stream().unwrap()).unwrap(),
                (columns(job.pairs), ops),
                "{job:?}"
            );
        }
    }

    /// Each pair reads the bytes of its header, queries and pages in order, and writes its result.
    /// No queue overflows, no descriptor is written while its task is in flight, and every token is
    /// waited for.
    #[test]
    fn every_pair_reads_exactly_its_bytes() {
        for job in jobs() {
            let mut bds: HashMap<(u8, u8), (Descriptor, u8, usize)> = HashMap::new();
            let mut flying: HashMap<Channel, Vec<u8>> = HashMap::new();
            let mut moved: HashMap<Channel, Vec<(u8, usize, usize)>> = HashMap::new();
            for op in job.ops().unwrap() {
                match op {
                    TransactionOp::Tokens(_) => {}
                    TransactionOp::Write(d) => {
                        let busy = flying
                            .iter()
                            .any(|(c, ids)| c.column == d.column && ids.contains(&d.id));
                        assert!(!busy, "{job:?} rewrites {d:?}");
                        bds.insert((d.column, d.id), (d, u8::MAX, 0));
                    }
                    TransactionOp::Patch { column, id, argument, offset } => {
                        let bd = bds.get_mut(&(column, id)).unwrap();
                        (bd.1, bd.2) = (argument, offset as usize);
                    }
                    TransactionOp::Push { channel, id, runs } => {
                        let (d, argument, offset) = bds[&(channel.column, id)];
                        assert_eq!(d.iterations, runs);
                        for i in 0..runs {
                            moved.entry(channel).or_default().push((
                                argument,
                                offset + i * d.step,
                                d.length,
                            ));
                        }
                        let queue = flying.entry(channel).or_default();
                        queue.push(id);
                        assert!(queue.len() <= QUEUE_DEPTH);
                    }
                    TransactionOp::Wait(channel) => {
                        flying.get_mut(&channel).unwrap().remove(0);
                    }
                }
            }
            assert!(flying.values().all(Vec::is_empty), "a token is left");
            for pair in 0..PAIRS {
                let moves = |d| moved.remove(&channel(pair, d)).unwrap_or_default();
                let [mut from, to] = [Direction::FromMemory, Direction::ToMemory].map({
                    let mut moves = moves;
                    move |d| moves(d)
                });
                if pair >= job.pairs {
                    assert!(from.is_empty() && to.is_empty());
                    continue;
                }
                let [queries, page, out] =
                    [job.shape.query_bytes(), job.shape.page_bytes(), PAIR * job.shape.out_bytes()];
                assert_eq!(to, [(ARG_RESULTS, pair * out, out)]);
                assert_eq!(from.remove(0), (ARG_QUERIES, pair * queries, queries));
                let mut at = pair * job.capacity * page;
                for (argument, offset, length) in from {
                    assert_eq!((argument, offset), (ARG_PAGES, at));
                    at += length;
                }
                assert_eq!(at, (pair * job.capacity + job.pages) * page);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let job = Job { shape: KernelShape::new(128).unwrap(), pairs: 8, capacity: 4, pages: 4 };
        assert!(job.ops().is_ok());
        assert!(
            Job { pairs: 9, ..job }.ops().is_err()
                && Job { pairs: 0, ..job }.ops().is_err()
                && Job { pages: 5, ..job }.ops().is_err()
        );
        // Offsets have 32 bits. An arena of more than 4 GiB is refused instead of truncated
        // silently.
        assert!(Job { capacity: 1 << 15, ..job }.ops().is_err());
    }
}
