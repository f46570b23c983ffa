//! Real prompts, plain against drafted: the same text both ways, and how much sooner.

use super::Bench;
use super::measure::{Figure, processor_seconds};
use super::report::{Acceptance, Row, Text, TextKind};
use crate::cli::generate::costs::Passes;
use crate::cli::generate::drafting;
use crate::cli::generate::options::DraftingOptions;
use crate::cli::generate::partner::Partner;
use crate::cli::session::{self, Model};
use crate::cli::ui::{Ui, digits3};
use crate::decode::{self, Flow, Limits, Stats};
use crate::draft::{Drafter, NoDraft};
use crate::engine::Timeline;
use crate::error::Fault;
use crate::gemma::{ChatTemplate, Generation, Message, ReducedVocabulary, Special, Tokenizer};
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// What is asked where no file is given: one prompt of several kinds.
const PROMPTS: &[(&str, &str)] = &[
    ("question", "What is photosynthesis, and why does it matter?"),
    ("how-to", "Give me five tips for writing clear documentation."),
    ("code", "Write a Python function that counts the words in a file, with a docstring."),
    ("arithmetic", "A shop sells pens at 3 dollars each. Tom buys 4 pens and pays with 20 dollars. How much does he get back?"),
    (
        "summary",
        "Summarise: The harbour was rebuilt after the storm. The new harbour wall is two metres higher than the old harbour wall, and the \
         lighthouse was moved to the end of the new harbour wall.",
    ),
];

struct Prompt {
    kind: String,
    tokens: Vec<Token>,
}

/// One row per kind of prompt and one for all: drafted over plain speed, prompt by prompt. And the same for plots.
pub fn run(model: &Model, options: &Bench, ui: &Ui) -> Result<(Vec<Row>, Text)> {
    let tokenizer = match &options.replay.tokenizer {
        Some(directory) => super::replay::read_tokenizer(directory)?,
        None => model.tokenizer(ui)?,
    };
    let prompts = prompts(model, options, &tokenizer)?;
    let longest = prompts.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
    let context = longest + options.text_tokens + 1;
    let pool = session::pool(&options.model.run)?;
    // A stand-in for a target may take several positions for a token.
    let room = context * ReducedVocabulary::of(model.checkpoint(), model.config().vocab)?.map_or(1, |v| v.most_parts());
    let mut first = session::load(&model.weights, &model.name, &options.model.run, room, &pool, ui)?;
    first.engine = Partner::stand_in(model.checkpoint(), &tokenizer, first.engine)?;
    let passes = Passes::measured(&mut first)?;
    let mut target = Timeline::new(first.engine);
    let chosen = DraftingOptions { mixing: options.mixing(), ..options.draft.clone() };
    let sampler =
        Sampler::new(SamplerConfig { temperature: options.temp, seed: 1, ..super::sampling() })?.usable(tokenizer.vocab());
    let generation = Generation::of(model.checkpoint())?;
    let mut stops = if generation.eos.is_empty() { model.config().eos.clone() } else { generation.eos };
    stops.extend(tokenizer.id("<end_of_turn>"));
    let mut drafting = drafting::build(&chosen, model, &tokenizer, &options.model.run, context, &passes, &pool, false, ui)?;

    let bar = ui.bar("text", prompts.len() as u64);
    let mut kinds: BTreeMap<&str, Vec<[f64; 6]>> = BTreeMap::new();
    let mut rounds = Stats::default();
    for prompt in &prompts {
        let mut best = [Stats::default(), Stats::default()];
        let mut texts: [Vec<Token>; 2] = Default::default();
        let mut busy = [f64::INFINITY; 2];
        for _ in 0..options.repetitions {
            for (way, drafter) in [&mut NoDraft as &mut dyn Drafter, drafting.drafter.as_mut()].into_iter().enumerate() {
                let before = processor_seconds();
                let (text, stats) = once(&mut target, drafter, &sampler, prompt, &stops, options.text_tokens)?;
                busy[way] = busy[way].min(processor_seconds() - before);
                texts[way] = text;
                if best[way].tokens == 0 || stats.decode_time < best[way].decode_time {
                    best[way] = stats;
                }
            }
            ensure!(texts[0] == texts[1], "drafts changed the text of a {} prompt: this is a bug", prompt.kind);
        }
        let speed = |s: &Stats| s.tokens as f64 / s.decode_time.as_secs_f64();
        let whole = |s: &Stats| (s.prefill_time + s.decode_time).as_secs_f64();
        if best[0].tokens > 1 {
            rounds.add_rounds(&best[1]);
            kinds.entry(&prompt.kind).or_default().push([
                speed(&best[0]),
                speed(&best[1]),
                best[1].committed() as f64,
                best[1].passes as f64,
                whole(&best[0]) / whole(&best[1]),
                busy[0] / busy[1],
            ]);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    drafting.drafter.save()?;
    let all: Vec<[f64; 6]> = kinds.values().flatten().copied().collect();
    let mut rows: Vec<Row> = kinds.iter().map(|(kind, runs)| row(kind, runs)).collect();
    rows.push(row("all", &all));
    let text = Text {
        temperature: options.temp,
        tokens: options.text_tokens,
        runs: options.repetitions,
        drafts: drafting
            .disabled
            .map_or_else(|| format!("--draft {}", options.draft.draft), |why| format!("--draft {} ({why})", options.draft.draft)),
        kinds: kinds.iter().map(|(kind, runs)| text_kind(kind, runs)).collect(),
        acceptance: Acceptance::of(&rounds),
    };
    Ok((rows, text))
}

fn text_kind(kind: &str, runs: &[[f64; 6]]) -> TextKind {
    let column = |i: usize| Figure::of(runs.iter().map(|r| r[i]).collect()).median;
    let sum = |i: usize| runs.iter().map(|r| r[i]).sum::<f64>();
    TextKind {
        kind: kind.to_owned(),
        prompts: runs.len(),
        plain: column(0),
        drafted: column(1),
        ratio: Figure::of(runs.iter().map(|r| r[1] / r[0]).collect()),
        tokens_per_pass: sum(2) / sum(3).max(1.0),
    }
}

fn row(kind: &str, runs: &[[f64; 6]]) -> Row {
    let TextKind { plain, drafted, ratio, tokens_per_pass, .. } = text_kind(kind, runs);
    let [whole, busy] = [4, 5].map(|i| Figure::of(runs.iter().map(|r| r[i]).collect()).median);
    let (plain, drafted) = (digits3(plain), digits3(drafted));
    Row {
        name: format!("drafted / plain, {kind}"),
        unit: "x".into(),
        figure: ratio,
        note: format!(
            "plain {plain} tok/s, drafted {drafted}, {tokens_per_pass:.2} tok/pass; prompt included {whole:.2} x, {busy:.2} x by \
             processor time"
        ),
        pass: None,
    }
}

/// One generation from an empty cache.
fn once(
    target: &mut Timeline,
    drafter: &mut dyn Drafter,
    sampler: &Sampler,
    prompt: &Prompt,
    stops: &[Token],
    tokens: usize,
) -> Result<(Vec<Token>, Stats)> {
    let never = AtomicBool::new(false);
    let limits = Limits { max_tokens: tokens, stop_ids: stops, interrupt: &never };
    let (mut history, mut stats) = (prompt.tokens.clone(), Stats::default());
    decode::generate(target, drafter, sampler, &mut history, &limits, &mut stats, &mut |_| Flow::Continue)?;
    Ok((history.split_off(prompt.tokens.len()), stats))
}

/// The built-in prompts, or every n-th of each file of `{"category": ..., "turns": [...]}` or `{"prompt": ...}` lines.
fn prompts(model: &Model, options: &Bench, tokenizer: &Tokenizer) -> Result<Vec<Prompt>> {
    let template = ChatTemplate::from_checkpoint(model.checkpoint())?;
    let encode = |kind: &str, text: &str| -> Result<Prompt> {
        let messages = [Message { role: "user".into(), content: text.into() }];
        Ok(Prompt { kind: kind.into(), tokens: template.encode(tokenizer, &messages, None, Special::AsText, None)? })
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
        // Evenly spread over the file, which is often sorted by category.
        let n = options.prompt_count.div_ceil(options.prompts.len()).min(fitting.len());
        let total = fitting.len();
        let chosen = fitting.into_iter().enumerate().filter(|(i, _)| (i + 1) * n / total > i * n / total);
        out.extend(chosen.map(|(_, prompt)| prompt));
    }
    if out.is_empty() {
        return Err(Fault::model("no prompt fits the model's context").help("give shorter prompts").into());
    }
    Ok(out)
}

/// Category and first user turn of each line.
fn read(path: &Path) -> Result<Vec<(String, String)>> {
    let text = crate::cli::input::read_file(path)?;
    let mut out = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let bad = || {
            Fault::model(format!("{}, line {}: no prompt", path.display(), i + 1)).help(r#"expected {"prompt": "..."} a line"#)
        };
        let value: serde_json::Value = serde_json::from_str(line).with_context(bad)?;
        let prompt = value["turns"][0].as_str().or_else(|| value["prompt"].as_str()).with_context(bad)?;
        out.push((value["category"].as_str().unwrap_or("prompt").to_owned(), prompt.to_owned()));
    }
    Ok(out)
}
