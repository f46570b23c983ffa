//! Functions that answers may call: their description in the prompt, and a parser of calls.

use crate::grammar::tools::{ARGUMENTS, CALL, Tool};
use crate::models::Message;
use serde_json::json;

/// Returns the description of the functions for the prompt.
pub fn instructions(tools: &[Tool]) -> String {
    let mut text = "You can call these functions:\n".to_owned();
    for Tool { name, description, parameters } in tools {
        let mut shown = json!({"name": name});
        if let Some(description) = description {
            shown["description"] = description.clone().into();
        }
        if !parameters.is_null() {
            shown["parameters"] = parameters.clone();
        }
        text += &format!("{shown}\n");
    }
    let calls = "To call one, answer with nothing but a line of JSON such as {\"name\": \"NAME\", \
        \"arguments\": {}}, and with a line for each of several calls.";
    let results = "The results come in the next message. Otherwise answer in plain text.";
    text + &format!("{calls} {results}")
}

/// Returns a call as the model writes it.
pub fn spelled(name: &str, arguments: &str) -> String {
    format!("{CALL}{name}{ARGUMENTS}{arguments}}}")
}

/// Returns the result of a call as the model reads it.
pub fn result(name: Option<&str>, content: &str) -> String {
    match name {
        Some(name) => format!("Result of {name}: {content}"),
        None => format!("Result: {content}"),
    }
}

/// Adds the result of a call. Consecutive results become one user message.
pub fn push_result(messages: &mut Vec<Message>, open: &mut bool, text: String) {
    match messages.last_mut().filter(|last| *open && last.role == "user") {
        Some(last) => last.content = format!("{}\n{text}", last.content),
        None => messages.push(Message { role: "user".into(), content: text }),
    }
    *open = true;
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerPart {
    Text(String),
    /// A call of this function begins.
    Call(String),
    /// More of the last call's arguments.
    Arguments(String),
}

/// State of a reader within an answer.
#[derive(Clone, Debug, PartialEq)]
enum ReaderState {
    Begin,
    Text,
    /// In the text before the arguments.
    Head(String),
    Arguments {
        depth: usize,
        in_string: bool,
        escaped: bool,
    },
    /// Between the end of the arguments and the next call.
    Between,
}

/// A parser of answers that follow the grammar of calls.
#[derive(Clone, Debug)]
pub struct CallReader {
    state: ReaderState,
}

impl CallReader {
    /// Makes a reader. Without `calls` all text is plain text.
    pub fn new(calls: bool) -> CallReader {
        CallReader { state: if calls { ReaderState::Begin } else { ReaderState::Text } }
    }

    /// Splits a piece of the answer into parts.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let mut parts: Vec<AnswerPart> = Vec::new();
        for c in text.chars() {
            match &mut self.state {
                ReaderState::Begin | ReaderState::Between if c == '{' => {
                    self.state = ReaderState::Head("{".into())
                }
                ReaderState::Between => {}
                ReaderState::Begin | ReaderState::Text => {
                    self.state = ReaderState::Text;
                    match parts.last_mut() {
                        Some(AnswerPart::Text(text)) => text.push(c),
                        _ => parts.push(AnswerPart::Text(c.into())),
                    }
                }
                ReaderState::Head(head) => {
                    head.push(c);
                    let name = head.strip_prefix(CALL).and_then(|h| h.strip_suffix(ARGUMENTS));
                    if let Some(name) = name {
                        parts.push(AnswerPart::Call(name.to_owned()));
                        self.state =
                            ReaderState::Arguments { depth: 0, in_string: false, escaped: false };
                    }
                }
                ReaderState::Arguments { depth, in_string, escaped } => {
                    match (&parts[..], c) {
                        _ if std::mem::take(escaped) => {}
                        (_, '\\') if *in_string => *escaped = true,
                        (_, '"') => *in_string = !*in_string,
                        (_, '{' | '[') if !*in_string => *depth += 1,
                        // This brace ends the call itself.
                        (_, '}') if !*in_string && *depth == 0 => {
                            self.state = ReaderState::Between;
                            continue;
                        }
                        (_, '}' | ']') if !*in_string => *depth -= 1,
                        _ => {}
                    }
                    match parts.last_mut() {
                        Some(AnswerPart::Arguments(text)) => text.push(c),
                        _ => parts.push(AnswerPart::Arguments(c.into())),
                    }
                }
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the parts of a text that arrives in pieces of `piece` characters.
    fn parts(text: &str, calls: bool, piece: usize) -> Vec<AnswerPart> {
        let mut reader = CallReader::new(calls);
        let chars: Vec<char> = text.chars().collect();
        let mut all: Vec<AnswerPart> = Vec::new();
        for piece in chars.chunks(piece) {
            for part in reader.push(&piece.iter().collect::<String>()) {
                match (all.last_mut(), part) {
                    (Some(AnswerPart::Text(old)), AnswerPart::Text(new)) => old.push_str(&new),
                    (Some(AnswerPart::Arguments(old)), AnswerPart::Arguments(new)) => {
                        old.push_str(&new)
                    }
                    (_, part) => all.push(part),
                }
            }
        }
        all
    }

    #[test]
    fn calls_are_taken_apart_wherever_pieces_end() {
        let arguments = r#"{"a": "}\"{\\", "b": [{"c": 1}, 2]}"#;
        let text = format!("{}\n{}", spelled("one", arguments), spelled("two", "{}"));
        let want = [
            AnswerPart::Call("one".into()),
            AnswerPart::Arguments(arguments.into()),
            AnswerPart::Call("two".into()),
            AnswerPart::Arguments("{}".into()),
        ];
        for piece in [1, 2, 3, 7, 1000] {
            assert_eq!(parts(&text, true, piece), want, "{piece}");
            assert_eq!(parts(&text, false, piece), [AnswerPart::Text(text.clone())]);
            assert_eq!(
                parts("It is {late}", true, piece),
                [AnswerPart::Text("It is {late}".into())]
            );
        }
        assert_eq!(parts(&text[..30], true, 4)[..1], want[..1]);
    }

    #[test]
    fn results_that_follow_each_other_are_one_message() {
        let (mut messages, mut open) = (Vec::new(), false);
        push_result(&mut messages, &mut open, result(Some("a"), "1"));
        push_result(&mut messages, &mut open, result(None, "2"));
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].content, "Result of a: 1\nResult: 2");
    }
}
