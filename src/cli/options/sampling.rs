//! Options of sampling. If one is not given, the model's value applies.

use super::Origin;
use crate::models::Generation;
use crate::sampler::SamplerConfig;
use crate::tensor::Token;
use crate::util::units::decimal;
use clap::Args;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingOptions {
    /// Generate at most this many tokens
    #[arg(short = 'n', long, value_name = "N", default_value_t = 512, value_parser = tokens)]
    pub max_tokens: usize,
    /// Temperature; 0 takes the likeliest token [default: the model's]
    #[arg(
        long, alias = "temperature", allow_negative_numbers = true, value_name = "T",
        value_parser = number::<0, 100>
    )]
    pub temp: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all [default: the model's]
    #[arg(long, value_name = "K", hide_short_help = true)]
    pub top_k: Option<usize>,
    /// Nucleus sampling: keep tokens of total probability P [default: the model's]
    ///
    /// The likeliest tokens are kept until their probabilities add up to P.
    #[arg(long, allow_negative_numbers = true, value_name = "P", value_parser = share)]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than P times the likeliest one [default: the model's]
    #[arg(
        long, hide_short_help = true, allow_negative_numbers = true, value_name = "P",
        value_parser = number::<0, 1>
    )]
    pub min_p: Option<f32>,
    /// Repetition penalty: make earlier tokens less likely by the factor X; 1 is off [default: the
    /// model's]
    #[arg(
        long, hide_short_help = true, allow_negative_numbers = true, value_name = "X",
        value_parser = positive
    )]
    pub repeat_penalty: Option<f32>,
    /// Count the last N tokens for --repeat-penalty; -1 counts all [default: -1]
    #[arg(
        long, hide_short_help = true, allow_negative_numbers = true, value_name = "N",
        value_parser = last_n
    )]
    pub repeat_last_n: Option<i64>,
    /// Subtract X from the logits of tokens that are in the answer, from -2 to 2 [default: 0]
    #[arg(
        long, hide_short_help = true, allow_negative_numbers = true, value_name = "X",
        value_parser = number::<-2, 2>
    )]
    pub presence_penalty: Option<f32>,
    /// Subtract X from a token's logit for each occurrence in the answer, from -2 to 2 [default: 0]
    #[arg(
        long, hide_short_help = true, allow_negative_numbers = true, value_name = "X",
        value_parser = number::<-2, 2>
    )]
    pub frequency_penalty: Option<f32>,
    /// Add a number to the logit of a token, given by its id (repeatable)
    ///
    /// The number is from -100, which bans the token, to 100. gemma tokenize prints ids.
    #[arg(long, hide_short_help = true, value_name = "TOKEN=BIAS", value_parser = bias)]
    pub logit_bias: Vec<(Token, f32)>,
    /// Seed of the random numbers [default: random]
    ///
    /// The same model, kind of device and seed give the same text, with and without drafts. The
    /// seed of a text is printed with its figures.
    #[arg(long, value_name = "N", value_parser = seed)]
    pub seed: Option<u64>,
    /// Always take the likeliest token, as with --temp 0
    #[arg(long, hide_short_help = true, conflicts_with = "temp")]
    pub greedy: bool,
    /// Stop before this text (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Continue up to --max-tokens where the model would end its answer
    #[arg(long, hide_short_help = true)]
    pub ignore_eos: bool,
}

/// A setting's name, value and source, as `--print-config` shows them.
pub type Resolved = (&'static str, String, Origin);

impl SamplingOptions {
    /// Returns options that leave every value to the model.
    pub fn of_the_model() -> SamplingOptions {
        SamplingOptions {
            max_tokens: 512,
            temp: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repeat_penalty: None,
            repeat_last_n: None,
            presence_penalty: None,
            frequency_penalty: None,
            logit_bias: Vec::new(),
            seed: None,
            greedy: false,
            stop: Vec::new(),
            ignore_eos: false,
        }
    }

    /// Returns the sampler's settings and their sources.
    ///
    /// Flags, environment and files take precedence over the model's generation_config.json, and
    /// that over the built-in values.
    pub fn resolve(
        &self,
        source: impl Fn(&str) -> Origin,
        model: &Generation,
    ) -> (SamplerConfig, Vec<Resolved>) {
        let mut resolved = Vec::new();
        let mut pick =
            |name: &'static str, given: Option<f64>, model: Option<f64>, built_in: f64| {
                let (value, from) = match (given, model) {
                    (Some(value), _) => (value, source(name)),
                    (None, Some(value)) => (value, Origin::Model),
                    (None, None) => (built_in, Origin::BuiltIn),
                };
                resolved.push((name, value.to_string(), from));
                value
            };
        let wide = |x: Option<f32>| x.map(decimal);
        let whole = |x: Option<usize>| x.map(|x| x as f64);
        let mut config = SamplerConfig {
            temperature: pick("temp", wide(self.temp), wide(model.temperature), 1.0) as f32,
            top_k: pick("top-k", whole(self.top_k), whole(model.top_k), 64.0) as usize,
            top_p: pick("top-p", wide(self.top_p), wide(model.top_p), 0.95) as f32,
            min_p: pick("min-p", wide(self.min_p), wide(model.min_p), 0.0) as f32,
            repeat_penalty: pick(
                "repeat-penalty",
                wide(self.repeat_penalty),
                wide(model.repeat_penalty),
                1.0,
            ) as f32,
            repeat_last_n: pick("repeat-last-n", self.repeat_last_n.map(|n| n as f64), None, -1.0)
                as i64,
            presence_penalty: pick("presence-penalty", wide(self.presence_penalty), None, 0.0)
                as f32,
            frequency_penalty: pick("frequency-penalty", wide(self.frequency_penalty), None, 0.0)
                as f32,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed.unwrap_or_else(random_seed),
        };
        if self.greedy {
            config.temperature = 0.0;
        }
        (config, resolved)
    }
}

/// Returns 32 random bits: easy to type again, and exact in every JSON reader.
fn random_seed() -> u64 {
    rand::random::<u32>() as u64
}

fn tokens(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| "expected a number of tokens, from 0 on; by default there are 512".into())
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| {
        format!("expected a whole number from 0 to {}; without --seed it is random", u64::MAX)
    })
}

/// Parses a number between bounds, both included.
fn number<const LOW: i32, const HIGH: i32>(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if (LOW as f32..=HIGH as f32).contains(&x) => Ok(x),
        _ => Err(format!("expected a number from {LOW} to {HIGH}")),
    }
}

fn last_n(text: &str) -> Result<i64, String> {
    let number = text.parse().ok().filter(|n| *n >= -1);
    number.ok_or_else(|| "expected a number of tokens from 0 on, or -1 for all".into())
}

fn bias(text: &str) -> Result<(Token, f32), String> {
    let pair = text.split_once('=');
    let pair =
        pair.and_then(|(token, bias)| Some((token.parse().ok()?, number::<-100, 100>(bias).ok()?)));
    pair.ok_or_else(|| "expected a token's id and a number from -100 to 100, as in 42=-100".into())
}

fn share(text: &str) -> Result<f32, String> {
    number::<0, 1>(text)
        .ok()
        .filter(|p| *p > 0.0)
        .ok_or_else(|| "expected a number above 0, at most 1".into())
}

fn positive(text: &str) -> Result<f32, String> {
    number::<0, 100>(text)
        .ok()
        .filter(|x| *x > 0.0)
        .ok_or_else(|| "expected a number above 0, at most 100".into())
}
