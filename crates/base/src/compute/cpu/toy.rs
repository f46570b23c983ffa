//! Test of a pass with the block of the tests.

use super::executor::{CpuExecutor, CpuOptions};
use super::isa::Isa;
use crate::compute::act::{Act, ActFormat};
use crate::compute::executor::{Executor, ExecutorExt};
use crate::compute::op::{Embed, Linear, LinearJob, Op, Prepare};
use crate::compute::operand::RowSet;
use crate::compute::plan::{Part, Plan};
use crate::compute::step::{NO_PARENT, StepLayout, StepView};
use crate::tensor::Format;
use crate::tensor::quantize::{gaussian, quantize};

/// Runs a pass with a block that is only defined by its row in `BLOCKS`. The executor compares each
/// dispatch with its scalar definition.
#[test]
fn a_block_is_its_row() {
    const ROWS: usize = 9;
    let (format, vocab, cols): (Format, _, _) = ("toy-g32".parse().unwrap(), 48, 256);
    let matrix = quantize(format, vocab, cols, &gaussian(vocab * cols, 3)).unwrap();
    for isa in Isa::all_supported() {
        let options = CpuOptions { threads: 2, isa: Some(isa), check: true };
        let mut exec = CpuExecutor::new(options).unwrap();
        let table = exec.load_matrix("table", Part::Head, &matrix).unwrap();
        let mut rows = |cols: usize| exec.alloc("rows", ROWS * cols * 4).unwrap();
        let (hidden, logits, values) = (rows(cols), rows(vocab), rows(cols));
        let format = ActFormat::for_weights(format);
        let (scales, sums) = (rows(format.groups(cols)), rows(format.groups(cols)));
        let act = Act { format, cols, values, scales, sums };
        let (rows, job) = (RowSet::All, LinearJob { weight: table, act, out: logits });
        let mut plan = Plan::default();
        plan.push("embed", None, Op::Embed(Embed { table, scale: 2.0, out: hidden }));
        plan.push("prepare", None, Op::Prepare(Prepare { input: hidden, act, rows }));
        plan.push("head", None, Op::Linear(Linear { jobs: vec![job], rows }));
        let layout = StepLayout { max_rows: ROWS, tables: 0 };
        let mut words = vec![0; layout.words()];
        let (tokens, parents) = ([0, 47, 1, 2, 3, 5, 8, 13, 21], [NO_PARENT; ROWS]);
        let roots: Vec<u32> = (0..ROWS as u32).collect();
        let zeros = [0; ROWS];
        let step = StepView {
            rows: ROWS,
            tokens: &tokens,
            positions: &zeros,
            parents: &parents,
            roots: &roots,
            sequences: &zeros,
            ..StepView::default()
        };
        layout.fill(&mut words, &step);
        let buffer = exec.alloc("step", words.len() * 4).unwrap();
        exec.write(buffer, 0, bytemuck::cast_slice(&words)).unwrap();
        let plan = exec.record(plan, buffer, layout).unwrap();
        exec.run(plan).unwrap();
        // Each token's likeliest successor is itself, because the head is the embedding table.
        let mut found = vec![0f32; ROWS * vocab];
        exec.read(logits, 0, bytemuck::cast_slice_mut(&mut found)).unwrap();
        for (row, token) in found.chunks_exact(vocab).zip(tokens) {
            let best = (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b]));
            assert_eq!(best, Some(token as usize), "{isa}");
        }
    }
}
