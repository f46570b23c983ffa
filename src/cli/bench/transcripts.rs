//! Transcripts to replay: JSON lines to tokens, each with the part that is to be guessed.

use crate::cli::text_file::read_file;
use crate::error::Fault;
use crate::models::{ChatTemplate, Message, Special, Tokenizer};
use crate::tensor::Token;
use crate::util::json;
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::Path;

/// One text: what is given and what is to be guessed after it.
pub struct Transcript {
    pub id: String,
    pub category: String,
    /// At least one token.
    pub prompt: Vec<Token>,
    pub answer: Vec<Token>,
}

const EXPECTED: &str = r#"a line is {"prompt": "...", "answer": "..."}, {"messages": [{"role", "content"}, ...]}, {"text": "..."} or
{"prompt_ids": [...], "answer_ids": [...]}, with "category" and "id" where wanted"#;

/// Reads a file. Of `messages` each answer is a transcript, what was said before it its prompt; a
/// `text` is guessed from its first token on. Answers are cut to `longest` tokens.
pub fn read(
    path: &Path,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    longest: usize,
) -> Result<Vec<Transcript>> {
    let mut out = Vec::new();
    for (i, line) in
        read_file(path)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty())
    {
        let bad = || {
            Fault::model(format!("{}, line {} is not a transcript", path.display(), i + 1))
                .help(EXPECTED)
        };
        let value: Value = json::parse(line.as_bytes()).with_context(bad)?;
        let parts = parts(&value, tokenizer, template).with_context(bad)?.with_context(bad)?;
        let category = value["category"].as_str().unwrap_or("text").to_owned();
        let id = match &value["id"] {
            Value::Null => (i + 1).to_string(),
            Value::String(id) => id.clone(),
            id => id.to_string(),
        };
        out.extend(
            parts
                .into_iter()
                .filter(|(prompt, answer)| !prompt.is_empty() && !answer.is_empty())
                .map(|(prompt, mut answer)| {
                    answer.truncate(longest);
                    Transcript { id: id.clone(), category: category.clone(), prompt, answer }
                }),
        );
    }
    Ok(out)
}

type Parts = Vec<(Vec<Token>, Vec<Token>)>;

fn parts(value: &Value, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Option<Parts>> {
    let ids = |key: &str| -> Option<Vec<Token>> {
        let known = |id: &Value| {
            id.as_u64().filter(|id| (*id as usize) < tokenizer.vocab()).map(|id| id as Token)
        };
        value[key].as_array()?.iter().map(known).collect()
    };
    if let (Some(prompt), Some(answer)) = (ids("prompt_ids"), ids("answer_ids")) {
        return Ok(Some(vec![(prompt, answer)]));
    }
    if let Some(text) = value["text"].as_str() {
        let mut tokens = tokenizer.encode(text, Special::AsText)?;
        let prompt = match tokenizer.id("<bos>") {
            Some(bos) => vec![bos],
            None => tokens.drain(..tokens.len().min(1)).collect(),
        };
        return Ok(Some(vec![(prompt, tokens)]));
    }
    let message =
        |role: &str, content: &str| Message { role: role.to_owned(), content: content.to_owned() };
    let messages = if let Some(list) = value["messages"].as_array() {
        let read = |m: &Value| Some(message(m["role"].as_str()?, m["content"].as_str()?));
        list.iter().map(read).collect::<Option<Vec<_>>>()
    } else {
        let answer = value["answer"].as_str().or_else(|| value["reference"].as_str());
        value["prompt"]
            .as_str()
            .zip(answer)
            .map(|(p, a)| vec![message("user", p), message("assistant", a)])
    };
    let Some(messages) = messages else { return Ok(None) };
    let end = tokenizer.id("<end_of_turn>");
    let answers = messages.iter().enumerate().filter(|(_, m)| m.role == "assistant");
    let part = |(at, answer): (usize, &Message)| {
        let prompt = template.encode(tokenizer, &messages[..at], None, Special::AsText, None)?;
        let mut tokens = tokenizer.encode(answer.content.trim(), Special::AsText)?;
        tokens.extend(end);
        Ok((prompt, tokens))
    };
    answers.map(part).collect::<Result<Parts>>().map(Some)
}
