//! Texts with images, compared with Hugging Face transformers (`scripts/golden/vision.py`): from
//! the pixels of a picture through the tower to likelihoods and greedy texts.

use crate::{common, fuzz};
use gemma::checkpoint::Checkpoint;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::{Executor, KvFormat};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::images::whole;
use gemma::models::{Image, Images, Weights};
use gemma::tensor::Token;
use gemma::vision::{Picture, PictureLimits, Vision, picture};
use serde::Deserialize;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FAMILIES: [&str; 3] = ["gemma3", "gemma4", "gemma4-unified"];

/// Limit in nats of a likelihood's difference. Soft tokens may differ by 1e-4.
const NATS: f64 = 1e-3;

/// The first of the ids that mark images. Greedy texts contain none of them.
const MARKS: Token = 250;
const SOFT: Token = 252;

#[derive(Deserialize)]
struct Golden {
    images: Vec<Shown>,
    texts: Vec<Text>,
}

#[derive(Deserialize)]
struct Shown {
    size: [usize; 2],
    seed: usize,
    is_faint: bool,
    tokens: usize,
}

#[derive(Deserialize)]
struct Text {
    name: String,
    window: usize,
    ids: Vec<Token>,
    images: Vec<usize>,
    nll: Vec<f64>, // [ids - 1]
    greedy: Vec<Token>,
    greedy_margin: f64,
}

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision").join(family)
}

fn json(family: &str, file: &str) -> Value {
    serde_json::from_slice(&fs::read(folder(family).join(file)).unwrap()).unwrap()
}

/// Returns the image of the script's `picture`.
fn drawn(image: &Shown) -> Picture {
    let ([width, height], seed) = (image.size, image.seed);
    let value = |x: usize, y: usize, c: usize| {
        let sum = x * (7 + 5 * c) + y * (11 + 3 * seed) + ((x * y) >> (2 + c)) * (seed + 1);
        let value = (sum + 40 * c + ((x ^ y) & 31) * 3) as u8;
        if image.is_faint { (value >> 6) + 100 } else { value }
    };
    let rows = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    let rgb = rows.flat_map(|(x, y)| (0..3).map(move |c| value(x, y, c))).collect();
    Picture { width, height, rgb, flattened: false }
}

/// A family's images, and its weights with another window.
struct Sighted {
    images: Vec<Arc<Image>>,
    registry: Arc<Images>,
    family: &'static str,
}

impl Sighted {
    fn new(family: &'static str, golden: &Golden) -> Sighted {
        let vision = Vision::open(&folder(family)).unwrap();
        let most = vision.most_tokens(None).unwrap();
        let registry = Arc::new(Images::new(vision.width(), most, 1 << 20));
        let images = golden.images.iter().map(|shown| {
            let prepared = vision.prepare_picture(&drawn(shown), None).unwrap();
            assert_eq!(prepared.tokens(), shown.tokens);
            registry.insert(prepared.digest, vision.encode(&prepared, 2).unwrap()).unwrap()
        });
        Sighted { images: images.collect(), registry, family }
    }

    fn weights(&self, window: usize) -> Weights {
        let mut config = json(self.family, "config.json");
        config["text_config"]["sliding_window"] = window.into();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let file = "model.safetensors";
        fs::copy(folder(self.family).join(file), dir.path().join(file)).unwrap();
        let weights = Weights::open(Checkpoint::open(dir.path()).unwrap()).unwrap();
        weights.seeing(self.registry.clone())
    }

    /// Returns the history of ids that all have the same token for places of images.
    fn history(&self, text: &Text) -> Vec<Token> {
        let places = text.images.iter().flat_map(|i| self.images[*i].places());
        let mut places = places.collect::<Vec<_>>().into_iter();
        let item = |id: &Token| if *id == SOFT { places.next().unwrap() } else { *id };
        text.ids.iter().map(item).collect()
    }
}

fn nll(logits: &[f32], token: Token) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    max + logits.iter().map(|v| (*v as f64 - max).exp()).sum::<f64>().ln()
        - logits[token as usize] as f64
}

/// Returns scores of all rows, read in passes of about `chunk` rows that do not split an image.
fn run(engine: &mut dyn Engine, history: &[Token], chunk: usize) -> Scores {
    let mut all = Scores { vocab: engine.info().vocab, logits: Vec::new(), ..Scores::default() };
    let (mut scores, mut rest) = (Scores::default(), history);
    while !rest.is_empty() {
        let n = whole(rest, chunk.min(engine.info().max_rows).min(rest.len()));
        engine.forward(&TokenTree::chain(&rest[..n]), Rows::All, &mut scores).unwrap();
        engine.commit(&[(0, &(0..n as u32).collect::<Vec<_>>())]).unwrap();
        all.logits.extend_from_slice(&scores.logits);
        rest = &rest[n..];
    }
    all
}

/// Returns the likeliest token that does not mark an image.
fn best(row: &[f32]) -> Token {
    let row = &row[..MARKS as usize];
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter().position(|v| *v == most).unwrap() as Token
}

fn agrees(exec: &dyn Fn() -> Box<dyn Executor>, device: &str) {
    for family in FAMILIES {
        let golden: Golden = serde_json::from_value(json(family, "golden.json")).unwrap();
        let sighted = Sighted::new(family, &golden);
        assert_eq!(golden.texts.len(), 6);
        for text in &golden.texts {
            let what = format!("{device}, {family}, {}", text.name);
            let weights = sighted.weights(text.window);
            let history = sighted.history(text);
            let context = history.len() + text.greedy.len();
            for chunk in [256, 5] {
                let options = EngineOptions { context, kv: KvFormat::F32 };
                let mut engine = PlannedEngine::new(&weights, exec(), options).unwrap();
                let mut scores = run(&mut engine, &history, chunk);
                let differences = text
                    .nll
                    .iter()
                    .enumerate()
                    .map(|(i, want)| (nll(scores.row(i), text.ids[i + 1]) - want).abs());
                let worst = differences.fold(0.0, f64::max);
                println!("{what}: worst NLL difference {worst:.2e}");
                assert!(worst < NATS, "{what}: NLL differs by {worst}");
                assert!(text.greedy_margin > 4.0 * NATS, "{what}: a close call");
                for (i, want) in text.greedy.iter().enumerate() {
                    let token = best(scores.row(scores.rows() - 1));
                    assert_eq!(token, *want, "{what}: greedy token {i}");
                    scores = run(&mut engine, &[token], 1);
                }
            }
        }
    }
}

#[test]
fn texts_with_images_agree_with_transformers() {
    let exec = || -> Box<dyn Executor> {
        let options = CpuOptions { threads: 2, ..CpuOptions::default() };
        Box::new(CpuExecutor::new(options).unwrap())
    };
    agrees(&exec, "processor");
}

#[test]
fn texts_with_images_on_a_device_agree_with_transformers() {
    let Some(open) = common::vulkan::device() else { return };
    agrees(&|| Box::new(open()), "device");
}

/// Images of all kinds with bytes changed, moved and cut are read or refused, without a panic.
#[test]
fn damaged_pictures_are_read_or_refused() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision/files.json");
    let cases: Vec<Value> = serde_json::from_slice(&fs::read(cases).unwrap()).unwrap();
    let file = |case: &Value| hex::decode(case["file"].as_str().unwrap()).unwrap();
    let seeds: Vec<Vec<u8>> = cases.iter().map(file).collect();
    let limits = PictureLimits { bytes: 1 << 16, pixels: 1 << 16 };
    let (_, read) = fuzz::run("pictures", &seeds, 20_000, &mut |bytes| {
        let picture = picture::decode(bytes, limits);
        picture.is_ok_and(|picture| {
            assert_eq!(picture.rgb.len(), 3 * picture.width * picture.height);
            true
        })
    });
    assert!(read > 100, "{read} were read");
}
