//! Compares towers with Hugging Face transformers (`scripts/golden/vision.py`), and the two kinds
//! of files with each other.

mod files;
mod forms;

use super::pixels::{Processor, cells};
use super::resize::{Filter, resize};
use super::*;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::PathBuf;

const FAMILIES: [&str; 3] = ["gemma3", "gemma4", "gemma4-unified"];

/// Largest allowed difference of a soft token's value, for values around 1.
const TOLERANCE: f32 = 1e-4;

fn golden(file: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.join("../../tests/golden/vision").join(file)
}

fn read<T: DeserializeOwned>(file: &str) -> T {
    let bytes = std::fs::read(golden(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    serde_json::from_slice(&bytes).unwrap()
}

/// Generates the same picture as the script's function `picture`.
fn picture(width: usize, height: usize, seed: usize) -> Picture {
    let value = |x: usize, y: usize, c: usize| {
        let sum = x * (7 + 5 * c) + y * (11 + 3 * seed) + ((x * y) >> (2 + c)) * (seed + 1);
        (sum + 40 * c + ((x ^ y) & 31) * 3) as u8
    };
    let rows = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    let rgb = rows.flat_map(|(x, y)| (0..3).map(move |c| value(x, y, c))).collect();
    Picture { width, height, rgb, flattened: false }
}

/// Returns the hash of values, computed as in the script.
fn hash(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[derive(Deserialize)]
struct PixelCase {
    family: String,
    size: [usize; 2],
    budget: usize,
    grid: Option<[usize; 2]>,
    values: String,
}

#[derive(Deserialize)]
struct Pixels {
    cases: Vec<PixelCase>,
}

#[test]
fn pixels_are_those_of_transformers() {
    let Pixels { cases } = read("pixels.json");
    assert!(cases.len() > 80);
    for PixelCase { family, size: [width, height], budget, grid, values } in cases {
        let source = picture(width, height, 1);
        let is_gemma3 = family == "gemma3";
        let (to, filter, side) = match family.as_str() {
            "gemma3" => ((896, 896), Filter::Bilinear, 14),
            kind => {
                let (columns, rows) = cells(width, height, 48, budget).unwrap();
                assert_eq!(Some([columns, rows]), grid, "{width} x {height}, {budget}");
                let side = if kind == "gemma4" { 16 } else { 48 };
                ((columns * 48, rows * 48), Filter::Bicubic, side)
            }
        };
        let rgb = resize(&source.rgb, (width, height), to, filter);
        let processor = Processor::read(&Value::Null, filter, is_gemma3).unwrap();
        let got = processor.patches(&rgb, to.0, side, is_gemma3);
        assert_eq!(hash(&got), values, "{family}, {width} x {height}, {budget}");
    }
}

#[derive(Deserialize)]
struct Image {
    size: [usize; 2],
    seed: usize,
    is_faint: bool,
    tokens: usize,
    values: String,
    soft: Vec<Vec<f32>>, // [tokens, width]
}

#[derive(Deserialize)]
struct Golden {
    images: Vec<Image>,
}

fn prepare(vision: &Vision, image: &Image) -> PreparedImage {
    let [width, height] = image.size;
    let mut source = picture(width, height, image.seed);
    if image.is_faint {
        source.rgb.iter_mut().for_each(|v| *v = (*v >> 6) + 100);
    }
    vision.prepare_picture(&source, None).unwrap()
}

/// Returns the largest difference between soft tokens and golden ones.
fn distance(got: &[f32], want: &[Vec<f32>]) -> f32 {
    let want: Vec<f32> = want.concat();
    assert_eq!(got.len(), want.len());
    got.iter().zip(&want).fold(0.0, |most, (a, b)| most.max((a - b).abs() / b.abs().max(1.0)))
}

#[test]
fn soft_tokens_are_those_of_transformers() {
    for family in FAMILIES {
        let vision = Vision::open(&golden(family)).unwrap();
        let Golden { images } = read(&format!("{family}/golden.json"));
        assert_eq!(images.len(), 3);
        let prepared: Vec<PreparedImage> =
            images.iter().map(|image| prepare(&vision, image)).collect();
        assert_ne!(prepared[0].digest, prepared[1].digest);
        for (image, prepared) in images.iter().zip(&prepared) {
            assert_eq!(prepared.tokens(), image.tokens, "{family}");
            let Fit { width, .. } = prepared.fit();
            let (side, is_gemma3) = match family {
                "gemma3" => (6, true),
                "gemma4" => (4, false),
                _ => (12, false),
            };
            let values =
                vision.tower.processor().patches(prepared.pixels(), width, side, is_gemma3);
            assert_eq!(hash(&values), image.values, "{family}");
            let soft = vision.encode(prepared, 1).unwrap();
            let worst = distance(&soft, &image.soft);
            assert!(worst < TOLERANCE, "{family}: {worst}");
            assert_eq!(soft.len(), image.tokens * vision.width());
            for threads in [2, 5] {
                assert!(soft == vision.encode(prepared, threads).unwrap(), "{threads} threads");
            }
        }
    }
}

#[test]
fn the_digest_names_all_that_soft_tokens_follow_from() {
    let digest = |family: &str, seed, budget| {
        let vision = Vision::open(&golden(family)).unwrap();
        vision.prepare_picture(&picture(60, 40, seed), budget).unwrap().digest
    };
    let all = [
        digest("gemma4", 1, None),
        digest("gemma4", 2, None),
        digest("gemma4", 1, Some(140)),
        digest("gemma4-unified", 1, None),
    ];
    for (i, one) in all.iter().enumerate() {
        assert!(!all[..i].contains(one), "{i}");
    }
    assert_eq!(all[0], digest("gemma4", 1, Some(70)));
}

#[test]
fn budgets_that_a_model_does_not_have_are_refused() {
    let refusal = |family: &str, budget| {
        let vision = Vision::open(&golden(family)).unwrap();
        vision.fit(60, 40, Some(budget)).unwrap_err().to_string()
    };
    assert_eq!(refusal("gemma4", 100), "an image cannot have up to 100 tokens");
    assert_eq!(refusal("gemma3", 280), "an image of Gemma 3 has 16 tokens, not up to 280");
    // The position table has 80 entries.
    let long = Vision::open(&golden("gemma4-unified")).unwrap().fit(9000, 10, Some(280));
    assert!(long.unwrap_err().to_string().contains("too long"));
}

#[test]
fn estimates_grow_with_the_image() {
    for family in FAMILIES {
        let vision = Vision::open(&golden(family)).unwrap();
        let small = vision.fit(60, 40, None).unwrap();
        assert!(vision.work(small) > (small.tokens() * vision.width()) as u64, "{family}");
        assert!(vision.weight_bytes() > 10_000 && vision.scratch_bytes() > 10_000, "{family}");
        if family != "gemma3" {
            let large = vision.fit(60, 40, Some(140)).unwrap();
            assert!(vision.work(large) > 3 * vision.work(small) / 2, "{family}");
        }
    }
}

#[test]
fn marks_are_read_in_both_spellings() {
    for family in FAMILIES {
        let marks = Vision::open(&golden(family)).unwrap().marks();
        assert_eq!((marks.begin, marks.soft, marks.end), (250, 252, 251), "{family}");
    }
}

#[test]
fn a_model_without_a_tower_names_the_file_to_get() {
    let text = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text");
    let error = Vision::open(&text).unwrap_err();
    let fault = gemma_base::error::fault_of(&error).unwrap();
    assert_eq!(fault.what, "text reads no images: its files hold no vision tower");
    assert!(fault.help.as_ref().unwrap().contains("mmproj"));
}
