//! The options of `gemma generate`, and sampling as flags and the model together set it.

use super::grammar::GrammarOptions;
use crate::cli::args::{AutoOr, InputOptions, ModelOptions, SpecialPolicy, UiOptions};
use crate::cli::output::Format;
use crate::cli::settings::{Source, Typed};
use crate::draft::{Mixing, TreeSize};
use crate::gemma::Generation;
use crate::sampler::SamplerConfig;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// The prompt goes in, the model's text comes out on standard output, and nothing else does.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Generate {
    #[command(flatten)]
    pub input: InputOptions,
    #[command(flatten)]
    pub chat: ChatOptions,
    #[command(flatten)]
    pub sampling: SamplingOptions,
    #[command(flatten)]
    pub grammar: GrammarOptions,
    #[command(flatten)]
    pub draft: DraftingOptions,
    #[command(flatten)]
    pub batch: BatchOptions,
    #[command(flatten)]
    pub output: OutputOptions,
    #[command(flatten)]
    pub model: ModelOptions,
    #[command(flatten)]
    pub ui: UiOptions,
}

const EXAMPLES: &str = "\
Examples:
  gemma generate 'Why is the sky blue?'
  git diff | gemma generate 'Write a commit message for this change.'
  gemma generate -m ./gemma-3-27b-it -f report.txt 'Summarise in five sentences.' -o summary.txt
  gemma generate --format json --seed 1 'A haiku about rain' | jq -r .text
  gemma generate --json-schema @person.json 'Invent a person.' | jq .name
  gemma generate --batch prompts.jsonl --resume answers.jsonl";

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Input")]
pub struct ChatOptions {
    /// Instructions put before the conversation
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// The same from a file
    #[arg(long, value_name = "FILE")]
    pub system_file: Option<PathBuf>,
    /// A conversation: JSON array of {"role", "content"}; a prompt is added as the last user turn
    #[arg(long, value_name = "FILE")]
    pub messages: Option<PathBuf>,
    /// No chat template: the model continues the text as it is, after one BOS
    #[arg(long)]
    pub raw: bool,
    /// How the answer must begin (not repeated in the output)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prefill: Option<String>,
    /// Control tokens spelled out in the prompt, such as <end_of_turn>
    #[arg(long, value_enum, value_name = "HOW", default_value_t = SpecialPolicy::Text)]
    pub special_in_prompt: SpecialPolicy,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingOptions {
    /// Most tokens to generate
    #[arg(short = 'n', long, value_name = "N", default_value_t = 512)]
    pub max_tokens: usize,
    /// Temperature; 0 always takes the likeliest token [default: the model's]
    #[arg(long, alias = "temperature", allow_negative_numbers = true, value_name = "T", value_parser = number::<0, 100>)]
    pub temp: Option<f32>,
    /// Sample from the K likeliest tokens only; 0 for all [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Sample from the likeliest tokens that make up this share [default: the model's]
    #[arg(long, allow_negative_numbers = true, value_name = "P", value_parser = share)]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than this share of the likeliest one [default: the model's]
    #[arg(long, allow_negative_numbers = true, value_name = "P", value_parser = number::<0, 1>)]
    pub min_p: Option<f32>,
    /// Make tokens that occurred before less likely; 1 changes nothing [default: the model's]
    #[arg(long, allow_negative_numbers = true, value_name = "X", value_parser = positive)]
    pub repeat_penalty: Option<f32>,
    /// Same model, device class and seed: same text [default: random, shown in the stats]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Always take the likeliest token: --temp 0
    #[arg(long)]
    pub greedy: bool,
    /// End before this text (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Never end by itself before --max-tokens
    #[arg(long)]
    pub ignore_eos: bool,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Drafting (changes the speed, never the text)")]
pub struct DraftingOptions {
    /// Source of guesses: auto, off, bundled, ngram, or a model with the same tokenizer or a part of it (a directory, a GGUF file, or an id as for --model)
    ///
    /// auto is the bundled draft model that shares the target's tokenizer (the demo's or Gemma 3's), if any, mixed with what followed the
    /// last time the text ended like this, and with what the target thought the last time the same tokens came last (see
    /// --draft-memory). ngram is the latter two alone.
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub draft: String,
    /// Longest line of guesses
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub draft_tokens: AutoOr,
    /// Shape of the guesses: auto, chain, or a number of nodes
    #[arg(long, value_name = "auto|chain|N", default_value = "auto", value_parser = tree)]
    pub draft_tree: TreeSize,
    /// Where what is learnt of a target's habits is kept for the next run: auto, on, off, or a directory with a slash in it
    ///
    /// The table of what the target thought after which tokens makes later texts come sooner; it is no part of the text. `on` keeps it
    /// in $XDG_STATE_HOME/gemma/draft-memory, at most 12 MB a target, readable by its owner alone; it holds fragments of what was read
    /// and written, so `off` where that must leave no trace. auto is `on` for generate, `off` for bench.
    #[arg(long, value_name = "auto|on|off|DIR/", default_value = "auto", value_parser = memory_place)]
    pub draft_memory: MemoryPlace,
    /// Where the draft model runs: auto, cpu, vulkan or vulkan:N
    ///
    /// auto is the processor, which is free while a GPU checks guesses; a draft model of more than 200 MB goes to a discrete GPU with room
    /// for all of it beside the target.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub draft_device: String,
    /// Draft on while the target's device checks the last guesses: auto, on or off
    ///
    /// auto does where target and draft model run on devices of their own, for as long as that is measured to pay.
    #[arg(long, value_enum, value_name = "auto|on|off", default_value_t = DraftAhead::Auto)]
    pub draft_ahead: DraftAhead,
    /// How the sources are mixed: `gemma bench` measures others.
    #[arg(skip)]
    pub mixing: Mixing,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Batch")]
pub struct BatchOptions {
    /// Answer records instead of one prompt: JSON lines from FILE or standard input, a line out for each, in their order
    ///
    /// A record is {"prompt": ...} or {"messages": [...]}, with an "id" and any of max_tokens, temperature, top_k, top_p, min_p,
    /// repeat_penalty, seed, stop, system, prefill, raw, json_schema, grammar, regex, response_format; or a line of OpenAI's batches, which
    /// is answered in kind. Blank lines are passed over. A record that fails has an error for an answer, and the others go on. A record without a seed gets one from --seed (0 where
    /// not given) and its id. --ctx-size auto is 4096 here.
    #[arg(long, value_name = "FILE|-", num_args = 0..=1, default_missing_value = "-")]
    pub batch: Option<PathBuf>,
    /// Write answers to OUT as they come; what it holds of an interrupted run is kept, and its records are not asked again
    #[arg(long, value_name = "OUT", requires = "batch")]
    pub resume: Option<PathBuf>,
    /// Answer every n-th record, from the i-th on: the i-th of n processes that share a batch
    #[arg(long, value_name = "I/N", requires = "batch")]
    pub shard: Option<super::batch::place::Shard>,
    /// Answer up to N records at once, which share the target's passes: the same answers, in the same order, sooner
    ///
    /// A pass reads the weights once for all of them. Each takes memory for a context of its own. Guesses come from the texts
    /// themselves (--draft ngram), a draft model is not asked; a pass has as many of them as pay.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub parallel: u16,
    /// Exit with 6, once all is done, if records failed
    #[arg(long, requires = "batch")]
    pub strict: bool,
}

/// Whether drafting overlaps the target's passes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DraftAhead {
    #[default]
    Auto,
    On,
    Off,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputOptions {
    /// Write to a file, which appears complete or not at all
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// What to write
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// End the text with a line break even where no terminal shows it
    #[arg(long)]
    pub newline: bool,
    /// Figures on standard error; auto: one line if that is a terminal
    #[arg(long, value_enum, value_name = "HOW", default_value_t = StatsFormat::Auto)]
    pub stats: StatsFormat,
    /// Write the figures to a file, as JSON
    #[arg(long, value_name = "FILE")]
    pub stats_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StatsFormat {
    Auto,
    Text,
    Json,
    Off,
}

/// A number between bounds, both included.
fn number<const LOW: i32, const HIGH: i32>(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if (LOW as f32..=HIGH as f32).contains(&x) => Ok(x),
        _ => Err(format!("expected a number from {LOW} to {HIGH}")),
    }
}

fn share(text: &str) -> Result<f32, String> {
    number::<0, 1>(text).ok().filter(|p| *p > 0.0).ok_or_else(|| "expected a number above 0, at most 1".into())
}

fn positive(text: &str) -> Result<f32, String> {
    number::<0, 100>(text).ok().filter(|x| *x > 0.0).ok_or_else(|| "expected a number above 0, at most 100".into())
}

fn tree(text: &str) -> Result<TreeSize, String> {
    text.parse().map_err(|_| "expected auto, chain, or a number above 0".into())
}

/// `--draft-memory`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MemoryPlace {
    #[default]
    Auto,
    On,
    Off,
    Directory(PathBuf),
}

fn memory_place(text: &str) -> Result<MemoryPlace, String> {
    match text {
        "auto" => Ok(MemoryPlace::Auto),
        "on" => Ok(MemoryPlace::On),
        "off" => Ok(MemoryPlace::Off),
        path if path.contains('/') => Ok(MemoryPlace::Directory(path.into())),
        _ => Err("expected auto, on, off, or a directory with a slash in it, such as ./memory".into()),
    }
}

impl MemoryPlace {
    /// The directory; `None` for no memory, and where the system has no place for it. `usual` is what auto stands for.
    pub fn directory(&self, usual: bool) -> Option<PathBuf> {
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        match self {
            MemoryPlace::Directory(path) => Some(path.clone()),
            MemoryPlace::Off => None,
            MemoryPlace::Auto if !usual => None,
            MemoryPlace::Auto | MemoryPlace::On => {
                let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
                state.map(|state| state.join("gemma/draft-memory"))
            }
        }
    }
}

/// A setting's name, value and source, as `--print-config` shows them.
pub type Resolved = (&'static str, String, Source);

impl SamplingOptions {
    /// Flags, environment and files first, then the model's generation_config.json, then what is built in.
    pub fn resolve(&self, typed: &Typed, model: &Generation) -> (SamplerConfig, Vec<Resolved>) {
        let mut resolved = Vec::new();
        let mut pick = |name: &'static str, given: Option<f64>, model: Option<f64>, built_in: f64| {
            let (value, source) = match (given, model) {
                (Some(value), _) => (value, typed.source(name)),
                (None, Some(value)) => (value, Source::Model),
                (None, None) => (built_in, Source::BuiltIn),
            };
            resolved.push((name, value.to_string(), source));
            value
        };
        let wide = |x: Option<f32>| x.map(super::stats::decimal);
        let whole = |x: Option<usize>| x.map(|x| x as f64);
        let mut config = SamplerConfig {
            temperature: pick("temp", wide(self.temp), wide(model.temperature), 1.0) as f32,
            top_k: pick("top-k", whole(self.top_k), whole(model.top_k), 64.0) as usize,
            top_p: pick("top-p", wide(self.top_p), wide(model.top_p), 0.95) as f32,
            min_p: pick("min-p", wide(self.min_p), wide(model.min_p), 0.0) as f32,
            repeat_penalty: pick("repeat-penalty", wide(self.repeat_penalty), wide(model.repeat_penalty), 1.0) as f32,
            seed: self.seed.unwrap_or_else(random_seed),
        };
        if self.greedy {
            config.temperature = 0.0;
        }
        (config, resolved)
    }
}

/// 32 bits: easy to type again, and exact in every JSON reader.
fn random_seed() -> u64 {
    rand::random::<u32>() as u64
}
