//! Options of a conversation: instructions, earlier messages, the start of the answer.

use super::SpecialPolicy;
use crate::error::Fault;
use crate::grammar::Grammar;
use crate::models::Tokenizer;
use crate::runtime::constraints::Constrained;
use crate::tensor::Token;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Input")]
pub struct ChatOptions {
    /// Instructions for the model (system prompt)
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Read the instructions from a file
    #[arg(long, value_name = "FILE", hide_short_help = true, conflicts_with = "system")]
    pub system_file: Option<PathBuf>,
    /// Continue a conversation that is stored as JSON
    ///
    /// The file holds an array of {"role": ..., "content": ...}. A prompt, if there is one, becomes
    /// the last message of the user.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub messages: Option<PathBuf>,
    /// Continue the text, without a chat template
    ///
    /// One BOS token goes before the text, and nothing else is added.
    #[arg(long, hide_short_help = true)]
    pub raw: bool,
    /// Start the answer with this text; the output does not repeat it
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, hide_short_help = true)]
    pub prefill: Option<String>,
    /// How to read control tokens in the prompt's text, such as <end_of_turn>
    #[arg(
        long, value_enum, value_name = "HOW", default_value_t = SpecialPolicy::Text,
        hide_short_help = true
    )]
    pub special_in_prompt: SpecialPolicy,
    #[command(flatten)]
    pub think: ThinkOptions,
    #[command(flatten)]
    pub template: TemplateArgs,
}

#[derive(Debug, Clone, Args)]
pub struct ThinkOptions {
    /// Let the model think before it answers: on or off
    ///
    /// Gemma 4 can think. Thoughts are not part of the answer. They count as its tokens, so
    /// --max-tokens has to leave room for them. A grammar or schema applies after the thought.
    #[arg(long, value_enum, value_name = "on|off", default_value_t = Think::Off)]
    pub think: Think,
    /// Limit of a thought in tokens; the thought ends when it is reached [default: no limit]
    ///
    /// The marks around a thought do not count. Without thoughts, the limit has no effect.
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub think_budget: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Think {
    On,
    Off,
}

impl ThinkOptions {
    /// Returns whether the model should think. Refuses a model that cannot.
    pub fn settled(&self, tokenizer: &Tokenizer) -> Result<bool, Fault> {
        if self.think == Think::On && tokenizer.channel().is_none() {
            let what = "--think on: this model cannot think, its vocabulary lacks <|think|>";
            return Err(Fault::usage(what).help("leave --think out, or give a Gemma 4 model"));
        }
        Ok(self.think == Think::On)
    }

    /// Returns the grammar of an answer to `prompt`, and the limit of its thoughts.
    pub fn constrained(
        &self,
        grammar: Option<&Grammar>,
        prompt: &[Token],
        tokenizer: &Tokenizer,
    ) -> Constrained {
        Constrained::new(grammar, prompt, tokenizer, self.think == Think::On, self.think_budget)
    }
}

/// The chat template of a conversation.
#[derive(Debug, Clone, Default, Args)]
pub struct TemplateArgs {
    /// Chat template in place of the model's own: google, or a Jinja file
    ///
    /// google renders what Google's newest templates render: of Gemma 3, and of Gemma 4 since
    /// 2026-07-09. Files that were made before carry older ones.
    #[arg(
        long, value_name = "google|FILE", hide_short_help = true,
        value_hint = clap::ValueHint::FilePath, help_heading = "Input"
    )]
    pub chat_template: Option<PathBuf>,
}
