//! Made-up images, and models of each family that read them.

#![allow(dead_code)]

use super::trees::{bits, reshape_global_layers};
use super::vulkan::config;
use gemma::compute::{Executor, KvFormat};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::forward::SparePages;
use gemma::models::images::whole;
use gemma::models::{Config, Image, Images, Role, Weights};
use gemma::tensor::Token;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;

/// Context size in positions.
pub const CONTEXT: usize = 1200;
/// Rows of the largest image. They exceed one pass of the processor.
pub const MOST_ROWS: usize = 160;

/// Returns a model for each mask of image rows: visible to each other in all layers, in layers with
/// a window, in none.
pub fn families(window: usize) -> [(&'static str, Config); 3] {
    let gemma4 = reshape_global_layers(config(window));
    let mut causal = gemma4.clone();
    causal.layers.iter_mut().for_each(|layer| layer.whole_images = false);
    [("Gemma 3", config(window)), ("Gemma 4", gemma4), ("Gemma 4 E2B's masks", causal)]
}

/// Returns an empty registry of images for the models of [`families`].
pub fn registry() -> Arc<Images> {
    Arc::new(Images::new(128, MOST_ROWS, 1 << 20))
}

/// Returns weights of one format that share a registry.
pub fn weights(config: Config, format: &str, images: &Arc<Images>) -> Weights {
    let embed = if format == "f32" { "f32" } else { "i8-row" };
    let format = |role| if role == Role::Embed { embed } else { format }.parse().unwrap();
    Weights::synthetic(config, format, 11).seeing(images.clone())
}

pub fn engine(
    weights: &Weights,
    exec: Box<dyn Executor>,
    kv: KvFormat,
    sequences: usize,
) -> PlannedEngine {
    let spare = SparePages { global: 4, local: 4 };
    let options = EngineOptions { context: CONTEXT, kv };
    PlannedEngine::with_spare(weights, exec, options, sequences, spare).unwrap()
}

/// Returns a made-up image that is named by a number.
pub fn image(images: &Images, number: u8, rows: usize) -> Arc<Image> {
    let mut rng = SmallRng::seed_from_u64(number.into());
    let soft = (0..rows * 128).map(|_| rng.random_range(-9f32..9.0)).collect();
    images.insert([number; 32], soft).unwrap()
}

/// Returns the history items of an image.
pub fn places(image: &Image) -> Vec<Token> {
    image.places().collect()
}

/// Reads the rest of a history in passes of random lengths that do not split an image.
pub fn read(engine: &mut PlannedEngine, sequence: usize, history: &[Token], rng: &mut SmallRng) {
    let mut scores = Scores::default();
    let most = engine.info().max_rows;
    while engine.position(sequence) < history.len() {
        let rest = &history[engine.position(sequence)..];
        let n = whole(rest, rng.random_range(1..=most.min(rest.len())));
        let chain = TokenTree::chain(&rest[..n]);
        let input = Input::new(sequence, &chain, Rows::None);
        engine.run(&[input], Output::Logits, &mut scores).unwrap();
        engine.commit(&[(sequence, &(0..n as u32).collect::<Vec<_>>())]).unwrap();
    }
}

/// Returns the logits of a tree after the committed text of a sequence.
pub fn scores(engine: &mut PlannedEngine, sequence: usize, tree: &TokenTree) -> Vec<u32> {
    let mut out = Scores::default();
    engine.run(&[Input::new(sequence, tree, Rows::All)], Output::Logits, &mut out).unwrap();
    bits(&out.logits)
}
