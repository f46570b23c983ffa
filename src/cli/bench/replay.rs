//! `gemma bench --replay`: how many tokens a pass would bring, on texts that are there already.
//!
//! With verification by equality the accepted path of greedy text depends on the tree and the text
//! alone, so a transcript of the target's own tells the tokens per pass exactly, and other people's
//! text how hard it is to guess. No target is needed. What a target would say of a row is not known
//! but for the token that came: that alone feeds the table, where a real target gives eight tokens
//! of every row. Nothing depends on the clock.

use super::Bench;
use super::measure::processor_seconds;
use super::transcripts::{self, Transcript};
use crate::cli::table::markdown;
use crate::cli::ui::Ui;
use crate::decode::{Stats, Verdict};
use crate::draft::{
    Ask, DraftContext, Drafter, Figures, Lm, Pass, Proposal, Table, TreeBuilder, TreeSize, Verified,
};
use crate::engine::{Scores, TokenTree};
use crate::error::Fault;
use crate::models::{ChatTemplate, Tokenizer};
use crate::runtime::load;
use crate::runtime::options::{AutoOr, GpuLayers, RunOptions};
use crate::runtime::partner::Partner;
use crate::runtime::placement::Device;
use crate::runtime::{Model, Room};
use crate::sampler::{Sampler, SamplerConfig};
use crate::util::files::read_regular;
use crate::util::hex;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Nodes of a tree where none is asked for.
const NODES: usize = 15;
/// Resamples behind an interval.
const RESAMPLES: usize = 1000;
/// Depths shown in the table.
const DEPTHS: usize = 4;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Replay")]
pub struct ReplayOptions {
    /// Replay transcripts, as JSON lines, instead of running a model (repeatable): tokens per pass
    /// that the drafts would bring
    ///
    /// A line is {"prompt", "answer"}, {"messages"}, {"text"} or {"prompt_ids", "answer_ids"}, with
    /// "category" and "id". The trees have 15 nodes unless --draft-tree says otherwise. For text
    /// that a target made at temperature 0 the figure is what that target would have had; for other
    /// text it says how hard the text is to guess. Of a row only the token that came is known, so
    /// the table learns less than from a running target. What is learnt from one transcript helps
    /// with the next, as from one prompt to the next.
    #[arg(long, value_name = "FILE")]
    pub replay: Vec<PathBuf>,
    /// Directory whose tokenizer.json transcripts, and prompts of the text test, are read with
    /// [default: the model's]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Most tokens guessed of one answer
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub replay_tokens: usize,
    /// Most transcripts of a category, evenly spread [default: all]
    #[arg(long, value_name = "N")]
    pub replay_count: Option<usize>,
    /// Sources that take part: for measuring what each brings
    #[arg(long, value_enum, value_name = "SOURCES", value_delimiter = ',', default_values_t = [Part::Context, Part::Table, Part::Model])]
    pub sources: Vec<Part>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// What followed the last time the text ended like this
    Context,
    /// What the target thought after these two tokens, or this one
    Table,
    /// The draft model
    Model,
}

/// What a replay found.
#[derive(Serialize)]
pub struct Report {
    v: u32,
    pub version: &'static str,
    pub tokenizer_sha256: String,
    pub draft: Option<String>,
    pub sources: Vec<String>,
    mixing: String,
    /// The mixer's weights of temperature 0 at the end, set by set: `scripts/draft_prior.py` reads
    /// them.
    weights: Vec<Vec<f32>>,
    pub tree: String,
    /// Time of drafting, for information: nothing depends on it.
    draft_ms_per_pass: f64,
    /// Processor time of a round in the middle, and of one in twenty: less than that is luck, more
    /// is a busy machine.
    draft_cpu_ms: [f64; 2],
    /// Passes of the draft model in a round, and rows of all of them.
    draft_work: [f64; 2],
    pub categories: Vec<Category>,
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
pub struct Category {
    pub name: String,
    pub records: usize,
    pub tokens: u64,
    pub passes: u64,
    /// Tokens per pass, and the bounds of its bootstrap interval of 95 % over records.
    pub tau: f64,
    pub low: f64,
    pub high: f64,
    /// What the nodes' chances promised.
    predicted: f64,
    /// Drafted and accepted nodes; by depth below the root, and by the source that spoke most for
    /// them.
    pub by_depth: Vec<[u64; 2]>,
    pub by_source: BTreeMap<String, [u64; 2]>,
}

/// What the replay of one or more transcripts gave.
#[derive(Clone, Default)]
struct Tally {
    stats: Stats,
    predicted: f64,
    time: Duration,
    /// Processor seconds of each round.
    rounds: Vec<f64>,
}

pub fn run(options: &Bench, ui: &Ui) -> Result<Report> {
    let replay = &options.replay;
    let (tokenizer, template) = match &replay.tokenizer {
        Some(dir) => (read_tokenizer(dir)?, ChatTemplate::built_in()),
        None => {
            let model = Model::open(options.model.model.as_deref(), ui)?;
            (model.tokenizer(ui)?, ChatTemplate::from_checkpoint(model.checkpoint())?)
        }
    };
    let mut texts = Vec::new();
    for file in &replay.replay {
        texts.extend(transcripts::read(file, &tokenizer, &template, replay.replay_tokens)?);
    }
    let texts = spread(texts, replay.replay_count);
    if texts.is_empty() {
        return Err(Fault::model("there is nothing to replay in these files").into());
    }
    let (mut builder, name) = builder(options, &tokenizer, &texts, ui)?;
    let sampler = Sampler::new(SamplerConfig::default())?.usable(tokenizer.vocab());
    let shape = Shape::of(options);
    let mut all: BTreeMap<&str, Vec<Tally>> = BTreeMap::new();
    let mut records = Vec::new();
    let bar = ui.bar("replaying", texts.len() as u64);
    for text in &texts {
        let tally = one(&mut builder, text, &sampler, shape, tokenizer.vocab())?;
        let (id, category) = (text.id.clone(), text.category.clone());
        records.push(Record {
            id,
            category,
            tokens: text.answer.len() as u64,
            passes: tally.stats.passes,
        });
        all.entry(&text.category).or_default().push(tally);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let time: Duration = all.values().flatten().map(|t| t.time).sum();
    let passes: u64 = records.iter().map(|r| r.passes).sum();
    let mut rounds: Vec<f64> =
        all.values().flatten().flat_map(|t| &t.rounds).map(|s| 1e3 * s).collect();
    rounds.sort_by(f64::total_cmp);
    let mut figures = Figures::default();
    builder.figures(&mut figures);
    let mut categories: Vec<Category> =
        all.iter().map(|(name, tallies)| category(name, tallies)).collect();
    if categories.len() > 1 {
        categories.push(category("all", &all.values().flatten().cloned().collect::<Vec<_>>()));
    }
    Ok(Report {
        v: 1,
        version: env!("CARGO_PKG_VERSION"),
        tokenizer_sha256: hex(tokenizer.sha256()),
        draft: name,
        sources: replay
            .sources
            .iter()
            .filter_map(|s| Some(s.to_possible_value()?.get_name().to_owned()))
            .collect(),
        mixing: format!("{:?}", options.mixing()),
        weights: builder.weights(),
        tree: shape.to_string(),
        draft_ms_per_pass: 1e3 * time.as_secs_f64() / passes as f64,
        draft_cpu_ms: [2, 20].map(|part| rounds[rounds.len() / part]),
        draft_work: [figures.draft_passes, figures.draft_rows].map(|n| n as f64 / passes as f64),
        categories,
        records,
    })
}

/// Bytes of a tokenizer.json at most.
const LARGEST: u64 = 512 << 20;

pub fn read_tokenizer(dir: &std::path::Path) -> Result<Tokenizer> {
    let path = if dir.is_dir() { dir.join("tokenizer.json") } else { dir.to_path_buf() };
    let bytes = read_regular(&path, LARGEST)
        .with_context(|| Fault::model(format!("cannot read {}", path.display())))?;
    Tokenizer::from_bytes(&bytes).with_context(|| format!("reading {}", path.display()))
}

/// Returns the sources that were asked for, mixed, and the name of the draft model.
fn builder(
    options: &Bench,
    tokenizer: &Tokenizer,
    texts: &[Transcript],
    ui: &Ui,
) -> Result<(TreeBuilder, Option<String>)> {
    let wants = |part| options.replay.sources.contains(&part);
    let (lm, name) = match wants(Part::Model) {
        true => draft_model(options, tokenizer, texts, ui)?,
        false => (None, None),
    };
    let table = wants(Part::Table).then(Table::new);
    let builder = TreeBuilder::new(lm, wants(Part::Context), table, options.mixing());
    Ok((builder, name))
}

/// The draft model and its name.
type Drafts = (Option<Lm>, Option<String>);

/// The draft model, with room for the longest text as far as it goes.
fn draft_model(
    options: &Bench,
    tokenizer: &Tokenizer,
    texts: &[Transcript],
    ui: &Ui,
) -> Result<Drafts> {
    let remedy =
        "leave `model` out of --sources, or name a draft model of the same tokenizer with --draft";
    let (asked, drafting) = (options.model.run.settled()?, options.draft.settled()?);
    let found = Partner::named(&drafting.source, tokenizer, f32::INFINITY)?;
    let partner = found
        .ok_or_else(|| Fault::usage("--draft does not name a draft model").help(remedy))?
        .map_err(|why| {
            Fault::model(format!("the draft model cannot draft for this tokenizer: {why}"))
                .help(remedy)
        })?;
    let name = partner.name();
    let longest = texts.iter().map(|t| t.prompt.len() + t.answer.len()).max().unwrap_or(0) + 1;
    let context = match asked.context {
        AutoOr::N(n) => n,
        AutoOr::Auto => longest,
    };
    let run = RunOptions {
        device: Device::Cpu,
        gpu_layers: GpuLayers::Auto,
        kv: partner.kv(asked.kv),
        ..asked
    };
    let (pool, room) = (load::pool(&run)?, Room::of(partner.context(context)));
    let loaded = load::load(&partner.weights, "draft model", &run, room, &pool, ui)?;
    Ok((Some(Lm::new(partner.engine(loaded.engine)?)), Some(name)))
}

/// At most `most` of each category, evenly spread over what is there.
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

/// The tree of every round.
#[derive(Clone, Copy)]
struct Shape {
    nodes: usize,
    chain: bool,
    depth: usize,
}

impl Shape {
    fn of(options: &Bench) -> Self {
        let longest = match options.draft.draft_tokens {
            AutoOr::Auto => None,
            AutoOr::N(n) => Some(n),
        };
        let depth = longest.unwrap_or(usize::MAX);
        match options.draft.draft_tree {
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

/// Replays one transcript, round by round.
fn one(
    builder: &mut TreeBuilder,
    text: &Transcript,
    sampler: &Sampler,
    shape: Shape,
    vocab: usize,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let mut history = text.prompt.clone();
    let mut left = &text.answer[..];
    let (mut proposal, mut scored) = (Proposal::default(), None::<(usize, TokenTree, Scores)>);
    builder.prepare(0, &history[..history.len() - 1])?;
    while !left.is_empty() {
        let (start, busy) = (Instant::now(), processor_seconds());
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
        builder.propose(&mut [Ask { text: 0, ctx, out: &mut proposal }])?;
        proposal.limit(&ctx);
        tally.time += start.elapsed();
        tally.rounds.push(processor_seconds() - busy);
        let path = proposal.tree.walk(&[&[root], left].concat());
        let next = left[path.len() - 1];
        tally.predicted += 1.0 + proposal.expected() as f64;
        let mut scores = Scores { best: vec![Vec::new(); proposal.len()], ..Scores::default() };
        path.iter()
            .zip(left)
            .for_each(|(&node, &token)| scores.best[node as usize].push((token, 0.0)));
        scored = Some((history.len(), proposal.tree.clone(), scores));
        let taken = path.len();
        tally.stats.round(&proposal, &Verdict { path, next }, Duration::ZERO, Pass::default());
        history.extend_from_slice(&left[..taken]);
        left = &left[taken..];
    }
    Ok(tally)
}

fn category(name: &str, tallies: &[Tally]) -> Category {
    let mut sum = Stats::default();
    tallies.iter().for_each(|t| sum.add_rounds(&t.stats));
    let runs: Vec<(u64, u64)> =
        tallies.iter().map(|t| (t.stats.committed(), t.stats.passes)).collect();
    let (low, high) = interval(&runs);
    Category {
        name: name.to_owned(),
        records: tallies.len(),
        tokens: sum.committed(),
        passes: sum.passes,
        tau: sum.accepted_length(),
        low,
        high,
        predicted: tallies.iter().map(|t| t.predicted).sum::<f64>() / sum.passes.max(1) as f64,
        by_depth: sum.by_depth.iter().map(|t| [t.drafted, t.accepted]).collect(),
        by_source: sum
            .by_source
            .iter()
            .map(|(name, t)| ((*name).to_owned(), [t.drafted, t.accepted]))
            .collect(),
    }
}

/// Bootstrap over records: the bounds that leave out 2.5 % of the resampled ratios on each side.
/// The same each time.
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

impl Report {
    pub fn markdown(&self) -> String {
        let out = format!(
            "Replay, {}, sources {}, draft model {}; drafting of a round takes {:.2} ms, {:.2} of \
             the processor in the middle and {:.2} in the least twentieth, and {:.1} passes over \
             {:.1} rows\n\n",
            self.tree,
            self.sources.join(" + "),
            self.draft.as_deref().unwrap_or("none"),
            self.draft_ms_per_pass,
            self.draft_cpu_ms[0],
            self.draft_cpu_ms[1],
            self.draft_work[0],
            self.draft_work[1]
        );
        let mut head: Vec<String> =
            ["text", "records", "tokens", "tokens/pass", "95 %", "predicted"]
                .map(String::from)
                .to_vec();
        head.extend((1..=DEPTHS).map(|d| format!("depth {d}")));
        head.push("tokens/pass by source".into());
        let mut table = vec![head];
        for c in &self.categories {
            let mut row = vec![
                c.name.clone(),
                c.records.to_string(),
                c.tokens.to_string(),
                format!("{:.2}", c.tau),
            ];
            row.extend([format!("{:.2}-{:.2}", c.low, c.high), format!("{:.2}", c.predicted)]);
            // Share of all passes that got this deep.
            row.extend((0..DEPTHS).map(|d| {
                format!("{:.2}", c.by_depth.get(d).map_or(0.0, |t| t[1] as f64) / c.passes as f64)
            }));
            let part = |(name, t): (&String, &[u64; 2])| {
                format!("{name} {:.2}", t[1] as f64 / c.passes as f64)
            };
            row.push(c.by_source.iter().map(part).collect::<Vec<_>>().join(", "));
            table.push(row);
        }
        out + &markdown(&table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_hold_the_ratio_and_shrink_with_more_records() {
        let runs = |n: u64| (0..n).map(|i| (10 + i % 7, 5)).collect::<Vec<_>>();
        let width = |n| {
            let (low, high) = interval(&runs(n));
            assert!(low <= 2.6 && high >= 2.5 && low < high, "{low} {high}");
            high - low
        };
        assert!(width(700) < width(14) / 3.0);
        assert_eq!(interval(&[(6, 2)]), (3.0, 3.0));
    }

    #[test]
    fn a_category_keeps_its_share_evenly_spread() {
        let text = |category: &str, i: usize| Transcript {
            id: i.to_string(),
            category: category.into(),
            prompt: vec![1],
            answer: vec![2],
        };
        let texts = (0..30).map(|i| text(if i % 3 == 0 { "a" } else { "b" }, i)).collect();
        let kept: Vec<_> = spread(texts, Some(5)).into_iter().map(|t| (t.category, t.id)).collect();
        assert_eq!(
            kept.iter().filter(|t| t.0 == "a").map(|t| t.1.as_str()).collect::<Vec<_>>(),
            ["3", "9", "15", "21", "27"]
        );
        assert_eq!(kept.iter().filter(|t| t.0 == "b").count(), 5);
    }

    /// A text that repeats itself, guessed without any model: copied parts come in long steps.
    #[test]
    fn a_copy_is_guessed_in_long_steps_and_noise_is_not() {
        let noise: Vec<u32> = (0..120u32).map(|i| i.wrapping_mul(2_654_435_761) >> 20).collect();
        let sampler = Sampler::new(SamplerConfig::default()).unwrap();
        let replay = |answer: Vec<u32>| {
            let mut builder = TreeBuilder::of_text();
            let text = Transcript {
                id: "1".into(),
                category: "x".into(),
                prompt: [&[2], &noise[..]].concat(),
                answer,
            };
            let tally = one(
                &mut builder,
                &text,
                &sampler,
                Shape { nodes: 15, chain: false, depth: 99 },
                9999,
            )
            .unwrap();
            assert_eq!(tally.stats.committed(), text.answer.len() as u64);
            tally.stats.accepted_length()
        };
        assert!(replay(noise[20..100].to_vec()) > 4.0);
        assert_eq!(replay((5000..5080).collect()), 1.0);
    }
}
