//! The Vulkan executor: scores near the CPU's. A rounding that falls the other way in one activation moves
//! these small random models by up to a hundredth; a wrong kernel moves them by their whole size.

mod common;

use common::vulkan::{config, device};
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::{Executor, KvFormat};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, PlannedEngine, Rows, Scores, TokenTree};
use gemma::gemma::{Role, Weights};

/// Formats of linear layers, of the table and of the cache that between them meet every kernel; every format by itself is the business of
/// `vulkan_twins.rs`. Few, because a driver on the processor compiles kernels for minutes.
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
    let weights = Weights::synthetic(config(70), move |role| if role == Role::Embed { embed } else { linear }, 11);
    PlannedEngine::new(&weights, exec, EngineOptions { context: 1200, kv }).unwrap()
}

#[test]
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
