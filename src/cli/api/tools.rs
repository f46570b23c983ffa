//! Functions that answers may call: their description in the prompt, and a parser of calls.

use crate::grammar::tools::{ARGUMENTS, CALL, CALL_MARKS, Tool};
use crate::models::{Message, MessageImage};
use serde_json::{Value, json};
use std::sync::Arc;

/// Characters that stand for a model's call tokens in decoded text.
const BEGIN: char = CALL_MARKS[0];
const END: char = CALL_MARKS[1];
const QUOTE: char = CALL_MARKS[2];

/// Returns the description of the functions for the prompt.
pub fn instructions(tools: &[Tool]) -> String {
    let mut text = "You can call these functions:\n".to_owned();
    for Tool { name, description, parameters, .. } in tools {
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

/// Returns a call in the form that the model writes.
pub fn spelled(name: &str, arguments: &str) -> String {
    format!("{CALL}{name}{ARGUMENTS}{arguments}}}")
}

/// Returns the result of a call in the form that the model reads.
pub fn result(name: Option<&str>, content: &str) -> String {
    match name {
        Some(name) => format!("Result of {name}: {content}"),
        None => format!("Result: {content}"),
    }
}

/// Writes calls and results as text, for a model without tokens for them.
///
/// Consecutive results and the user message after them become one user message.
pub fn folded(messages: Vec<Message>) -> Vec<Message> {
    let (mut all, mut open) = (Vec::<Message>::new(), false);
    for Message { role, content, calls, result_of, images, .. } in messages {
        let is_result = result_of.is_some();
        let text = match result_of {
            Some((_, name)) => result(Some(&*name).filter(|name| !name.is_empty()), &content),
            None => {
                let text = Some(content).filter(|text| calls.is_empty() || !text.is_empty());
                let calls = calls.iter().map(|call| spelled(&call.name, &call.arguments));
                text.into_iter().chain(calls).collect::<Vec<_>>().join("\n")
            }
        };
        let is_more = is_result || open && role == "user";
        match all.last_mut().filter(|last| is_more && last.role == "user") {
            Some(last) => {
                last.content.push('\n');
                let begin = last.content.len();
                let moved = |image: MessageImage| MessageImage { at: begin + image.at, ..image };
                last.images.extend(images.into_iter().map(moved));
                last.content.push_str(&text);
            }
            None if is_result => all.push(Message::new("user", text)),
            None => all.push(Message { images, ..Message::new(role, text) }),
        }
        open = is_more;
    }
    all
}

/// Returns the functions in the form that chat templates expect.
pub fn declared(tools: &[Tool]) -> Vec<Value> {
    let declare = |Tool { name, description, parameters, .. }: &Tool| {
        let mut function =
            json!({"name": name, "description": description.as_deref().unwrap_or("")});
        if !parameters.is_null() {
            function["parameters"] = parameters.clone();
        }
        json!({"type": "function", "function": function})
    };
    tools.iter().map(declare).collect()
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

/// State of a parser within an answer.
#[derive(Clone, Debug, PartialEq)]
enum ReaderState {
    Begin,
    Text,
    /// In text of a model with call tokens. A call then passes through `MarkedHead` and `Marked`.
    MarkedText,
    MarkedHead(String),
    Marked(MarkedArguments),
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
    /// Texts that begin a call, up to the brace of its arguments, each with the name of the
    /// function.
    heads: Arc<[(String, String)]>,
}

impl CallReader {
    /// Makes a parser of calls of these functions; without functions, all text is plain text.
    ///
    /// With `marked`, calls are between call tokens.
    pub fn new(tools: &[Tool], marked: bool) -> CallReader {
        let state = match (tools, marked) {
            ([], _) => ReaderState::Text,
            (_, true) => ReaderState::MarkedText,
            (_, false) => ReaderState::Begin,
        };
        let head = |Tool { name, .. }: &Tool| (format!("{CALL}{name}{ARGUMENTS}{{"), name.clone());
        CallReader { state, heads: tools.iter().map(head).collect() }
    }

    /// Returns the head of a call as text, if the answer was cut off within it.
    pub fn finish(&mut self) -> Option<AnswerPart> {
        match &mut self.state {
            ReaderState::Head(head) | ReaderState::MarkedHead(head) if !head.is_empty() => {
                Some(AnswerPart::Text(std::mem::take(head)))
            }
            _ => None,
        }
    }

    /// Splits a piece of the answer into parts.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let mut parts: Vec<AnswerPart> = Vec::new();
        for c in text.chars() {
            match &mut self.state {
                ReaderState::MarkedText if c == BEGIN => {
                    self.state = ReaderState::MarkedHead(String::new());
                }
                ReaderState::MarkedText => match parts.last_mut() {
                    Some(AnswerPart::Text(text)) => text.push(c),
                    _ => parts.push(AnswerPart::Text(c.into())),
                },
                ReaderState::MarkedHead(head) if c == '{' => {
                    let name = head.strip_prefix("call:").unwrap_or(head);
                    parts.push(AnswerPart::Call(name.to_owned()));
                    parts.push(AnswerPart::Arguments("{".into()));
                    self.state = ReaderState::Marked(MarkedArguments::new());
                }
                ReaderState::MarkedHead(head) => head.push(c),
                ReaderState::Marked(_) if c == END => self.state = ReaderState::MarkedText,
                ReaderState::Marked(arguments) => {
                    let json = arguments.json(c);
                    match parts.last_mut() {
                        Some(AnswerPart::Arguments(text)) => text.push_str(&json),
                        _ if json.is_empty() => {}
                        _ => parts.push(AnswerPart::Arguments(json)),
                    }
                }
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
                    let first = self.heads.iter().find(|(own, _)| own.starts_with(&**head));
                    if let Some((_, name)) = first.filter(|(own, _)| own == head) {
                        parts.push(AnswerPart::Call(name.clone()));
                        parts.push(AnswerPart::Arguments("{".into()));
                        self.state =
                            ReaderState::Arguments { depth: 1, in_string: false, escaped: false };
                    } else if first.is_none() {
                        parts.push(AnswerPart::Text(std::mem::take(head)));
                        self.state = ReaderState::Text;
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

/// Converts the arguments of a marked call to JSON.
#[derive(Clone, Debug, PartialEq)]
struct MarkedArguments {
    /// Open objects (true) and lists, outermost first.
    open: Vec<bool>,
    /// The key so far.
    key: Option<String>,
    in_string: bool,
}

impl MarkedArguments {
    /// Makes a converter that starts after the opening brace of the arguments.
    fn new() -> MarkedArguments {
        MarkedArguments { open: vec![true], key: Some(String::new()), in_string: false }
    }

    /// Returns the JSON for the next character.
    fn json(&mut self, c: char) -> String {
        if c == QUOTE {
            self.in_string = !self.in_string;
            return "\"".into();
        }
        if self.in_string {
            let quoted = Value::from(c.to_string()).to_string();
            return quoted[1..quoted.len() - 1].to_owned();
        }
        match (&mut self.key, c) {
            (Some(key), ':') => {
                let json = format!("{}: ", Value::from(std::mem::take(key)));
                self.key = None;
                json
            }
            (Some(key), c) if c != '}' => {
                key.push(c);
                String::new()
            }
            (_, '{' | '[') => {
                self.open.push(c == '{');
                self.key = (c == '{').then(String::new);
                c.into()
            }
            (_, '}' | ']') => {
                self.open.pop();
                self.key = None;
                c.into()
            }
            (_, ',') => {
                self.key = (self.open.last() == Some(&true)).then(String::new);
                ", ".into()
            }
            _ => c.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::ToolCall;

    fn tool(name: &str) -> Tool {
        let (name, description, parameters) = (name.into(), None, Value::Null);
        Tool { name, description, parameters, strict: false }
    }

    /// Returns the parts of a text that arrives in pieces of `piece` characters.
    fn parts(text: &str, calls: bool, piece: usize) -> Vec<AnswerPart> {
        let tools = ["one", "two"].map(tool);
        parts_of(CallReader::new(if calls { &tools } else { &[] }, false), text, piece)
    }

    fn parts_of(mut reader: CallReader, text: &str, piece: usize) -> Vec<AnswerPart> {
        let chars: Vec<char> = text.chars().collect();
        let mut all: Vec<AnswerPart> = Vec::new();
        let pieces = chars.chunks(piece).map(|piece| piece.iter().collect::<String>());
        let mut steps: Vec<Vec<AnswerPart>> = pieces.map(|piece| reader.push(&piece)).collect();
        steps.push(reader.finish().into_iter().collect());
        for step in steps {
            for part in step {
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
        for json in [
            r#"{"n": 5}"#,
            r#"{"name": "A B"}"#,
            r#"{"name": "one", "age": 5}"#,
            "{}",
            // An answer by a schema with these two fields, and calls that were cut off in their
            // heads.
            r#"{"name": "Ada", "arguments": {"for": "b"}}"#,
            r#"{"name": "one", "arguments": ["for"]}"#,
            r#"{"name": "on"#,
            r#"{"name": "two", "arguments": "#,
        ] {
            for piece in [1, 4, 1000] {
                assert_eq!(parts(json, true, piece), [AnswerPart::Text(json.into())]);
            }
        }
    }

    #[test]
    fn calls_with_marks_become_json_wherever_pieces_end() {
        let text = "Let me see.\u{fdd0}call:plan{a:\u{fdd2}x: \"{y}\",\n\u{fdd2},b:[1,{c:true},\
            {}],d:{},e:\u{fdd2}\u{fdd2},f:[],g:-1.5e3}\u{fdd1}\u{fdd0}call:now{}\u{fdd1}";
        let want = [
            AnswerPart::Text("Let me see.".into()),
            AnswerPart::Call("plan".into()),
            AnswerPart::Arguments(
                [
                    r#"{"a": "x: \"{y}\",\n", "b": [1, {"c": true}, {}], "#,
                    r#""d": {}, "e": "", "f": [], "g": -1.5e3}"#,
                ]
                .concat(),
            ),
            AnswerPart::Call("now".into()),
            AnswerPart::Arguments("{}".into()),
        ];
        for piece in [1, 2, 3, 7, 1000] {
            let reader = CallReader::new(&["plan", "now"].map(tool), true);
            assert_eq!(parts_of(reader.clone(), text, piece), want, "{piece}");
            let cut = [AnswerPart::Text("So: call:pl".into())];
            assert_eq!(parts_of(reader, "So: \u{fdd0}call:pl", piece), cut, "{piece}");
        }
    }

    #[test]
    fn results_that_follow_each_other_are_one_message() {
        let result = |name: &str, text: &str| Message {
            result_of: Some((String::new(), name.into())),
            ..Message::new("tool", text)
        };
        let call = ToolCall { id: "1".into(), name: "a".into(), arguments: "{}".into() };
        let messages = vec![
            Message::new("user", "q"),
            Message { calls: vec![call.clone(), call.clone()], ..Message::new("assistant", "") },
            result("a", "1"),
            result("", "2"),
            Message::new("user", "x"),
            Message { calls: vec![call], ..Message::new("assistant", "So:") },
            result("a", "3"),
        ];
        let folded = folded(messages);
        let call = spelled("a", "{}");
        let want = [
            Message::new("user", "q"),
            Message::new("assistant", format!("{call}\n{call}")),
            Message::new("user", "Result of a: 1\nResult: 2\nx"),
            Message::new("assistant", format!("So:\n{call}")),
            Message::new("user", "Result of a: 3"),
        ];
        assert_eq!(folded, want);
    }
}
