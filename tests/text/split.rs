//! One model on two executors: if both are the processor, the bits are those of one executor; if
//! they differ, the promises still hold.

use crate::{common, invariance};
use common::pooled::pooled;
use common::trees::{bits, check_tree, tokens};
use common::vulkan::{config, device};
use gemma::compute::cpu::{CpuExecutor, CpuFootprint, CpuOptions};
use gemma::compute::dry::Dry;
use gemma::compute::split::{Side, SplitExecutor};
use gemma::compute::{Executor, KvFormat, Reports};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::forward::{self, ForwardOptions, SparePages};
use gemma::models::{Role, Weights};
use gemma::sampler::SamplerConfig;
use gemma::vulkan::{Choice, Vulkan, VulkanFootprint, choose};
use invariance::Case;
use rand::SeedableRng;
use rand::rngs::SmallRng;

const LAYERS: u16 = 4;

fn weights(linear: &str, embed: &str) -> Weights {
    let (linear, embed) = (linear.parse().unwrap(), embed.parse().unwrap());
    Weights::synthetic(config(70), move |role| if role == Role::Embed { embed } else { linear }, 11)
}

fn engine(exec: impl Executor + 'static, linear: &str, embed: &str, kv: KvFormat) -> PlannedEngine {
    PlannedEngine::new(&weights(linear, embed), Box::new(exec), EngineOptions { context: 1200, kv })
        .unwrap()
}

fn cpu() -> CpuExecutor {
    CpuExecutor::new(CpuOptions { threads: 2, ..Default::default() }).unwrap()
}

fn split(device: impl Executor + 'static, layers: u16) -> SplitExecutor {
    SplitExecutor::new(Box::new(device), Box::new(cpu()), layers, LAYERS)
}

/// Returns the scores of a tree after a prompt, and of the rest of the tree after a part of it.
fn scores(engine: &mut PlannedEngine) -> Vec<u32> {
    let mut rng = SmallRng::seed_from_u64(3);
    common::trees::prefill(engine, &tokens(&mut rng, 300), &mut rng);
    let tree = common::trees::random_tree(&mut rng, 20);
    let mut out = Scores::default();
    let (start, parent) = (tree.tokens[..7].to_vec(), tree.parent[..7].to_vec());
    engine.forward(&TokenTree { tokens: start, parent }, Rows::All, &mut out).unwrap();
    let mut all = bits(&out.logits);
    engine.run(&[Input::new(0, &tree, Rows::Last).after(7)], Output::Hidden, &mut out).unwrap();
    assert!(!out.hidden.is_empty());
    all.extend(bits(&out.logits));
    all.extend(bits(&out.hidden));
    all
}

#[test]
fn two_processors_give_the_bits_of_one() {
    for (linear, embed, kv) in
        [("i4-g32", "i8-row", KvFormat::F16), ("bf16", "i4-row+h128", KvFormat::F32)]
    {
        let mut plain = engine(cpu(), linear, embed, kv);
        let want = scores(&mut plain);
        for layers in 0..=LAYERS {
            let mut engine = engine(split(cpu(), layers), linear, embed, kv);
            assert_eq!(scores(&mut engine), want, "{linear}, {layers} layers");
            assert!(
                engine.visible_cache(0).unwrap() == plain.visible_cache(0).unwrap(),
                "{linear}, {layers} layers"
            );
        }
    }
}

#[test]
fn a_profile_counts_both_sides() {
    let mut engine = engine(split(cpu(), 1), "i4-g32", "i8-row", KvFormat::F16);
    engine.device().unwrap().start_profile();
    engine.forward(&TokenTree::root(1), Rows::All, &mut Scores::default()).unwrap();
    let calls = |label| {
        engine.report().executor.unwrap().kernels.iter().find(|k| k.label == label).map(|k| k.calls)
    };
    assert_eq!(
        (calls("qkv"), calls("head"), calls("down")),
        (Some(LAYERS as u64), Some(1), Some(LAYERS as u64))
    );
}

/// Formats that together use every kernel of linear layers.
const KINDS: [(&str, &str, KvFormat); 3] = [
    ("i4-g32", "i8-row", KvFormat::F16),
    ("i4-row+h128", "i8a-row", KvFormat::F32),
    ("t3-row+h128", "i4-g64", KvFormat::F16),
];

#[test]
fn trees_equal_one_by_one_decoding_for_every_split() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    let text = tokens(&mut rng, 1100);
    for layers in [0, 1, 2, LAYERS] {
        let (linear, embed, kv) = KINDS[layers as usize % KINDS.len()];
        let mut a = engine(split(open(), layers), linear, embed, kv);
        let mut b = engine(split(open(), layers), linear, embed, kv);
        // At a page's edge, and once, because it is slow, after the ring has wrapped.
        for n in if layers == 2 { vec![256, 1050] } else { vec![256] } {
            check_tree(
                &mut a,
                &mut b,
                &text[..n],
                &mut rng,
                &format!("{layers} layers of {linear}, {embed}, {kv:?}"),
            );
        }
    }
}

#[test]
fn scores_are_the_processors() {
    let Some(open) = device() else { return };
    let tree = TokenTree::chain(&tokens(&mut SmallRng::seed_from_u64(2), 37));
    let mut want = Scores::default();
    engine(cpu(), "i4-row+h128", "i8-row", KvFormat::F16)
        .forward(&tree, Rows::All, &mut want)
        .unwrap();
    let largest = want.logits.iter().fold(0f32, |m, v| m.max(v.abs()));
    for layers in 0..=LAYERS {
        let mut engine = engine(split(open(), layers), "i4-row+h128", "i8-row", KvFormat::F16);
        let mut got = Scores::default();
        engine.forward(&tree, Rows::All, &mut got).unwrap();
        let worst =
            got.logits.iter().zip(&want.logits).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= 0.02 * largest, "{layers} layers: {worst} of {largest}");
    }
}

/// A pass returns while the device still computes its layers. This does not happen if both
/// executors are the processor.
#[test]
fn a_split_leaves_its_device_at_work() {
    let tree = TokenTree::chain(&tokens(&mut SmallRng::seed_from_u64(4), 9));
    let inputs = [Input::new(0, &tree, Rows::All)];
    let (mut want, mut got) = (Scores::default(), Scores::default());
    let mut check = |mut engine: PlannedEngine, leaves: bool| {
        engine.run(&inputs, Output::Hidden, &mut want).unwrap();
        assert_eq!(engine.begin(&inputs, Output::Hidden).unwrap(), leaves);
        while engine.is_busy() {
            std::thread::yield_now();
        }
        engine.finish(&mut got).unwrap();
        assert_eq!(
            (bits(&got.logits), bits(&got.hidden)),
            (bits(&want.logits), bits(&want.hidden))
        );
        assert!(!engine.is_busy());
    };
    check(engine(split(cpu(), 2), "i4-g32", "i8-row", KvFormat::F16), false);
    let Some(open) = device() else { return };
    for layers in [0, 2, LAYERS] {
        check(engine(split(open(), layers), "i4-g32", "i8-row", KvFormat::F16), true);
    }
}

#[test]
fn no_drafter_changes_the_text_of_a_split() {
    let Some(open) = device() else { return };
    let target = pooled(|| Box::new(engine(split(open(), 2), "i4-g32", "i8-row", KvFormat::F16)));
    let draft =
        || -> Box<dyn Engine> { Box::new(engine(cpu(), "i2-g32", "i8-row", KvFormat::F16)) };
    let config = SamplerConfig { temperature: 0.8, seed: 5, ..SamplerConfig::default() };
    let case = Case { max_tokens: 20, ..Case::new(&[3, 1, 4, 1, 5], config) };
    let (text, figures) = invariance::check(&target, &draft, &case);
    assert_eq!(text.heard.len(), 20);
    assert!(
        figures.iter().any(
            |(_, stats)| stats.total.accepted > 0 && stats.total.accepted < stats.total.drafted
        )
    );
}

#[test]
fn what_is_allocated_is_what_a_dry_run_counts() {
    let Some(open) = device() else { return };
    let devices = Vulkan::open().unwrap().devices().unwrap();
    let info = choose(&devices, Choice::Best).unwrap();
    for (linear, embed, kv) in KINDS {
        let weights = weights(linear, embed);
        let load = |exec: &mut dyn Executor| {
            let options = ForwardOptions {
                context: 3000,
                kv,
                max_rows: exec.caps().max_rows,
                sequences: 1,
                spare: SparePages::default(),
            };
            forward::load(&weights, exec, options).unwrap();
        };
        let (dry_gpu, dry_cpu) = (
            || Dry::new(Box::new(VulkanFootprint::new(info))),
            || Dry::new(Box::new(CpuFootprint)),
        );
        for layers in [0, 1, 3, LAYERS] {
            let (gpu, cpu) = (dry_gpu(), dry_cpu());
            let counted = [gpu.counted(), cpu.counted()];
            load(&mut SplitExecutor::new(Box::new(gpu), Box::new(cpu), layers, LAYERS));
            let mut gpu = open();
            gpu.expect(&counted[0].pieces());
            let mut taken = split(gpu, layers);
            load(&mut taken);
            for (side, counted) in [Side::Device, Side::Host].into_iter().zip(counted) {
                let taken = taken.side(side).report().allocated;
                assert_eq!(counted.held(), taken, "{linear}, {layers} layers, {side:?}");
            }
        }
        let mut dry = dry_gpu();
        load(&mut dry);
        let counted = dry.counted();
        let mut taken = open();
        taken.expect(&counted.pieces());
        load(&mut taken);
        assert_eq!(counted.held(), taken.report().allocated, "{linear}");
    }
}
