//! Computes the tokens per pass that drafts would reach on existing texts. `scripts/bench/draft.sh`
//! calls it.
//!
//!     cargo run --release --example replay -- TRANSCRIPTS.jsonl... >REPORT.json
//!
//! Verification compares tokens, so the accepted path of a greedy text depends only on the tree and
//! the text. A transcript of the target itself gives the exact tokens per pass. Other text shows
//! how hard it is to predict. No target runs. The replay knows only the one token that follows each
//! row, so the table learns one token where a real target provides eight.

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use gemma::decode::{Stats, Verdict};
use gemma::draft::{
    CandidateSource, DraftContext, DraftFigures, DraftModel, DraftRequest, Drafter, Mixing, Pass,
    Proposal, TreeBuilder, TreeSize, Verified, mix,
};
use gemma::engine::{Scores, TokenTree};
use gemma::error::Fault;
use gemma::models::{ChatTemplate, Message, Special, Tokenizer};
use gemma::runtime::model::partner::Partner;
use gemma::runtime::options::Device;
use gemma::runtime::options::{AutoOr, GpuLayers};
use gemma::runtime::{Model, Room, RunOptions, Silence, load};
use gemma::sampler::{Sampler, SamplerConfig};
use gemma::tensor::Token;
use gemma::util::json;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Default number of nodes of a tree.
const NODES: usize = 15;
/// Number of resamples for an interval.
const RESAMPLES: usize = 1000;

#[derive(Debug, Parser)]
struct Options {
    /// JSON lines: {"prompt", "answer"}, {"messages"}, {"text"} or {"prompt_ids", "answer_ids"},
    /// with "category" and "id"
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// tokenizer.json, or a directory that has one [default: the demo model's]
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// Draft model, as for gemma generate
    #[arg(long, default_value = "auto")]
    draft: String,
    /// Limit of draft tokens in a row
    #[arg(long, default_value = "auto")]
    draft_tokens: AutoOr,
    /// Shape of a draft: auto, chain, or the number of nodes of a tree
    #[arg(long, default_value = "auto", value_parser = tree)]
    draft_tree: TreeSize,
    /// Limit of tokens of one answer
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Limit of transcripts per category, evenly spread [default: all]
    #[arg(long)]
    count: Option<usize>,
    /// Sources to use
    #[arg(
        long,
        value_parser = source,
        value_delimiter = ',',
        default_value = "context,table,model"
    )]
    sources: Vec<CandidateSource>,
    /// Weights of the sources
    #[arg(long, value_enum, default_value_t = Weights::Learned)]
    mixing: Weights,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Weights {
    /// Continue to learn
    Learned,
    /// Keep their initial values
    Taught,
    /// Are the same at all places
    Fixed,
}

fn source(name: &str) -> Result<CandidateSource, String> {
    let names: Vec<&str> = CandidateSource::mixed().map(CandidateSource::name).collect();
    let source = CandidateSource::mixed().find(|source| source.name() == name);
    source.ok_or_else(|| format!("expected one of {}", names.join(", ")))
}

fn tree(text: &str) -> Result<TreeSize, String> {
    text.parse().map_err(|_| "expected auto, chain, or a number above 0".into())
}

#[derive(Serialize)]
struct Report {
    tokenizer_sha256: String,
    draft: Option<String>,
    tree: String,
    /// The mixer's final weights at temperature 0 by set, for `scripts/train/draft_prior.py`.
    weights: Vec<Vec<f32>>,
    draft_ms_per_pass: f64,
    /// Passes of the draft model in a round, and rows of these passes.
    draft_work: [f64; 2],
    categories: Vec<Category>,
    records: Vec<Record>,
}

#[derive(Serialize)]
struct Record {
    id: String,
    category: String,
    tokens: u64,
    passes: u64,
}

/// Transcripts of one kind.
#[derive(Serialize)]
struct Category {
    name: String,
    records: usize,
    tokens: u64,
    passes: u64,
    /// Tokens per pass, with a bootstrap interval of 95 % over records.
    tau: f64,
    low: f64,
    high: f64,
    /// Tokens per pass that the probabilities of the nodes predicted.
    predicted: f64,
    /// Drafted and accepted nodes, by depth below the root and by the source with the largest
    /// share.
    by_depth: Vec<[u64; 2]>,
    by_source: BTreeMap<String, [u64; 2]>,
}

/// Result of the replay of one transcript.
#[derive(Clone, Default)]
struct Replayed {
    stats: Stats,
    predicted: f64,
    time: Duration,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let (tokenizer, template) = match &options.tokenizer {
        Some(path) => {
            let tokenizer = read_tokenizer(path)?;
            let template = ChatTemplate::built_in(tokenizer.dialect());
            (tokenizer, template)
        }
        None => {
            let model = Model::open(None, &Silence)?;
            let tokenizer = model.tokenizer(&Silence)?;
            let template = ChatTemplate::from_checkpoint(model.checkpoint(), tokenizer.dialect())?;
            (tokenizer, template)
        }
    };
    let mut texts = Vec::new();
    for file in &options.files {
        texts.extend(read_transcripts(file, &tokenizer, &template, options.tokens)?);
    }
    let texts = spread(texts, options.count);
    let (mut builder, draft) = builder(&options, &tokenizer, &texts)?;
    let sampler = Sampler::new(SamplerConfig::default())?.usable(tokenizer.vocab());
    let shape = Shape::of(&options);
    let mut all: BTreeMap<&str, Vec<Replayed>> = BTreeMap::new();
    let mut records = Vec::new();
    for text in &texts {
        let replayed = replay(&mut builder, text, &sampler, shape, tokenizer.vocab())?;
        records.push(Record {
            id: text.id.clone(),
            category: text.category.clone(),
            tokens: text.answer.len() as u64,
            passes: replayed.stats.passes,
        });
        all.entry(&text.category).or_default().push(replayed);
    }
    let time: Duration = all.values().flatten().map(|t| t.time).sum();
    let passes = records.iter().map(|r| r.passes).sum::<u64>() as f64;
    let mut figures = DraftFigures::default();
    builder.figures(&mut figures);
    let mut categories: Vec<Category> =
        all.iter().map(|(name, replayed)| category(name, replayed)).collect();
    if categories.len() > 1 {
        categories.push(category("all", &all.values().flatten().cloned().collect::<Vec<_>>()));
    }
    let report = Report {
        tokenizer_sha256: gemma::util::hex(tokenizer.sha256()),
        draft,
        tree: shape.to_string(),
        weights: builder.weights(),
        draft_ms_per_pass: 1e3 * time.as_secs_f64() / passes,
        draft_work: [figures.draft_passes, figures.draft_rows].map(|n| n as f64 / passes),
        categories,
        records,
    };
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

fn read_tokenizer(path: &Path) -> Result<Tokenizer> {
    let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
    let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Tokenizer::from_bytes(&bytes).with_context(|| format!("reading {}", path.display()))
}

/// Returns a drafter with the sources that the options name, and the name of its draft model.
fn builder(
    options: &Options,
    tokenizer: &Tokenizer,
    texts: &[Transcript],
) -> Result<(TreeBuilder, Option<String>)> {
    let (model, name) = match options.sources.contains(&CandidateSource::Model) {
        true => draft_model(options, tokenizer, texts).map(|(m, name)| (Some(m), Some(name)))?,
        false => (None, None),
    };
    let (prior, rate) = match options.mixing {
        Weights::Learned => (true, mix::RATE),
        Weights::Taught => (true, 0.0),
        Weights::Fixed => (false, 0.0),
    };
    let mixing = Mixing { prior, rate, ..Mixing::default() };
    Ok((TreeBuilder::new(model, &options.sources, mixing), name))
}

/// Loads the draft model, with room for the longest text.
fn draft_model(
    options: &Options,
    tokenizer: &Tokenizer,
    texts: &[Transcript],
) -> Result<(DraftModel, String)> {
    let partner = Partner::named(&options.draft.as_str().into(), tokenizer, f32::INFINITY)?
        .context("--draft does not name a draft model")?
        .map_err(|why| {
            Fault::model(format!("the draft model cannot draft for this tokenizer: {why}"))
        })?;
    let name = partner.name();
    let longest = texts.iter().map(|t| t.prompt.len() + t.answer.len()).max().unwrap_or(0) + 1;
    let run = RunOptions::default();
    let run = RunOptions {
        device: Device::Cpu,
        gpu_layers: GpuLayers::Auto,
        kv: partner.kv(run.kv),
        ..run
    };
    let (pool, room) = (load::pool(&run)?, Room::of(partner.context(longest)));
    let loaded = load::load(&partner.weights, "draft model", &run, room, &pool, &Silence)?;
    Ok((DraftModel::new(partner.engine(loaded.engine)?), name))
}

/// A text, divided into the given part and the part to predict.
struct Transcript {
    id: String,
    category: String,
    /// At least one token.
    prompt: Vec<Token>,
    answer: Vec<Token>,
}

const EXPECTED: &str = r#"a line is {"prompt": "...", "answer": "..."},
{"messages": [{"role", "content"}, ...]}, {"text": "..."} or
{"prompt_ids": [...], "answer_ids": [...]}, with "category" and "id" where wanted"#;

/// Reads a file of transcripts.
///
/// Each answer of `messages` becomes a transcript, with the messages before it as the prompt. A
/// `text` is predicted after its first token. Answers are cut to `longest` tokens.
fn read_transcripts(
    path: &Path,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    longest: usize,
) -> Result<Vec<Transcript>> {
    let mut out = Vec::new();
    for (i, line) in std::fs::read_to_string(path)
        .with_context(|| format!("cannot read {}", path.display()))?
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let bad = || {
            Fault::model(format!("{}, line {} is not a transcript", path.display(), i + 1))
                .help(EXPECTED)
        };
        let value: Value = json::parse(line.as_bytes()).with_context(bad)?;
        let parts = parts(&value, tokenizer, template).with_context(bad)?.with_context(bad)?;
        let category = value["category"].as_str().unwrap_or("text").to_owned();
        let id = match &value["id"] {
            Value::Null => (i + 1).to_string(),
            Value::String(id) => id.clone(),
            id => id.to_string(),
        };
        out.extend(
            parts
                .into_iter()
                .filter(|(prompt, answer)| !prompt.is_empty() && !answer.is_empty())
                .map(|(prompt, mut answer)| {
                    answer.truncate(longest);
                    Transcript { id: id.clone(), category: category.clone(), prompt, answer }
                }),
        );
    }
    Ok(out)
}

type Parts = Vec<(Vec<Token>, Vec<Token>)>;

fn parts(value: &Value, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Option<Parts>> {
    let ids = |key: &str| -> Option<Vec<Token>> {
        let known = |id: &Value| {
            id.as_u64().filter(|id| (*id as usize) < tokenizer.vocab()).map(|id| id as Token)
        };
        value[key].as_array()?.iter().map(known).collect()
    };
    if let (Some(prompt), Some(answer)) = (ids("prompt_ids"), ids("answer_ids")) {
        return Ok(Some(vec![(prompt, answer)]));
    }
    if let Some(text) = value["text"].as_str() {
        let mut tokens = tokenizer.encode(text, Special::AsText)?;
        let prompt = match tokenizer.id("<bos>") {
            Some(bos) => vec![bos],
            None => tokens.drain(..tokens.len().min(1)).collect(),
        };
        return Ok(Some(vec![(prompt, tokens)]));
    }
    let message = |role: &str, content: &str| Message::new(role, content);
    let messages = if let Some(list) = value["messages"].as_array() {
        let read = |m: &Value| Some(message(m["role"].as_str()?, m["content"].as_str()?));
        list.iter().map(read).collect::<Option<Vec<_>>>()
    } else {
        let answer = value["answer"].as_str().or_else(|| value["reference"].as_str());
        value["prompt"]
            .as_str()
            .zip(answer)
            .map(|(p, a)| vec![message("user", p), message("assistant", a)])
    };
    let Some(messages) = messages else { return Ok(None) };
    let end = tokenizer.id("<end_of_turn>");
    let answers = messages.iter().enumerate().filter(|(_, m)| m.role == "assistant");
    let part = |(at, answer): (usize, &Message)| {
        let prompt = template.encode(tokenizer, &messages[..at], None, Special::AsText, None)?;
        let mut tokens = tokenizer.encode(answer.content.trim(), Special::AsText)?;
        tokens.extend(end);
        Ok((prompt, tokens))
    };
    answers.map(part).collect::<Result<Parts>>().map(Some)
}

/// Returns at most `most` transcripts of each category, evenly spread.
fn spread(texts: Vec<Transcript>, most: Option<usize>) -> Vec<Transcript> {
    let Some(most) = most else { return texts };
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    texts.iter().for_each(|t| *counts.entry(t.category.clone()).or_default() += 1);
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let chosen = |t: &Transcript| {
        let (n, i) = (counts[&t.category], seen.entry(t.category.clone()).or_default());
        *i += 1;
        *i * most / n > (*i - 1) * most / n
    };
    texts.into_iter().filter(chosen).collect()
}

/// Shape of the tree in every round.
#[derive(Clone, Copy)]
struct Shape {
    nodes: usize,
    chain: bool,
    depth: usize,
}

impl Shape {
    fn of(options: &Options) -> Self {
        let longest = match options.draft_tokens {
            AutoOr::Auto => None,
            AutoOr::N(n) => Some(n),
        };
        let depth = longest.unwrap_or(usize::MAX);
        match options.draft_tree {
            TreeSize::Auto => Shape { nodes: NODES, chain: false, depth },
            TreeSize::Nodes(nodes) => Shape { nodes, chain: false, depth },
            TreeSize::Chain => Shape { nodes: longest.unwrap_or(NODES), chain: true, depth },
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} nodes", if self.chain { "chain" } else { "tree" }, self.nodes)
    }
}

/// Replays one transcript round by round.
fn replay(
    builder: &mut TreeBuilder,
    text: &Transcript,
    sampler: &Sampler,
    shape: Shape,
    vocab: usize,
) -> Result<Replayed> {
    let mut replayed = Replayed::default();
    let mut history = text.prompt.clone();
    let mut left = &text.answer[..];
    let (mut proposal, mut scored) = (Proposal::default(), None::<(usize, TokenTree, Scores)>);
    builder.prepare(0, &history[..history.len() - 1], Duration::MAX)?;
    while !left.is_empty() {
        let start = Instant::now();
        let ctx = DraftContext {
            history: &history,
            sampler,
            nodes: shape.nodes,
            depth: shape.depth.min(left.len() - 1),
            vocab,
            chain: shape.chain,
            draft_steps: usize::MAX,
            rate: None,
            verified: scored.as_ref().map(|(position, tree, scores)| Verified {
                position: *position,
                tree,
                scores,
                first: 0,
            }),
        };
        let root = ctx.root();
        proposal.reset(root);
        builder.propose(&mut [DraftRequest { text: 0, ctx, out: &mut proposal }], None)?;
        proposal.limit(ctx.nodes, ctx.depth, ctx.vocab);
        replayed.time += start.elapsed();
        let path = proposal.tree.walk(&[&[root], left].concat());
        let next = left[path.len() - 1];
        replayed.predicted += 1.0 + proposal.expected() as f64;
        let mut best = vec![Vec::new(); proposal.len()];
        path.iter().zip(left).for_each(|(&node, &token)| best[node as usize].push((token, 0.0)));
        let scores = Scores { best: best.into_iter().map(Some).collect(), ..Scores::default() };
        scored = Some((history.len(), proposal.tree.clone(), scores));
        let taken = path.len();
        replayed.stats.round(&proposal, &Verdict { path, next }, Duration::ZERO, Pass::default());
        history.extend_from_slice(&left[..taken]);
        left = &left[taken..];
    }
    Ok(replayed)
}

fn category(name: &str, replayed: &[Replayed]) -> Category {
    let mut sum = Stats::default();
    replayed.iter().for_each(|t| sum.add_rounds(&t.stats));
    let runs: Vec<(u64, u64)> =
        replayed.iter().map(|t| (t.stats.committed(), t.stats.passes)).collect();
    let (low, high) = interval(&runs);
    Category {
        name: name.to_owned(),
        records: replayed.len(),
        tokens: sum.committed(),
        passes: sum.passes,
        tau: sum.accepted_length(),
        low,
        high,
        predicted: replayed.iter().map(|t| t.predicted).sum::<f64>() / sum.passes.max(1) as f64,
        by_depth: sum.by_depth.iter().map(|t| [t.drafted, t.accepted]).collect(),
        by_source: sum
            .by_source
            .iter()
            .map(|(name, t)| ((*name).to_owned(), [t.drafted, t.accepted]))
            .collect(),
    }
}

/// Returns the bounds that exclude 2.5 % of the resampled ratios on each side. The generator is
/// seeded, so the bounds are reproducible.
fn interval(runs: &[(u64, u64)]) -> (f64, f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut ratios: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let (tokens, passes) = (0..runs.len()).fold((0, 0), |(tokens, passes), _| {
                let run = runs[rng.random_range(0..runs.len())];
                (tokens + run.0, passes + run.1)
            });
            tokens as f64 / passes.max(1) as f64
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let cut = RESAMPLES / 40;
    (ratios[cut], ratios[RESAMPLES - 1 - cut])
}
