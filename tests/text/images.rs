//! Images in histories: the masks of the reference engine, the same bits for every way to split a
//! prompt and to share passes, and texts that do not depend on drafters or caches.

use crate::common;
#[path = "../common/reference.rs"]
mod reference;

use common::images::{
    CONTEXT, MOST_ROWS, engine, families, image, places, read, registry, scores, weights,
};
use common::trees::{bits, random_tree, tokens};
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::split::SplitExecutor;
use gemma::compute::{Executor, KvFormat};
use gemma::decode::{Flow, PageDirectory, PromptCache, Request, Scheduler};
use gemma::draft::{DraftOptions, Drafter, NoDraft, Policy, TreeBuilder, TreeSize};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores};
use gemma::engine::{Timeline, TokenTree};
use gemma::kv::PAGE;
use gemma::models::{Image, Weights};
use gemma::sampler::{Sampler, SamplerConfig};
use gemma::tensor::Token;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use reference::ReferenceEngine;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn cpu(threads: usize) -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(CpuOptions { threads, ..CpuOptions::default() }).unwrap())
}

/// Returns the logits of all rows of a history after the committed text. The history is read in
/// parts, and each part is committed.
fn all_logits(engine: &mut dyn Engine, parts: &[&[Token]]) -> Vec<f32> {
    let (mut all, mut scores) = (Vec::new(), Scores::default());
    for part in parts {
        engine.forward(&TokenTree::chain(part), Rows::All, &mut scores).unwrap();
        all.extend_from_slice(&scores.logits);
        engine.commit(&[(0, &(0..part.len() as u32).collect::<Vec<_>>())]).unwrap();
    }
    all
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// One image, two, one that is longer than the window, and one in the second turn, each compared
/// with the same pass in candle. Other masks give other logits.
#[test]
fn rows_of_an_image_see_what_the_reference_says() {
    let mut rng = SmallRng::seed_from_u64(5);
    let text = tokens(&mut rng, 40);
    for (name, config) in families(13) {
        let images = registry();
        let [a, b, long] = [(1, 9), (2, 9), (3, 31)].map(|(n, rows)| image(&images, n, rows));
        let [a, b, long] = [a, b, long].map(|image| places(&image));
        let histories: [&[&[Token]]; 4] = [
            &[&text[..5], &a, &text[5..9]],
            &[&text[..3], &a, &text[3..5], &b, &text[5..12]],
            &[&text[..20], &long, &text[20..24]],
            &[&text[..30], &text[30..33], &b, &text[33..40]],
        ];
        for (case, parts) in histories.into_iter().enumerate() {
            // The second turn is a separate pass.
            let cuts = if case == 3 {
                vec![parts[0].to_vec(), parts[1..].concat()]
            } else {
                vec![parts.concat()]
            };
            let cuts: Vec<&[Token]> = cuts.iter().map(|part| &part[..]).collect();
            let of_reference = |flip: bool| {
                let mut config = config.clone();
                let layers = config.layers.iter_mut().filter(|_| flip);
                layers.for_each(|layer| layer.whole_images = !layer.whole_images);
                let weights = weights(config, "f32", &images);
                all_logits(&mut ReferenceEngine::new(&weights, CONTEXT).unwrap(), &cuts)
            };
            let weights = weights(config.clone(), "f32", &images);
            let got = all_logits(&mut engine(&weights, cpu(2), KvFormat::F32, 1), &cuts);
            let (right, wrong) = (of_reference(false), of_reference(true));
            let (near, far) = (largest_difference(&got, &right), largest_difference(&got, &wrong));
            assert!(near < 1e-3 && far > 0.05, "{name}, case {case}: {near} and {far}");
        }
    }
}

/// Returns a history of about 600 items: an image across a page boundary, an image with more rows
/// than a pass of tokens, and text around them.
fn long_history(images: &gemma::models::Images, rng: &mut SmallRng) -> Vec<Token> {
    let text = tokens(rng, 500);
    let (a, b) = (image(images, 1, 40), image(images, 2, MOST_ROWS - 7));
    [&text[..240], &places(&a), &text[240..400], &places(&b), &text[400..430]].concat()
}

#[test]
fn the_bits_are_the_same_however_a_prompt_is_cut() {
    let mut rng = SmallRng::seed_from_u64(6);
    let tree = random_tree(&mut rng, 9);
    for (name, config) in families(70) {
        let images = registry();
        let history = long_history(&images, &mut rng);
        for kv in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
            let weights = weights(config.clone(), "i4-g32", &images);
            let mut read_by = |exec: Box<dyn Executor>| {
                let mut engine = engine(&weights, exec, kv, 1);
                read(&mut engine, 0, &history, &mut rng);
                (engine.visible_cache(0).unwrap(), scores(&mut engine, 0, &tree))
            };
            let one = read_by(cpu(1));
            assert!(read_by(cpu(2)) == one, "{name}, {kv:?}");
            let split = Box::new(SplitExecutor::new(cpu(1), cpu(2), 2, 4));
            assert!(read_by(split) == one, "{name}, {kv:?}: split");
        }
    }
}

/// Every kernel equals its scalar twin, on poisoned memory.
#[test]
fn kernels_are_their_twins_in_a_pass_with_images() {
    let mut rng = SmallRng::seed_from_u64(7);
    let text = tokens(&mut rng, 40);
    for (name, config) in families(13) {
        for kv in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
            let images = registry();
            let (a, b) = (image(&images, 1, 9), image(&images, 2, 31));
            let history = [&text[..20], &places(&a), &text[20..25], &places(&b), &text[25..]];
            let weights = weights(config.clone(), "i4-g32", &images);
            let run = |check: bool| {
                let options = CpuOptions { threads: 2, check, isa: None };
                let exec = Box::new(CpuExecutor::new(options).unwrap());
                let mut engine = engine(&weights, exec, kv, 1);
                if !check {
                    engine.device().unwrap().set_poison(true);
                }
                let parts = [history[..2].concat(), history[2..].concat()];
                bits(&all_logits(&mut engine, &[&parts[0], &parts[1]]))
            };
            assert!(run(true) == run(false), "{name}, {kv:?}");
        }
    }
}

/// The places of two images of equal size are different histories. A kept prefix may end inside an
/// image; then the rest of the image is read.
#[test]
fn a_prefix_may_end_inside_an_image() {
    let mut rng = SmallRng::seed_from_u64(8);
    let tree = random_tree(&mut rng, 9);
    for (name, config) in families(70) {
        let images = registry();
        let weights = weights(config, "i4-g32", &images);
        let history = long_history(&images, &mut rng);
        assert!(common::images::places(&images.find(&[1; 32]).unwrap()).contains(&history[PAGE]));
        let mut engine = engine(&weights, cpu(2), KvFormat::F16, 2);
        read(&mut engine, 0, &history[..300], &mut rng);
        let prefix = engine.retain(0, PAGE).unwrap();
        read(&mut engine, 0, &history, &mut rng);
        engine.resume(1, &prefix, PAGE).unwrap();
        read(&mut engine, 1, &history, &mut rng);
        assert!(scores(&mut engine, 0, &tree) == scores(&mut engine, 1, &tree), "{name}");
        assert_eq!(engine.visible_cache(0).unwrap(), engine.visible_cache(1).unwrap(), "{name}");
        // Text cannot continue inside an image, and a part of an image cannot be read.
        engine.resume(1, &prefix, PAGE).unwrap();
        let mut out = Scores::default();
        for bad in [&history[PAGE..PAGE + 3], &history[PAGE + 1..290], &[7]] {
            let input = TokenTree::chain(bad);
            let run = engine.run(&[Input::new(1, &input, Rows::None)], Output::Logits, &mut out);
            assert!(run.is_err(), "{name}: {bad:?}");
        }
    }
}

#[test]
fn a_text_beside_an_image_has_the_bits_that_it_has_alone() {
    let mut rng = SmallRng::seed_from_u64(9);
    let (text, tree) = (tokens(&mut rng, 300), random_tree(&mut rng, 9));
    for (name, config) in families(70) {
        let images = registry();
        let weights = weights(config, "i4-g32", &images);
        let picture = places(&image(&images, 1, 50));
        let chain = TokenTree::chain(&[&text[..3], &picture, &text[3..7]].concat());
        let alone = |history: &[Token], tree: &TokenTree, rng: &mut SmallRng| {
            let mut engine = engine(&weights, cpu(1), KvFormat::F16, 1);
            read(&mut engine, 0, history, rng);
            scores(&mut engine, 0, tree)
        };
        let want = [alone(&text, &tree, &mut rng), alone(&text[..90], &chain, &mut rng)];
        let mut both = engine(&weights, cpu(2), KvFormat::F16, 2);
        read(&mut both, 0, &text, &mut rng);
        read(&mut both, 1, &text[..90], &mut rng);
        for order in [[0, 1], [1, 0]] {
            let inputs = order.map(|i| Input::new(i, [&tree, &chain][i], Rows::All));
            let mut out = Scores::default();
            both.run(&inputs, Output::Logits, &mut out).unwrap();
            let got = bits(&out.logits);
            let parts = order.map(|i| &want[i][..]);
            assert!(got == parts.concat(), "{name}, {order:?}");
        }
    }
}

#[test]
fn what_cannot_be_seen_is_refused() {
    let images = registry();
    let [(_, config), ..] = families(70);
    let weights = weights(config.clone(), "i4-g32", &images);
    let picture = places(&image(&images, 1, 20));
    let mut out = Scores::default();
    let mut run = |engine: &mut PlannedEngine, items: &[Token]| {
        let error = engine.forward(&TokenTree::chain(items), Rows::None, &mut out).err();
        error.map(|error| format!("{error:#}"))
    };
    let mut seeing = engine(&weights, cpu(1), KvFormat::F16, 1);
    assert_eq!(run(&mut seeing, &[&[1][..], &picture, &[2]].concat()), None);
    let unknown = picture[19] + 100;
    for (items, part) in [
        ([&[1][..], &picture[..19]].concat(), "part of an image"),
        ([&[1][..], &picture[1..]].concat(), "part of an image"),
        ([&picture[..3], &[5], &picture[4..]].concat(), "part of an image"),
        (vec![1, unknown], "not kept"),
        (vec![1, 96], "vocabulary"),
    ] {
        let error = run(&mut seeing, &items);
        assert!(error.as_ref().is_some_and(|e| e.contains(part)), "{items:?}: {error:?}");
    }
    // Two children of one place.
    let mut fork = TokenTree::chain(&[&[1][..], &picture].concat());
    fork.push(4, 7);
    assert!(seeing.forward(&fork, Rows::None, &mut Scores::default()).is_err());

    let options = EngineOptions { context: 100, kv: KvFormat::F16 };
    let format = |_| "i4-g32".parse().unwrap();
    let plain = Weights::synthetic(config, format, 11);
    let mut plain = PlannedEngine::new(&plain, cpu(1), options).unwrap();
    assert!(run(&mut plain, &picture).is_some_and(|e| e.contains("without images")));
    assert!(images.insert([9; 32], vec![0.0; 128 * (MOST_ROWS + 1)]).is_err());
}

/// A prompt with the images that it refers to.
struct Prompt {
    history: Vec<Token>,
    images: Vec<Arc<Image>>,
    temperature: f32,
}

/// Generates texts at once. Returns each text, and the number of tokens of its prompt that were
/// read.
fn grow(
    target: &mut Timeline,
    (drafter, mut policy): (&mut dyn Drafter, Policy),
    cache: Option<&mut PromptCache>,
    prompts: &[&Prompt],
) -> Vec<(Vec<Token>, usize)> {
    let interrupt = AtomicBool::new(false);
    let mut texts = vec![(Vec::new(), 0); prompts.len()];
    let scheduler = Scheduler::new(target, drafter, &mut policy, &[], &interrupt);
    let mut scheduler = scheduler.keeping_prefixes().with_prompt_cache(cache);
    let mut sequences = Vec::new();
    for prompt in prompts {
        let config = SamplerConfig {
            temperature: prompt.temperature,
            repeat_penalty: 1.1,
            ..SamplerConfig::default()
        };
        let sampler = Sampler::new(config).unwrap();
        let mut request = Request::new(prompt.history.clone(), sampler, 24);
        request.images = prompt.images.clone();
        sequences.push(scheduler.admit(request).map_err(|e| e.error).unwrap());
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

fn plain(target: &mut Timeline, prompt: &Prompt) -> (Vec<Token>, usize) {
    grow(target, (&mut NoDraft, Policy::off()), None, &[prompt]).remove(0)
}

fn timeline(weights: &Weights, sequences: usize) -> Timeline {
    Timeline::new(Box::new(engine(weights, cpu(2), KvFormat::F16, sequences)))
}

/// Returns prompts with a small image, with another one of the same size, with one that is larger
/// than a pass of tokens, and with two. The last prompt has none.
fn prompts(images: &gemma::models::Images, temperature: f32) -> Vec<Prompt> {
    let mut rng = SmallRng::seed_from_u64(10);
    let text = tokens(&mut rng, 60);
    let [a, b, large] = [(1, 30), (2, 30), (3, MOST_ROWS)].map(|(n, rows)| image(images, n, rows));
    let prompt = |seen: &[&Arc<Image>]| {
        let mut history = text[..20].to_vec();
        for (i, image) in seen.iter().enumerate() {
            history.extend(image.places());
            history.extend(&text[20 + 10 * i..30 + 10 * i]);
        }
        let images = seen.iter().map(|image| (*image).clone()).collect();
        Prompt { history: [&history, &text[50..]].concat(), images, temperature }
    };
    [&[&a][..], &[&b], &[&large], &[&b, &a], &[]].map(prompt).into()
}

/// Drafts from the text, from the table, and from a model that does not read images change no text.
#[test]
fn no_drafter_and_no_neighbour_changes_a_text_about_an_image() {
    for (name, config) in families(70) {
        let images = registry();
        let weights = weights(config.clone(), "i4-g32", &images);
        let blind = Weights::synthetic(config, |_| "i4-g32".parse().unwrap(), 11).blind(0);
        for temperature in [0.0, 1.0] {
            let prompts = prompts(&images, temperature);
            let alone: Vec<Vec<Token>> =
                prompts.iter().map(|p| plain(&mut timeline(&weights, 1), p).0).collect();
            let answer = |n: usize| &alone[n][prompts[n].history.len()..];
            assert_ne!(answer(0), answer(1), "{name}: two images of one size");
            let policy = || {
                let options = DraftOptions { tree: TreeSize::Nodes(7), tokens: None };
                Policy::new(Default::default(), options, false)
            };
            let draft = || {
                let options = EngineOptions { context: CONTEXT, kv: KvFormat::F16 };
                let engine = PlannedEngine::for_sequences(&blind, cpu(1), options, 5).unwrap();
                Box::new(engine)
            };
            let drafters: [(&str, Box<dyn Drafter>); 3] = [
                ("text", Box::new(TreeBuilder::of_text())),
                ("model", Box::new(TreeBuilder::of_model(draft()))),
                ("both", Box::new(TreeBuilder::of_both(draft()))),
            ];
            for (drafter_name, mut drafter) in drafters {
                let all: Vec<&Prompt> = prompts.iter().collect();
                let mut target = timeline(&weights, prompts.len());
                let drafting: (&mut dyn Drafter, Policy) = (&mut *drafter, policy());
                let texts = grow(&mut target, drafting, None, &all);
                for (n, (text, _)) in texts.iter().enumerate() {
                    assert!(*text == alone[n], "{name}, {drafter_name}, {temperature}: {n}");
                }
            }
        }
    }
}

/// The same image again is the same prefix, in memory and on disk. Another image of its size is
/// not, in whatever order a process reads them.
#[test]
fn caches_go_by_the_image_and_not_by_its_number() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("pages");
    let cache = || PromptCache::new(PageDirectory::open(&directory, 1 << 30).unwrap(), [7; 32]);
    let [(_, config), ..] = families(70);
    let mut rng = SmallRng::seed_from_u64(11);
    let text = tokens(&mut rng, 600);
    let prompt = |image: &Arc<Image>| Prompt {
        history: [&text[..200], &places(image), &text[200..450], &places(image), &text[450..460]]
            .concat(),
        images: vec![image.clone()],
        temperature: 1.0,
    };
    let ask = |weights: &Weights, prompt: &Prompt| {
        let (mut target, mut cache) = (timeline(weights, 1), cache());
        grow(&mut target, (&mut NoDraft, Policy::off()), Some(&mut cache), &[prompt]).remove(0)
    };
    let first = registry();
    let seeing = weights(config.clone(), "i4-g32", &first);
    let (a, b) = (image(&first, 1, 50), image(&first, 2, 50));
    let about = [prompt(&a), prompt(&b)];
    let answers = about.each_ref().map(|prompt| plain(&mut timeline(&seeing, 1), prompt).0);
    let len = about[0].history.len();
    let (text_a, read) = ask(&seeing, &about[0]);
    assert_eq!((&text_a, read), (&answers[0], len - 1));

    // Another process reads the images in another order.
    let second = registry();
    let seeing = weights(config, "i4-g32", &second);
    let (b, a) = (image(&second, 2, 50), image(&second, 1, 50));
    let about = [prompt(&a), prompt(&b)];
    let answer = |(text, read): (Vec<Token>, usize)| (text[len..].to_vec(), read);
    let want = answers.map(|text| text[len..].to_vec());
    assert_ne!(want[0], want[1]);
    assert_eq!(answer(ask(&seeing, &about[1])), (want[1].clone(), len - 1), "of the other image");
    for n in [0, 1] {
        let read = len - 1 - (len - 1) / PAGE * PAGE;
        assert_eq!(answer(ask(&seeing, &about[n])), (want[n].clone(), read), "{n}");
    }
    // In memory, the same text with each of the two images in turn.
    let mut target = timeline(&seeing, 2);
    let all = [&about[0], &about[1]];
    grow(&mut target, (&mut NoDraft, Policy::off()), None, &all);
    for n in [1, 0] {
        let (text, read) = plain(&mut target, &about[n]);
        assert!(text[len..] == want[n] && read < PAGE, "{n}: {read}");
    }
}
