//! Promise 2: a row's scores depend only on its own token path, bit for bit. Random trees are
//! compared with token-by-token decoding across page and window edges, weight formats, cache
//! formats, instruction sets, thread counts and prompt chunkings. Paths with images are in
//! `images.rs`.

use crate::{common, reduced};
use common::trees::{
    VOCAB, check_sequences, check_tree, mixed, one_by_one, prefill, random_tree,
    reshape_global_layers, tokens,
};
use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions, Isa};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{
    Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree, VocabAdapter,
};
use gemma::models::{Config, Role, Weights};
use gemma::tensor::Format;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Returns a configuration of four layers. The third is global, and the window is an odd number.
fn config(window: usize) -> Config {
    config_of(window, VOCAB as usize)
}

fn config_of(window: usize, vocab: usize) -> Config {
    let json = serde_json::json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": vocab,
        "query_pre_attn_scalar": 21, "sliding_window": window, "sliding_window_pattern": 3,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0,
            "rope_type": "linear"},
        "max_position_embeddings": 4096,
    });
    Config::from_json(&json).unwrap()
}

fn engine(
    window: usize,
    linear: &str,
    embed: &str,
    kv: KvFormat,
    options: CpuOptions,
) -> PlannedEngine {
    engine_for(window, linear, embed, kv, options, 1)
}

fn engine_for(
    window: usize,
    linear: &str,
    embed: &str,
    kv: KvFormat,
    options: CpuOptions,
    sequences: usize,
) -> PlannedEngine {
    let (linear, embed) = (linear.parse().unwrap(), embed.parse().unwrap());
    let weights = Weights::synthetic(
        config(window),
        move |role| if role == Role::Embed { embed } else { linear },
        11,
    );
    let exec = CpuExecutor::new(options).unwrap();
    PlannedEngine::for_sequences(
        &weights,
        Box::new(exec),
        EngineOptions { context: 1200, kv },
        sequences,
    )
    .unwrap()
}

#[test]
fn trees_equal_one_by_one_decoding_across_pages_and_windows() {
    let mut rng = SmallRng::seed_from_u64(1);
    let text = tokens(&mut rng, 1100);
    for (linear, embed, kv) in [
        ("f32", "f32", KvFormat::F32),
        ("bf16", "bf16", KvFormat::F16),
        ("i4-row+h128", "i8-row", KvFormat::F16),
        ("i4-g32", "i4-g64", KvFormat::F16),
        ("i2-g128", "i2-row+h128", KvFormat::F32),
        ("t2-row+h128", "t4-row+h128", KvFormat::F16),
        ("f32", "i8-row", KvFormat::Q8),
        ("i4-g32", "bf16", KvFormat::Q8),
        ("t3-row+h128", "i8a-row", KvFormat::F16),
    ] {
        let one = CpuOptions { threads: 1, ..CpuOptions::default() };
        let two = CpuOptions { threads: 2, ..CpuOptions::default() };
        let window = 70;
        let mut a = engine(window, linear, embed, kv, two);
        let mut b = engine(window, linear, embed, kv, one);
        // Empty, inside the window, at its edge, at and around page edges, and after the ring has
        // wrapped.
        for n in [0, 5, 60, 69, 70, 71, 225, 255, 256, 257, 300, 500, 512, 770, 1050] {
            check_tree(&mut a, &mut b, &text[..n], &mut rng, &format!("{linear}, {embed}, {kv:?}"));
        }
    }
}

#[test]
fn layers_of_different_shapes_run_in_one_model() {
    let mut rng = SmallRng::seed_from_u64(7);
    let text = tokens(&mut rng, 600);
    for (format, kv) in
        [("f32", KvFormat::F32), ("i4-row+h128", KvFormat::F16), ("i4-g32", KvFormat::Q8)]
    {
        let engine = |threads| {
            let config = reshape_global_layers(config(70));
            let weights = Weights::synthetic(config, |_| format.parse().unwrap(), 12);
            let options = CpuOptions { threads, check: kv == KvFormat::F32, isa: None };
            let exec = Box::new(CpuExecutor::new(options).unwrap());
            PlannedEngine::new(&weights, exec, EngineOptions { context: 700, kv }).unwrap()
        };
        let (mut a, mut b) = (engine(2), engine(1));
        for n in if kv == KvFormat::F32 { [0, 80] } else { [257, 600] } {
            check_tree(&mut a, &mut b, &text[..n], &mut rng, &format!("{format}, {kv:?}"));
        }
    }
}

/// In trees, in passes of many rows and together with other sequences.
#[test]
fn rows_of_a_mixture_have_their_own_experts() {
    let mut rng = SmallRng::seed_from_u64(8);
    let text = tokens(&mut rng, 300);
    let engine = |format: &str, sequences, options| {
        let format: Format = format.parse().unwrap();
        let weights = Weights::synthetic(mixed(config(70)), |_| format, 13);
        let exec = Box::new(CpuExecutor::new(options).unwrap());
        let options = EngineOptions { context: 400, kv: KvFormat::F16 };
        PlannedEngine::for_sequences(&weights, exec, options, sequences).unwrap()
    };
    for format in ["f32", "bf16", "i4-g32", "i8-g32", "q5_1", "i4-row"] {
        let of = |threads, check| CpuOptions { threads, check, isa: None };
        let (mut a, mut b) = (engine(format, 1, of(2, false)), engine(format, 1, of(1, false)));
        for n in [0, 71, 300] {
            check_tree(&mut a, &mut b, &text[..n], &mut rng, format);
        }
        let lengths = [20, 0, 75];
        let mut shared = engine(format, 3, of(2, true));
        let mut alone: Vec<_> = lengths.map(|_| engine(format, 1, of(1, false))).into();
        check_sequences(&mut shared, &mut alone, &lengths, &mut rng, format);
        let all = Isa::all_supported().into_iter().map(|isa| {
            let options = CpuOptions { threads: 3, check: true, isa: Some(isa) };
            let mut engine = engine(format, 1, options);
            prefill(&mut engine, &text[..40], &mut SmallRng::seed_from_u64(9));
            one_by_one(&mut engine, &[3, 1, 4])
        });
        let all: Vec<_> = all.collect();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{format}: instruction sets differ");
    }
}

#[test]
fn sequences_in_one_pass_do_not_meet() {
    let mut rng = SmallRng::seed_from_u64(6);
    for (linear, embed, kv, check) in [
        ("f32", "f32", KvFormat::F32, false),
        ("i4-row+h128", "i8-row", KvFormat::F16, false),
        ("t2-row+h128", "i4-g32", KvFormat::Q8, false),
        ("i4-g32", "i8-row", KvFormat::F16, true),
    ] {
        let options = |threads| CpuOptions { threads, check, ..CpuOptions::default() };
        // Empty, within a page, around the edges of pages and of the window, and after the ring has
        // wrapped. Twins are slow.
        let lengths = if check { [0, 5, 69, 75] } else { [255, 0, 70, 1050] };
        let mut shared = engine_for(70, linear, embed, kv, options(2), lengths.len());
        let mut alone: Vec<_> =
            lengths.iter().map(|_| engine(70, linear, embed, kv, options(1))).collect();
        check_sequences(
            &mut shared,
            &mut alone,
            &lengths,
            &mut rng,
            &format!("{linear}, {embed}, {kv:?}"),
        );
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let mut rng = SmallRng::seed_from_u64(2);
    let text = tokens(&mut rng, 300);
    for (linear, embed, kv) in [
        ("bf16", "bf16", KvFormat::F16),
        ("i4-row+h128", "i8-row", KvFormat::F16),
        ("i2-g64", "i4-g32", KvFormat::F32),
        ("t2.5-row+h128", "t3-row", KvFormat::F16),
        ("t4-row", "i8a-row+h128", KvFormat::F16),
        ("i4-g64", "bf16", KvFormat::Q8),
    ] {
        let mut logits: Vec<(Isa, Vec<u32>)> = Vec::new();
        for isa in Isa::all_supported() {
            let mut e = engine(
                90,
                linear,
                embed,
                kv,
                CpuOptions { threads: 2, isa: Some(isa), check: false },
            );
            prefill(&mut e, &text, &mut rng);
            logits.push((isa, one_by_one(&mut e, &[3, 1, 4])));
        }
        assert!(
            logits.len() >= 2 || cfg!(not(target_arch = "x86_64")),
            "only {} instruction set to compare",
            logits.len()
        );
        assert!(
            logits.windows(2).all(|w| w[0].1 == w[1].1),
            "{linear}: {:?} differ",
            logits.iter().map(|l| l.0).collect::<Vec<_>>()
        );
    }
}

#[test]
fn every_dispatch_equals_its_twin() {
    let mut rng = SmallRng::seed_from_u64(3);
    let text = tokens(&mut rng, 280);
    for (linear, embed, kv) in [
        ("f32", "bf16", KvFormat::F32),
        ("i4-row+h128", "t2-row+h128", KvFormat::F16),
        ("i4-g32", "i8a-row", KvFormat::F16),
        ("bf16", "i8-row", KvFormat::Q8),
    ] {
        for isa in Isa::all_supported() {
            let mut e = engine(
                50,
                linear,
                embed,
                kv,
                CpuOptions { threads: 2, isa: Some(isa), check: true },
            );
            prefill(&mut e, &text, &mut rng);
            let mut scores = Scores::default();
            e.forward(&random_tree(&mut rng, 20), Rows::All, &mut scores).unwrap();
            assert!(scores.logits.iter().all(|v| v.is_finite()));
        }
    }
}

#[test]
fn after_a_thousand_rounds_the_cache_equals_a_fresh_prefill() {
    rounds_equal_a_fresh_prefill(KvFormat::F16);
}

#[test]
fn after_a_thousand_rounds_codes_and_scales_equal_a_fresh_prefill() {
    rounds_equal_a_fresh_prefill(KvFormat::Q8);
}

fn rounds_equal_a_fresh_prefill(kv: KvFormat) {
    let mut rng = SmallRng::seed_from_u64(4);
    let mut a =
        engine(70, "i4-row+h128", "i8-row", kv, CpuOptions { threads: 2, ..CpuOptions::default() });
    let mut history: Vec<u32> = Vec::new();
    let mut scores = Scores::default();
    for round in 0..1000 {
        if history.len() > 1100 {
            history.clear();
            a.truncate(0, 0).unwrap();
        } else if rng.random_bool(0.2) {
            let back = rng.random_range(0..=history.len().min(100));
            history.truncate(history.len() - back);
            a.truncate(0, history.len()).unwrap();
        }
        let rows = rng.random_range(1..=16);
        let tree = random_tree(&mut rng, rows);
        a.forward(&tree, Rows::Last, &mut scores).unwrap();
        // Accepts a random path. All other nodes of the tree are rejected.
        let mut node = rng.random_range(0..tree.len() as u32);
        let mut path = vec![node];
        while let Some(parent) = tree.parent[node as usize] {
            path.push(parent);
            node = parent;
        }
        path.reverse();
        a.commit(&[(0, &path)]).unwrap();
        history.extend(path.iter().map(|n| tree.tokens[*n as usize]));
        if round % 100 == 99 {
            let mut fresh = engine(70, "i4-row+h128", "i8-row", kv, CpuOptions::default());
            prefill(&mut fresh, &history, &mut rng);
            assert_eq!(a.position(0), fresh.position(0));
            assert!(
                a.visible_cache(0).unwrap() == fresh.visible_cache(0).unwrap(),
                "round {round}, {} tokens",
                history.len()
            );
        }
    }
}

#[test]
fn a_ring_refuses_to_go_back_further_than_it_remembers() {
    let mut rng = SmallRng::seed_from_u64(5);
    let text = tokens(&mut rng, 1100);
    let mut a = engine(70, "f32", "f32", KvFormat::F32, CpuOptions::default());
    prefill(&mut a, &text, &mut rng);
    assert!(a.truncate(0, 100).is_err());
    a.truncate(0, 900).unwrap();
    a.truncate(0, 0).unwrap();
    prefill(&mut a, &text[..100], &mut rng);
}

#[test]
fn a_commit_takes_only_paths_of_the_last_tree() {
    let mut a = engine(70, "f32", "f32", KvFormat::F32, CpuOptions::default());
    let mut scores = Scores::default();
    let mut tree = TokenTree::root(1);
    tree.push(0, 2);
    tree.push(0, 3);
    a.forward(&tree, Rows::All, &mut scores).unwrap();
    assert!(a.commit(&[(0, &[1])]).is_err());
    assert!(a.commit(&[(0, &[0, 1, 2])]).is_err());
    a.commit(&[(0, &[0, 2])]).unwrap();
    assert!(a.commit(&[(0, &[0])]).is_err(), "the tree is spent");

    let mut b = engine_for(70, "f32", "f32", KvFormat::F32, CpuOptions::default(), 3);
    let mut pass = |b: &mut PlannedEngine, inputs: &[(usize, usize)]| {
        let input = |&(s, first): &(usize, usize)| Input::new(s, &tree, Rows::All).after(first);
        let inputs: Vec<_> = inputs.iter().map(input).collect();
        b.run(&inputs, Output::Logits, &mut scores)
    };
    pass(&mut b, &[(2, 0), (0, 0)]).unwrap();
    assert!(b.commit(&[(1, &[0])]).is_err(), "a sequence that had no tree");
    assert!(b.commit(&[(2, &[0, 3])]).is_err(), "a node of another sequence's tree");
    b.commit(&[(0, &[0])]).unwrap();
    b.commit(&[(2, &[0, 1])]).unwrap();
    assert!(b.commit(&[(2, &[0])]).is_err(), "the tree is spent");
    assert_eq!([0, 1, 2].map(|sequence| b.position(sequence)), [1, 0, 2]);
    assert!(pass(&mut b, &[(1, 0), (1, 0)]).is_err(), "two trees of one sequence");
    assert!(pass(&mut b, &[(3, 0)]).is_err(), "a sequence that is none");
    assert!(pass(&mut b, &[(1, 2)]).is_err(), "a tree that scratch does not hold");
}

/// Logits that stay on the device equal those that are returned, also for a draft model with one or
/// several rows per token.
#[test]
fn logits_left_with_the_engine_are_those_handed_over() {
    let vocab = reduced::tokens().len();
    let weights = Weights::synthetic(config_of(40, vocab), |_| "i8-row".parse().unwrap(), 3);
    let plain = || {
        let exec = Box::new(CpuExecutor::new(CpuOptions::default()).unwrap());
        PlannedEngine::new(&weights, exec, EngineOptions { context: 300, kv: KvFormat::F16 })
            .unwrap()
    };
    let narrow = || VocabAdapter::new(Box::new(plain()), reduced::spelling()).unwrap();
    let pairs: [[Box<dyn Engine>; 2]; 2] =
        [[Box::new(plain()), Box::new(plain())], [Box::new(narrow()), Box::new(narrow())]];
    for [mut gives, mut keeps] in pairs {
        let known = gives.info().vocab as u32;
        let history: Vec<u32> = (0..12).map(|i| 2 + i * 29 % (known - 2)).collect();
        let mut tree = TokenTree::chain(&history);
        let (mut given, mut none) = (Scores::default(), Scores::default());
        // The whole tree three times, then with more nodes below its last one.
        for (first, more, rows) in [
            (0, 0, Rows::None),
            (0, 0, Rows::Last),
            (0, 0, Rows::All),
            (12, 5, Rows::All),
            (17, 1, Rows::All),
            (18, 4, Rows::Last),
        ] {
            (0..more).for_each(|i| _ = tree.push(11, 5 + (7 * (first as u32 + i)) % (known - 5)));
            let input = Input::new(0, &tree, rows).after(first);
            gives.run(&[input], Output::Logits, &mut given).unwrap();
            keeps.run(&[input], Output::Lent, &mut none).unwrap();
            assert_eq!((none.rows(), none.vocab), (0, given.vocab));
            for row in 0..given.rows() {
                assert_eq!(
                    (gives.lend(row), keeps.lend(row)),
                    (None, Some(given.row(row))),
                    "row {row} from {first}"
                );
            }
            assert_eq!(keeps.lend(given.rows()), None);
        }
    }
}
