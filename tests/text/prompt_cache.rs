//! The prompt cache on disk: texts equal those without it, whatever its files contain, and only the
//! rest of a prompt is read.

use crate::common;
use common::trees::{bits, random_tree, tokens};
use common::vulkan::{config, config_of, device};
use gemma::checkpoint::Checkpoint;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::split::SplitExecutor;
use gemma::compute::{Executor, KvFormat};
use gemma::decode::{Flow, PageDirectory, PromptCache, Request, Scheduler};
use gemma::draft::{NoDraft, Policy};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{EngineExt, Input, Output, PlannedEngine, Rows, Scores, Timeline};
use gemma::error::{Kind, fault_of};
use gemma::kv::PAGE;
use gemma::models::forward::SparePages;
use gemma::models::{Role, Weights};
use gemma::sampler::{Sampler, SamplerConfig};
use gemma::tensor::Token;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::fs;
#[cfg(unix)]
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;

const CONTEXT: usize = 1200;
/// Number of tokens generated after a prompt.
const ANSWER: usize = 6;
/// Hash that identifies the engine.
const ENGINE: [u8; 32] = [7; 32];

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap())
}

fn weights() -> Weights {
    let format = |role| if role == Role::Embed { "i8-row" } else { "i4-g32" }.parse().unwrap();
    Weights::synthetic(config(70), format, 11)
}

fn target(weights: &Weights, exec: Box<dyn Executor>, kv: KvFormat, sequences: usize) -> Timeline {
    let options = EngineOptions { context: CONTEXT, kv };
    let spare = SparePages::default();
    let engine = PlannedEngine::with_spare(weights, exec, options, sequences, spare).unwrap();
    Timeline::new(Box::new(engine))
}

/// Returns a directory that only this user can enter.
fn private() -> tempfile::TempDir {
    #[cfg_attr(windows, allow(unused_mut))]
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(PermissionsExt::from_mode(0o700));
    builder.tempdir().unwrap()
}

fn cache(directory: &Path) -> PromptCache {
    PromptCache::new(PageDirectory::open(directory, 1 << 30).unwrap(), ENGINE)
}

/// Generates texts after these prompts at once, from empty sequences. Returns each text, and the
/// number of tokens of its prompt that were read.
fn grow(
    target: &mut Timeline,
    cache: Option<&mut PromptCache>,
    prompts: &[&[Token]],
) -> Vec<(Vec<Token>, usize)> {
    (0..target.sequences()).for_each(|sequence| target.clear(sequence).unwrap());
    let (mut policy, interrupt) = (Policy::off(), AtomicBool::new(false));
    let mut texts = vec![(Vec::new(), 0); prompts.len()];
    let mut sequences = Vec::new();
    let mut drafter = NoDraft;
    let scheduler = Scheduler::new(target, &mut drafter, &mut policy, &[], &interrupt);
    let mut scheduler = scheduler.keeping_prefixes().with_prompt_cache(cache);
    for prompt in prompts {
        let sampler = Sampler::new(SamplerConfig::default()).unwrap();
        let request = Request::new(prompt.to_vec(), sampler, ANSWER);
        sequences.push(scheduler.admit(request).unwrap());
    }
    while scheduler.running() > 0 {
        for ended in scheduler.step(&mut |_, _| Flow::Continue).unwrap() {
            ended.stop.unwrap();
            let number = sequences.iter().position(|s| *s == ended.sequence).unwrap();
            texts[number] = (ended.text.history, ended.text.stats.prefilled as usize);
        }
    }
    while scheduler.write_page().unwrap() {}
    texts
}

/// Generates one text in a separate run. Its cache is what the files contain.
fn ask(target: &mut Timeline, directory: &Path, prompt: &[Token]) -> (Vec<Token>, usize) {
    let mut cache = cache(directory);
    let text = grow(target, Some(&mut cache), &[prompt]).remove(0);
    assert_eq!(cache.take_note(), None);
    text
}

/// Returns a prompt that begins with the first `at` tokens of another one.
fn parting(prompt: &[Token], at: usize, tokens: usize, rng: &mut SmallRng) -> Vec<Token> {
    [&prompt[..at], &common::trees::tokens(rng, tokens)].concat()
}

fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

/// Checks the same prompt, other questions about it, and damaged files.
fn check(target: &mut Timeline, what: &str) {
    let mut rng = SmallRng::seed_from_u64(3);
    let root = private();
    let directory = root.path().join("prompts");
    let prompt = tokens(&mut rng, 900);
    let plain = |target: &mut Timeline, prompt: &[Token]| grow(target, None, &[prompt]).remove(0).0;
    let want = plain(target, &prompt);
    let read = |target: &mut Timeline, prompt: &[Token], want: &[Token]| {
        let (text, read) = ask(target, &directory, prompt);
        assert_eq!(text, want, "{what}");
        prompt.len() - 1 - read
    };
    assert_eq!(read(target, &prompt, &want), 0, "{what}: nothing is kept yet");
    assert_eq!(read(target, &prompt, &want), 3 * PAGE, "{what}");
    // Windows are kept after the last two pages of a prompt. The next text can continue where a
    // text parted from an earlier one.
    let window = target.engine().info().paged.last().unwrap().pages;
    let first = if window.first_visible(2 * PAGE) < PAGE { PAGE } else { 0 };
    let ends = [(800, 100, 3 * PAGE), (767, 150, 2 * PAGE), (300, 600, first), (290, 40, PAGE)];
    for (at, more, cached) in ends {
        let other = parting(&prompt, at, more, &mut rng);
        let want = plain(target, &other);
        assert_eq!(read(target, &other, &want), cached, "{what}: parts at {at}");
    }
    // A damaged bit in each file, and later a removed directory: prompts are read again.
    for file in files(&directory) {
        let mut bytes = fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).unwrap();
    }
    let mut cache = cache(&directory);
    let (text, read_again) = grow(target, Some(&mut cache), &[&prompt]).remove(0);
    assert!(text == want && read_again == prompt.len() - 1, "{what}");
    assert!(cache.take_note().is_some_and(|note| note.contains("damaged")), "{what}");
    assert_eq!(read(target, &prompt, &want), 3 * PAGE, "{what}: written again");
    fs::remove_dir_all(&directory).unwrap();
    assert_eq!(read(target, &prompt, &want), 0, "{what}");
}

#[test]
fn a_prompt_of_an_earlier_run_is_not_read_again() {
    let weights = weights();
    for kv in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
        check(&mut target(&weights, cpu(), kv, 1), &format!("{kv:?}"));
    }
    let split = Box::new(SplitExecutor::new(cpu(), cpu(), 2, 4));
    check(&mut target(&weights, split, KvFormat::Q8, 1), "split");
}

#[test]
fn layers_with_shapes_of_their_own_are_kept_too() {
    for case in ["gemma4-wide", "gemma4-unified"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case);
        let weights = Weights::open(Checkpoint::open(&folder).unwrap()).unwrap();
        for kv in [KvFormat::F32, KvFormat::Q8] {
            check(&mut target(&weights, cpu(), kv, 1), &format!("{case}, {kv:?}"));
        }
    }
}

/// Pages of a device: for all of the model, and for half of it. Uses the shortest prompts, because
/// a driver may compute on the processor.
#[test]
fn a_gpu_keeps_prompts_too() {
    let Some(open) = device() else { return };
    let (weights, mut rng) = (weights(), SmallRng::seed_from_u64(4));
    for (kv, on_gpu) in [(KvFormat::Q8, 4), (KvFormat::F16, 2)] {
        let exec: Box<dyn Executor> = match on_gpu {
            4 => Box::new(open()),
            _ => Box::new(SplitExecutor::new(Box::new(open()), cpu(), on_gpu, 4)),
        };
        let mut target = target(&weights, exec, kv, 1);
        let root = private();
        let prompt = tokens(&mut rng, PAGE + 2);
        let other = parting(&prompt, PAGE + 1, 3, &mut rng);
        let want = grow(&mut target, None, &[&other]).remove(0).0;
        assert_eq!(ask(&mut target, root.path(), &prompt).1, PAGE + 1);
        let (text, read) = ask(&mut target, root.path(), &other);
        assert_eq!((text, other.len() - 1 - read), (want, PAGE), "{kv:?}, {on_gpu}");
    }
}

/// Texts that share passes. Files hold some of their prompts.
#[test]
fn texts_at_once_keep_their_prompts() {
    let (weights, mut rng) = (weights(), SmallRng::seed_from_u64(5));
    let mut target = target(&weights, cpu(), KvFormat::F16, 3);
    let root = private();
    let one = tokens(&mut rng, 700);
    let prompts = [one.clone(), parting(&one, 650, 60, &mut rng), tokens(&mut rng, 600)];
    let prompts = prompts.each_ref().map(|prompt| &prompt[..]);
    let mut alone = |prompt: &[Token]| grow(&mut target, None, &[prompt]).remove(0).0;
    let want = prompts.map(&mut alone);
    let mut at_once = |cached: [usize; 3]| {
        let texts = grow(&mut target, Some(&mut cache(root.path())), &prompts);
        for (((text, read), want), cached) in texts.iter().zip(&want).zip(cached) {
            assert_eq!((text, want.len() - ANSWER - 1 - read), (want, cached));
        }
    };
    at_once([0, 2 * PAGE, 0]);
    at_once([2 * PAGE; 3]);
    // The second text's file is removed for all of them.
    fs::remove_file(&files(root.path())[0]).unwrap();
    let texts = grow(&mut target, Some(&mut cache(root.path())), &prompts);
    assert!(texts.iter().map(|(text, _)| text).eq(&want));
}

/// Another model, another format of the KV cache or another program has another hash.
#[test]
fn another_engine_takes_nothing() {
    let (weights, mut rng) = (weights(), SmallRng::seed_from_u64(6));
    let mut target = target(&weights, cpu(), KvFormat::F16, 1);
    let root = private();
    let prompt = tokens(&mut rng, 300);
    ask(&mut target, root.path(), &prompt);
    let directory = PageDirectory::open(root.path(), 1 << 30).unwrap();
    let mut other = PromptCache::new(directory, [8; 32]);
    assert_eq!(grow(&mut target, Some(&mut other), &[&prompt])[0].1, 299);
    assert_eq!(ask(&mut target, root.path(), &prompt).1, 299 - PAGE);
}

/// The directory stays within its size. A size that is too small for a prompt gives a note, and the
/// directory stays empty.
#[test]
fn the_directory_keeps_to_its_size() {
    let (weights, mut rng) = (weights(), SmallRng::seed_from_u64(7));
    let mut target = target(&weights, cpu(), KvFormat::F16, 1);
    let root = private();
    let prompts = [0; 4].map(|_| tokens(&mut rng, 600));
    let bytes = || files(root.path()).iter().map(|f| f.metadata().unwrap().len()).sum::<u64>();
    let mut ask = |prompt: &[Token], most: u64| {
        let directory = PageDirectory::open(root.path(), most).unwrap();
        let mut cache = PromptCache::new(directory, ENGINE);
        let (_, read) = grow(&mut target, Some(&mut cache), &[prompt]).remove(0);
        assert!(bytes() <= most);
        (599 - read, cache.take_note())
    };
    let (_, note) = ask(&prompts[0], 1000);
    assert!(note.is_some_and(|note| note.contains("takes")) && bytes() == 0);
    ask(&prompts[0], 1 << 30);
    let two = 2 * bytes();
    for (prompt, cached) in [(1, 0), (0, 2 * PAGE), (2, 0), (0, 2 * PAGE), (1, 0)] {
        assert_eq!(ask(&prompts[prompt], two), (cached, None), "{prompt}");
    }
}

/// A sequence that needs the pages of a window gets them, after they are written to disk.
#[test]
fn pages_that_are_to_be_written_are_let_go() {
    let (weights, mut rng) = (weights(), SmallRng::seed_from_u64(8));
    let text = tokens(&mut rng, CONTEXT - 20);
    let mut target = target(&weights, cpu(), KvFormat::F16, 1);
    let root = private();
    let mut cache = cache(root.path());
    target.sync(0, &text[..3 * PAGE], &mut |_| true).unwrap();
    cache.store(&mut target, 0, 3 * PAGE);
    assert!(files(root.path()).is_empty());
    let mut released = 0;
    while let Err(error) = target.sync(0, &text, &mut |_| true) {
        assert_eq!(fault_of(&error).unwrap().kind, Kind::Memory, "{error:#}");
        assert!(cache.release(&mut target).unwrap(), "a window is all that is lacking");
        released += 1;
    }
    assert_eq!((released, files(root.path()).len()), (2, 2), "the windows of two ends");
    let tree = random_tree(&mut rng, 5);
    let scores = |target: &mut Timeline| {
        let mut out = Scores::default();
        target.run(&[Input::new(0, &tree, Rows::All)], Output::Logits, &mut out).unwrap();
        bits(&out.logits)
    };
    let want = scores(&mut target);
    while cache.write(&mut target).unwrap() {}
    target.clear(0).unwrap();
    assert_eq!(cache.begin(&mut target, 0, &text).unwrap(), Some(3));
    assert!(cache.read(&mut target).unwrap());
    assert_eq!(target.engine().position(0), 3 * PAGE);
    target.sync(0, &text, &mut |_| true).unwrap();
    assert_eq!(scores(&mut target), want);
}

/// Without windows a text can continue after any page.
#[test]
fn global_layers_go_on_behind_any_page_that_files_hold() {
    let mut rng = SmallRng::seed_from_u64(9);
    let format = "bf16".parse().unwrap();
    let weights = Weights::synthetic(config_of(2, 1, 70), move |_| format, 11);
    let mut target = target(&weights, cpu(), KvFormat::F32, 1);
    let root = private();
    let prompt = tokens(&mut rng, 900);
    ask(&mut target, root.path(), &prompt);
    for pages in [3, 2, 1] {
        let other = parting(&prompt, pages * PAGE + 9, 40, &mut rng);
        let want = grow(&mut target, None, &[&other]).remove(0).0;
        let (text, read) = ask(&mut target, root.path(), &other);
        assert_eq!((text, other.len() - 1 - read), (want, pages * PAGE));
    }
}
