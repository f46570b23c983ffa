//! What can be typed: the clap types shared by the commands, and the texts around them.
//!
//! Names and defaults are a contract with people's scripts; `settings.rs` adds the environment and `gemma.toml` to each option.

use super::lock::DeviceLock;
use super::npu::Npu;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// What the exit code says.
pub const EXIT_CODES: [(&str, &str); 12] = [
    ("0", "done"),
    ("1", "a failure at run time"),
    ("2", "wrong usage of the command line"),
    ("3", "a model, weight format, tokenizer or input file is missing or invalid"),
    ("4", "the device is absent or was lost"),
    ("5", "the model does not fit in memory"),
    ("6", "some records of a batch failed (with --strict)"),
    ("7", "the prompt exceeds the context"),
    ("8", "the text ended before its grammar was complete"),
    ("130", "interrupted (Ctrl-C)"),
    ("141", "the reader closed the pipe (SIGPIPE)"),
    ("143", "terminated (SIGTERM)"),
];

/// Where values come from.
pub const SETTINGS: &str = "\
Every option can also be set as GEMMA_<NAME> in the environment (GEMMA_MAX_TOKENS=100) or in gemma.toml (max-tokens = 100, or under \
[generate] for one command), in the working directory or as $XDG_CONFIG_HOME/gemma/config.toml. First found wins: flag, environment, \
gemma.toml, the model's generation_config.json, built in. Nothing in a gemma.toml of the working directory may load code or name a \
file to write. --print-config shows each value and where it came from.";

/// Run Gemma 3 models faster: a small draft model guesses several tokens, and the model checks all of them in one pass.
#[derive(Debug, Parser)]
#[command(name = "gemma", version = super::help::VERSION, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text from a prompt
    Generate(Box<super::generate::Generate>),
    /// Talk to the model at a terminal
    Chat(Box<super::chat::Chat>),
    /// Make a smaller model of one: 4 bits per weight or fewer
    Quantize(super::quantize::Quantize),
    /// Measure a model's quality: perplexity, or distance from another
    Eval(super::eval::Eval),
    /// Measure a model's speed, with and without drafts
    Bench(Box<super::bench::Bench>),
    /// Show what memory a model would take here, and how fast it would be
    Plan(Box<super::plan::Plan>),
    /// Show the Gemma 3 models on this machine, and whether they fit
    List(Box<super::list::List>),
    /// Show what a model consists of: its shape, tensors and formats
    Inspect(super::inspect::Inspect),
    /// Show the tokens of a text
    Tokenize(super::tokenize::Tokenize),
    /// Show the devices of this machine, and which one would be chosen
    Devices(super::devices::Devices),
    /// Check this machine, and say what to type about what is wrong
    Doctor(Box<super::doctor::Doctor>),
    /// Print the JSON Schema of generate's JSON result
    Schema,
    /// Print a shell completion script
    Completions(super::manual::Completions),
    /// Print a man page
    Man(super::manual::Man),
}

/// Which model, and where it runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and device")]
pub struct ModelOptions {
    /// Directory, GGUF file or id of a downloaded model
    ///
    /// A directory is one of Hugging Face's or one that gemma quantize made; an id such as google/gemma-3-27b-it names a model in the
    /// Hugging Face cache. Nothing is ever downloaded. Without this option the bundled demo model is used.
    #[arg(short, long, value_name = "PATH|ID")]
    pub model: Option<String>,
    #[command(flatten)]
    pub run: RunOptions,
}

/// Where and how a model runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and device")]
pub struct RunOptions {
    /// auto, cpu, vulkan or vulkan:N (see gemma devices)
    ///
    /// auto takes a GPU for models that are worth it, for as many layers as fit (see --gpu-layers). A named device is taken or refused,
    /// never replaced. The draft model runs where --draft-device says.
    #[arg(short, long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,
    /// Layers that run on the GPU: auto, all, or a number
    ///
    /// auto puts as many there as fit; the others run on the processor. The output head goes to the GPU with the first layer. For one
    /// number of layers the text does not depend on the drafts; another number rounds in other places, as another device does. A number
    /// or all asks for a GPU, and is refused where the layers do not fit.
    #[arg(long, value_name = "N|auto|all", default_value = "auto")]
    pub gpu_layers: GpuLayers,
    /// CPU threads [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Context: tokens of prompt and answer together
    ///
    /// auto makes room for what the prompt and --max-tokens need; for eval it is the length of a window, and auto that of the longest text.
    #[arg(short, long, value_name = "N|auto", default_value = "auto")]
    pub ctx_size: AutoOr,
    /// Precision of the stored keys and values
    ///
    /// auto is f16 for quantised weights and f32 for others. q8 stores 8-bit integers with a scale for every 32 channels: little more than
    /// half the memory of f16, for contexts that would not fit otherwise.
    #[arg(long, value_enum, default_value_t = Kv::Auto)]
    pub kv: Kv,
    /// What to do where another process uses the same GPU
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = DeviceLock::Wait)]
    pub device_lock: DeviceLock,
    /// NPU beside the device: auto, off, force, or model
    ///
    /// The NPU takes full pages of the layers that see the whole context. auto uses an AMD NPU of the first generation where that is
    /// measured to pay (long contexts only), force uses it in any case. model runs the same kernel on a software model of the NPU, slowly,
    /// for tests; model:FILE takes the kernel from a library made with npu-kernels/build.sh --host. This has never run on a real NPU.
    #[arg(long, value_name = "MODE", default_value = "auto", hide_short_help = true)]
    pub npu: Npu,
    /// Fault that the NPU's model shall have, and from which command on: abort@3
    #[arg(long, value_name = "KIND[@N]", hide = true)]
    pub npu_fault: Option<crate::npu::host::Fault>,
    /// Instructions of the CPU kernels: scalar, avx2 or avx512-vnni; a processor without the others, as far as speed goes
    #[arg(long, value_name = "ISA", hide = true)]
    pub isa: Option<crate::compute::cpu::Isa>,
    /// Compare every kernel's result with its scalar twin's, and stop at the first difference (very slow)
    #[arg(long, hide_short_help = true)]
    pub check: bool,
}

/// A number, or the program's choice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AutoOr {
    #[default]
    Auto,
    N(usize),
}

impl std::str::FromStr for AutoOr {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(AutoOr::Auto),
            _ => match s.parse() {
                Ok(n) if n > 0 => Ok(AutoOr::N(n)),
                _ => Err("expected auto or a number above 0".into()),
            },
        }
    }
}

/// How many layers the GPU gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GpuLayers {
    /// As many as fit.
    #[default]
    Auto,
    All,
    N(usize),
}

impl std::str::FromStr for GpuLayers {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(GpuLayers::Auto),
            "all" => Ok(GpuLayers::All),
            _ => s.parse().map(GpuLayers::N).map_err(|_| "expected auto, all or a number".into()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kv {
    Auto,
    F16,
    F32,
    Q8,
}

/// What is said on standard error.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Terminal")]
pub struct UiOptions {
    /// Print nothing on standard error but errors
    #[arg(short, long)]
    pub quiet: bool,
    /// Print more details; -vv prints more still
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Show progress bars; auto does on a terminal, until the first token
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = OnTerminal::Auto)]
    pub progress: OnTerminal,
    /// Use colours; auto does on a terminal, unless NO_COLOR, CLICOLOR=0 or TERM=dumb says otherwise
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Colour::Auto)]
    pub color: Colour,
    /// Print each option's value and where it came from, in the form of gemma.toml, and stop
    #[arg(long)]
    pub print_config: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnTerminal {
    Auto,
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Colour {
    Auto,
    Always,
    Never,
}

/// Where a prompt or text comes from; joined by `input.rs`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Input")]
pub struct InputOptions {
    /// The prompt, in quotes; `-` stands for standard input
    ///
    /// Files (-f, in order), then piped standard input, then PROMPT are joined by blank lines. An argument `-` puts standard
    /// input exactly there. One final line break of a file or of standard input is dropped.
    #[arg(value_name = "PROMPT")]
    pub words: Vec<String>,
    /// The prompt, as an option
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// Put a file in front of the prompt (repeatable)
    ///
    /// Files are joined in the order in which they are given; `-` is standard input.
    #[arg(short, long, value_name = "FILE")]
    pub file: Vec<PathBuf>,
}

/// What becomes of a model's control tokens in the user's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpecialPolicy {
    /// They are characters like any others
    Text,
    /// They are control tokens
    Parse,
}

impl Command {
    /// As typed.
    pub fn name(&self) -> &'static str {
        match self {
            Command::Generate(_) => "generate",
            Command::Chat(_) => "chat",
            Command::Quantize(_) => "quantize",
            Command::Eval(_) => "eval",
            Command::Bench(_) => "bench",
            Command::Plan(_) => "plan",
            Command::List(_) => "list",
            Command::Inspect(_) => "inspect",
            Command::Tokenize(_) => "tokenize",
            Command::Devices(_) => "devices",
            Command::Doctor(_) => "doctor",
            Command::Schema => "schema",
            Command::Completions(_) => "completions",
            Command::Man(_) => "man",
        }
    }
}
