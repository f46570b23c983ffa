//! Models of the threads that fill the GPU's staging blocks.

use crate::device::memory::Block;
use crate::device::queue::TimelineSemaphore;
use crate::tensor::Source;
use crate::vulkan::fill::{Filling, RING, Stream, StreamPart};
use loom::cell::UnsafeCell;
use std::sync::OnceLock;

/// Number of fills: one more than blocks, so that the first block is used again.
const FILLS: usize = RING + 1;

/// State that the threads of a model share. Loom's threads cannot borrow, so each execution leaks
/// it.
struct Shared {
    filling: Filling<'static>,
    blocks: &'static [OnceLock<Block>; RING],
    timeline: &'static TimelineSemaphore,
}

// SAFETY: loom watches every access to the blocks.
unsafe impl Sync for Block {}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn start(source: &'static dyn Source) -> &'static Shared {
    let stream = Stream { job: 0, is_side: false, to: 0, source, bytes: FILLS, unit: 1 };
    let fills: Vec<Vec<StreamPart>> =
        (0..FILLS).map(|from| vec![StreamPart { stream: 0, from, bytes: 1, at: 0 }]).collect();
    let blocks: &'static [OnceLock<Block>; RING] = leak([const { OnceLock::new() }; RING]);
    for block in blocks {
        let _ = block.set(Block(UnsafeCell::new([0])));
    }
    let timeline = leak(TimelineSemaphore::new());
    let streams = leak(vec![stream]);
    leak(Shared {
        filling: Filling::new(streams, &fills, blocks, timeline, Vec::new()),
        blocks,
        timeline,
    })
}

/// A thread reads, a thread waits for the device, and the caller submits. The device sees every
/// byte of every block, and no block is written while the device reads it.
pub fn ring() {
    static BYTES: &[u8] = &[1, 2, 3, 4];
    let shared = start(leak(BYTES));
    let reading = loom::thread::spawn(move || _ = shared.filling.read());
    let releasing = loom::thread::spawn(move || shared.filling.release());
    let stop = shared.filling.stop_at_end();
    for fill in 0..FILLS {
        shared.filling.wait(fill).unwrap();
        shared.filling.taken(fill as u64 + 1);
        // SAFETY: loom fails if a thread writes the block at the same time.
        let seen = shared.blocks[fill % RING].get().unwrap().0.with(|byte| unsafe { (*byte)[0] });
        assert_eq!(seen, BYTES[fill]);
        shared.timeline.end_one();
    }
    drop(stop);
    reading.join().unwrap();
    releasing.join().unwrap();
}

/// A read fails: the caller gets the error, and all threads end.
pub fn failure() {
    struct Bad;
    impl Source for Bad {
        fn read_at(&self, offset: usize, to: &mut [u8]) -> anyhow::Result<()> {
            anyhow::ensure!(offset == 0, "expected");
            to.fill(1);
            Ok(())
        }
    }
    let shared = start(leak(Bad));
    let reading = loom::thread::spawn(move || _ = shared.filling.read());
    let releasing = loom::thread::spawn(move || shared.filling.release());
    let stop = shared.filling.stop_at_end();
    shared.filling.wait(0).unwrap();
    shared.filling.taken(1);
    shared.timeline.end_one();
    assert_eq!(shared.filling.wait(1).unwrap_err().to_string(), "expected");
    drop(stop);
    reading.join().unwrap();
    releasing.join().unwrap();
}
