//! Images on the command line: `generate --image`, `eval --image`, and their refusals.

use crate::pull::{FakeHub, content};
use crate::{common, shell};
use common::sighted::{FAMILIES, SOFT, golden, picture, png, write_model};
use serde_json::{Value, json};
use shell::{Run, gemma_in};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

const SIZE: [usize; 2] = [60, 40];

/// Writes models of all families, two images of one size, and a text model.
fn setup() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        write_model(family, 100, &dir.path().join(family));
    }
    for (name, seed) in [("a.png", 1), ("b.png", 2)] {
        fs::write(dir.path().join(name), png(SIZE, &picture(SIZE, seed))).unwrap();
    }
    dir
}

fn generate(dir: &TempDir, stdin: &[u8], more: &[&str]) -> Run {
    let common = ["generate", "--json", "-q", "-n", "24", "--seed", "5", "--ignore-eos"];
    gemma_in(dir.path(), &[&common, more].concat(), stdin)
}

fn text(run: Run) -> String {
    run.ok().json()["text"].as_str().unwrap().to_owned()
}

#[test]
fn a_text_about_images_is_the_same_however_they_come_in() {
    let dir = setup();
    let picture = fs::read(dir.path().join("a.png")).unwrap();
    for family in FAMILIES {
        for temp in ["0", "4"] {
            let base = ["-m", family, "--temp", temp];
            let run =
                |stdin: &[u8], more: &[&str]| text(generate(&dir, stdin, &[&base, more].concat()));
            let two = ["--image", "a.png", "--image", "b.png"];
            let ask = |more: &[&str]| run(b"", &[&two, more, &["See: ab"]].concat());
            let plain = ask(&["--draft", "off", "-t", "1"]);
            for other in [&["-t", "2"][..], &["--draft", "ngram"], &["--draft", family]] {
                assert_eq!(ask(other), plain, "{family}, {temp}, {other:?}");
            }
            assert_eq!(run(b"", &[&two[..], &["<image><image>See: ab"]].concat()), plain);
            let stdin = ["--image", "-", "--image", "b.png", "See: ab"];
            assert_eq!(run(&picture, &stdin), plain, "{family}: standard input");
            let swapped = ["--image", "b.png", "--image", "a.png", "See: ab"];
            if temp != "0" {
                assert_ne!(run(b"", &swapped), plain, "{family}: images of one size are swapped");
            }
            let cached = [&two[..], &["--cache-dir", "pages", "See: ab"]].concat();
            assert_eq!((run(b"", &cached), run(b"", &cached)), (plain.clone(), plain));
            // The prompt is shorter than a page of the KV cache, so the directory has only soft
            // tokens: a file for each image.
            let pages = dir.path().join("pages");
            assert_eq!(fs::read_dir(&pages).unwrap().count(), 2, "{family}, {temp}");
            fs::remove_dir_all(pages).unwrap();
        }
    }
}

#[test]
fn figures_count_the_tokens_of_images() {
    let dir = setup();
    let ask = |more: &[&str]| generate(&dir, b"", &[&["-m", "gemma3", "ab"], more].concat()).ok();
    let (with, without) = (ask(&["--image", "a.png"]).json(), ask(&[]).json());
    assert_eq!(with["images"]["images"], 1);
    assert_eq!(with["images"]["tokens"], 16);
    assert!(without.get("images").is_none());
    let tokens = |json: &Value| json["usage"]["prompt_tokens"].as_u64().unwrap();
    // The soft tokens, the marks around them, and two blank lines of two characters each.
    assert_eq!(tokens(&with) - tokens(&without), 16 + 2 + 4);
}

/// `eval --ids --image` gives the likelihoods of transformers.
#[test]
fn goldens_can_be_checked_from_outside() {
    let dir = setup();
    for family in FAMILIES {
        let file = fs::read(golden(family).join("golden.json")).unwrap();
        let golden: Value = serde_json::from_slice(&file).unwrap();
        for case in golden["texts"].as_array().unwrap() {
            let window = case["window"].as_u64().unwrap() as usize;
            let model = format!("{family}-{window}");
            write_model(family, window, &dir.path().join(&model));
            fs::write(dir.path().join("ids.json"), json!({"ids": case["ids"]}).to_string())
                .unwrap();
            let mut words =
                vec!["eval".to_owned(), "-m".into(), model, "-q".into(), "--json".into()];
            words.extend(["--ids", "ids.json", "--kv", "f32"].map(str::to_owned));
            for (i, of) in case["images"].as_array().unwrap().iter().enumerate() {
                let shown = &golden["images"][of.as_u64().unwrap() as usize];
                let side = |i: usize| shown["size"][i].as_u64().unwrap() as usize;
                let size = [side(0), side(1)];
                let pixels = picture(size, shown["seed"].as_u64().unwrap() as usize);
                let name = format!("{i}.png");
                fs::write(dir.path().join(&name), png(size, &pixels)).unwrap();
                words.extend(["--image".to_owned(), name]);
            }
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let got = gemma_in(dir.path(), &words, b"").ok().json();
            let ids = case["ids"].as_array().unwrap().iter().skip(1);
            let want = case["nll"].as_array().unwrap().iter().zip(ids);
            let want: Vec<f64> = want
                .filter(|(_, id)| id.as_u64() != Some(SOFT.into()))
                .map(|(nll, _)| nll.as_f64().unwrap())
                .collect();
            let got = got["nll"].as_array().unwrap();
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                let differs = (got.as_f64().unwrap() - want).abs();
                assert!(differs < 2e-3, "{family}, {}: {differs}", case["name"]);
            }
        }
    }
}

#[test]
fn refusals_name_the_remedy() {
    let dir = setup();
    fs::write(dir.path().join("text.png"), "no picture").unwrap();
    fs::write(dir.path().join("ids.json"), r#"{"ids": [2, 250, 252, 252, 251, 9]}"#).unwrap();
    let model = ["-m", "gemma3"];
    for (words, code, said) in [
        (&["--image", "none.png", "a"][..], 3, "none.png"),
        (&["--image", ".", "a"], 3, "is a directory"),
        (&["--image", "text.png", "a"], 2, "unknown format"),
        (&["--image", "a.png", "<image> or <image>"], 2, "2 times, for 1 images"),
        (&["--image", "a.png", "--raw", "a"], 2, "--raw"),
        (&["--image", "a.png", "--image-tokens", "70", "a"], 2, "16 tokens, not up to 70"),
        (&["--image", "-", "--image", "-", "a"], 2, "only once"),
        (&["--image", "a.png", "--mmproj", "none.gguf", "a"], 3, "none.gguf"),
    ] {
        generate(&dir, b"", &[&model, words].concat()).fails(code, &[said]);
    }
    // The demo reads no images, and its error names a model that does.
    generate(&dir, b"", &["--image", "a.png", "a"]).fails(3, &["reads no images", "gemma-3-4b-it"]);
    let eval = ["eval", "-m", "gemma3", "--ids", "ids.json"];
    let short = gemma_in(dir.path(), &[&eval[..], &["--image", "a.png"]].concat(), b"");
    short.fails(2, &["2 image tokens stand for an image of 16 tokens"]);
}

#[test]
fn the_list_says_which_models_read_images() {
    let dir = setup();
    // The model has too few columns for formats with groups of weights.
    let rows = "[formats]\nembed_tokens = \"i8-row\"\nlinears = \"i8-row\"\nnorms = \"as-is\"\n";
    let recipe = format!("about = \"8 bits\"\n{rows}");
    fs::write(dir.path().join("8.toml"), recipe).unwrap();
    let quantize = ["quantize", "gemma3", "text-only", "--recipe", "8.toml"];
    let run = gemma_in(dir.path(), &quantize, b"").ok();
    assert!(run.err.contains("--mmproj gemma3"), "{}", run.err);
    let list = gemma_in(dir.path(), &["list", "--json"], b"").ok().json();
    let models = list["models"].as_array().unwrap().iter();
    let mut found: Vec<_> = models.map(|m| (m["model"].as_str(), m["images"].as_bool())).collect();
    found.sort();
    let mut all = FAMILIES.map(|family| (Some(family), Some(true))).to_vec();
    all.push((Some("text-only"), Some(false)));
    all.sort();
    assert_eq!(found, all);
    let ask = ["--image", "a.png", "-m", "text-only", "a"];
    generate(&dir, b"", &ask).fails(3, &["--mmproj"]);
}

/// The mmproj file is downloaded with its model, in the type that models are trained in.
#[test]
fn a_tower_is_pulled_beside_its_model() {
    let names = ["m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"];
    let contents = [1usize, 2, 3, 4].map(|n| content(4 * n));
    let files = [0, 1, 2, 3].map(|i| (names[i], &contents[i][..], true));
    let (home, hub) = (tempfile::tempdir().unwrap(), FakeHub::new(&files));
    let run = hub.pull(home.path(), "org/m:Q4_0").ok();
    let model = PathBuf::from(run.text().trim_end());
    assert_eq!(model.file_name().unwrap(), "m-Q4_0.gguf");
    let entries = fs::read_dir(model.parent().unwrap()).unwrap();
    let mut found: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    found.sort();
    assert_eq!(found, ["m-Q4_0.gguf", "mmproj-BF16.gguf"]);
    assert_eq!(gemma::vision::beside(&model).unwrap(), Some(model.with_file_name(&found[1])));
}
