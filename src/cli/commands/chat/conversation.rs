//! A conversation as messages and as tokens.
//!
//! The tokens of an answer stay as the model generated them. Tokenised again, or trimmed by the
//! template, they might differ from the cached tokens, and everything after them would have to be
//! read again.

use crate::error::Fault;
use crate::models::{ChatTemplate, Image, Message, MessageImage, Special, Tokenizer};
use crate::tensor::Token;
use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Clone)]
pub struct Conversation<'a> {
    template: ChatTemplate,
    tokenizer: &'a Tokenizer,
    system: Option<String>,
    turns: Vec<Turn>,
    /// Number of the oldest turns, which the model no longer sees, to make room for new ones.
    unseen: usize,
    /// Images for the next message.
    shown: Vec<ShownImage>,
    /// All tokens that the model has seen, up to the end of the last answer. [`Turn::end`] says how
    /// far they are valid.
    tokens: Vec<Token>,
}

/// An image in the prompt, and its file.
#[derive(Clone, Debug)]
pub struct ShownImage {
    pub image: Arc<Image>,
    pub file: Arc<[u8]>,
}

/// Returns a user message with its images before the text.
fn user(text: &str, images: &[ShownImage]) -> Message {
    let mut message = Message::new("user", text);
    let image = |shown: &ShownImage| MessageImage { at: 0, file: shown.file.clone() };
    message.images = images.iter().map(image).collect();
    message
}

impl Turn {
    /// Returns the message and its answer.
    fn messages(&self) -> [Message; 2] {
        [user(&self.user, &self.images), Message::new("assistant", &*self.assistant)]
    }

    /// Returns the user's message as JSON, with images as data URLs.
    fn asked(&self) -> Value {
        if self.images.is_empty() {
            return json!({"role": "user", "content": self.user});
        }
        let image = |shown: &ShownImage| {
            let url = format!("data:;base64,{}", STANDARD.encode(&shown.file));
            json!({"type": "image_url", "image_url": {"url": url}})
        };
        let text = json!({"type": "text", "text": self.user});
        let content: Vec<Value> = self.images.iter().map(image).chain([text]).collect();
        json!({"role": "user", "content": content})
    }
}

/// A message and its answer.
#[derive(Clone, Debug)]
struct Turn {
    user: String,
    /// Images before the text.
    images: Vec<ShownImage>,
    assistant: String,
    /// Number of the conversation's tokens at the answer's end. `None` if they are not the model's
    /// own: the turn was read from a file, or the text before it changed.
    end: Option<usize>,
}

impl<'a> Conversation<'a> {
    pub fn new(template: ChatTemplate, tokenizer: &'a Tokenizer, system: Option<String>) -> Self {
        Conversation {
            template,
            tokenizer,
            system,
            turns: Vec::new(),
            unseen: 0,
            shown: Vec::new(),
            tokens: Vec::new(),
        }
    }

    /// Adds an image to the next message.
    pub fn show(&mut self, image: ShownImage) {
        self.shown.push(image);
    }

    /// Removes the images of the next message.
    pub fn show_none(&mut self) {
        self.shown.clear();
    }

    /// Returns the images of the prompt, including those of the next message.
    pub fn images(&self) -> Vec<Arc<Image>> {
        let turns = self.turns[self.unseen..].iter().flat_map(|turn| &turn.images);
        turns.chain(&self.shown).map(|shown| shown.image.clone()).collect()
    }

    /// Returns the prompt's tokens, up to where the model answers `text`.
    ///
    /// The message is not stored before [`answered`](Self::answered).
    pub fn ask(&self, text: &str) -> Result<Vec<Token>> {
        let seen = &self.turns[self.unseen..];
        let fresh = self.encode(seen, (text, &self.shown))?;
        let Some((last, before)) = seen.split_last() else { return Ok(fresh) };
        let Some(tokens) = last.end.map(|end| &self.tokens[..end]) else { return Ok(fresh) };
        // In the template's text, the last answer begins where its prompt ends. A control token
        // ends it.
        let prompt = self.encode(before, (&last.user, &last.images))?;
        let answer = fresh.strip_prefix(&prompt[..]);
        let rest = answer.and_then(|answer| {
            Some(&answer[answer.iter().position(|token| self.tokenizer.is_control(*token))?..])
        });
        Ok(rest.map_or(fresh.clone(), |rest| [tokens, rest].concat()))
    }

    /// Returns the number of tokens of a prompt with only the instructions and `text`.
    pub fn alone(&self, text: &str) -> Result<usize> {
        Ok(self.encode(&[], (text, &self.shown))?.len())
    }

    fn encode(&self, turns: &[Turn], last: (&str, &[ShownImage])) -> Result<Vec<Token>> {
        let last_message = user(last.0, last.1);
        let messages: Vec<Message> =
            turns.iter().flat_map(Turn::messages).chain([last_message]).collect();
        let tokens = self.template.encode(
            self.tokenizer,
            &messages,
            self.system.as_deref(),
            Special::AsText,
            None,
        )?;
        let Some(text) = self.template.images() else { return Ok(tokens) };
        let images = turns.iter().flat_map(|turn| &turn.images).chain(last.1);
        let places: Vec<_> = images.map(|shown| shown.image.places()).collect();
        text.place(&tokens, &places)
    }

    /// Stores a message and its answer.
    ///
    /// `history` is the result of [`ask`](Self::ask) followed by the answer's tokens.
    pub fn answered(&mut self, text: &str, answer: &str, history: Vec<Token>) {
        // If the answer's tokens do not continue the earlier ones, the earlier ones become unknown.
        let seen = history.iter().zip(&self.tokens).take_while(|(new, old)| new == old).count();
        self.turns
            .iter_mut()
            .filter(|turn| turn.end.is_some_and(|end| end > seen))
            .for_each(|turn| turn.end = None);
        // The template leaves thoughts out of later prompts.
        let is_thought = |token: &Token| self.tokenizer.channel().is_some_and(|c| c.0 == *token);
        let is_plain = !history[seen..].iter().any(is_thought);
        self.turns.push(Turn {
            user: text.into(),
            images: std::mem::take(&mut self.shown),
            assistant: answer.into(),
            end: is_plain.then_some(history.len()),
        });
        self.tokens = history;
    }

    pub fn reset(&mut self) {
        self.turns.clear();
        self.unseen = 0;
        self.shown.clear();
        self.tokens.clear();
    }

    /// Removes the last message and its answer, and returns the message.
    ///
    /// Its images move to the next message.
    pub fn undo(&mut self) -> Option<String> {
        let turn = self.turns.pop()?;
        self.shown = turn.images;
        if self.unseen >= self.turns.len() {
            self.unseen = 0;
        }
        Some(turn.user)
    }

    /// Leaves the oldest visible message and its answer out of later prompts.
    ///
    /// Returns `false` if there is none. Both stay in the saved conversation.
    pub fn leave_out_oldest(&mut self) -> bool {
        let some = self.unseen < self.turns.len();
        self.unseen += some as usize;
        self.forget_tokens();
        some
    }

    /// Discards the tokens, because the text before the turns changed.
    fn forget_tokens(&mut self) {
        self.turns.iter_mut().for_each(|turn| turn.end = None);
        self.tokens.clear();
    }

    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Replaces the instructions of this conversation.
    pub fn set_system(&mut self, system: Option<String>) {
        self.system = system;
        self.forget_tokens();
    }

    /// Replaces the conversation by messages of a file, including its instructions.
    ///
    /// Returns the last message if it has no answer yet.
    pub fn load(
        &mut self,
        messages: Vec<Message>,
        see: &dyn Fn(&Arc<[u8]>) -> Result<ShownImage>,
    ) -> Result<Option<String>> {
        let bad = |what: &str| {
            Fault::model(what)
                .help("a conversation is [system,] user, assistant, user, assistant, ...")
        };
        let mut messages = messages.into_iter().peekable();
        let system =
            messages.next_if(|message| message.role == "system").map(|message| message.content);
        let (mut turns, mut shown) = (Vec::new(), Vec::new());
        let mut open = None;
        while let Some(message) = messages.next() {
            if message.role != "user" {
                return Err(bad(&format!(
                    "a message of role {:?} is where a user's is expected",
                    message.role
                ))
                .into());
            }
            let images = message.images.iter().map(|image| see(&image.file));
            let images = images.collect::<Result<Vec<_>>>()?;
            match messages.next() {
                Some(answer) if matches!(answer.role.as_str(), "assistant" | "model") => {
                    turns.push(Turn {
                        user: message.content,
                        images,
                        assistant: answer.content,
                        end: None,
                    });
                }
                Some(other) => {
                    let what = format!(
                        "a message of role {:?} is where an answer is expected",
                        other.role
                    );
                    return Err(bad(&what).into());
                }
                None => (open, shown) = (Some(message.content), images),
            }
        }
        if turns.is_empty() && open.is_none() {
            return Err(bad("the file holds no messages").into());
        }
        self.reset();
        (self.system, self.turns, self.shown) = (system, turns, shown);
        Ok(open)
    }

    /// Returns the number of messages with answers, including those that the model no longer sees.
    pub fn turns(&self) -> usize {
        self.turns.len()
    }

    /// Returns the number of tokens so far; 0 if unknown.
    pub fn position(&self) -> usize {
        self.turns.last().and_then(|turn| turn.end).unwrap_or(0)
    }

    /// Returns the conversation with its instructions.
    pub fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new("system", text));
        system.chain(self.turns.iter().flat_map(Turn::messages)).collect()
    }

    /// Returns the conversation in the form that `--messages` and `/load` read.
    pub fn to_json(&self) -> Result<String> {
        let item = |role: &str, content: &str| json!({"role": role, "content": content});
        let system = self.system.iter().map(|text| item("system", text));
        let pair = |turn: &Turn| [turn.asked(), item("assistant", &turn.assistant)];
        let all: Vec<_> = system.chain(self.turns.iter().flat_map(pair)).collect();
        Ok(serde_json::to_string_pretty(&all)? + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::gemma3::bundled;
    use crate::models::tokenizer::samples::thinking_letters;

    fn none(_: &Arc<[u8]>) -> Result<ShownImage> {
        panic!("there are no images")
    }

    #[test]
    fn a_prompt_begins_with_all_that_was_said_as_it_was_said() {
        let tokenizer = tokenizer();
        let template = ChatTemplate::built_in(&crate::models::gemma3::DIALECT);
        let mut talk = Conversation::new(template.clone(), &tokenizer, Some("Be brief.".into()));
        let first = talk.ask("Hi").unwrap();
        // An answer of single letters, with spaces at its ends that a template trims.
        let answer: Vec<Token> = " He llo "
            .chars()
            .flat_map(|c| tokenizer.encode(&c.to_string(), Special::AsText).unwrap())
            .collect();
        let history = [&first[..], &answer[..]].concat();
        talk.answered("Hi", " He llo ", history.clone());
        assert_eq!(talk.ask("And?").unwrap(), talk.ask("And?").unwrap(), "asking keeps nothing");
        let second = talk.ask("And?").unwrap();
        assert!(second.starts_with(&history) && second.len() > history.len());
        // After the answer, the prompt equals the template's text.
        let message = |role: &str, content: &str| Message::new(role, content);
        let messages = [message("user", "Hi"), message("assistant", "x"), message("user", "And?")];
        let plain = template
            .encode(&tokenizer, &messages, Some("Be brief."), Special::AsText, None)
            .unwrap();
        let end = plain.iter().skip(first.len()).position(|t| tokenizer.is_control(*t)).unwrap()
            + first.len();
        assert_eq!(second[history.len()..], plain[end..]);
        // This holds for the next prompt too, however the earlier answers were tokenised.
        let history = [&second[..], &answer[..]].concat();
        talk.answered("And?", " He llo ", history.clone());
        let third = talk.ask("So?").unwrap();
        // The answer's end, two marks of the question, and the start of the next answer.
        assert!(
            third.starts_with(&history)
                && third[history.len()..].iter().filter(|t| tokenizer.is_control(**t)).count() == 4
        );
        assert_eq!(talk.to_json().unwrap().matches("\"role\"").count(), 5);
        talk.reset();
        assert_eq!(talk.ask("Hi").unwrap(), first);
        assert!(talk.turns() == 0 && talk.position() == 0);
    }

    /// The demo's template shows the model only the last message.
    #[test]
    fn a_template_may_leave_out_what_was_said() {
        let (file, tokenizer) = (bundled::target().unwrap(), tokenizer());
        let template =
            ChatTemplate::from_checkpoint(&file, &crate::models::gemma3::DIALECT).unwrap();
        let mut talk = Conversation::new(template, &tokenizer, Some("Be brief.".into()));
        let first = talk.ask("Hi").unwrap();
        talk.answered("Hi", "Yes", [&first[..], &first[..1]].concat());
        for text in ["And?", "Hi"] {
            assert_eq!(talk.ask(text).unwrap().len(), talk.alone(text).unwrap());
        }
        assert_eq!(talk.ask("Hi").unwrap(), first);
    }

    #[test]
    fn thoughts_are_not_read_again() {
        let tokenizer = thinking_letters();
        let template = ChatTemplate::built_in(&crate::models::gemma4::DIALECT).thinking(true);
        let mut talk = Conversation::new(template.clone(), &tokenizer, None);
        let first = talk.ask("Hi").unwrap();
        let encode = |text: &str| tokenizer.encode(text, Special::Parse).unwrap();
        let plain = [&first[..], &encode("Yes")].concat();
        talk.answered("Hi", "Yes", plain.clone());
        assert!(talk.ask("And?").unwrap().starts_with(&plain));
        talk.undo();
        let thought = encode("<|channel>thought\nHm.\n<channel|>Yes");
        talk.answered("Hi", "Yes", [&first[..], &thought].concat());
        let messages = [
            Message::new("user", "Hi"),
            Message::new("assistant", "Yes"),
            Message::new("user", "And?"),
        ];
        let fresh = template.encode(&tokenizer, &messages, None, Special::AsText, None).unwrap();
        assert_eq!(talk.ask("And?").unwrap(), fresh);
    }

    /// Returns a conversation of three answers, and the prompts of all of them.
    fn three<'a>(tokenizer: &'a Tokenizer) -> (Conversation<'a>, Vec<Vec<Token>>) {
        let mut talk = Conversation::new(
            ChatTemplate::built_in(&crate::models::gemma3::DIALECT),
            tokenizer,
            None,
        );
        let mut prompts = Vec::new();
        for text in ["one", "two", "three"] {
            let prompt = talk.ask(text).unwrap();
            let answer: Vec<Token> = "yes"
                .chars()
                .flat_map(|c| tokenizer.encode(&c.to_string(), Special::AsText).unwrap())
                .collect();
            talk.answered(text, "yes", [&prompt[..], &answer].concat());
            prompts.push(prompt);
        }
        (talk, prompts)
    }

    fn tokenizer() -> Tokenizer {
        let file = bundled::target().unwrap();
        Tokenizer::from_bytes(&file.side_file("tokenizer.json").unwrap().unwrap()).unwrap()
    }

    #[test]
    fn what_is_undone_leaves_the_conversation_as_it_was() {
        let tokenizer = tokenizer();
        let (mut talk, prompts) = three(&tokenizer);
        for (text, prompt) in ["one", "two", "three"].iter().zip(&prompts).rev() {
            assert_eq!(talk.undo().as_deref(), Some(*text));
            assert_eq!(&talk.ask(text).unwrap(), prompt, "{text}");
        }
        assert_eq!(talk.undo(), None);
    }

    #[test]
    fn the_oldest_turns_are_left_out_of_the_prompt_and_stay_in_the_file() {
        let tokenizer = tokenizer();
        let (mut talk, _) = three(&tokenizer);
        let whole = talk.ask("four").unwrap();
        assert!(talk.leave_out_oldest());
        let less = talk.ask("four").unwrap();
        assert!(less.len() < whole.len());
        // The rest equals a conversation of only the two other messages.
        let mut later = Conversation::new(talk.template.clone(), &tokenizer, None);
        let message = |role: &str, content: &str| Message::new(role, content);
        let pair = |text| [message("user", text), message("assistant", "yes")];
        assert_eq!(
            later.load(["two", "three"].into_iter().flat_map(pair).collect(), &none).unwrap(),
            None
        );
        assert_eq!(less, later.ask("four").unwrap());
        assert!(talk.leave_out_oldest() && talk.leave_out_oldest() && !talk.leave_out_oldest());
        assert_eq!(talk.ask("four").unwrap().len(), talk.alone("four").unwrap());
        assert_eq!(talk.to_json().unwrap().matches("\"role\"").count(), 6);
    }

    #[test]
    fn new_instructions_and_a_file_begin_from_messages_alone() {
        let tokenizer = tokenizer();
        let (mut talk, _) = three(&tokenizer);
        let before = talk.ask("four").unwrap();
        talk.set_system(Some("Be brief.".into()));
        let with = talk.ask("four").unwrap();
        assert_ne!(with, before);
        let saved: Vec<serde_json::Value> = serde_json::from_str(&talk.to_json().unwrap()).unwrap();
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        let messages: Vec<Message> =
            saved.iter().map(|m| Message::new(text(&m["role"]), text(&m["content"]))).collect();
        let mut other = Conversation::new(talk.template.clone(), &tokenizer, None);
        assert_eq!(other.load(messages.clone(), &none).unwrap(), None);
        assert_eq!(other.ask("four").unwrap(), with);
        // A message without an answer is returned, to be answered next. Other orders are refused
        // and change nothing.
        assert_eq!(other.load(messages[..2].to_vec(), &none).unwrap().as_deref(), Some("one"));
        for wrong in [&messages[2..], &[], &[messages[1].clone(), messages[3].clone()]] {
            assert!(other.load(wrong.to_vec(), &none).is_err());
            assert_eq!(other.system(), Some("Be brief."));
        }
    }
}
