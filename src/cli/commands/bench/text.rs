//! The text test: answers real prompts with and without drafts.

use super::BenchArgs;
use super::measure::Figure;
use super::report::{DraftAcceptance, TextKind, TextReport};
use crate::cli::io::text_file::read_file;
use crate::cli::io::ui::Ui;
use crate::decode::{self, Flow, GenerationLimits, Stats};
use crate::engine::Timeline;
use crate::error::Fault;
use crate::models::{ChatTemplate, Message, ReducedVocabulary, Special, Tokenizer};
use crate::runtime::drafting::costs::Passes;
use crate::runtime::drafting::{self, Drafting};
use crate::runtime::model::partner::Partner;
use crate::runtime::{Model, Room, RunOptions, Session};
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;
use crate::util::files::read_regular;
use crate::util::json;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Built-in prompts, one of each kind.
const PROMPTS: &[(&str, &str)] = &[
    ("question", "What is photosynthesis, and why does it matter?"),
    ("how-to", "Give me five tips for writing clear documentation."),
    ("code", "Write a Python function that counts the words in a file, with a docstring."),
    (
        "arithmetic",
        "A shop sells pens at 3 dollars each. Tom buys 4 pens and pays with 20 dollars. \
         How much does he get back?",
    ),
    (
        "summary",
        "Summarise: The harbour was rebuilt after the storm. \
         The new harbour wall is two metres higher than the old harbour wall, \
         and the lighthouse was moved to the end of the new harbour wall.",
    ),
];

/// Tokens that are generated before the timing starts.
const WARM: usize = 16;

struct BenchPrompt {
    kind: String,
    tokens: Vec<Token>,
}

/// Answers each prompt with and without drafts, and checks that both texts are equal.
pub fn measure(model: Model, run: &RunOptions, options: &BenchArgs, ui: &Ui) -> Result<TextReport> {
    let tokenizer = match &options.tokenizer {
        Some(path) => read_tokenizer(path)?,
        None => model.tokenizer(ui)?,
    };
    let chosen = options.draft.settled()?;
    let session = Session::of(model, tokenizer, run.clone(), &chosen.source, ui)?;
    let (model, tokenizer) = (&session.model, &*session.tokenizer);
    let prompts = prompts(model, options, tokenizer)?;
    let longest = prompts.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
    let context = longest + options.text_tokens + 1;
    // A stand-in for a target may need several positions for a token.
    let room = context
        * ReducedVocabulary::of(model.checkpoint(), model.config().vocab)?
            .map_or(1, |v| v.most_parts());
    let mut first = session.load(Room::of(room), ui)?;
    first.engine = Partner::stand_in(model.checkpoint(), tokenizer, first.engine)?;
    let passes = Passes::measured(&mut first)?;
    let drafted = session.target(Room::of(context), &passes, &first.pool);
    let mut target = Timeline::new(first.engine);
    let sampler =
        Sampler::new(SamplerConfig { temperature: options.temp, seed: 1, ..super::sampling() })?
            .usable(tokenizer.vocab());
    let stops = &session.stop_ids;
    let bar = ui.bar("text", (prompts.len() * options.repetitions) as u64);
    let mut kinds: BTreeMap<&str, Vec<TimedPair>> = BTreeMap::new();
    let mut rounds = Stats::default();
    let mut disabled = None;
    // Warms up, so that work that happens only once is not timed.
    let mut off = Drafting::off();
    once(&mut target, &mut off, &sampler, &prompts[0], stops, options.text_tokens.min(WARM))?;
    for repetition in 0..options.repetitions {
        // A drafter that saw the texts before could predict them.
        let mut drafting = drafting::build(&chosen, &drafted, ui)?;
        for (i, prompt) in prompts.iter().enumerate() {
            let mut ways: [Option<TimedText>; 2] = [None, None];
            // Runs both ways alternately. Each of them is first equally often.
            for way in if (i + repetition) % 2 == 0 { [0, 1] } else { [1, 0] } {
                let way_of = if way == 0 { &mut off } else { &mut drafting };
                let text = once(&mut target, way_of, &sampler, prompt, stops, options.text_tokens);
                ways[way] = Some(text?);
            }
            let [Some(plain), Some(drafted)] = ways else { unreachable!("both ways were gone") };
            ensure!(
                plain.text == drafted.text,
                "drafts changed the text of a {} prompt: this is a bug",
                prompt.kind
            );
            if plain.stats.tokens > 1 {
                rounds.add_rounds(&drafted.stats);
                kinds.entry(&prompt.kind).or_default().push(TimedPair::of(&plain, &drafted));
            }
            bar.inc(1);
        }
        disabled = drafting.disabled;
    }
    bar.finish_and_clear();
    let all: Vec<TimedPair> = kinds.values().flatten().copied().collect();
    Ok(TextReport {
        temperature: options.temp,
        tokens: options.text_tokens,
        runs: options.repetitions,
        drafts: disabled.map_or_else(
            || format!("--draft {}", options.draft.draft),
            |why| format!("--draft {} ({why})", options.draft.draft),
        ),
        kinds: kinds
            .iter()
            .map(|(kind, pairs)| text_kind(kind, pairs, options.repetitions))
            .collect(),
        all: Some(text_kind("all", &all, options.repetitions)),
        acceptance: DraftAcceptance::of(&rounds),
    })
}

/// A text that was generated with or without drafts.
struct TimedText {
    text: Vec<Token>,
    stats: Stats,
}

/// Speeds of one prompt with and without drafts.
///
/// The runs follow each other directly, so that other load of the machine affects both.
#[derive(Clone, Copy)]
struct TimedPair {
    /// Speed in tokens a second.
    plain: f64,
    drafted: f64,
    tokens: u64,
    passes: u64,
}

impl TimedPair {
    fn of(plain: &TimedText, drafted: &TimedText) -> TimedPair {
        let speed = |w: &TimedText| w.stats.tokens as f64 / w.stats.decode_time.as_secs_f64();
        TimedPair {
            plain: speed(plain),
            drafted: speed(drafted),
            tokens: drafted.stats.committed(),
            passes: drafted.stats.passes,
        }
    }
}

fn figure(pairs: &[TimedPair], value: impl Fn(&TimedPair) -> f64) -> Figure {
    Figure::of(pairs.iter().map(value).collect())
}

fn text_kind(kind: &str, pairs: &[TimedPair], repetitions: usize) -> TextKind {
    let sum = |value: fn(&TimedPair) -> u64| pairs.iter().map(value).sum::<u64>() as f64;
    TextKind {
        kind: kind.to_owned(),
        prompts: pairs.len() / repetitions,
        plain: figure(pairs, |p| p.plain).median,
        drafted: figure(pairs, |p| p.drafted).median,
        ratio: figure(pairs, |p| p.drafted / p.plain),
        tokens_per_pass: sum(|p| p.tokens) / sum(|p| p.passes).max(1.0),
    }
}

/// Generates one text from an empty cache.
fn once(
    target: &mut Timeline,
    drafting: &mut Drafting,
    sampler: &Sampler,
    prompt: &BenchPrompt,
    stops: &[Token],
    tokens: usize,
) -> Result<TimedText> {
    let never = AtomicBool::new(false);
    let limits = GenerationLimits { max_tokens: tokens, stop_ids: stops, interrupt: &never };
    let (mut history, mut stats) = (prompt.tokens.clone(), Stats::default());
    let Drafting { drafter, policy, .. } = drafting;
    // The other way has just read the same prompt.
    target.clear(0)?;
    decode::generate(
        target,
        drafter.as_mut(),
        policy,
        sampler,
        &mut history,
        &limits,
        &mut stats,
        &mut |_| Flow::Continue,
    )?;
    Ok(TimedText { text: history.split_off(prompt.tokens.len()), stats })
}

/// Limit of tokenizer.json in bytes.
const LARGEST: u64 = 512 << 20;

fn read_tokenizer(path: &Path) -> Result<Tokenizer> {
    let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
    let bytes = read_regular(&path, LARGEST)
        .with_context(|| Fault::model(format!("cannot read {}", path.display())))?;
    Tokenizer::from_bytes(&bytes).with_context(|| format!("reading {}", path.display()))
}

/// Returns the built-in prompts, or evenly spread lines of each file.
///
/// A line is `{"category": ..., "turns": [...]}` or `{"prompt": ...}`.
fn prompts(model: &Model, options: &BenchArgs, tokenizer: &Tokenizer) -> Result<Vec<BenchPrompt>> {
    let template = ChatTemplate::from_checkpoint(model.checkpoint(), tokenizer.dialect())?;
    let encode = |kind: &str, text: &str| -> Result<BenchPrompt> {
        let messages = [Message::new("user", text)];
        Ok(BenchPrompt {
            kind: kind.into(),
            tokens: template.encode(tokenizer, &messages, None, Special::AsText, None)?,
        })
    };
    if options.prompts.is_empty() {
        return PROMPTS.iter().map(|(kind, text)| encode(kind, text)).collect();
    }
    let mut out = Vec::new();
    let room = model.config().max_position.saturating_sub(options.text_tokens + 1);
    for file in &options.prompts {
        let mut fitting = Vec::new();
        for (kind, text) in read(file)? {
            let prompt = encode(&kind, &text)?;
            if prompt.tokens.len() <= room {
                fitting.push(prompt);
            }
        }
        // Spreads the choice over the file, because files are often sorted by category.
        let n = options.prompt_count.div_ceil(options.prompts.len()).min(fitting.len());
        let total = fitting.len();
        let chosen =
            fitting.into_iter().enumerate().filter(|(i, _)| (i + 1) * n / total > i * n / total);
        out.extend(chosen.map(|(_, prompt)| prompt));
    }
    if out.is_empty() {
        return Err(Fault::model("no prompt fits the model's context")
            .help("give shorter prompts")
            .into());
    }
    Ok(out)
}

/// Reads the category and the first user message of each line.
fn read(path: &Path) -> Result<Vec<(String, String)>> {
    let text = read_file(path)?;
    let mut out = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let bad = || {
            let what = format!("{}, line {}: there is no prompt", path.display(), i + 1);
            Fault::model(what).help(r#"each line is {"prompt": "..."}, or has "turns""#)
        };
        let value: serde_json::Value = json::parse(line.as_bytes()).with_context(bad)?;
        let prompt =
            value["turns"][0].as_str().or_else(|| value["prompt"].as_str()).with_context(bad)?;
        out.push((value["category"].as_str().unwrap_or("prompt").to_owned(), prompt.to_owned()));
    }
    Ok(out)
}
