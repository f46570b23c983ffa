//! `gemma eval`: likelihood of texts under a model, alone or compared with a reference model.

use crate::cli::io::image_file::read_image;
use crate::cli::io::output::print;
use crate::cli::io::text_file::read_file;
use crate::cli::io::ui::Ui;
use crate::cli::options::{ModelArgs, SightArgs, UiOptions};
use crate::cli::settings::Typed;
use crate::error::Fault;
use crate::eval::{self, Comparison, EvalTask, Figures};
use crate::models::{Image, Special};
use crate::runtime::devices::npu;
use crate::runtime::options::AutoOr;
use crate::runtime::{Model, ModelOptions, Room, Viewer, load};
use crate::tensor::Token;
use crate::util::units::{digits3, duration, thousands};
use anyhow::{Context, Result};
use clap::Args;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  gemma eval TEXT.txt
  gemma eval -m SMALLER --reference MODEL prose=A.txt code=B.txt
  gemma tokenize --json -f TEXT.txt >IDS.json && gemma eval --ids IDS.json --json";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES, override_usage = "gemma eval [OPTIONS] <FILE...|--ids FILE>")]
pub struct EvalArgs {
    /// Texts to evaluate, in windows that each begin with a BOS; KIND=FILE names a text's kind
    ///
    /// Figures are printed for each text and for all together. Windows have --ctx-size tokens: by
    /// default the length of the longest text, or the model's maximum.
    #[arg(value_name = "[KIND=]FILE", conflicts_with = "ids")]
    pub files: Vec<String>,
    /// Token ids to evaluate unchanged, instead of texts: {"ids": [...]} (repeatable)
    #[arg(long, value_name = "[KIND=]FILE")]
    pub ids: Vec<String>,
    /// Image in the token ids: JPEG, PNG or WebP (repeatable, in order)
    ///
    /// Each run of the model's image token in the ids stands for an image. The run must be as long
    /// as the image has tokens. These tokens are not scored.
    #[arg(long, value_name = "FILE", requires = "ids")]
    pub image: Vec<PathBuf>,
    /// Model to compare with: adds KL divergence, top-1 agreement and the ratio of perplexities
    #[arg(long, value_name = "PATH|ID")]
    pub reference: Option<String>,
    /// Number of tokens at the start of each window that are not scored
    #[arg(long, value_name = "N", default_value_t = 0, hide_short_help = true)]
    pub skip: usize,
    /// Print one JSON object with the figures of every token
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sight: SightArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// A kind of text, and tokens of that kind.
type TextPart = (String, Vec<Token>);

pub fn run(options: &EvalArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    if options.files.is_empty() && options.ids.is_empty() {
        let help = "give texts (gemma eval FILE...), or token ids (gemma eval --ids FILE)";
        return Err(Fault::usage("there is nothing to evaluate").help(help).into());
    }
    let ModelOptions { model, run } = options.model.settled()?;
    let mut model = Model::open(model.as_deref(), ui)?;
    let (window, mut parts) = read(options, &model, ui)?;
    let viewer = match options.image.is_empty() {
        true => None,
        false => {
            let viewer = Viewer::open(&model, &options.sight.settled(None), load::threads(&run))?;
            Some(viewer.on(run.device, run.lock))
        }
    };
    let images = viewer.as_ref().map(|viewer| show(&options.image, viewer, &mut parts, window));
    // The images have to live as long as texts refer to them.
    let _images = images.transpose()?;
    if let Some(viewer) = &viewer {
        model.weights = model.weights.seeing(viewer.images().clone());
    }
    if options.skip + 1 >= window {
        let what = format!("--skip {} skips all of a window of {window} tokens", options.skip);
        return Err(Fault::usage(what).help("skip fewer, or give a larger --ctx-size").into());
    }
    let pool = load::pool(&run)?;
    let load =
        |model: &Model| load::load(&model.weights, &model.name, &run, Room::of(window), &pool, ui);
    let mut engine = load(&model)?.engine;
    let total: u64 = parts.iter().map(|p| p.1.len() as u64).sum();
    let bar = ui.bar("evaluating", total);
    let progress = EvalProgress::new(ui, bar.is_hidden(), total);
    let mut done = 0;
    let tasks = parts.iter().map(|(_, ids)| {
        let before = done;
        done += ids.len();
        let (bar, progress) = (bar.clone(), &progress);
        let hear = move |n: usize| {
            bar.set_position((before + n) as u64);
            progress.hear((before + n) as u64);
        };
        (EvalTask { ids, window, skip: options.skip }, hear)
    });
    let (json, text) = match &options.reference {
        None => {
            let figures: Vec<Figures> = tasks
                .map(|(task, mut progress)| {
                    eval::evaluate_task(engine.as_mut(), task, &mut progress)
                })
                .collect::<Result<_>>()?;
            let whole =
                if figures.len() == 1 { figures[0].clone() } else { Figures::all(figures.iter()) };
            render(&parts, &figures, &whole, |f| Ok((serde_json::to_value(f)?, describe(f))))?
        }
        Some(name) => {
            let mut reference = Model::open(Some(name), ui)?;
            if let Some(viewer) = &viewer {
                reference.weights = reference.weights.seeing(viewer.images().clone());
            }
            let mut other = load(&reference)?.engine;
            let found: Vec<Comparison> = tasks
                .map(|(task, mut progress)| {
                    eval::compare_task(engine.as_mut(), other.as_mut(), task, &mut progress)
                })
                .collect::<Result<_>>()?;
            let whole = if found.len() == 1 { found[0].clone() } else { Comparison::all(&found) };
            render(&parts, &found, &whole, |c| Ok((comparison_json(c)?, describe_comparison(c))))?
        }
    };
    bar.finish_and_clear();
    npu::say(engine.as_ref(), ui);
    print(&if options.json { format!("{json}\n") } else { text })?;
    Ok(0)
}

/// Progress without a bar: a line per minute shows that a long run does not hang.
struct EvalProgress<'a> {
    ui: &'a Ui,
    wanted: bool,
    total: u64,
    start: Instant,
    last_line: Cell<Instant>,
}

/// Time between two lines.
const SILENCE: Duration = Duration::from_secs(60);

impl<'a> EvalProgress<'a> {
    fn new(ui: &'a Ui, wanted: bool, total: u64) -> EvalProgress<'a> {
        let start = Instant::now();
        let progress = EvalProgress {
            ui,
            wanted: wanted && !ui.is_quiet(),
            total,
            start,
            last_line: Cell::new(start),
        };
        if progress.wanted {
            ui.line(&format!("evaluating {} tokens", thousands(total)));
        }
        progress
    }

    fn hear(&self, done: u64) {
        if self.wanted && self.last_line.get().elapsed() > SILENCE {
            let left = self.start.elapsed().as_secs_f64() * (self.total - done) as f64
                / done.max(1) as f64;
            let (done, total) = (thousands(done), thousands(self.total));
            self.ui.line(&format!("{done} of {total} tokens, about {} left", duration(left)));
            self.last_line.set(Instant::now());
        }
    }
}

fn comparison_json(c: &Comparison) -> Result<serde_json::Value> {
    let mut json = serde_json::to_value(&c.figures)?;
    let map = json.as_object_mut().context("figures are an object")?;
    map.insert("kld".into(), serde_json::to_value(c.kld)?);
    map.insert("top1_agreement".into(), c.top1_agreement.into());
    map.insert("top1_stderr".into(), c.top1_stderr.into());
    map.insert("ppl_ratio".into(), c.ppl_ratio.into());
    map.insert("ppl_ratio_stderr".into(), c.ppl_ratio_stderr.into());
    Ok(json)
}

/// Returns the window size and the texts, cut into windows that begin with BOS. Ids stay unchanged.
fn read(options: &EvalArgs, model: &Model, ui: &Ui) -> Result<(usize, Vec<TextPart>)> {
    let from_ids = !options.ids.is_empty();
    let tokenizer = if from_ids { None } else { Some(model.tokenizer(ui)?) };
    let mut parts: Vec<TextPart> = Vec::new();
    for named in if from_ids { &options.ids } else { &options.files } {
        let (kind, path) = named.split_once('=').unwrap_or_else(|| (stem(named), named));
        let ids = match &tokenizer {
            None => read_ids(Path::new(path))?,
            Some(tokenizer) => {
                tokenizer
                    .encode_behind_bos(
                        &read_file(Path::new(path))?,
                        Special::AsText,
                        model.config().bos,
                    )?
                    .0
            }
        };
        if ids.len() < 2 {
            let what =
                format!("{path} has fewer than two tokens, and the first one cannot be scored");
            return Err(Fault::usage(what).help("give a longer text").into());
        }
        if parts.iter().any(|p| p.0 == kind) {
            let help = "name their kinds: gemma eval code=a.txt prose=b.txt";
            return Err(Fault::usage(format!("there are two texts of kind {kind}"))
                .help(help)
                .into());
        }
        parts.push((kind.to_owned(), ids));
    }
    let longest = parts.iter().map(|p| p.1.len()).max().unwrap_or(2);
    let window = match options.model.run.ctx_size {
        AutoOr::N(n) => n.max(2),
        AutoOr::Auto => longest.min(model.config().max_position),
    };
    if !from_ids {
        let bos = model.config().bos;
        for (_, ids) in &mut parts {
            let windows = ids[1..].chunks(window - 1);
            *ids = windows.flat_map(|w| std::iter::once(bos).chain(w.iter().copied())).collect();
        }
    }
    Ok((window, parts))
}

/// Replaces runs of the model's image token by the places of images.
fn show(
    files: &[PathBuf],
    viewer: &Viewer,
    parts: &mut [TextPart],
    window: usize,
) -> Result<Vec<Arc<Image>>> {
    let images = files.iter().map(|file| viewer.see(&read_image(file)?));
    let images = images.collect::<Result<Vec<_>>>()?;
    let (soft, mut next) = (viewer.vision().marks().soft, images.iter());
    let mismatch = |what: String| Fault::usage(what).help("give each image with --image, in order");
    for (_, ids) in parts {
        if ids.len() > window {
            let fault = Fault::usage("a text with images is longer than the window");
            return Err(fault.help("give a larger --ctx-size").into());
        }
        let mut at = 0;
        while at < ids.len() {
            let run = ids[at..].iter().take_while(|id| **id == soft).count();
            if run > 0 {
                let missing = || mismatch("the ids contain more images than are given".into());
                let image = next.next().ok_or_else(missing)?;
                if image.rows() != run {
                    let what =
                        format!("{run} image tokens stand for an image of {} tokens", image.rows());
                    return Err(mismatch(what).into());
                }
                ids[at..at + run]
                    .iter_mut()
                    .zip(image.places())
                    .for_each(|(id, place)| *id = place);
            }
            at += run.max(1);
        }
    }
    match next.len() {
        0 => Ok(images),
        n => Err(mismatch(format!("the ids contain no image tokens for {n} of the images")).into()),
    }
}

/// Returns a file's name without its directory and extension.
fn stem(path: &str) -> &str {
    Path::new(path).file_stem().and_then(|s| s.to_str()).unwrap_or(path)
}

/// Formats the figures as JSON and text: of all texts, and of each part if there are several.
fn render<T>(
    parts: &[TextPart],
    figures: &[T],
    whole: &T,
    one: impl Fn(&T) -> Result<(serde_json::Value, String)>,
) -> Result<(serde_json::Value, String)> {
    let (mut json, mut text) = one(whole)?;
    if parts.len() > 1 {
        let mut kinds = serde_json::Map::new();
        let width = parts.iter().map(|p| p.0.len()).max().unwrap_or(0).max(3);
        text = format!("{:width$}  {text}", "all");
        for ((kind, _), figures) in parts.iter().zip(figures) {
            let (json, line) = one(figures)?;
            text += &format!("{kind:width$}  {line}");
            kinds.insert(kind.clone(), json);
        }
        json.as_object_mut()
            .context("figures are an object")?
            .insert("categories".into(), kinds.into());
    }
    Ok((json, text))
}

fn describe(f: &Figures) -> String {
    let tokens = thousands(f.tokens as u64);
    let (nll, error) = (f.mean_nll, f.nll_stderr);
    // Perplexity is e^NLL, so its error is that of the NLL times the perplexity.
    let (perplexity, of_it) = (f.perplexity, f.perplexity * error);
    format!(
        "{tokens} tokens: mean NLL {nll:.4} +- {error:.4}, perplexity {} +- {}\n",
        digits3(perplexity),
        digits3(of_it)
    )
}

fn describe_comparison(c: &Comparison) -> String {
    format!(
        "{} tokens: KL divergence mean {:.5} +- {:.5}, median {:.5}, 99 % {:.4}, max {:.3}; \
         top-1 agreement {:.2} +- {:.2} %; perplexity {} against {}, ratio {:.4} +- {:.4}\n",
        thousands(c.figures.tokens as u64),
        c.kld.mean,
        c.kld.stderr,
        c.kld.median,
        c.kld.p99,
        c.kld.max,
        100.0 * c.top1_agreement,
        100.0 * c.top1_stderr,
        digits3(c.figures.perplexity),
        digits3(c.reference.perplexity),
        c.ppl_ratio,
        c.ppl_ratio_stderr
    )
}

/// Reads the ids of a file `{"ids": [...]}`.
fn read_ids(path: &Path) -> Result<Vec<Token>> {
    #[derive(serde::Deserialize)]
    struct TokenFile {
        ids: Vec<Token>,
    }
    let bad = || {
        Fault::model(format!("{} contains no token ids", path.display()))
            .help(r#"it should be {"ids": [2, 105, ...]}"#)
    };
    let file: TokenFile = serde_json::from_str(&read_file(path)?).with_context(bad)?;
    Ok(file.ids)
}
