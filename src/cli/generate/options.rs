//! The options of `gemma generate`, and sampling as flags and the model together set it.

use super::grammar::GrammarOptions;
use crate::cli::args::{AutoOr, InputOptions, ModelOptions, SpecialPolicy, UiOptions};
use crate::cli::destination::Destination;
use crate::cli::output::Format;
use crate::cli::settings::{Source, Typed};
use crate::draft::{Mixing, TreeSize};
use crate::gemma::Generation;
use crate::sampler::SamplerConfig;
use crate::util::xdg;
use clap::{Args, ValueEnum, ValueHint};
use std::path::PathBuf;

/// Answer a prompt: the model's text goes to standard output, and nothing else does.
#[derive(Debug, Args)]
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

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Input")]
pub struct ChatOptions {
    /// Instructions for the model, put before the prompt
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// The instructions, from a file
    #[arg(long, value_name = "FILE")]
    pub system_file: Option<PathBuf>,
    /// A conversation as JSON, before the prompt
    ///
    /// The file holds an array of {"role": ..., "content": ...}; the prompt, if any, is added as the last turn of the user.
    #[arg(long, value_name = "FILE")]
    pub messages: Option<PathBuf>,
    /// Continue the text as it is, without a chat template
    ///
    /// The text is put behind one BOS token, and nothing else is added.
    #[arg(long)]
    pub raw: bool,
    /// How the answer begins; the model continues from there (not repeated in the output)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prefill: Option<String>,
    /// What to do with control tokens that the prompt spells, such as <end_of_turn>
    #[arg(long, value_enum, value_name = "HOW", default_value_t = SpecialPolicy::Text)]
    pub special_in_prompt: SpecialPolicy,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingOptions {
    /// Generate at most this many tokens
    #[arg(short = 'n', long, value_name = "N", default_value_t = 512, value_parser = tokens)]
    pub max_tokens: usize,
    /// Temperature, 0 for none [default: the model's]
    #[arg(long, alias = "temperature", allow_negative_numbers = true, value_name = "T", value_parser = number::<0, 100>)]
    pub temp: Option<f32>,
    /// Sample from the K likeliest [default: the model's]
    ///
    /// 0 samples from all tokens.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Sample from share P only [default: the model's]
    ///
    /// The likeliest tokens whose chances add up to P are sampled from (nucleus sampling).
    #[arg(long, allow_negative_numbers = true, value_name = "P", value_parser = share)]
    pub top_p: Option<f32>,
    /// Drop tokens that are less likely than P times the likeliest one [default: the model's]
    #[arg(long, allow_negative_numbers = true, value_name = "P", value_parser = number::<0, 1>)]
    pub min_p: Option<f32>,
    /// Make tokens that occurred before less likely; 1 changes nothing [default: the model's]
    #[arg(long, allow_negative_numbers = true, value_name = "X", value_parser = positive)]
    pub repeat_penalty: Option<f32>,
    /// Repeat a text that was sampled [default: random]
    ///
    /// The same model, kind of device and seed give the same text, whatever --draft and its like say. The seed of a text is part of its
    /// figures.
    #[arg(long, value_name = "N", value_parser = seed)]
    pub seed: Option<u64>,
    /// Always take the likeliest token, as with --temp 0
    #[arg(long)]
    pub greedy: bool,
    /// End the answer before this text (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Go on to --max-tokens where the model would end its answer
    #[arg(long)]
    pub ignore_eos: bool,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Drafting (changes the speed, never the text)")]
pub struct DraftingOptions {
    /// Source of guesses: auto, off, ngram, or a model
    ///
    /// auto is the bundled draft model that shares the model's tokenizer (the demo's or Gemma 3's), mixed with what followed the last time
    /// the text ended like this, and with what the model found likely the last time after the same tokens (see --draft-memory). ngram
    /// is the latter two alone, bundled refuses to run without a bundled draft model, and off decodes without drafts. A model is a
    /// directory, a GGUF file or an id as for --model; it needs the same tokenizer, or a part of it.
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub draft: String,
    /// How many tokens ahead to guess at most
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub draft_tokens: AutoOr,
    /// Shape of the guesses: auto, chain (one line), or the number of nodes of a tree
    #[arg(long, value_name = "auto|chain|N", default_value = "auto", value_parser = tree)]
    pub draft_tree: TreeSize,
    /// Where drafting keeps what it learns of a model for the next run: auto, on, off, or a directory with a slash in it
    ///
    /// The table of what the model found likely after which tokens makes later texts come sooner, and never changes them. `on` keeps it
    /// in $XDG_STATE_HOME/gemma/draft-memory (~/.local/state without that variable), at most 12 MB for each model, readable by its owner
    /// alone. It holds fragments of prompts and answers: take `off` where those must leave no trace. auto is `on` for generate and chat,
    /// and `off` for bench.
    #[arg(long, value_name = "auto|on|off|DIR/", default_value = "auto", value_parser = memory_place)]
    pub draft_memory: MemoryPlace,
    /// Where the draft model runs: auto, cpu, vulkan or vulkan:N
    ///
    /// auto is the processor, which is free while a GPU checks guesses; a draft model of more than 200 MB goes to a discrete GPU that has
    /// room for all of it beside the model.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub draft_device: String,
    /// Guess further while the model's device checks the last guesses: auto, on or off
    ///
    /// auto does so where the model and its draft model run on devices of their own, for as long as that is measured to pay.
    #[arg(long, value_enum, value_name = "auto|on|off", default_value_t = DraftAhead::Auto)]
    pub draft_ahead: DraftAhead,
    /// How the sources are mixed: `gemma bench` measures others.
    #[arg(skip)]
    pub mixing: Mixing,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Batch")]
pub struct BatchOptions {
    /// Answer JSON lines, from a file or standard input
    ///
    /// Each line of input is a record, and gets one line of output, in the same order.
    ///
    /// A record is {"prompt": ...} or {"messages": [...]}, with an "id" and any of max_tokens, temperature, top_k, top_p, min_p,
    /// repeat_penalty, seed, stop, system, prefill, raw, json_schema, grammar, regex, response_format; or a line of OpenAI's batches, which
    /// is answered in kind. Blank lines are passed over. A record that fails has an error for an answer, and the others go on. A record without a seed gets one from --seed (0 where
    /// not given) and its id. --ctx-size auto is 4096 here.
    #[arg(long, value_name = "FILE|-", num_args = 0..=1, default_missing_value = "-")]
    pub batch: Option<PathBuf>,
    /// Write answers to a file, and go on where it ends
    ///
    /// Answers that the file holds are kept, and failures and what is missing are asked. A file that
    /// holds anything but answers of a batch is refused and left alone. One run at a time writes to
    /// it. An answer takes the place of the failure before it.
    #[arg(long, value_name = "OUT", requires = "batch", value_hint = ValueHint::FilePath)]
    pub resume: Option<Destination>,
    /// Answer every N-th record, from the I-th on: for N processes that share a batch
    #[arg(long, value_name = "I/N", requires = "batch")]
    pub shard: Option<super::batch::place::Shard>,
    /// Answer N records of a batch at once
    ///
    /// The answers and their order are the same, and they come sooner: a pass reads the weights once for all of them. Each takes memory
    /// for a context of its own. Guesses come from the texts themselves (--draft ngram), and a draft model is not asked.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub parallel: u16,
    /// Exit with code 6, once all is done, if records failed
    ///
    /// A record with an unknown field is a failure then; otherwise it is only named.
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
    /// Write to a file, which appears when it is complete
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<Destination>,
    /// Write text, json, jsonl or stream-json
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// Write one JSON object, as --format json does
    #[arg(long, overrides_with = "format")]
    pub json: bool,
    /// End the text with a line break on pipes and in files too
    #[arg(long)]
    pub newline: bool,
    /// Print figures: auto, text, json or off
    ///
    /// Figures go to standard error. auto prints one line where standard error is a terminal, and all figures with -v.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = StatsFormat::Auto)]
    pub stats: StatsFormat,
    /// Write the figures to a file, as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub stats_file: Option<Destination>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StatsFormat {
    Auto,
    Text,
    Json,
    Off,
}

fn tokens(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected a number of tokens, from 0 on; by default there are 512".into())
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}; without --seed it is random", u64::MAX))
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
    /// The directory; `None` where nothing is to be kept, and where the system has no place for it. `usual` is what auto stands for.
    pub fn directory(&self, usual: bool) -> Option<PathBuf> {
        match self {
            MemoryPlace::Directory(path) => Some(path.clone()),
            MemoryPlace::Off => None,
            MemoryPlace::Auto if !usual => None,
            MemoryPlace::Auto | MemoryPlace::On => xdg::state().map(|state| state.join("draft-memory")),
        }
    }
}

/// A setting's name, value and source, as `--print-config` shows them.
pub type Resolved = (&'static str, String, Source);

impl OutputOptions {
    /// What `--format` and `--json` ask for.
    pub fn format(&self) -> Format {
        if self.json { Format::Json } else { self.format }
    }
}

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
