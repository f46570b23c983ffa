//! Mixtures of experts on Vulkan: each kernel equals its scalar twin, and rows have the same bits
//! as alone.

use crate::common;
use common::trees::{check_sequences, check_tree, mixed, tokens};
use common::twins::{Step, Twins, format};
use common::vulkan::{config, device};
use gemma::compute::KvFormat;
use gemma::engine::PlannedEngine;
use gemma::engine::planned::EngineOptions;
use gemma::models::Weights;
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Every kernel of linear layers, experts that many slots share, and experts without slots.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn products_equal_their_twins() {
    let Some(open) = device() else { return };
    for (seed, (first, second, up, shape, lives)) in [
        ("i4-g32", "i4-g32", None, [5, 2, 128, 64], &[1, 2, 9, 33][..]),
        ("q6_k", "q4_k", Some("i8-g32"), [19, 3, 256, 256], &[1, 5]),
        ("bf16", "f32", None, [4, 4, 32, 96], &[1, 6]),
        ("t3-row", "i8-row", Some("f32"), [3, 1, 128, 64], &[2, 17]),
        ("i8-row", "i4-row", None, [130, 8, 160, 96], &[3]),
    ]
    .into_iter()
    .enumerate()
    {
        let mut t = Twins::new(open(), seed as u64);
        let ops = t.mixture([format(first), format(second)], up.map(format), shape);
        let steps = lives.iter().map(|n| Step { live: *n, first: n % 3, ..Step::default() });
        t.run(&format!("{first}, {second}"), ops, steps);
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn rows_have_their_own_experts() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(8);
    let text = tokens(&mut rng, 71);
    let engine = |sequences| {
        let weights = Weights::synthetic(mixed(config(70)), |_| format("i4-g32"), 13);
        let options = EngineOptions { context: 400, kv: KvFormat::F16 };
        PlannedEngine::for_sequences(&weights, Box::new(open()), options, sequences).unwrap()
    };
    check_tree(&mut engine(1), &mut engine(1), &text, &mut rng, "on the device");
    let lengths = [20, 0];
    let mut alone: Vec<_> = lengths.map(|_| engine(1)).into();
    check_sequences(&mut engine(2), &mut alone, &lengths, &mut rng, "on the device");
}
