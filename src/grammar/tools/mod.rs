//! Grammars of answers that call functions.
//!
//! Gemma 3 has no tokens for calls. A call is a line of JSON: `{"name": "NAME", "arguments":
//! {...}}`. The grammar fixes everything but the function's name and the arguments. An answer that
//! begins with a brace consists of calls; any other answer is text. [`gemma4`] has the calls of
//! Gemma 4.

mod gemma4;

use serde_json::{Value, json};

use super::{GrammarSource, schema};
use crate::error::Fault;
use crate::models::Tokenizer;
use crate::tensor::Token;
use anyhow::{Result, ensure};

/// A function that an answer may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// JSON Schema of its arguments, an object.
    pub parameters: Value,
}

/// Whether an answer calls functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallPolicy {
    /// The model decides.
    Optional,
    Required,
}

/// Beginning of a call, before the function's name, and the text between the name and the
/// arguments.
pub const CALL: &str = "{\"name\": \"";
pub const ARGUMENTS: &str = "\", \"arguments\": ";

/// Control tokens of Gemma 4's calls: before and behind a call, and around a string. Each has a
/// noncharacter that stands for it in the text of an answer.
pub const CALL_MARKS: [(&str, char); 3] =
    [("<|tool_call>", '\u{fdd0}'), ("<tool_call|>", '\u{fdd1}'), ("<|\"|>", '\u{fdd2}')];

/// Returns the tokens of Gemma 4's calls with their characters; none for other vocabularies.
pub fn call_marks(tokenizer: &Tokenizer) -> Vec<(Token, char)> {
    let mark = |(name, mark)| Some((*tokenizer.control().get(name)?, mark));
    CALL_MARKS.into_iter().map(mark).collect::<Option<_>>().unwrap_or_default()
}

/// Longest name of a function.
const LONGEST: usize = 64;

impl Tool {
    /// Refuses the names that OpenAI's server refuses.
    pub fn check(&self) -> Result<()> {
        let is_plain = |c: u8| c.is_ascii_alphanumeric() || c == b'_' || c == b'-';
        let fits = (1..=LONGEST).contains(&self.name.len());
        ensure!(
            fits && self.name.bytes().all(is_plain),
            Fault::usage(format!("{:?} is no name of a function", self.name))
                .help("a name has at most 64 letters, digits, _ and -")
        );
        Ok(())
    }
}

/// Returns the grammar of an answer that may or must call some of these functions. `many` allows
/// several calls. `marks` are those of the vocabulary. An answer without calls fits the schema
/// `answer` if there is one.
pub fn source(
    tools: &[Tool],
    calls: CallPolicy,
    many: bool,
    marks: &[(Token, char)],
    answer: Option<&Value>,
) -> Result<GrammarSource> {
    let no_schema = |why| Fault::usage(format!("the schema of the answer is none: {why}"));
    let answer = answer.map(|schema| schema::strict(schema).map_err(no_schema)).transpose()?;
    for (i, tool) in tools.iter().enumerate() {
        tool.check()?;
        ensure!(
            !tools[..i].iter().any(|other| other.name == tool.name),
            Fault::usage(format!("the function {:?} is given twice", tool.name))
        );
    }
    if let [(begin, _), (end, _), (quote, _)] = *marks {
        return gemma4::source(tools, calls, many, [begin, end, quote], answer.as_ref());
    }
    let mut rules = String::new();
    for (i, tool) in tools.iter().enumerate() {
        let name = &tool.name;
        let schema = match &tool.parameters {
            Value::Null => {
                json!({"type": "object", "properties": {}, "additionalProperties": false})
            }
            schema => schema.clone(),
        };
        let arguments = schema::strict(&schema).map_err(|why| {
            Fault::usage(format!("the parameters of the function {name:?} are no schema: {why}"))
                .help(r#"parameters look like {"type": "object", "properties": {...}}"#)
        })?;
        let head = Value::from(format!("{CALL}{name}{ARGUMENTS}"));
        rules +=
            &format!("call_{i}: {head} arguments_{i} \"}}\"\narguments_{i}: %json {arguments}\n");
    }
    let any: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let more = if many { " (\"\\n\" call)*" } else { "" };
    let start = match (calls, &answer) {
        (CallPolicy::Optional, None) => "start: TEXT | calls |\nTEXT: /[^{](?s:.)*/\n".into(),
        (CallPolicy::Optional, Some(schema)) => {
            format!("start: answer | calls\nanswer: %json {schema}\n")
        }
        (CallPolicy::Required, _) => "start: calls\n".to_owned(),
    };
    Ok(GrammarSource::Lark(format!("{start}calls: call{more}\ncall: {}\n{rules}", any.join(" | "))))
}

#[cfg(test)]
mod tests {
    use super::super::Grammars;
    use super::*;
    use crate::models::Special;
    use crate::models::tokenizer::tests::letters;
    use std::sync::Arc;

    fn tools() -> Vec<Tool> {
        let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}},
            "required": ["city"], "additionalProperties": false});
        let weather = Tool { name: "weather".into(), description: None, parameters };
        vec![weather, Tool { name: "now".into(), description: None, parameters: Value::Null }]
    }

    /// Returns whether `text` is allowed, and whether the answer may end after it.
    fn follows(calls: CallPolicy, many: bool, text: &str) -> (bool, bool) {
        follows_or(calls, many, None, text)
    }

    fn follows_or(
        calls: CallPolicy,
        many: bool,
        answer: Option<&Value>,
        text: &str,
    ) -> (bool, bool) {
        let tokenizer = Arc::new(letters());
        let grammars = Grammars::new(tokenizer.clone(), &[1], 1).unwrap();
        let grammar =
            grammars.compile(&source(&tools(), calls, many, &[], answer).unwrap(), &|| true);
        let grammar = grammar.unwrap();
        let rule = grammar.follow(0);
        let tokens = tokenizer.encode(text, Special::AsText).unwrap();
        use crate::sampler::TokenRule;
        let fits = (0..tokens.len()).all(|n| rule.mask(&tokens[..n]).unwrap().allows(tokens[n]));
        (fits, fits && rule.is_complete(&tokens))
    }

    #[test]
    fn calls_cannot_be_malformed() {
        let weather = r#"{"name": "weather", "arguments": {"city": "Rome"}}"#;
        let now = r#"{"name": "now", "arguments": {}}"#;
        for calls in [CallPolicy::Optional, CallPolicy::Required] {
            assert_eq!(follows(calls, true, weather), (true, true));
            assert_eq!(follows(calls, true, now), (true, true));
            assert_eq!(follows(calls, true, &format!("{now}\n{weather}")), (true, true));
            assert!(!follows(calls, false, &format!("{now}\n{weather}")).0);
            assert_eq!(follows(calls, true, &weather[..20]), (true, false));
            assert!(!follows(calls, true, r#"{"name": "other""#).0);
            assert!(!follows(calls, true, r#"{"name": "weather", "arguments": {}"#).0);
            assert!(!follows(calls, true, r#"{"name":"now""#).0);
        }
        assert_eq!(follows(CallPolicy::Optional, true, "It is\nlate {a}"), (true, true));
        assert!(!follows(CallPolicy::Required, true, "It").0);
    }

    #[test]
    fn an_answer_without_calls_may_have_a_schema() {
        let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}},
            "required": ["n"], "additionalProperties": false});
        let call = r#"{"name": "now", "arguments": {}}"#;
        let follows = |calls, text| follows_or(calls, true, Some(&schema), text);
        for text in [call, r#"{"n": 5}"#] {
            assert_eq!(follows(CallPolicy::Optional, text), (true, true), "{text}");
        }
        assert!(!follows(CallPolicy::Optional, "It is late").0);
        assert!(!follows(CallPolicy::Required, r#"{"n": 5}"#).0);
    }

    #[test]
    fn names_are_plain_and_differ() {
        let named = |names: &[&str]| {
            let tool = |name: &&str| Tool { name: name.to_string(), ..tools()[1].clone() };
            let tools = names.iter().map(tool).collect::<Vec<_>>();
            source(&tools, CallPolicy::Required, true, &[], None)
        };
        assert!(named(&["a", "b-c_D9"]).is_ok());
        for bad in [&["a", "a"][..], &[""], &["a b"], &["a\""], &["\u{e4}"]] {
            assert!(named(bad).is_err(), "{bad:?}");
        }
    }
}
