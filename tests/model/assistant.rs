//! Gemma 4's assistant with its target, compared with transformers (`scripts/golden/assistant.py`):
//! the logits of four drafted positions, and of three nodes of one depth in one pass.

use crate::common;
use gemma::checkpoint::Checkpoint;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::split::SplitExecutor;
use gemma::compute::{Executor, KvFormat};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{
    AssistantNode, Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree,
};
use gemma::models::Weights;
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

const CASES: [&str; 3] = ["assistant-wide", "assistant-unified", "assistant-long"];

/// Limit of a logit's difference. All computation is in f32.
const NEAR: f32 = 2e-3;

#[derive(Deserialize)]
struct Golden {
    target: String,
    ids: Vec<u32>,
    /// The token after them
    last: u32,
    /// One row for each drafted position
    logits: Vec<Vec<f32>>,
    tokens: Vec<u32>,
    tree: Tree,
}

/// Children of the root.
#[derive(Deserialize)]
struct Tree {
    children: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case)
}

fn golden(case: &str) -> Golden {
    serde_json::from_slice(&fs::read(folder(case).join("golden.json")).unwrap()).unwrap()
}

fn open(case: &str) -> Weights {
    Weights::open(Checkpoint::open(&folder(case)).unwrap()).unwrap()
}

fn pair(case: &str) -> Weights {
    open(&golden(case).target).assisted_by(Some(open(case)))
}

fn cpu(check: bool) -> Box<dyn Executor> {
    let options = CpuOptions { threads: 2, check, ..CpuOptions::default() };
    Box::new(CpuExecutor::new(options).unwrap())
}

/// Reads the prompt of each sequence. The last part is scored in a pass with other sequences.
fn engine(weights: &Weights, exec: Box<dyn Executor>, prompts: &[&[u32]]) -> PlannedEngine {
    let longest = prompts.iter().map(|ids| ids.len()).max().unwrap();
    let options = EngineOptions { context: longest + 8, kv: KvFormat::F32 };
    let sequences = prompts.len();
    let mut engine = PlannedEngine::for_sequences(weights, exec, options, sequences).unwrap();
    let mut scores = Scores::default();
    for (sequence, ids) in prompts.iter().enumerate() {
        for chunk in ids[..ids.len() - 3].chunks(100) {
            let tree = TokenTree::chain(chunk);
            let input = Input::new(sequence, &tree, Rows::None);
            engine.run(&[input], Output::Logits, &mut scores).unwrap();
            let path: Vec<u32> = (0..chunk.len() as u32).collect();
            engine.commit(&[(sequence, &path)]).unwrap();
        }
    }
    // Another branch comes before the newest token.
    let ends: Vec<TokenTree> = prompts
        .iter()
        .map(|ids| {
            let mut tree = TokenTree::chain(&ids[ids.len() - 3..ids.len() - 1]);
            tree.push(0, 7);
            tree.push(1, ids[ids.len() - 1]);
            tree
        })
        .collect();
    let inputs: Vec<Input<'_>> =
        ends.iter().enumerate().map(|(s, tree)| Input::new(s, tree, Rows::All)).collect();
    engine.run(&inputs, Output::Logits, &mut scores).unwrap();
    let paths: Vec<(usize, &[u32])> = (0..sequences).map(|s| (s, &[0, 1, 3][..])).collect();
    engine.commit(&paths).unwrap();
    engine
}

fn node(sequence: usize, parent: Option<u32>, token: u32) -> AssistantNode {
    AssistantNode { sequence, parent, token }
}

fn check(what: &str, scores: &Scores, want: &[&Vec<f32>]) {
    assert_eq!(scores.rows(), want.len(), "{what}");
    let differences = want.iter().enumerate().flat_map(|(row, want)| {
        assert_eq!(scores.row(row).len(), want.len());
        scores.row(row).iter().zip(*want).map(|(a, b)| (a - b).abs())
    });
    let worst = differences.fold(0.0, f32::max);
    println!("{what}: a logit differs by {worst:.1e} at most");
    assert!(worst < NEAR, "{what}: a logit differs by {worst}");
}

/// Drafts a chain of four and two more children of the root, for several texts at once.
fn draft(what: &str, engine: &mut PlannedEngine, golden: &Golden, sequences: usize) {
    let mut scores = Scores::default();
    for round in 0..2 {
        let assistant = engine.assistant().unwrap();
        let all: Vec<usize> = (0..sequences).collect();
        assert_eq!(assistant.begin(&all).unwrap(), vec![true; sequences], "{what}");
        let roots: Vec<_> = all.iter().map(|s| node(*s, None, golden.last)).collect();
        assistant.evaluate(&roots, Output::Logits, &mut scores).unwrap();
        check(&format!("{what}, roots"), &scores, &vec![&golden.logits[0]; sequences]);
        let mut last: Vec<u32> = (0..sequences as u32).collect();
        let mut next = sequences as u32;
        for depth in 1..4 {
            let mut nodes = Vec::new();
            let mut want = Vec::new();
            for sequence in 0..sequences {
                nodes.push(node(sequence, Some(last[sequence]), golden.tokens[depth - 1]));
                want.push(&golden.logits[depth]);
                last[sequence] = next + nodes.len() as u32 - 1;
                for (token, logits) in golden.tree.children.iter().zip(&golden.tree.logits) {
                    if depth == 1 + round {
                        nodes.push(node(sequence, Some(sequence as u32), *token));
                        want.push(logits);
                    }
                }
            }
            next += nodes.len() as u32;
            assistant.evaluate(&nodes, Output::Logits, &mut scores).unwrap();
            check(&format!("{what}, depth {depth}"), &scores, &want);
        }
    }
}

#[test]
fn four_drafted_positions_and_a_tree_are_those_of_transformers() {
    for case in CASES {
        let (weights, golden) = (pair(case), golden(case));
        for sequences in [1, 3] {
            let prompts = vec![&golden.ids[..]; sequences];
            let mut engine = engine(&weights, cpu(false), &prompts);
            draft(&format!("{case}, {sequences} texts"), &mut engine, &golden, sequences);
        }
    }
}

#[test]
fn a_device_drafts_as_transformers_does() {
    let Some(open) = common::vulkan::device() else { return };
    for case in CASES {
        let (weights, golden) = (pair(case), golden(case));
        for sequences in [1, 2] {
            let prompts = vec![&golden.ids[..]; sequences];
            let mut engine = engine(&weights, Box::new(open()), &prompts);
            draft(&format!("device, {case}, {sequences} texts"), &mut engine, &golden, sequences);
        }
        // The assistant is on the device of the target's last layer.
        let layers = weights.config().layers.len() as u16;
        for on_device in [1, layers - 1] {
            let split = SplitExecutor::new(Box::new(open()), cpu(false), on_device, layers);
            let mut engine = engine(&weights, Box::new(split), &[&golden.ids]);
            draft(&format!("split at {on_device}, {case}"), &mut engine, &golden, 1);
        }
    }
}

/// Each kernel of the passes equals its twin.
#[test]
fn kernels_of_the_assistant_equal_their_twins() {
    for case in CASES {
        let (weights, golden) = (pair(case), golden(case));
        let mut engine = engine(&weights, cpu(true), &[&golden.ids]);
        draft(&format!("checked, {case}"), &mut engine, &golden, 1);
    }
}

/// Lists of the largest logits equal the largest ones of complete rows.
#[test]
fn lists_are_the_beginning_of_the_rows() {
    let Some(open) = common::vulkan::device() else { return };
    let (weights, golden) = (pair(CASES[0]), golden(CASES[0]));
    let mut engine = engine(&weights, Box::new(open()), &[&golden.ids]);
    let assistant = engine.assistant().unwrap();
    assistant.begin(&[0]).unwrap();
    let (mut lists, root) = (Scores::default(), [node(0, None, golden.last)]);
    assistant.evaluate(&root, Output::Best { n: 5, usable: 200 }, &mut lists).unwrap();
    assistant.begin(&[0]).unwrap();
    let mut rows = Scores::default();
    assistant.evaluate(&root, Output::Logits, &mut rows).unwrap();
    let mut best: Vec<(u32, f32)> = (0..200).zip(rows.row(0).iter().copied()).collect();
    best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    assert_eq!(lists.list(0).unwrap()[..5], best[..5]);
}

/// A text can be drafted for only directly after a pass that scored its newest token. Drafts do not
/// change the target.
#[test]
fn drafts_need_the_state_of_the_newest_token_and_change_nothing() {
    let (weights, golden) = (pair(CASES[1]), golden(CASES[1]));
    let mut engine = engine(&weights, cpu(false), &[&golden.ids]);
    let begin = |engine: &mut PlannedEngine| engine.assistant().unwrap().begin(&[0]).unwrap();
    let cache = engine.visible_cache(0).unwrap();
    draft("before", &mut engine, &golden, 1);
    assert!(engine.visible_cache(0).unwrap() == cache);
    let tree = TokenTree::chain(&[golden.last, 9]);
    let mut scores = Scores::default();
    let mut pass = |engine: &mut PlannedEngine, rows: Rows| {
        engine.run(&[Input::new(0, &tree, rows)], Output::Logits, &mut scores).unwrap();
        std::mem::take(&mut scores.logits)
    };
    let scored = pass(&mut engine, Rows::All);
    assert_eq!(begin(&mut engine), [false], "a pass was made since");
    engine.commit(&[(0, &[0])]).unwrap();
    assert_eq!(begin(&mut engine), [true]);
    engine.truncate(0, golden.ids.len()).unwrap();
    assert_eq!(begin(&mut engine), [false], "the newest token is another one");
    assert!(pass(&mut engine, Rows::All) == scored, "drafts show in the target's scores");
    pass(&mut engine, Rows::Last);
    engine.commit(&[(0, &[0])]).unwrap();
    assert_eq!(begin(&mut engine), [false], "its row was not scored");
    engine.truncate(0, 0).unwrap();
    assert_eq!(begin(&mut engine), [false], "nothing is committed");
    // Leaf nodes as parents and unknown tokens are errors.
    let assistant = engine.assistant().unwrap();
    for bad in [node(0, Some(0), 1), node(0, None, 1 << 20)] {
        assert!(assistant.evaluate(&[bad], Output::Logits, &mut scores).is_err());
    }
}

#[test]
fn an_assistant_of_another_model_and_one_alone_are_refused() {
    let options = EngineOptions { context: 64, kv: KvFormat::F32 };
    let refused = |weights: &Weights| {
        let error = PlannedEngine::new(weights, cpu(false), options).err().unwrap();
        format!("{error:#}")
    };
    assert!(refused(&open(CASES[0])).contains("drafts from the cache of another model"));
    let other = open("gemma4-wide").assisted_by(Some(open("assistant-unified")));
    assert!(refused(&other).contains("belongs to another model"), "{}", refused(&other));
}
