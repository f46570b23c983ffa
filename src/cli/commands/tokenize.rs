//! `gemma tokenize`: the ids and pieces of a text, or of the prompt that the chat template makes of
//! it.

use crate::cli::io::input;
use crate::cli::io::output::print;
use crate::cli::options::{InputOptions, SpecialPolicy, UiOptions};
use crate::cli::settings::Typed;
use crate::models::{ChatTemplate, Message, Special};
use crate::runtime::Model;
use anyhow::Result;
use clap::Args;
use std::fmt::Write;

const EXAMPLES: &str = "\
Examples:
  gemma tokenize 'Why is the sky blue?'
  gemma tokenize --template 'Why is the sky blue?'
  gemma tokenize -m MODEL --json -f TEXT.txt | jq '.ids | length'";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES, override_usage = "gemma tokenize [OPTIONS] [TEXT]")]
pub struct TokenizeArgs {
    #[command(flatten)]
    pub input: InputOptions,
    /// Model directory, GGUF file or id [default: the bundled demo model]
    #[arg(short, long, value_name = "PATH|ID")]
    pub model: Option<String>,
    /// Put the text through the chat template first, as a user message
    #[arg(long)]
    pub template: bool,
    /// Control tokens that the text spells
    #[arg(
        long, value_enum, value_name = "HOW", default_value_t = SpecialPolicy::Text,
        hide_short_help = true
    )]
    pub special_in_prompt: SpecialPolicy,
    /// One JSON object: {"ids": [...], "pieces": [...]}, which eval --ids takes
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ui: UiOptions,
}

pub fn run(options: &TokenizeArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    input::check_once(&options.input, typed)?;
    let parts = input::parts(&options.input, input::stdin_is_piped())?;
    let text =
        input::assemble(&parts, &mut std::io::stdin().lock())?.ok_or_else(input::no_prompt)?;
    let model = Model::open(options.model.as_deref(), ui)?;
    let tokenizer = model.tokenizer(ui)?;
    let special = match options.special_in_prompt {
        SpecialPolicy::Text => Special::AsText,
        SpecialPolicy::Parse => Special::Parse,
    };
    let ids = if options.template {
        let message = Message::new("user", text);
        ChatTemplate::from_checkpoint(model.checkpoint(), tokenizer.dialect())?.encode(
            &tokenizer,
            &[message],
            None,
            special,
            None,
        )?
    } else {
        tokenizer.encode(&text, special)?
    };
    let pieces: Vec<String> =
        ids.iter().map(|id| tokenizer.piece(*id).unwrap_or_default()).collect();
    if options.json {
        print(&format!("{}\n", serde_json::json!({"ids": ids, "pieces": pieces})))?;
        return Ok(0);
    }
    let mut out = String::new();
    for (id, piece) in ids.iter().zip(&pieces) {
        writeln!(out, "{id}\t{}", piece.escape_debug())?;
    }
    print(&out)?;
    Ok(0)
}
