//! Caches with more elements than 32 bits can count. Pages with huge numbers are in a small buffer,
//! because the kernels get a cache address that is lower by the missing pages. Results must equal
//! those of pages with small numbers.

use crate::common::vulkan::device;
use gemma::compute::step::{NO_PARENT, StepView};
use gemma::compute::{
    Attention, BufferId, Commit, Dispatch, Executor, ExecutorExt, KvFormat, KvLayer, Op, PageRange,
    Part, Plan, StepLayout,
};
use gemma::kv::{OffloadedPages, PAGE, Pages};
use gemma::vulkan::VulkanExecutor;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const LAYOUT: StepLayout = StepLayout { max_rows: 12, tables: PAGES };
const PAGES: usize = 3;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
/// Positions before the rows. They fill almost two pages.
const BASE: usize = 2 * PAGE - 5;
/// Number of a page such that its first element has number 2^35.
const FAR: usize = 1 << 20;

/// Allocates a buffer of random numbers: f32, f16 or int8 elements, then scales.
fn filled(exec: &mut VulkanExecutor, rng: &mut SmallRng, n: usize, format: KvFormat) -> BufferId {
    let mut bytes: Vec<u8> = Vec::new();
    for _ in 0..n * DIM {
        let number = rng.random_range(-1f32..1.0);
        match format {
            KvFormat::F32 => bytes.extend(number.to_le_bytes()),
            KvFormat::F16 => bytes.extend(half::f16::from_f32(number).to_le_bytes()),
            KvFormat::Q8 => bytes.push(rng.random()),
        }
    }
    let scales = (0..n * format.scales(DIM)).map(|_| rng.random_range(0.001f32..0.01));
    bytes.extend(scales.flat_map(|scale| half::f16::from_f32(scale).to_le_bytes()));
    let id = exec.alloc("numbers", bytes.len()).unwrap();
    exec.write(id, 0, &bytes).unwrap();
    id
}

/// Returns the outputs of attention over all pages and over some, then the cache after a commit of
/// all rows. The first page in the buffer has the number `first`.
fn results(mut exec: VulkanExecutor, format: KvFormat, first: usize) -> Vec<Vec<u8>> {
    let mut rng = SmallRng::seed_from_u64(1);
    let (cached, rows) = (PAGES * PAGE * KV_HEADS, LAYOUT.max_rows);
    let [k, v] = [0; 2].map(|_| filled(&mut exec, &mut rng, cached, format));
    let [scratch_k, scratch_v] =
        [0; 2].map(|_| filled(&mut exec, &mut rng, rows * KV_HEADS, format));
    let q = filled(&mut exec, &mut rng, rows * HEADS, KvFormat::F32);
    let width = HEADS * (DIM + 2);
    let [all, rest] = [0; 2].map(|_| exec.alloc("out", rows * width * 4).unwrap());
    // Scales come after the codes of all pages. With this number of pages they come after the codes
    // that exist, since a page has 16 times fewer bytes of scales than of codes.
    let all_pages = PAGES + first - if format == KvFormat::Q8 { first / 16 } else { 0 };
    let page_bytes = (KV_HEADS * PAGE * DIM * format.bytes()) as u64;
    [k, v].iter().for_each(|id| exec.extend_backwards(*id, first as u64 * page_bytes));
    let kv = KvLayer {
        format,
        n_kv_heads: KV_HEADS,
        head_dim: DIM,
        pages: Pages { count: PAGES, window: None },
        all_pages,
        table: 0,
        key_block: exec.key_block(Part::Layer(0))(format),
        k,
        v,
        scratch_k,
        scratch_v,
    };
    let after = PageRange::After(OffloadedPages { lag: rows, share: 0 });
    let (n_heads, scale, whole_images) = (HEADS, 0.125, false);
    let attention =
        |out, range| Op::Attention(Attention { q, out, n_heads, scale, kv, whole_images, range });
    let ops = [
        attention(all, PageRange::All),
        attention(rest, after),
        Op::Commit(Commit { layers: vec![kv] }),
    ];
    let dispatches = ops.map(|op| Dispatch { op, label: "op", layer: None }).into();
    let step = exec.alloc("step", LAYOUT.words() * 4).unwrap();
    let plan = exec.record(Plan { dispatches }, step, LAYOUT).unwrap();
    let numbers: Vec<u32> = (0..rows as u32).collect();
    let parents: Vec<u32> =
        (0..rows).map(|row| numbers[..row].last().copied()).map(parent).collect();
    let positions: Vec<u32> = numbers.iter().map(|row| BASE as u32 + row).collect();
    let zeros = vec![0; rows];
    let view = StepView {
        rows,
        tokens: &zeros,
        positions: &positions,
        parents: &parents,
        path: &numbers,
        roots: &zeros,
        sequences: &zeros,
        ..StepView::default()
    };
    let mut words = vec![0; LAYOUT.words()];
    LAYOUT.fill(&mut words, &view);
    // The sequence's pages are not in the order of the cache.
    let table = [2, 0, 1].map(|page| (first + page) as u32);
    words[LAYOUT.tables_at()..].copy_from_slice(&table);
    exec.write(step, 0, bytemuck::cast_slice(&words)).unwrap();
    exec.run(plan).unwrap();
    let cache_bytes = cached * format.head_bytes(DIM);
    let sizes = [
        (all, rows * HEADS * DIM * 4),
        (rest, rows * width * 4),
        (k, cache_bytes),
        (v, cache_bytes),
    ];
    let read = |(id, bytes)| {
        let mut bytes = vec![0; bytes];
        exec.read(id, 0, &mut bytes).unwrap();
        bytes
    };
    sizes.map(read).into()
}

fn parent(row: Option<u32>) -> u32 {
    row.unwrap_or(NO_PARENT)
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn pages_beyond_32_bits_are_read_and_written() {
    let Some(open) = device() else { return };
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
        let (near, far) = (results(open(), format, 0), results(open(), format, FAR));
        assert!(near == far, "{format:?}");
        assert!(near.iter().all(|bytes| bytes.iter().any(|byte| *byte != 0)));
    }
}
