//! `gemma tokenize`: the token ids and pieces of a text, or of a prompt made by the chat template.

use crate::cli::api::tokens::spelled;
use crate::cli::io::input;
use crate::cli::io::output::print;
use crate::cli::io::prompt::{chat_template, read_messages};
use crate::cli::options::{InputOptions, SpecialPolicy, TemplateArgs, UiOptions};
use crate::cli::settings::Typed;
use crate::models::{Message, Special};
use crate::runtime::Model;
use anyhow::Result;
use clap::Args;
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  gemma tokenize 'Why is the sky blue?'
  gemma tokenize --template 'Why is the sky blue?'
  gemma tokenize --messages TALK.json --rendered
  gemma tokenize -m MODEL --json -f TEXT.txt | jq '.ids | length'";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES, override_usage = "gemma tokenize [OPTIONS] [TEXT]")]
pub struct TokenizeArgs {
    #[command(flatten)]
    pub input: InputOptions,
    /// Model directory, GGUF file or id [default: the bundled demo model]
    #[arg(short, long, value_name = "PATH|ID")]
    pub model: Option<String>,
    /// Apply the chat template first, with the text as a user message
    #[arg(long)]
    pub template: bool,
    /// Apply the chat template to a conversation that is stored as JSON
    ///
    /// The file holds an array of {"role": ..., "content": ...}, as for gemma generate. A text, if
    /// there is one, becomes the last message of the user.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub messages: Option<PathBuf>,
    /// Print the text that the chat template produces for the model, instead of tokens
    #[arg(long, conflicts_with = "json")]
    pub rendered: bool,
    #[command(flatten)]
    pub chat_template: TemplateArgs,
    /// How to read control tokens in the text
    #[arg(
        long, value_enum, value_name = "HOW", default_value_t = SpecialPolicy::Text,
        hide_short_help = true
    )]
    pub special_in_prompt: SpecialPolicy,
    /// Print one JSON object, {"ids": [...], "pieces": [...]}, for eval --ids
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ui: UiOptions,
}

pub fn run(options: &TokenizeArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    input::check_once(&options.input, typed)?;
    let parts = input::parts(&options.input, input::stdin_is_piped())?;
    let text = input::assemble(&parts, &mut std::io::stdin().lock())?;
    let mut messages = match &options.messages {
        Some(file) => read_messages(file)?,
        None => Vec::new(),
    };
    if text.is_none() && messages.is_empty() {
        return Err(input::no_prompt().into());
    }
    let model = Model::open(options.model.as_deref(), ui)?;
    let tokenizer = model.tokenizer(ui)?;
    let special = match options.special_in_prompt {
        SpecialPolicy::Text => Special::AsText,
        SpecialPolicy::Parse => Special::Parse,
    };
    let is_chosen = options.chat_template.chat_template.is_some();
    let ids = if options.template || options.rendered || options.messages.is_some() || is_chosen {
        messages.extend(text.map(|text| Message::new("user", text)));
        let template = chat_template(&model, &tokenizer, &options.chat_template, ui)?;
        template.encode(&tokenizer, &messages, None, special, None)?
    } else {
        tokenizer.encode(&text.unwrap_or_default(), special)?
    };
    if options.rendered {
        print(&spelled(&tokenizer, &ids))?;
        return Ok(0);
    }
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
