//! A conversation as messages and as tokens.
//!
//! The tokens of an answer stay as the model gave them: cut anew by the tokenizer, or trimmed by the template, they might differ from
//! what the cache holds, and all that follows would have to be read again.

use crate::error::Fault;
use crate::gemma::{ChatTemplate, Message, Special, Tokenizer};
use crate::tensor::Token;
use anyhow::Result;
use serde_json::json;

pub struct Conversation<'a> {
    template: ChatTemplate,
    tokenizer: &'a Tokenizer,
    system: Option<String>,
    messages: Vec<Message>,
    /// All of it up to the last answer's last token.
    tokens: Vec<Token>,
}

impl<'a> Conversation<'a> {
    pub fn new(template: ChatTemplate, tokenizer: &'a Tokenizer, system: Option<String>) -> Self {
        Conversation { template, tokenizer, system, messages: Vec::new(), tokens: Vec::new() }
    }

    /// The tokens up to where the model answers `text`; nothing is kept of it before [`answered`](Self::answered).
    pub fn ask(&self, text: &str) -> Result<Vec<Token>> {
        let fresh = self.encode(&self.messages, text)?;
        let Some((last, before)) = self.messages.split_last_chunk::<2>().map(|(before, last)| (last, before)) else {
            return Ok(fresh);
        };
        // As the template and the tokenizer have it, the last answer begins where its prompt ends, and a control token ends it.
        let prompt = self.encode(before, &last[0].content)?;
        let behind = fresh.strip_prefix(&prompt[..]);
        let rest = behind.and_then(|behind| Some(&behind[behind.iter().position(|token| self.tokenizer.is_control(*token))?..]));
        Ok(rest.map_or(fresh.clone(), |rest| [&self.tokens[..], rest].concat()))
    }

    fn encode(&self, messages: &[Message], text: &str) -> Result<Vec<Token>> {
        let user = Message { role: "user".into(), content: text.into() };
        let messages: Vec<Message> = messages.iter().cloned().chain([user]).collect();
        self.template.encode(self.tokenizer, &messages, self.system.as_deref(), Special::AsText, None)
    }

    /// Keeps a message and its answer. `history` is what [`ask`](Self::ask) gave and the answer's tokens.
    pub fn answered(&mut self, text: &str, answer: &str, history: Vec<Token>) {
        self.messages.push(Message { role: "user".into(), content: text.into() });
        self.messages.push(Message { role: "assistant".into(), content: answer.into() });
        self.tokens = history;
    }

    pub fn reset(&mut self) {
        self.messages.clear();
        self.tokens.clear();
    }

    /// Tokens so far.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// As `--messages` reads it.
    pub fn to_json(&self) -> Result<String> {
        if self.messages.is_empty() {
            return Err(Fault::usage("nothing was said yet").into());
        }
        let item = |role: &str, content: &str| json!({"role": role, "content": content});
        let system = self.system.iter().map(|text| item("system", text));
        let all: Vec<_> = system.chain(self.messages.iter().map(|m| item(&m.role, &m.content))).collect();
        Ok(serde_json::to_string_pretty(&all)? + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemma::bundled;

    #[test]
    fn a_prompt_begins_with_all_that_was_said_as_it_was_said() {
        let file = bundled::target().unwrap();
        let tokenizer = Tokenizer::from_bytes(&file.side_file("tokenizer.json").unwrap().unwrap()).unwrap();
        let template = ChatTemplate::from_checkpoint(&file).unwrap();
        let mut talk = Conversation::new(template.clone(), &tokenizer, Some("Be brief.".into()));
        let first = talk.ask("Hi").unwrap();
        // An answer cut letter by letter, with blanks around it that a template trims.
        let answer: Vec<Token> =
            " He llo ".chars().flat_map(|c| tokenizer.encode(&c.to_string(), Special::AsText).unwrap()).collect();
        let history = [&first[..], &answer[..]].concat();
        talk.answered("Hi", " He llo ", history.clone());
        assert_eq!(talk.ask("And?").unwrap(), talk.ask("And?").unwrap(), "asking keeps nothing");
        let second = talk.ask("And?").unwrap();
        assert!(second.starts_with(&history) && second.len() > history.len());
        // Behind the answer all is as the template has it.
        let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        let messages = [message("user", "Hi"), message("assistant", "x"), message("user", "And?")];
        let plain = template.encode(&tokenizer, &messages, Some("Be brief."), Special::AsText, None).unwrap();
        let end = plain.iter().skip(first.len()).position(|t| tokenizer.is_control(*t)).unwrap() + first.len();
        assert_eq!(second[history.len()..], plain[end..]);
        // And so on, whatever earlier answers were cut into.
        let history = [&second[..], &answer[..]].concat();
        talk.answered("And?", " He llo ", history.clone());
        let third = talk.ask("So?").unwrap();
        // The answer's end, the question's two marks, and the next answer's beginning.
        assert!(third.starts_with(&history) && third[history.len()..].iter().filter(|t| tokenizer.is_control(**t)).count() == 4);
        assert_eq!(talk.to_json().unwrap().matches("\"role\"").count(), 5);
        talk.reset();
        assert_eq!(talk.ask("Hi").unwrap(), first);
        assert!(talk.to_json().is_err() && talk.position() == 0);
    }
}
