//! Sequences that begin with a prefix kept from another one: the bits equal those after reading it,
//! whichever sequences share its pages, and unused pages are returned.

use crate::common;
use common::trees::{bits, prefill_sequence, random_tree, tokens};
use common::vulkan::{config, config_of, device};
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::split::SplitExecutor;
use gemma::compute::{Executor, KvFormat};
use gemma::decode::{Flow, Request, Scheduler};
use gemma::draft::{NoDraft, Policy};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Prefix, Rows, Scores};
use gemma::engine::{Timeline, TokenTree};
use gemma::error::{Fault, Kind};
use gemma::kv::PAGE;
use gemma::models::forward::SparePages;
use gemma::models::{Config, Role, Weights};
use gemma::sampler::{Sampler, SamplerConfig};
use gemma::tensor::Token;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::atomic::AtomicBool;

const CONTEXT: usize = 1200;

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap())
}

fn engine(
    config: Config,
    exec: Box<dyn Executor>,
    kv: KvFormat,
    sequences: usize,
    spare: usize,
) -> PlannedEngine {
    let format = |role| if role == Role::Embed { "i8-row" } else { "i4-g32" }.parse().unwrap();
    let weights = Weights::synthetic(config, format, 11);
    let spare = SparePages { global: spare, local: spare };
    let options = EngineOptions { context: CONTEXT, kv };
    PlannedEngine::with_spare(&weights, exec, options, sequences, spare).unwrap()
}

/// Returns the logits of a tree after the committed text of a sequence.
fn scores(engine: &mut PlannedEngine, sequence: usize, tree: &TokenTree) -> Vec<u32> {
    let mut out = Scores::default();
    engine.run(&[Input::new(sequence, tree, Rows::All)], Output::Logits, &mut out).unwrap();
    bits(&out.logits)
}

/// Reads texts with a common prefix, from the start and from kept prefixes.
fn check(open: &dyn Fn() -> Box<dyn Executor>, kv: KvFormat, sequences: usize) {
    let mut rng = SmallRng::seed_from_u64(3);
    let text = tokens(&mut rng, 1000);
    let tree = random_tree(&mut rng, 9);
    let mut other = tokens(&mut rng, 700);
    other[..600].copy_from_slice(&text[..600]);
    let read = |text: &[u32], rng: &mut SmallRng| {
        let mut engine = engine(config(70), open(), kv, 1, 0);
        prefill_sequence(&mut engine, 0, text, rng);
        let scores = scores(&mut engine, 0, &tree);
        (scores, engine.visible_cache(0).unwrap())
    };
    let (want, other_want) = (read(&text, &mut rng), read(&other, &mut rng));

    let mut engine = engine(config(70), open(), kv, sequences, 8);
    let last = sequences - 1;
    let all = engine.cached(0).free_pages;
    prefill_sequence(&mut engine, 0, &text[..600], &mut rng);
    assert!(engine.retain(0, 600).is_none(), "600 tokens are no whole pages");
    assert!(engine.retain(0, 768).is_none(), "not all of them are there");
    let two = engine.retain(0, 2 * PAGE).unwrap();
    prefill_sequence(&mut engine, 0, &text[600..800], &mut rng);
    let three = engine.retain(0, 3 * PAGE).unwrap();
    assert_eq!((two.tokens(), three.tokens()), (&text[..512], &text[..768]));
    // The sequence continues with another text. The prefixes stay.
    engine.truncate(0, 0).unwrap();
    prefill_sequence(&mut engine, 0, &tokens(&mut rng, 900), &mut rng);
    let mut go_on = |prefix: &Prefix, sequence: usize, text: &[u32]| {
        let n = prefix.tokens().len();
        engine.resume(sequence, prefix, n).unwrap();
        assert_eq!(engine.cached(sequence).tokens, &text[..n]);
        // Other sequences in the pass make no difference.
        prefill_sequence(&mut engine, sequence, &text[n..], &mut rng);
        let scores = scores(&mut engine, sequence, &tree);
        (scores, engine.visible_cache(sequence).unwrap())
    };
    assert!(go_on(&three, last, &text) == want, "{kv:?}: three pages");
    assert!(go_on(&two, 0, &other) == other_want, "{kv:?}: two pages, another end");
    assert!(go_on(&two, last, &text) == want, "{kv:?}: two pages, the same end");
    assert!(go_on(&three, 0, &text) == want, "{kv:?}: three pages, once more");

    let missing = engine.resume(0, &three, 2 * PAGE).unwrap_err();
    assert!(missing.to_string().contains("lacks pages"), "{missing}");
    (0..sequences).for_each(|sequence| engine.truncate(sequence, 0).unwrap());
    assert!(engine.cached(0).free_pages < all);
    drop((two, three));
    assert_eq!(engine.cached(0).free_pages, all, "every page went back");
}

#[test]
fn what_begins_with_a_prefix_has_the_bits_of_what_was_read() {
    for kv in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
        check(&cpu, kv, 3);
    }
    let check_twins = || -> Box<dyn Executor> {
        let options = CpuOptions { threads: 1, check: true, isa: None };
        Box::new(CpuExecutor::new(options).unwrap())
    };
    check(&check_twins, KvFormat::F16, 2);
}

#[test]
fn a_split_shares_pages_too() {
    check(&|| Box::new(SplitExecutor::new(cpu(), cpu(), 2, 4)), KvFormat::F16, 2);
}

#[test]
fn a_gpu_shares_pages_too() {
    let Some(open) = device() else { return };
    check(&|| Box::new(open()), KvFormat::Q8, 2);
}

/// Without windows, every beginning of a prefix can be used.
#[test]
fn global_layers_go_on_behind_any_page() {
    let mut rng = SmallRng::seed_from_u64(5);
    let (text, tree) = (tokens(&mut rng, 800), random_tree(&mut rng, 5));
    let mut engine = engine(config_of(2, 1, 70), cpu(), KvFormat::F16, 2, 0);
    prefill_sequence(&mut engine, 0, &text, &mut rng);
    let want = scores(&mut engine, 0, &tree);
    let prefix = engine.retain(0, 3 * PAGE).unwrap();
    for pages in [0, 1, 2, 3] {
        engine.resume(1, &prefix, pages * PAGE).unwrap();
        prefill_sequence(&mut engine, 1, &text[pages * PAGE..], &mut rng);
        assert_eq!(scores(&mut engine, 1, &tree), want, "{pages} pages");
    }
    assert!(engine.resume(1, &prefix, PAGE + 1).is_err(), "no whole page");
    assert!(engine.resume(1, &prefix, 4 * PAGE).is_err(), "more than there is");
}

/// A page of a prefix is not written. A sequence that goes back into it reads its tokens again.
#[test]
fn a_shared_page_is_never_written() {
    let mut rng = SmallRng::seed_from_u64(6);
    let (text, tree) = (tokens(&mut rng, 600), random_tree(&mut rng, 5));
    let mut other = text.clone();
    other[400..].iter_mut().for_each(|token| *token = (*token + 1) % 96);
    let mut engine = engine(config(70), cpu(), KvFormat::F16, 1, 4);
    prefill_sequence(&mut engine, 0, &text, &mut rng);
    let want = scores(&mut engine, 0, &tree);
    let prefix = engine.retain(0, 2 * PAGE).unwrap();
    assert!(engine.truncate(0, 400).is_err(), "the prefix has the page of position 400");
    assert_eq!(engine.position(0), 600);
    engine.truncate(0, 0).unwrap();

    let mut timeline = Timeline::new(Box::new(engine));
    timeline.resume(0, &prefix, 2 * PAGE).unwrap();
    assert_eq!(timeline.common(0, &other), 400);
    assert!(timeline.sync(0, &other, &mut |_| true).unwrap());
    timeline.resume(0, &prefix, 2 * PAGE).unwrap();
    let mut read = Vec::new();
    assert!(
        timeline
            .sync(0, &text, &mut |cached| {
                read.push(cached);
                true
            })
            .unwrap()
    );
    assert_eq!(read, [600], "only the tokens after the prefix");
    let mut out = Scores::default();
    timeline.run(&[Input::new(0, &tree, Rows::All)], Output::Logits, &mut out).unwrap();
    assert_eq!(bits(&out.logits), want);
}

/// If prefixes hold pages that sequences need, the error says so, and dropping a prefix helps.
#[test]
fn a_full_pool_says_so() {
    let mut rng = SmallRng::seed_from_u64(7);
    let text = tokens(&mut rng, CONTEXT);
    let mut engine = engine(config_of(2, 1, 70), cpu(), KvFormat::F16, 1, 1);
    prefill_sequence(&mut engine, 0, &text[..3 * PAGE], &mut rng);
    let prefix = engine.retain(0, 3 * PAGE).unwrap();
    engine.truncate(0, 0).unwrap();
    assert_eq!(engine.cached(0).free_pages, 3, "of five and a spare one");
    prefill_sequence(&mut engine, 0, &text[..3 * PAGE], &mut rng);
    let one = TokenTree::root(5);
    let mut out = Scores::default();
    engine.forward(&one, Rows::All, &mut out).unwrap();
    let error = engine.commit(&[(0, &[0])]).unwrap_err();
    assert!(error.downcast_ref::<Fault>().is_some_and(|f| f.kind == Kind::Memory), "{error:#}");
    assert_eq!(engine.position(0), 3 * PAGE);
    drop(prefix);
    engine.forward(&one, Rows::All, &mut out).unwrap();
    engine.commit(&[(0, &[0])]).unwrap();
    assert_eq!(engine.position(0), 3 * PAGE + 1);
}

/// A scheduler with an engine. All texts are greedy.
struct Texts<'a> {
    scheduler: Scheduler<'a>,
    /// Ended texts, with the number of their request and of the prompt tokens that were read.
    ended: Vec<(usize, Vec<Token>, u64)>,
    running: Vec<(usize, usize)>,
}

impl Texts<'_> {
    fn begin(&mut self, number: usize, history: &[Token]) {
        let sampler = Sampler::new(SamplerConfig::default()).unwrap();
        let request = Request::new(history.to_vec(), sampler, 8);
        let sequence = self.scheduler.admit(request).unwrap();
        self.running.push((sequence, number));
    }

    fn step(&mut self) {
        for ended in self.scheduler.step(&mut |_, _| Flow::Continue).unwrap() {
            let at = self.running.iter().position(|(s, _)| *s == ended.sequence).unwrap();
            let (_, number) = self.running.swap_remove(at);
            ended.stop.unwrap();
            self.ended.push((number, ended.text.history, ended.text.stats.prefilled));
        }
    }

    /// Generates a text. Returns its history, and the number of tokens of its prompt that were
    /// read.
    fn whole(&mut self, history: &[Token]) -> (Vec<Token>, u64) {
        self.begin(usize::MAX, history);
        while self.scheduler.running() > 0 {
            self.step();
        }
        let (_, history, read) = self.ended.pop().unwrap();
        (history, read)
    }
}

/// Runs texts on one engine, with or without kept prefixes.
fn with_texts(sequences: usize, spare: usize, keeps: bool, run: impl FnOnce(&mut Texts<'_>)) {
    let engine = engine(config(70), cpu(), KvFormat::F16, sequences, spare);
    let (mut target, mut drafter) = (Timeline::new(Box::new(engine)), NoDraft);
    let (mut policy, interrupt) = (Policy::off(), AtomicBool::new(false));
    let texts = Scheduler::new(&mut target, &mut drafter, &mut policy, &[], &interrupt);
    let scheduler = if keeps { texts.keeping_prefixes() } else { texts };
    run(&mut Texts { scheduler, ended: Vec::new(), running: Vec::new() });
}

/// Returns the text that is generated alone.
fn alone(history: &[Token]) -> Vec<Token> {
    let mut text = Vec::new();
    with_texts(1, 0, false, |texts| text = texts.whole(history).0);
    text
}

#[test]
fn a_conversation_that_comes_back_is_not_read_again() {
    let mut rng = SmallRng::seed_from_u64(8);
    let first = tokens(&mut rng, 700);
    let mut later = alone(&first);
    later.extend(tokens(&mut rng, 20));
    let others: Vec<Vec<Token>> = (0..8).map(|_| tokens(&mut rng, 600)).collect();
    let (want, want_others) = (alone(&later), others.iter().map(|o| alone(o)).collect::<Vec<_>>());
    let read = |spare, keeps| {
        let mut read = 0;
        with_texts(2, spare, keeps, |texts| {
            texts.whole(&first);
            for (other, want) in others.iter().zip(&want_others) {
                assert_eq!(&texts.whole(other).0, want);
            }
            let (text, again) = texts.whole(&later);
            assert_eq!(text, want);
            read = again as usize;
        });
        read
    };
    assert_eq!(read(60, false), later.len() - 1);
    assert_eq!(read(60, true), later.len() - 1 - 2 * PAGE, "whole pages are kept");
    // There is no room for all prefixes: the least recently used one is gone.
    assert_eq!(read(0, true), later.len() - 1);
}

#[test]
fn what_texts_have_in_common_is_read_once() {
    let mut rng = SmallRng::seed_from_u64(9);
    let shared = tokens(&mut rng, 600);
    let texts: Vec<Vec<Token>> =
        (0..4).map(|_| [&shared[..], &tokens(&mut rng, 90)].concat()).collect();
    let want: Vec<Vec<Token>> = texts.iter().map(|t| alone(t)).collect();
    // At once: the second text waits for the prefix that the first one reads.
    with_texts(4, 0, true, |all| {
        texts.iter().enumerate().for_each(|(number, text)| all.begin(number, text));
        while all.scheduler.running() > 0 {
            all.step();
        }
        all.ended.sort();
        for (number, text, read) in &all.ended {
            assert_eq!(text, &want[*number]);
            let pages = if *number == 0 { 0 } else { 2 * PAGE };
            assert_eq!(*read as usize, 689 - pages, "text {number}");
        }
    });
    // Texts one after the other, with unrelated texts between them, so that windows have moved on.
    // The second text leaves a prefix that the third one finds.
    let texts: Vec<Vec<Token>> =
        (0..3).map(|_| [&shared[..], &tokens(&mut rng, 400)].concat()).collect();
    let between = tokens(&mut rng, 700);
    with_texts(1, 40, true, |all| {
        for (text, pages) in texts.iter().zip([0, 0, 2]) {
            let (whole, read) = all.whole(text);
            assert_eq!(whole, alone(text));
            assert_eq!(read as usize, 999 - pages * PAGE);
            all.whole(&between);
        }
    });
}

/// Sequences that need all pages get them, whatever is kept and shared.
#[test]
fn texts_never_lack_pages_that_are_only_kept() {
    let mut rng = SmallRng::seed_from_u64(10);
    let shared = tokens(&mut rng, 512);
    for (sequences, spare) in [(1, 0), (2, 0), (3, 1)] {
        with_texts(sequences, spare, true, |all| {
            for round in 0..4 {
                let mut asked = Vec::new();
                for number in 0..sequences {
                    let own = tokens(&mut rng, CONTEXT - 512 - 10 - number);
                    let text = match (round + number) % 3 {
                        0 => own,
                        _ => [&shared[..], &own].concat(),
                    };
                    all.begin(number, &text);
                    asked.push(text);
                    all.step();
                }
                while all.scheduler.running() > 0 {
                    all.step();
                }
                for (number, text, _) in std::mem::take(&mut all.ended) {
                    assert_eq!(text, alone(&asked[number]));
                }
            }
        });
    }
}
