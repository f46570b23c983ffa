//! The options of `gemma generate`.

use super::batch::place::Shard;
use crate::cli::io::destination::Destination;
use crate::cli::io::output::OutputFormat;
use crate::cli::options::{
    ChatOptions, DraftArgs, GrammarOptions, ImageOptions, InputOptions, ModelArgs, PresetOption,
    PromptCacheArgs, SamplingOptions, SightArgs, UiOptions,
};
use clap::{Args, ValueEnum, ValueHint};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  gemma generate 'What is the capital of France?'
  gemma generate --json 'Who are you?' | jq -r .text
  gemma generate --regex '[A-Z][a-z]+' 'What is the capital of France?'
With a real model:
  git diff | gemma generate -m MODEL 'Write a commit message for this change.'
  git diff | gemma generate --preset commit    with options from [preset.commit] in gemma.toml
  gemma generate -m MODEL -f REPORT.txt 'Summarise in five sentences.' -o SUMMARY.txt
  gemma generate -m MODEL --batch PROMPTS.jsonl --resume ANSWERS.jsonl
In a shell loop, add </dev/null: standard input is part of the prompt.";

/// Answer a prompt: the model's text, and only that, goes to standard output
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES, override_usage = "gemma generate [OPTIONS] [PROMPT]")]
pub struct GenerateArgs {
    #[command(flatten)]
    pub input: InputOptions,
    #[command(flatten)]
    pub images: ImageOptions,
    #[command(flatten)]
    pub chat: ChatOptions,
    #[command(flatten)]
    pub sampling: SamplingOptions,
    #[command(flatten)]
    pub grammar: GrammarOptions,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub batch: BatchOptions,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    #[command(flatten)]
    pub output: OutputOptions,
    #[command(flatten)]
    pub preset: PresetOption,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sight: SightArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Batch")]
pub struct BatchOptions {
    /// Answer JSON lines, from a file or standard input
    ///
    /// Each line of input is a record, and gets one line of output, in the same order.
    ///
    /// A record is {"prompt": ...} or {"messages": [...]} with an "id", or a line of OpenAI's
    /// batches, which gets an answer in OpenAI's form. It may have max_tokens, temperature, top_k,
    /// top_p, min_p, repeat_penalty, repeat_last_n, presence_penalty, frequency_penalty,
    /// logit_bias, seed, stop, system, prefill, raw, json_schema, grammar, regex and
    /// response_format. Blank lines are skipped. A record that fails gets an error as its answer,
    /// and the others continue. A record without a seed gets one from --seed (default 0) and its
    /// id. --ctx-size auto is 4096 here.
    #[arg(
        long, value_name = "FILE|-", num_args = 0..=1, default_missing_value = "-",
        help_heading = "Input"
    )]
    pub batch: Option<PathBuf>,
    /// Write the batch's answers to a file, and continue an interrupted run
    ///
    /// Answers in the file are kept; missing and failed records are computed. A file that contains
    /// anything but answers of a batch is refused and left unchanged. Only one run at a time writes
    /// to it. A new answer replaces an earlier failure.
    #[arg(
        long, value_name = "OUT", requires = "batch", value_hint = ValueHint::FilePath,
        hide_short_help = true
    )]
    pub resume: Option<Destination>,
    /// Answer every N-th record, starting with the I-th, as one of N processes
    #[arg(long, value_name = "I/N", requires = "batch", hide_short_help = true)]
    pub shard: Option<Shard>,
    /// Answer N records of a batch at once
    ///
    /// The answers and their order stay the same. This is faster, because a pass reads the weights
    /// once for all records. Each record takes memory for its own context.
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=64), hide_short_help = true
    )]
    pub parallel: u16,
    /// Exit with code 6 at the end if records failed
    ///
    /// An unknown field then makes a record fail. Otherwise it only causes a note.
    #[arg(long, requires = "batch", hide_short_help = true)]
    pub strict: bool,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputOptions {
    /// Write the answer to a file, which appears when it is complete
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<Destination>,
    /// Format of the output: text, json, jsonl or stream-json
    #[arg(long, value_enum, default_value_t = OutputFormat::Text, hide_short_help = true)]
    pub format: OutputFormat,
    /// Write one JSON object, as --format json does
    #[arg(long, overrides_with = "format")]
    pub json: bool,
    /// Do not add a line break at the end of the text
    ///
    /// By default a text ends with a line break, on pipes and in files too, so that >> does not
    /// join two answers. JSON has the text unchanged.
    #[arg(long, hide_short_help = true)]
    pub no_newline: bool,
    /// Add a line break at the end of the text (the default)
    #[arg(long, hide = true, overrides_with = "no_newline")]
    pub newline: bool,
    /// Print figures: auto, text, json or off
    ///
    /// Figures go to standard error. auto prints one line if standard error is a terminal, and all
    /// figures with -v.
    #[arg(
        long, value_enum, value_name = "HOW", default_value_t = StatsFormat::Auto,
        hide_short_help = true
    )]
    pub stats: StatsFormat,
    /// Write the figures to a file, as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, hide_short_help = true)]
    pub stats_file: Option<Destination>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StatsFormat {
    Auto,
    Text,
    Json,
    Off,
}

impl OutputOptions {
    /// Returns the format that `--format` and `--json` name.
    pub fn format(&self) -> OutputFormat {
        if self.json { OutputFormat::Json } else { self.format }
    }
}
