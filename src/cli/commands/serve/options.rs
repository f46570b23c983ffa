//! The options of `gemma serve`.

use super::access::{ApiKey, ListenHost, PageOrigin};
use crate::cli::api::keep_alive::KeepAlive;
use crate::cli::options::{
    DraftArgs, PresetOption, PromptCacheArgs, RunArgs, SightArgs, TemplateArgs, ThinkOptions,
    UiOptions, memory,
};
use crate::error::Fault;
use crate::runtime::options::AutoOr;
use anyhow::{Context, Result};
use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum, ValueHint};
use std::ops::RangeInclusive;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  gemma serve                                  then open http://127.0.0.1:8080
  gemma serve -m MODEL --parallel 8 --ctx-size 16384
  gemma serve -m MODEL --host 0.0.0.0 --api-key-file KEYS
  gemma serve -m MODEL -m OTHER --keep-alive 5m
Ask it as OpenAI's server:
  curl localhost:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \
\"content\": \"Who are you?\"}]}'";

/// Answer clients over HTTP, with the APIs of OpenAI, Anthropic and Ollama
///
/// Each answer is byte for byte the one that gemma generate gives for the same messages, options
/// and seed, under any load. docs/SERVER.md describes the APIs.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct ServeArgs {
    #[command(flatten)]
    pub edge: EdgeOptions,
    #[command(flatten)]
    pub load: LoadOptions,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub preset: PresetOption,
    #[command(flatten)]
    pub models: ServedModelArgs,
    #[command(flatten)]
    pub sight: SightArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// The models and their device.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and device")]
pub struct ServedModelArgs {
    /// Model: a directory, a GGUF file or an id (repeatable)
    ///
    /// The value is as for gemma generate. The default is the bundled demo model. A single model is
    /// loaded at the start. If there are several, a request names one in its `model`, and the model
    /// is loaded by its first request.
    #[arg(short, long, value_name = "PATH|ID")]
    pub model: Vec<String>,
    /// Also serve the models in a directory: its subdirectories and GGUF files
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub models_dir: Option<PathBuf>,
    /// Time that a model stays loaded after its last answer, such as 5m
    ///
    /// A plain number is in seconds, and -1 means for ever. The default is 5m with several models,
    /// and for ever with one. A request in Ollama's form may set another time with `keep_alive`.
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub keep_alive: Option<KeepAlive>,
    /// Memory for all loaded models, such as 16GB [default: the memory that is free at the start]
    ///
    /// The bytes of a model are counted as by gemma plan. If they do not fit, the models that were
    /// used longest ago are unloaded. This applies only with several models.
    #[arg(long, value_name = "SIZE", value_parser = memory, hide_short_help = true)]
    pub models_memory: Option<u64>,
    #[command(flatten)]
    pub run: RunArgs,
}

impl ServedModelArgs {
    /// Returns whether the options may name several models.
    pub fn is_several(&self) -> bool {
        self.model.len() > 1 || self.models_dir.is_some()
    }
}

/// Address, permissions and limits of connections.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct EdgeOptions {
    /// Address to listen on, localhost or unix:PATH
    ///
    /// An address that others can reach needs a key. localhost listens on 127.0.0.1 and [::1].
    /// unix:PATH is a socket that only this user can connect to. It has no port, and replaces a
    /// socket that a killed server left.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: ListenHost,
    /// Port to listen on; 0 chooses a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub port: u16,
    /// Key that clients must send (repeatable)
    ///
    /// Other users of this machine can see a command line. GEMMA_API_KEY and --api-key-file hide
    /// the key.
    #[arg(long, value_name = "KEY", hide_env_values = true)]
    pub api_key: Vec<ApiKey>,
    /// File with keys that clients must send, one per line
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_key_file: Option<PathBuf>,
    /// Origin of browser pages that may use the server, such as https://chat.example.org
    /// (repeatable)
    ///
    /// Pages of localhost at any port, of local programs and of browser extensions are always
    /// allowed.
    #[arg(long, value_name = "ORIGIN", hide_short_help = true)]
    pub cors_origin: Vec<PageOrigin>,
    /// Limit of a request's body, in megabytes
    #[arg(long, value_name = "MB", default_value_t = 16, value_parser = number(1..=1024))]
    #[arg(hide_short_help = true)]
    pub max_body: u16,
    /// Seconds that a client may take to send a request, or to read what is sent to it
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = number(1..=3600))]
    #[arg(hide_short_help = true)]
    pub client_timeout: u16,
    /// Seconds that running answers may take to end after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = 30, hide_short_help = true)]
    pub grace: u16,
    /// Format of the log of requests on standard error: text, json or off
    #[arg(long, value_enum, value_name = "HOW", default_value_t = LogFormat::Text)]
    pub log: LogFormat,
}

/// Limits of the load.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Load")]
pub struct LoadOptions {
    /// Number of requests answered at once
    ///
    /// A pass reads the weights once for all of them. Each request takes memory for its own
    /// context.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = number(1..=64))]
    pub parallel: u16,
    /// Additional memory for the prefix cache, such as 2GB
    ///
    /// A prompt is read only after the part that it has in common with an earlier text, such as a
    /// conversation or a system message. Unused contexts are a part of this cache, so 0 keeps some
    /// texts.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = memory)]
    pub cache_ram: u64,
    /// Limit of waiting texts, half of them for one client; more get status 429
    #[arg(long, value_name = "N", default_value_t = 128, hide_short_help = true)]
    pub max_queue: u16,
    /// Limit of an answer in tokens if the client gives none; auto is the rest of the context
    #[arg(short = 'n', long, value_name = "N|auto", default_value = "auto")]
    pub max_tokens: AutoOr,
    #[command(flatten)]
    pub think: ThinkOptions,
    #[command(flatten)]
    pub template: TemplateArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
    Off,
}

/// Parses a number of this range.
fn number(range: RangeInclusive<i64>) -> RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(range)
}

impl EdgeOptions {
    /// Returns the keys. A client must send one of them; without keys no client needs one.
    pub fn keys(&self) -> Result<Vec<ApiKey>> {
        let mut keys = self.api_key.clone();
        if let Some(file) = &self.api_key_file {
            let text = crate::cli::io::text_file::read_file(file).context("--api-key-file")?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            let own: Result<Vec<ApiKey>, String> = lines.map(str::parse).collect();
            let own = own.map_err(|why| Fault::usage(format!("{}: {why}", file.display())))?;
            if own.is_empty() {
                let fault = Fault::usage(format!("{} contains no key", file.display()));
                return Err(fault.help("write one key per line").into());
            }
            keys.extend(own);
        }
        if keys.is_empty() && self.host.is_public() {
            let what = format!("--host {} would let others use the model without a key", self.host);
            return Err(Fault::usage(what)
                .help("give --api-key-file FILE, or leave out --host to serve this machine only")
                .into());
        }
        Ok(keys)
    }
}
