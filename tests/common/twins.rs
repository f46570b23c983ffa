//! Single operations on a Vulkan device whose every result is held to the scalar twin: made-up
//! inputs, matrices and steps. Workgroups run in another order than that of a driver on the
//! processor.

#![allow(dead_code)]

use gemma::compute::step::{NO_PARENT, StepView, roots};
use gemma::compute::{
    Act, ActFormat, BufferId, Dispatch, Executor, ExecutorExt, KvFormat, LinearJob, Op, Part, Plan,
    PlanId, StepLayout, WeightId,
};
use gemma::tensor::block::BLOCKS;
use gemma::tensor::{Code, Format, Matrix};
use gemma::vulkan::{CheckedExecutor, VulkanExecutor};
use half::{bf16, f16};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Numbers of rows around the blocks that kernels work in.
pub const ROWS: [usize; 9] = [1, 2, 3, 5, 8, 9, 16, 17, 33];

/// Rows and sequences that there is room for.
const MAX_ROWS: usize = 48;
pub const SEQUENCES: usize = 3;
/// Entries of the page tables of all layers.
const TABLES: usize = 64;

/// A format that weights are rounded to, or one that only files have, by its name.
pub fn format(spelled: &str) -> Format {
    let of_file = BLOCKS.iter().find(|block| block.name == spelled && block.code.is_stored());
    of_file.map_or_else(|| spelled.parse().unwrap(), |block| Format::of_file(block.code).unwrap())
}

/// A device, and a source of numbers.
pub struct Twins {
    pub exec: CheckedExecutor,
    pub rng: SmallRng,
    pub layout: StepLayout,
    step: BufferId,
    /// Page tables of the layers made so far.
    tables: Vec<u32>,
}

/// A step of made-up tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// Live rows.
    pub live: usize,
    /// Rows before them, evaluated earlier.
    pub first: usize,
    pub base: usize,
    /// A random tree, instead of a chain.
    pub tree: bool,
    /// The live rows are shared out among this many sequences; 0 is one.
    pub sequences: usize,
    /// Rows whose logits are wanted.
    pub selected: usize,
    /// Rows to commit, from the root.
    pub path: usize,
    pub n_best: u32,
    pub usable: u32,
}

impl Twins {
    pub fn new(gpu: VulkanExecutor, seed: u64) -> Twins {
        Twins::of_rows(gpu, seed, MAX_ROWS)
    }

    /// With room for passes of so many rows.
    pub fn of_rows(gpu: VulkanExecutor, seed: u64, max_rows: usize) -> Twins {
        let layout = StepLayout { max_rows, tables: TABLES };
        let mut exec = CheckedExecutor::new(gpu.shuffled(seed));
        let step = exec.alloc("step", layout.words() * 4).unwrap();
        Twins { exec, rng: SmallRng::seed_from_u64(seed), layout, step, tables: Vec::new() }
    }

    /// A page table of all sequences for a layer of `all_pages` pages, which are in no order.
    /// Returns where it begins.
    pub fn table(&mut self, pages: usize, all_pages: usize) -> usize {
        let at = self.tables.len();
        let mut ids: Vec<u32> = (0..all_pages as u32).collect();
        ids.shuffle(&mut self.rng);
        self.tables.extend(&ids[..SEQUENCES * pages]);
        assert!(self.tables.len() <= TABLES);
        at
    }

    /// A buffer of `[max_rows, cols]` numbers of four bytes, zero.
    pub fn rows(&mut self, cols: usize) -> BufferId {
        self.exec.alloc("rows", self.layout.max_rows * cols * 4).unwrap()
    }

    /// The same, filled.
    pub fn floats(&mut self, cols: usize) -> BufferId {
        let id = self.rows(cols);
        self.fill(id, self.layout.max_rows * cols);
        id
    }

    /// A vector of floats.
    pub fn vector(&mut self, n: usize) -> BufferId {
        let id = self.exec.alloc("vector", n * 4).unwrap();
        self.fill(id, n);
        id
    }

    pub fn fill(&mut self, id: BufferId, n: usize) {
        let values: Vec<f32> = (0..n).map(|_| self.rng.random_range(-1f32..1.0)).collect();
        self.exec.write(id, 0, bytemuck::cast_slice(&values)).unwrap();
    }

    /// Fills keys or values. Values for which `is_live` is false are NaN, as far as their format or
    /// its scales can be. `is_live` gets the index of a channel, or of a scale and true.
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
    }

    /// Random codes and scales: every code occurs.
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
        // The floats of an element come first, then integers of any value.
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

    /// Room for prepared activations.
    pub fn act(&mut self, format: Format, cols: usize) -> Act {
        let format = ActFormat::for_weights(format);
        let groups = format.groups(cols).max(1);
        Act {
            format,
            cols,
            values: self.rows(cols),
            scales: self.rows(groups),
            sums: self.rows(groups),
        }
    }

    /// Prepared activations, filled.
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
        act
    }

    /// A product of random activations with a random matrix of `[n, cols]`.
    pub fn job(&mut self, format: Format, n: usize, cols: usize) -> LinearJob {
        LinearJob {
            act: self.filled_act(format, cols),
            weight: self.matrix(format, n, cols),
            out: self.rows(n),
        }
    }

    /// Runs `ops` for each of `steps`; they must give what their twins give.
    pub fn run(&mut self, what: &str, ops: Vec<Op>, steps: impl IntoIterator<Item = Step>) {
        let plan = self.record(ops);
        for step in steps {
            self.try_run(plan, step).unwrap_or_else(|e| panic!("{what}, {step:?}: {e:#}"));
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
        // Each sequence at a position of its own.
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
            // Backwards: the rows' order is not that of the pages.
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

/// Steps of every number of rows, some behind rows of an earlier pass.
pub fn every_row_count() -> impl Iterator<Item = Step> {
    ROWS.into_iter().map(|live| Step {
        live,
        first: if live % 3 == 0 { 4 } else { 0 },
        ..Step::default()
    })
}
