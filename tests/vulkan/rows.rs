//! Promise 2 on Vulkan: a row's scores depend only on its own token path, bit for bit, whichever
//! rows share the pass.

use crate::common;
use common::trees::{
    bits, check_sequences, check_tree, prefill, random_tree, reshape_global_layers, tokens,
};
use common::twins::format;
use common::vulkan::{config, device, wide_config};
use gemma::compute::KvFormat;
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::{Role, Weights};
use gemma::vulkan::VulkanExecutor;
use rand::SeedableRng;
use rand::rngs::SmallRng;

fn engine(exec: VulkanExecutor, linear: &str, embed: &str, kv: KvFormat) -> PlannedEngine {
    engine_for(exec, linear, embed, kv, 1)
}

fn engine_for(
    exec: VulkanExecutor,
    linear: &str,
    embed: &str,
    kv: KvFormat,
    sequences: usize,
) -> PlannedEngine {
    let (linear, embed) = (format(linear), format(embed));
    let weights = Weights::synthetic(
        config(70),
        move |role| if role == Role::Embed { embed } else { linear },
        11,
    );
    PlannedEngine::for_sequences(
        &weights,
        Box::new(exec),
        EngineOptions { context: 1200, kv },
        sequences,
    )
    .unwrap()
}

/// Formats that together use every kernel of linear layers.
const KINDS: [(&str, &str, KvFormat); 5] = [
    ("i4-g32", "i8-row", KvFormat::F16),
    ("i4-row+h128", "i8a-row", KvFormat::F32),
    ("t3-row+h128", "i4-g64", KvFormat::F16),
    ("i4-g32", "i8-row", KvFormat::Q8),
    ("q5_1", "iq4_nl", KvFormat::F16),
];

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn trees_equal_one_by_one_decoding() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    let text = tokens(&mut rng, 1100);
    // Inside the window, at its edge, around page edges, and after the ring has wrapped, each with
    // several formats, the last with both forms of half precision. On a processor's driver every
    // case takes half a minute.
    let depths: [&[usize]; KINDS.len()] = [&[256, 1050], &[0, 70], &[0, 256], &[70, 1050], &[70]];
    for ((linear, embed, kv), depths) in KINDS.into_iter().zip(depths) {
        let mut a = engine(open(), linear, embed, kv);
        let mut b = engine(open(), linear, embed, kv);
        for &n in depths {
            check_tree(&mut a, &mut b, &text[..n], &mut rng, &format!("{linear}, {embed}, {kv:?}"));
        }
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn layers_of_different_shapes_run_in_one_model() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(7);
    let text = tokens(&mut rng, 257);
    let engine = || {
        let config = reshape_global_layers(config(70));
        let weights = Weights::synthetic(config, |_| "i4-g32".parse().unwrap(), 12);
        let options = EngineOptions { context: 700, kv: KvFormat::F16 };
        PlannedEngine::new(&weights, Box::new(open()), options).unwrap()
    };
    check_tree(&mut engine(), &mut engine(), &text, &mut rng, "on the device");
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn sequences_in_one_pass_do_not_meet() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(3);
    let lengths = [1050, 0, 255];
    let (linear, embed, kv) = KINDS[3];
    let mut shared = engine_for(open(), linear, embed, kv, lengths.len());
    let mut alone: Vec<_> = lengths.iter().map(|_| engine(open(), linear, embed, kv)).collect();
    check_sequences(&mut shared, &mut alone, &lengths, &mut rng, "on the device");
}

/// Codes and scales are those of the row when it was first evaluated, whichever other rows were
/// rejected.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn committed_bytes_equal_a_fresh_prefill() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(2);
    for kv in [KvFormat::F16, KvFormat::Q8] {
        let mut a = engine(open(), "i4-g32", "i8-row", kv);
        let mut history = tokens(&mut rng, 240);
        prefill(&mut a, &history, &mut rng);
        let mut scores = Scores::default();
        for rows in [1, 7, 16, 32, 3, 20] {
            let tree = random_tree(&mut rng, rows);
            a.forward(&tree, Rows::Last, &mut scores).unwrap();
            let mut path = vec![rows as u32 - 1];
            while let Some(parent) = tree.parent[path[path.len() - 1] as usize] {
                path.push(parent);
            }
            path.reverse();
            a.commit(&[(0, &path)]).unwrap();
            history.extend(path.iter().map(|n| tree.tokens[*n as usize]));
        }
        let mut fresh = engine(open(), "i4-g32", "i8-row", kv);
        prefill(&mut fresh, &history, &mut rng);
        let (a, fresh) = (a.visible_cache(0).unwrap(), fresh.visible_cache(0).unwrap());
        assert!(a == fresh && a.iter().any(|b| *b != 0), "{kv:?}, {} tokens", history.len());
    }
}

/// One row, a few and many use different kernels of linear layers: dot products, and matrix
/// instructions if a device has them.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn kernels_for_one_few_and_many_rows_give_the_same_bits() {
    let Some(open) = device() else { return };
    let tokens = tokens(&mut SmallRng::seed_from_u64(3), 72);
    // Numbers of rows around each change of kernel: all for each way to multiply. Formats that
    // differ only in decoding get one for each kernel.
    let (around, one_each) = (&[7, 8, 9, 16, 31, 33, 64, 72][..], &[7, 8, 16, 33, 72][..]);
    for (linear, lengths) in [
        ("i4-g32", around),
        ("i4-row+h128", around),
        ("i8-g32", one_each),
        ("q4_k", around),
        ("q6_k", around),
        ("q5_0", one_each),
        ("q5_k", one_each),
        ("iq4_xs", one_each),
        ("q2_k", one_each),
        ("iq2_s", one_each),
        ("iq3_xxs", one_each),
    ] {
        // The output of attention is too narrow for blocks of 256.
        let format_of = move |role| match role {
            Role::Embed => format("i8-row"),
            Role::O if linear.contains("_") => format("q4_1"),
            _ => format(linear),
        };
        let weights = Weights::synthetic(wide_config(), format_of, 12);
        let options = EngineOptions { context: 128, kv: KvFormat::F16 };
        let mut engine = PlannedEngine::new(&weights, Box::new(open()), options).unwrap();
        let mut scores = Scores::default();
        let mut want = Vec::new();
        for token in &tokens {
            engine.forward(&TokenTree::root(*token), Rows::All, &mut scores).unwrap();
            engine.commit(&[(0, &[0])]).unwrap();
            want.push(bits(scores.row(0)));
        }
        for &rows in lengths {
            engine.truncate(0, 0).unwrap();
            engine.forward(&TokenTree::chain(&tokens[..rows]), Rows::All, &mut scores).unwrap();
            let wrong: Vec<usize> =
                (0..rows).filter(|row| bits(scores.row(*row)) != want[*row]).collect();
            assert!(wrong.is_empty(), "{linear}: rows {wrong:?} of {rows}");
        }
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn lists_of_the_best_logits_are_those_of_the_logits() {
    let Some(open) = device() else { return };
    let mut engine = engine(open(), "i4-g32", "i8-row", KvFormat::F16);
    let tree = TokenTree::chain(&[3, 1, 4, 1, 5]);
    let (mut all, mut best) = (Scores::default(), Scores::default());
    engine.forward(&tree, Rows::All, &mut all).unwrap();
    for (n, usable) in [(1, 96), (5, 96), (64, 90), (3, 7)] {
        let input = Input::new(0, &tree, Rows::All);
        engine.run(&[input], Output::Best { n, usable }, &mut best).unwrap();
        assert_eq!(best.rows(), 5);
        for row in 0..5 {
            let list = best.list(row).unwrap();
            let mut want: Vec<(u32, f32)> =
                (0..).zip(all.row(row)[..usable].iter().copied()).collect();
            want.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let n = n.min(usable);
            assert!(list.len() >= n, "{} of {n}", list.len());
            assert_eq!(list[..n], want[..n], "row {row}, best {n} of {usable}");
        }
    }
}
