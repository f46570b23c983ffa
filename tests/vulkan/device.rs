//! The Vulkan executor: its scores are near the CPU's. An activation that is rounded the other way
//! changes the scores of these small random models by up to a hundredth; a wrong kernel changes
//! them completely.

use crate::common;
use common::vulkan::{config, device};
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::step::StepView;
use gemma::compute::{Dispatch, Executor, KvFormat, Norm, Op, Plan, RowSet, StepLayout};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::{Role, Weights};
use gemma::vulkan::VulkanExecutor;

/// Formats of linear layers, of the table and of the cache that together use every kernel.
/// `twins.rs` tests every single format. The list is short, because a driver on the processor
/// compiles kernels for minutes.
const CASES: [(&str, &str, KvFormat); 7] = [
    ("f32", "i4-row+h128", KvFormat::F16),
    ("i8a-row", "i2-g32", KvFormat::F16),
    ("i4-row+h128", "i2-g128", KvFormat::F32),
    ("i4-g32", "t2-row+h128", KvFormat::F16),
    ("i2-row+h128", "t4-row+h128", KvFormat::F16),
    ("t3-row", "i8-g32", KvFormat::F16),
    ("f32", "bf16", KvFormat::Q8),
];

fn engine(exec: Box<dyn Executor>, linear: &str, embed: &str, kv: KvFormat) -> PlannedEngine {
    let (linear, embed) = (linear.parse().unwrap(), embed.parse().unwrap());
    let weights = Weights::synthetic(
        config(70),
        move |role| if role == Role::Embed { embed } else { linear },
        11,
    );
    PlannedEngine::new(&weights, exec, EngineOptions { context: 1200, kv }).unwrap()
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn scores_are_the_cpus() {
    let Some(open) = device() else { return };
    for (format, embed, kv) in CASES {
        let mut gpu = engine(Box::new(open()), format, embed, kv);
        let exec = CpuExecutor::new(CpuOptions { threads: 2, ..Default::default() }).unwrap();
        let mut cpu = engine(Box::new(exec), format, embed, kv);
        let tokens: Vec<u32> = (0..37).map(|i| (i * 31 + 7) % 96).collect();
        let (mut a, mut b) = (Scores::default(), Scores::default());
        gpu.forward(&TokenTree::chain(&tokens), Rows::All, &mut a).unwrap();
        cpu.forward(&TokenTree::chain(&tokens), Rows::All, &mut b).unwrap();
        let largest = b.logits.iter().fold(0f32, |m, v| m.max(v.abs()));
        let worst = a.logits.iter().zip(&b.logits).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= 0.02 * largest, "{format}, {kv:?}: {worst} of {largest}");
    }
}

/// A pass that is begun and finished separately gives the same result. The commit before it is
/// submitted with it.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_pass_that_is_waited_for_later_is_the_same_pass() {
    let Some(open) = device() else { return };
    let [mut a, mut b] =
        [0; 2].map(|_| engine(Box::new(open()), "i4-g32", "i8-row", KvFormat::F16));
    let (mut want, mut got) = (Scores::default(), Scores::default());
    assert!(b.finish(&mut got).is_err(), "nothing was begun");
    for round in 0..6u32 {
        let mut tree = TokenTree::chain(&[round, 7, 9]);
        tree.push(1, 30 + round);
        // Complete rows of logits and lists of the best tokens are returned by different code.
        let output = [Output::Logits, Output::Best { n: 4, usable: 96 }][round as usize % 2];
        let inputs = [Input::new(0, &tree, Rows::All)];
        a.run(&inputs, output, &mut want).unwrap();
        assert!(b.begin(&inputs, output).unwrap());
        while b.is_busy() {
            std::thread::yield_now();
        }
        b.finish(&mut got).unwrap();
        assert_eq!(
            (&got.logits, &got.best, got.rows()),
            (&want.logits, &want.best, 4),
            "round {round}"
        );
        assert!(!b.is_busy());
        let path = [0, 1, 3];
        [&mut a, &mut b].into_iter().for_each(|e| e.commit(&[(0, &path)]).unwrap());
    }
    assert_eq!(a.visible_cache(0).unwrap(), b.visible_cache(0).unwrap());
}

/// A running pass does not see data that is written for the next pass.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn the_next_pass_is_prepared_while_one_runs() {
    let Some(open) = device() else { return };
    const COLS: usize = 4096;
    let layout = StepLayout { max_rows: 512, tables: 0 };
    let results = |overlapped: bool| {
        let mut exec = open();
        let [step, x, w, out] = [layout.words(), 512 * COLS, COLS, 512 * COLS]
            .map(|n| exec.alloc("words", 4 * n).unwrap());
        let op = Op::Norm(Norm {
            x,
            add: None,
            scale: 1.0,
            w,
            eps: 1e-6,
            dim: COLS,
            out,
            rows: RowSet::All,
        });
        let plan = Plan { dispatches: vec![Dispatch { op, label: "norm", layer: None }] };
        let plan = exec.record(plan, step, layout).unwrap();
        // More than one submission: the second half is sent before the pass is done.
        let write = |exec: &mut VulkanExecutor, i: usize| {
            let rows = [300, 512, 1][i % 3];
            let list: Vec<u32> = (0..rows as u32).collect();
            let parents: Vec<u32> = (0..rows as u32).map(|r| r.wrapping_sub(1)).collect();
            let view = StepView {
                rows,
                tokens: &list,
                positions: &list,
                parents: &parents,
                ..StepView::default()
            };
            let mut words = vec![0; layout.words()];
            layout.fill(&mut words, &view);
            let values: Vec<f32> =
                (0..rows * COLS).map(|n| ((n * 31 + i * 977) % 251) as f32).collect();
            exec.write(step, 0, bytemuck::cast_slice(&words)).unwrap();
            exec.write(x, 0, bytemuck::cast_slice(&values)).unwrap();
        };
        write(&mut exec, 0);
        exec.write(w, 0, bytemuck::cast_slice(&[1f32; COLS])).unwrap();
        let mut results = Vec::new();
        for i in 1..7 {
            let mut head = vec![0; 64 * COLS];
            exec.start(plan, Some((out, head.len()))).unwrap();
            if overlapped {
                write(&mut exec, i);
            }
            exec.finish(Some((out, &mut head))).unwrap();
            results.push(head);
            if !overlapped {
                write(&mut exec, i);
            }
        }
        results
    };
    let want = results(false);
    assert!(want.windows(2).all(|w| w[0] != w[1]));
    assert!(results(true) == want);
}

/// Ignored tests do not fail, so this test fails if a device is required and missing.
#[test]
fn a_driver_is_there_where_one_is_required() {
    let is_required = std::env::var_os("GEMMA_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(
        !is_required || cfg!(vulkan_driver),
        "no Vulkan driver was there when tests were built"
    );
}
