//! Runs single operations on an executor that compares every result with the scalar twin. Inputs,
//! matrices and steps are made up.
//!
//! Each step runs twice, the second time with NaN, infinity, denormals and groups of tiny values
//! among the inputs. On a Vulkan device, workgroups run in another order than that of a driver on
//! the processor.

#![allow(dead_code)]

use gemma::compute::step::{NO_PARENT, StepView, roots};
use gemma::compute::{
    Act, ActFormat, BufferId, Choose, Combine, Dispatch, Executor, ExecutorExt, ExpertWeights,
    Experts, KvFormat, KvLayer, LinearJob, Op, Part, Plan, PlanId, Prepare, RowSet, StepLayout,
    WeightId,
};
use gemma::kv::Pages;
use gemma::tensor::block::BLOCKS;
use gemma::tensor::{Code, Format, Matrix};
use gemma::vulkan::{CheckedExecutor, VulkanExecutor};
use half::{bf16, f16};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Numbers of rows around the block sizes of kernels.
pub const ROWS: [usize; 9] = [1, 2, 3, 5, 8, 9, 16, 17, 33];

/// Limit of rows, and of sequences.
const MAX_ROWS: usize = 48;
pub const SEQUENCES: usize = 3;
/// Entries of the page tables of all layers.
const TABLES: usize = 64;

/// Returns a format by its name. It may be one that only files have.
pub fn format(spelled: &str) -> Format {
    let of_file = BLOCKS.iter().find(|block| block.name == spelled && block.code.is_stored());
    of_file.map_or_else(|| spelled.parse().unwrap(), |block| Format::of_file(block.code).unwrap())
}

/// An executor that checks its results, and a source of numbers.
pub struct Twins<E: Executor = CheckedExecutor> {
    pub exec: E,
    pub rng: SmallRng,
    pub layout: StepLayout,
    step: BufferId,
    /// Page tables of the layers made so far.
    tables: Vec<u32>,
    filled: Vec<(BufferId, Filled)>,
    /// Number of runs with odd numbers so far.
    odd_runs: usize,
    /// Whether keys and values get odd numbers too.
    has_odd_caches: bool,
}

/// Kind of the random numbers in a buffer.
#[derive(Clone, Copy)]
enum Filled {
    /// This many floats in each row, for all rows if possible.
    Floats(usize),
    /// Scales of activations: 0, numbers from 1e-32, or NaN.
    Scales(usize),
    /// Channels and scales of keys or values.
    Cache(KvFormat, [usize; 2]),
}

/// Odd numbers. A row gets one of them in one of its columns.
const ODD: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40];

/// A step of made-up tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// Number of live rows.
    pub live: usize,
    /// Number of rows before them, evaluated earlier.
    pub first: usize,
    pub base: usize,
    /// Whether the rows are a random tree, rather than a chain.
    pub tree: bool,
    /// Number of sequences that the live rows belong to; 0 means one.
    pub sequences: usize,
    /// Number of rows that need logits.
    pub selected: usize,
    /// Number of rows to commit, from the root.
    pub path: usize,
    pub n_best: u32,
    pub usable: u32,
}

impl Twins {
    pub fn new(gpu: VulkanExecutor, seed: u64) -> Twins {
        Twins::of_rows(gpu, seed, MAX_ROWS)
    }

    /// Makes twins with room for passes of `max_rows` rows.
    pub fn of_rows(gpu: VulkanExecutor, seed: u64, max_rows: usize) -> Twins {
        let mut twins = Twins::on(CheckedExecutor::new(gpu.shuffled(seed)), seed, max_rows);
        // A GPU multiplies hidden values by a weight of 0, which gives NaN if they are not finite.
        twins.has_odd_caches = false;
        twins
    }
}

impl<E: Executor> Twins<E> {
    /// Makes twins on any executor that checks its results.
    pub fn on(mut exec: E, seed: u64, max_rows: usize) -> Twins<E> {
        let layout = StepLayout { max_rows, tables: TABLES };
        let step = exec.alloc("step", layout.words() * 4).unwrap();
        let rng = SmallRng::seed_from_u64(seed);
        let (tables, filled) = (Vec::new(), Vec::new());
        Twins { exec, rng, layout, step, tables, filled, odd_runs: 0, has_odd_caches: true }
    }

    /// Makes a page table of all sequences for a layer of `all_pages` pages in random order.
    ///
    /// Returns its offset.
    pub fn table(&mut self, pages: usize, all_pages: usize) -> usize {
        let at = self.tables.len();
        let mut ids: Vec<u32> = (0..all_pages as u32).collect();
        ids.shuffle(&mut self.rng);
        self.tables.extend(&ids[..SEQUENCES * pages]);
        assert!(self.tables.len() <= TABLES);
        at
    }

    /// Allocates a zeroed buffer of `[max_rows, cols]` numbers of four bytes.
    pub fn rows(&mut self, cols: usize) -> BufferId {
        self.exec.alloc("rows", self.layout.max_rows * cols * 4).unwrap()
    }

    /// The same, filled with random floats.
    pub fn floats(&mut self, cols: usize) -> BufferId {
        let id = self.rows(cols);
        self.fill(id, self.layout.max_rows * cols);
        id
    }

    /// Allocates a vector of floats.
    pub fn vector(&mut self, n: usize) -> BufferId {
        let id = self.exec.alloc("vector", n * 4).unwrap();
        self.fill(id, n);
        id
    }

    pub fn fill(&mut self, id: BufferId, n: usize) {
        let values: Vec<f32> = (0..n).map(|_| self.rng.random_range(-1f32..1.0)).collect();
        self.exec.write(id, 0, bytemuck::cast_slice(&values)).unwrap();
        self.remember(id, Filled::Floats(n));
    }

    fn remember(&mut self, id: BufferId, filled: Filled) {
        self.filled.retain(|other| other.0 != id);
        self.filled.push((id, filled));
    }

    /// Fills keys or values. If `is_live` is false, they are NaN, as far as their format or its
    /// scales allow.
    ///
    /// `is_live` gets the index of a channel, or the index of a scale and true.
    pub fn fill_cache(
        &mut self,
        id: BufferId,
        kv: KvFormat,
        [channels, scales]: [usize; 2],
        is_live: impl Fn(usize, bool) -> bool,
    ) {
        let rng = &mut self.rng;
        let mut number = |i: usize, is_scale: bool| match (is_live(i, is_scale), is_scale) {
            (false, _) => f32::NAN,
            (true, false) => rng.random_range(-1f32..1.0),
            (true, true) => rng.random_range(0.001f32..0.01),
        };
        let mut bytes: Vec<u8> = Vec::with_capacity(channels * kv.bytes() + 2 * scales);
        for i in 0..channels {
            let number = number(i, false);
            match kv {
                KvFormat::F32 => bytes.extend(number.to_le_bytes()),
                KvFormat::F16 => bytes.extend(f16::from_f32(number).to_le_bytes()),
                KvFormat::Q8 => bytes.extend(((number * 127.0) as i8).to_le_bytes()),
            }
        }
        (0..scales).for_each(|i| bytes.extend(f16::from_f32(number(i, true)).to_le_bytes()));
        self.exec.write(id, 0, &bytes).unwrap();
        self.remember(id, Filled::Cache(kv, [channels, scales]));
    }

    /// Makes a matrix of random codes and scales. Every code occurs.
    pub fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> WeightId {
        let rng = &mut self.rng;
        let codes: Vec<u8> = match format.code {
            Code::F32 => {
                (0..rows * cols).flat_map(|_| rng.random_range(-1f32..1.0).to_le_bytes()).collect()
            }
            Code::Bf16 => (0..rows * cols)
                .flat_map(|_| bf16::from_f32(rng.random_range(-1f32..1.0)).to_le_bytes())
                .collect(),
            _ => (0..format.stored_rows(rows) * format.row_bytes(cols))
                .map(|_| rng.random::<u8>())
                .collect(),
        };
        // The floats of an element come first, then integers with any value.
        let kind = format.code.spec().side;
        let floats = if kind.has_min() { 4 } else { 2 };
        let spread = if kind.groups() > 1 { 0.0005 } else { 0.05 };
        let mut side: Vec<u8> =
            (0..rows * format.row_side(cols)).map(|_| rng.random::<u8>()).collect();
        for element in side.chunks_exact_mut(kind.bytes().max(1)) {
            for float in element[..floats].as_chunks_mut().0 {
                *float = f16::from_f32(rng.random_range(-spread..spread)).to_le_bytes();
            }
        }
        self.exec
            .load_matrix(
                "matrix",
                Part::Layer(0),
                &Matrix::new(format, rows, cols, codes, side).unwrap(),
            )
            .unwrap()
    }

    /// Allocates prepared activations.
    pub fn act(&mut self, format: Format, cols: usize) -> Act {
        self.act_of_slots(format, cols, 1)
    }

    /// The same for `slots` slots per row.
    fn act_of_slots(&mut self, format: Format, cols: usize, slots: usize) -> Act {
        let format = ActFormat::for_weights(format);
        let groups = format.groups(cols).max(1);
        Act {
            format,
            cols,
            values: self.rows(slots * cols),
            scales: self.rows(slots * groups),
            sums: self.rows(slots * groups),
        }
    }

    /// Makes the operations of a mixture of experts.
    ///
    /// Each row uses `used` of `experts`. The matrices have `width` rows (gate and up) and `dim`
    /// rows (down). With `up`, gate and up are separate matrices.
    pub fn mixture(
        &mut self,
        [first, second]: [Format; 2],
        up: Option<Format>,
        [experts, used, dim, width]: [usize; 4],
    ) -> Vec<Op> {
        let (scores, factors) = (self.floats(experts), self.vector(experts));
        let (chosen, weights) = (self.rows(used), self.rows(used));
        let (gated, parts, out) = (self.rows(used * width), self.rows(used * dim), self.rows(dim));
        let product =
            |weights, act, out| Op::Experts(Experts { weights, act, chosen, experts, used, out });
        let act = self.filled_act(first, dim);
        let gates = match up {
            None => ExpertWeights::Fused(self.matrix(first, experts * 2 * width, dim)),
            Some(up) => ExpertWeights::Apart {
                gate: self.matrix(first, experts * width, dim),
                up: self.matrix(up, experts * width, dim),
                act_up: self.filled_act(up, dim),
            },
        };
        let mut ops = vec![
            Op::Choose(Choose { scores, factors, experts, used, chosen, weights }),
            product(gates, act, gated),
        ];
        let mut slots = self.act_of_slots(second, width, used);
        if slots.format.int8 || slots.format.hadamard {
            let rows = RowSet::Slots(used);
            ops.push(Op::Prepare(Prepare { input: gated, act: slots, rows }));
        } else {
            slots.values = gated;
        }
        let down = ExpertWeights::Plain(self.matrix(second, experts * dim, width));
        ops.push(product(down, slots, parts));
        ops.push(Op::Combine(Combine { parts, weights, used, dim, out }));
        ops
    }

    /// Makes prepared activations, filled with random values.
    pub fn filled_act(&mut self, format: Format, cols: usize) -> Act {
        let act = self.act(format, cols);
        let groups = act.format.groups(cols).max(1);
        if !act.format.int8 {
            self.fill(act.values, self.layout.max_rows * cols);
            return act;
        }
        let codes: Vec<i8> =
            (0..self.layout.max_rows * cols).map(|_| self.rng.random_range(-127..=127)).collect();
        let sums: Vec<i32> =
            codes.chunks(cols / groups).map(|g| g.iter().map(|c| *c as i32).sum()).collect();
        let scales: Vec<f32> = sums.iter().map(|_| self.rng.random_range(0.001f32..0.1)).collect();
        self.exec.write(act.values, 0, bytemuck::cast_slice(&codes)).unwrap();
        self.exec.write(act.sums, 0, bytemuck::cast_slice(&sums)).unwrap();
        self.exec.write(act.scales, 0, bytemuck::cast_slice(&scales)).unwrap();
        self.remember(act.scales, Filled::Scales(scales.len()));
        act
    }

    /// Makes a product of random activations with a random matrix of `[n, cols]`.
    pub fn job(&mut self, format: Format, n: usize, cols: usize) -> LinearJob {
        LinearJob {
            act: self.filled_act(format, cols),
            weight: self.matrix(format, n, cols),
            out: self.rows(n),
        }
    }

    /// Runs `ops` for each of `steps`, and compares the results with those of their twins.
    pub fn run(&mut self, what: &str, ops: Vec<Op>, steps: impl IntoIterator<Item = Step>) {
        let read: Vec<BufferId> = ops.iter().flat_map(Op::inputs).collect();
        let plan = self.record(ops);
        for step in steps {
            self.try_run(plan, step).unwrap_or_else(|e| panic!("{what}, {step:?}: {e:#}"));
            let odd = self.run_with_odd_numbers(plan, step, &read);
            odd.unwrap_or_else(|e| panic!("{what}, {step:?}, odd numbers: {e:#}"));
        }
    }

    /// Runs a plan with odd numbers in the buffers `read`, and restores their content afterwards.
    fn run_with_odd_numbers(
        &mut self,
        plan: PlanId,
        step: Step,
        read: &[BufferId],
    ) -> anyhow::Result<()> {
        let is_odd = |(id, filled): &(BufferId, Filled)| {
            let is_cache = matches!(filled, Filled::Cache(..));
            read.contains(id) && (self.has_odd_caches || !is_cache)
        };
        let filled: Vec<_> = self.filled.iter().copied().filter(is_odd).collect();
        let mut held = Vec::new();
        for (place, (id, filled)) in filled.into_iter().enumerate() {
            let n = match filled {
                Filled::Floats(n) | Filled::Scales(n) => 4 * n,
                Filled::Cache(kv, [channels, scales]) => channels * kv.bytes() + 2 * scales,
            };
            let mut bytes = vec![0; n];
            self.exec.read(id, 0, &mut bytes)?;
            let mut odd = bytes.clone();
            match filled {
                Filled::Floats(n) => self.make_odd(&mut odd, n, place),
                Filled::Scales(n) => {
                    let scales = bytemuck::cast_slice_mut::<u8, f32>(&mut odd);
                    let numbers = [f32::NAN, 0.0, 1e-29].into_iter().cycle();
                    let every = (self.odd_runs % 3..n).step_by(5);
                    every.zip(numbers).for_each(|(i, number)| scales[i] = number);
                }
                Filled::Cache(kv, sizes) => {
                    let is_scratch = self.filled.iter().any(|(_, other)| {
                        matches!(other, Filled::Cache(_, [more, _]) if *more > sizes[0])
                    });
                    self.make_cache_odd(&mut odd, kv, sizes, is_scratch);
                }
            }
            self.exec.write(id, 0, &odd)?;
            held.push((id, bytes));
        }
        self.odd_runs += 1;
        let result = self.try_run(plan, step);
        for (id, bytes) in held {
            self.exec.write(id, 0, &bytes)?;
        }
        result
    }

    /// Changes rows: each gets odd numbers of one kind, or none. A vector gets a denormal.
    fn make_odd(&mut self, bytes: &mut [u8], n: usize, place: usize) {
        let values = bytemuck::cast_slice_mut::<u8, f32>(bytes);
        if !n.is_multiple_of(self.layout.max_rows) {
            values[n / 3] = 1e-40;
            return;
        }
        let cols = n / self.layout.max_rows;
        for (r, row) in values.chunks_exact_mut(cols).enumerate() {
            let at = (7 * r + 3 + place) % cols;
            match (r + self.odd_runs) % 7 {
                kind @ 0..4 => row[at] = ODD[kind],
                // Groups of tiny values, then a row of them, as gates of about -12 produce them.
                4 => row[..cols.min(128)].iter_mut().for_each(|v| *v *= 7.3e-38),
                5 => row.iter_mut().for_each(|v| *v *= 9e-31),
                _ => {}
            }
        }
    }

    /// Changes a cache: denormals anywhere, and one NaN or infinity in scratch rows.
    ///
    /// A kernel may multiply committed values that a row does not see by 0, so these stay finite.
    fn make_cache_odd(
        &mut self,
        bytes: &mut [u8],
        kv: KvFormat,
        [channels, scales]: [usize; 2],
        is_scratch: bool,
    ) {
        let (numbers, width, first) = match kv {
            KvFormat::Q8 => (scales, 2, channels),
            _ => (channels, kv.bytes(), 0),
        };
        let not_finite = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][self.odd_runs % 3];
        for value in [1e-40f32, 1e-7, 1e-7, if is_scratch { not_finite } else { 0.0 }] {
            // An int8 code times infinity can be 0 times infinity.
            let value = if kv == KvFormat::Q8 && value.is_infinite() { f32::NAN } else { value };
            let at = first + width * self.rng.random_range(0..numbers);
            match width {
                4 => bytes[at..at + 4].copy_from_slice(&value.to_le_bytes()),
                _ => bytes[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            }
        }
    }

    /// Records `ops`, all with the label `op`.
    pub fn record(&mut self, ops: Vec<Op>) -> PlanId {
        let dispatches =
            ops.into_iter().map(|op| Dispatch { op, label: "op", layer: None }).collect();
        self.exec.record(Plan { dispatches }, self.step, self.layout).unwrap()
    }

    /// Runs a plan for a step. Fails if a result differs from its twin's.
    pub fn try_run(&mut self, plan: PlanId, step: Step) -> anyhow::Result<()> {
        self.write_step(step);
        self.exec.run(plan)
    }

    fn write_step(&mut self, s: Step) {
        let rows = s.first + s.live;
        // Each sequence is at its own position.
        let each = rows.div_ceil(s.sequences.max(1));
        let (mut parents, mut positions, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
        for row in 0..rows {
            let (nth, root) = (row / each, row / each * each);
            if row == root {
                parents.push(NO_PARENT);
                positions.push((s.base + 37 * nth) as u32);
            } else {
                let parent = if s.tree {
                    self.rng.random_range(root + (row - root) / 2..row)
                } else {
                    row - 1
                };
                parents.push(parent as u32);
                positions.push(positions[parent] + 1);
            }
            // In reverse, so that the rows' order is not that of the pages.
            sequences.push((SEQUENCES - 1 - nth) as u32);
        }
        let tokens: Vec<u32> = (0..rows as u32).map(|r| r * 7 % 37).collect();
        let selected: Vec<u32> = (0..s.selected).map(|i| (rows - 1 - i % rows) as u32).collect();
        // From the last row back to the root.
        let mut path = Vec::new();
        let mut node = rows as u32 - 1;
        while node != NO_PARENT {
            path.insert(0, node);
            node = parents[node as usize];
        }
        path.truncate(s.path);
        let view = StepView {
            rows,
            first: s.first,
            tokens: &tokens,
            positions: &positions,
            parents: &parents,
            selected: &selected,
            path: &path,
            roots: &roots(&parents),
            sequences: &sequences,
            n_best: s.n_best,
            usable: s.usable,
            tables: &[],
        };
        let mut words = vec![0; self.layout.words()];
        self.layout.fill(&mut words, &view);
        words[self.layout.tables_at()..][..self.tables.len()].copy_from_slice(&self.tables);
        self.exec.write(self.step, 0, bytemuck::cast_slice(&words)).unwrap();
    }
}

/// Channels of a head, query heads, kv heads, cache format, window.
pub type Heads = (usize, usize, usize, KvFormat, Option<usize>);

/// Heads, each with the numbers of rows to test. A driver on the processor compiles kernels for
/// wide heads slowly.
pub const HEADS: [(Heads, &[usize]); 10] = [
    ((16, 2, 2, KvFormat::F16, None), &ROWS),
    ((32, 4, 2, KvFormat::F32, Some(70)), &ROWS),
    ((16, 4, 1, KvFormat::F32, Some(256)), &[1, 3, 9]),
    ((64, 1, 1, KvFormat::F16, None), &[2, 5]),
    ((128, 2, 1, KvFormat::F16, None), &[1, 2]),
    ((256, 1, 1, KvFormat::F32, Some(257)), &[1, 3]),
    // The number of query heads per kv head is not a power of two.
    ((64, 12, 2, KvFormat::F32, None), &[1, 2, 3]),
    ((32, 12, 3, KvFormat::F32, Some(299)), &[1, 2, 5]),
    // More query heads per kv head than a workgroup handles.
    ((512, 16, 2, KvFormat::F16, None), &[1, 5]),
    // Two groups of channels with scales.
    ((64, 4, 2, KvFormat::Q8, None), &[1, 3, 9]),
];

/// Makes the cache of a layer, filled with random values.
pub fn layer<E: Executor>(t: &mut Twins<E>, (dim, _, heads, kv, window): Heads) -> KvLayer {
    let pages = Pages::for_layer(1100, t.layout.max_rows, window);
    let all_pages = SEQUENCES * pages.count + 2;
    let (cache, scratch) = (all_pages * gemma::kv::PAGE * heads, t.layout.max_rows * heads);
    let table = t.table(pages.count, all_pages);
    let mut made = |n: usize| {
        let id = t.exec.alloc("cache", n * kv.head_bytes(dim)).unwrap();
        t.fill_cache(id, kv, [n * dim, n * kv.scales(dim)], |_, _| true);
        id
    };
    let [k, v, scratch_k, scratch_v] = [cache, cache, scratch, scratch].map(&mut made);
    let key_block = t.exec.key_block(Part::Layer(0))(kv);
    KvLayer {
        format: kv,
        n_kv_heads: heads,
        head_dim: dim,
        pages,
        all_pages,
        table,
        key_block,
        k,
        v,
        scratch_k,
        scratch_v,
    }
}

/// Fills the scratch rows of a step. All other rows are NaN.
pub fn fill_scratch<E: Executor>(t: &mut Twins<E>, kv: &KvLayer, step: Step) {
    let (rows, max_rows) = (step.first + step.live, t.layout.max_rows);
    let (width, scales) = (kv.n_kv_heads * kv.head_dim, kv.n_kv_heads * kv.scales());
    let sizes = [max_rows * width, max_rows * scales];
    let block = kv.key_block;
    t.fill_cache(kv.scratch_k, kv.format, sizes, |i, is_scale| {
        (if is_scale { i } else { i / block }) % max_rows < rows
    });
    t.fill_cache(kv.scratch_v, kv.format, sizes, |i, is_scale| {
        (if is_scale { i % max_rows } else { i / width }) < rows
    });
}

/// Returns steps with every number of rows, some after rows of an earlier pass.
pub fn every_row_count() -> impl Iterator<Item = Step> {
    ROWS.into_iter().map(|live| Step {
        live,
        first: if live % 3 == 0 { 4 } else { 0 },
        ..Step::default()
    })
}
