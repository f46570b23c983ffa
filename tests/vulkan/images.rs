//! Images on Vulkan: each kernel equals its twin in passes with images, and the bits are the same
//! for every way to split a prompt and to share passes.

use crate::common;
use common::images::{engine, families, image, places, read, registry, scores, weights};
use common::trees::{bits, random_tree, tokens};
use common::vulkan::device;
use gemma::compute::KvFormat;
use gemma::engine::{Engine, EngineExt, Input, Output, Rows, Scores, TokenTree};
use gemma::kv::PAGE;
use gemma::vulkan::CheckedExecutor;
use rand::SeedableRng;
use rand::rngs::SmallRng;

const FORMATS: [KvFormat; 3] = [KvFormat::F16, KvFormat::Q8, KvFormat::F32];

/// A chain with two images, one of them longer than the window, then a branching tree. All are in
/// one pass with another sequence.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn kernels_are_their_twins_in_a_pass_with_images() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(7);
    let text = tokens(&mut rng, 60);
    // The twin of int8 keys rounds queries, which the GPU does not.
    let formats = [KvFormat::F16, KvFormat::F32, KvFormat::F16];
    for ((name, config), kv) in families(13).into_iter().zip(formats) {
        let images = registry();
        let (a, b) = (image(&images, 1, 9), image(&images, 2, 31));
        let weights = weights(config, "i4-g32", &images);
        let exec = Box::new(CheckedExecutor::new(open()));
        let mut checked = engine(&weights, exec, kv, 2);
        checked.device().unwrap().set_poison(true);
        let mut plain = engine(&weights, Box::new(open()), kv, 2);
        let mut tree = TokenTree::chain(&[&text[20..24], &places(&a), &places(&b), &[5]].concat());
        for node in [0, 2, tree.len() as u32 - 1] {
            tree.push(node, 7);
        }
        let other = random_tree(&mut rng, 5);
        let run = |engine: &mut gemma::engine::PlannedEngine| {
            let mut all = Vec::new();
            let mut out = Scores::default();
            let read = engine.forward(&TokenTree::chain(&text[..20]), Rows::Last, &mut out);
            read.unwrap_or_else(|error| panic!("{name}, {kv:?}: {error:#}"));
            engine.commit(&[(0, &(0..20).collect::<Vec<u32>>())]).unwrap();
            let alone = [Input::new(0, &tree, Rows::All)];
            let both = [Input::new(1, &other, Rows::All), alone[0]];
            for inputs in [&alone[..], &both] {
                let run = engine.run(inputs, Output::Logits, &mut out);
                run.unwrap_or_else(|error| panic!("{name}, {kv:?}, images: {error:#}"));
                all.push(bits(&out.logits));
            }
            all
        };
        let (got, want) = (run(&mut checked), run(&mut plain));
        assert!(got == want, "{name}, {kv:?}");
        assert!(got[1].ends_with(&got[0]), "{name}, {kv:?}: a neighbour changes the bits");
    }
}

/// A history across the edges of pages and windows, with an image of more rows than the others.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn the_bits_are_the_same_however_a_prompt_is_cut() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(6);
    let (text, tree) = (tokens(&mut rng, 500), random_tree(&mut rng, 9));
    for ((name, config), kv) in families(70).into_iter().zip(FORMATS) {
        let images = registry();
        let (a, b) = (image(&images, 1, 40), image(&images, 2, 150));
        let history = [&text[..240], &places(&a), &text[240..300], &places(&b), &text[300..320]];
        let history = history.concat();
        let weights = weights(config, "i4-g32", &images);
        let mut read_by = |sequences: usize| {
            let mut engine = engine(&weights, Box::new(open()), kv, sequences);
            read(&mut engine, 0, &history[..300], &mut rng);
            let prefix = engine.retain(0, PAGE);
            read(&mut engine, 0, &history, &mut rng);
            let last = sequences - 1;
            if let Some(prefix) = prefix.filter(|_| sequences > 1) {
                // The prefix ends inside an image.
                engine.resume(last, &prefix, PAGE).unwrap();
                read(&mut engine, last, &history, &mut rng);
            }
            (engine.visible_cache(last).unwrap(), scores(&mut engine, last, &tree))
        };
        assert!(read_by(1) == read_by(2), "{name}, {kv:?}");
    }
}
