//! Grammars of answers that call functions.
//!
//! Gemma 3 has no tokens for calls. A call is a line of JSON: `{"name": "NAME", "arguments":
//! {...}}`. The grammar fixes everything except the function's name and the arguments. An answer
//! that begins with a brace consists of calls; any other answer is text. [`marked`] handles calls
//! between control tokens.

mod marked;

use serde_json::{Value, json};

use super::GrammarSource;
use super::schema::{self, Enforcement};
use anyhow::{Result, ensure};
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use gemma_base::util::json::bytes as json_bytes;
use gemma_model::models::Tokenizer;
use std::collections::HashSet;

/// A function that an answer may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// JSON Schema of its arguments, an object; null for a function without arguments.
    pub parameters: Value,
    /// Makes parameters an error if a grammar cannot enforce them completely.
    pub strict: bool,
}

/// Whether an answer calls functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallPolicy {
    /// The model decides.
    Optional,
    Required,
}

/// Text of a call before the function's name, and between the name and the arguments.
pub const CALL: &str = "{\"name\": \"";
pub const ARGUMENTS: &str = "\", \"arguments\": ";

/// Noncharacters that represent the marks of a call in an answer's text: before a call, after it,
/// and around a string.
pub const CALL_MARKS: [char; 3] = ['\u{fdd0}', '\u{fdd1}', '\u{fdd2}'];

/// Returns the control tokens of calls with their characters; empty if the dialect has none.
pub fn call_marks(tokenizer: &Tokenizer) -> Vec<(Token, char)> {
    let mark = |(name, mark)| Some((*tokenizer.control().get(name)?, mark));
    let marks = tokenizer.dialect().calls.into_iter().flatten().zip(CALL_MARKS);
    marks.map(mark).collect::<Option<_>>().unwrap_or_default()
}

/// Longest name of a function.
const LONGEST: usize = 128;
/// Most functions per request, and most total bytes of their schemas and that of the answer.
const MOST_TOOLS: usize = 1000;
const MOST_BYTES: usize = 2 << 20;
const HELP: &str = "send fewer functions";

impl Tool {
    /// Fails for names that OpenAI's and Anthropic's servers reject.
    pub fn check(&self) -> Result<()> {
        let is_plain = |c: u8| c.is_ascii_alphanumeric() || c == b'_' || c == b'-';
        let fits = (1..=LONGEST).contains(&self.name.len());
        ensure!(
            fits && self.name.bytes().all(is_plain),
            Fault::usage(format!("{:?} is not a valid function name", self.name))
                .help("a name has at most 128 letters, digits, _ and -")
        );
        Ok(())
    }

    /// Returns the schema of the arguments that the grammar enforces. `beyond` lists keywords that
    /// this form of calls does not enforce.
    fn arguments(&self, enforcement: Enforcement, beyond: &[&str]) -> Result<Value> {
        let Tool { name, parameters, strict, .. } = self;
        let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let schema = if parameters.is_null() { &nothing } else { parameters };
        let is_object = |kind: &Value| kind == "object" || kind == &json!(["object", "null"]);
        ensure!(
            schema.is_object() && schema.get("type").is_none_or(is_object),
            Fault::usage(format!(
                "function {name:?}: its parameters are not the schema of an object"
            ))
            .help(r#"parameters look like {"type": "object", "properties": {...}}"#)
        );
        let enforcement = if *strict { Enforcement::Whole } else { enforcement };
        let mut enforced = schema::enforced(schema, enforcement, beyond)
            .map_err(|why| self.fault(&format!("{why:#}")))?;
        if enforced.get("$ref").is_none() {
            enforced["type"] = json!("object");
        }
        Ok(enforced)
    }

    /// Returns an expression for the arguments as JSON, and its rules.
    fn json(&self, enforcement: Enforcement, prefix: &str) -> Result<(String, String)> {
        let refused = |why| self.fault(&format!("{why:#}"));
        let arguments = self.arguments(enforcement, &[])?;
        match schema::expression(&arguments, !self.strict, prefix) {
            Err(_) if !self.strict => {
                // Drops bounds and constants with numbers that cannot be written exactly.
                let arguments = self.arguments(enforcement, &schema::NUMERIC)?;
                schema::expression(&arguments, true, prefix).map_err(|why| refused(why).into())
            }
            written => written.map_err(|why| refused(why).into()),
        }
    }

    /// Returns a grammar of only the arguments, to find a function that causes an error.
    pub fn alone(&self) -> Result<GrammarSource> {
        let mut arguments = self.arguments(Enforcement::Structure, &[])?;
        if schema::has_large_numbers(&arguments) {
            let (start, rules) = self.json(Enforcement::Structure, "a")?;
            return Ok(GrammarSource::Lark(format!("start: {start}\n{rules}")));
        }
        arguments["x-guidance"] = schema::settings(&arguments, !self.strict);
        Ok(GrammarSource::JsonSchema(arguments))
    }

    /// Creates the fault for unusable parameters.
    pub fn fault(&self, why: &str) -> Fault {
        let help = match self.strict {
            true => "leave `strict` out of the function, or rewrite its parameters",
            false => "rewrite the function's parameters",
        };
        Fault::usage(format!("function {:?}: {why}", self.name)).help(help)
    }
}

/// Fails if there are too many functions or too long schemas to compare and rewrite.
fn check_sizes(tools: &[Tool], answer: Option<&Value>) -> Result<()> {
    check_count(tools.len())?;
    check_bytes("schemas", tools.iter().map(|tool| &tool.parameters).chain(answer))
}

/// Fails if a request's lists of tools and choices are too long to read or store.
pub fn check_lists(tools: &[Value], choice: &Value) -> Result<()> {
    check_count(tools.len())?;
    check_bytes("tools", tools.iter().chain([choice]))
}

fn check_count(count: usize) -> Result<()> {
    ensure!(
        count <= MOST_TOOLS,
        Fault::usage(format!("{count} functions are given, more than the limit of {MOST_TOOLS}"))
            .help(HELP)
    );
    Ok(())
}

fn check_bytes<'a>(what: &str, values: impl Iterator<Item = &'a Value>) -> Result<()> {
    let bytes: usize = values.map(json_bytes).sum();
    ensure!(
        bytes <= MOST_BYTES,
        Fault::usage(format!("the {what} have {bytes} bytes, more than the limit of {MOST_BYTES}"))
            .help(HELP)
    );
    Ok(())
}

/// Returns the grammar of an answer that may or must call some of these functions.
///
/// `many` allows several calls. `marks` are those of the vocabulary. An answer without calls must
/// match the schema `answer`, if present. `enforcement` applies to functions that are not strict.
pub fn source(
    tools: &[Tool],
    calls: CallPolicy,
    many: bool,
    marks: &[(Token, char)],
    answer: Option<&Value>,
    enforcement: Enforcement,
) -> Result<GrammarSource> {
    let no_schema = |why| Fault::usage(format!("the schema of the answer: {why}"));
    check_sizes(tools, answer)?;
    let answer = answer.map(|schema| schema::strict(schema, "s").map_err(no_schema)).transpose()?;
    let answer = answer.map(|(start, rules)| format!("answer: {start}\n{rules}"));
    let mut names = HashSet::new();
    for tool in tools {
        tool.check()?;
        ensure!(
            names.insert(&tool.name),
            Fault::usage(format!("the function {:?} is given twice", tool.name))
        );
    }
    if let [(begin, _), (end, _), (quote, _)] = *marks {
        let marks = [begin, end, quote];
        return marked::source(tools, calls, many, marks, answer.as_deref(), enforcement);
    }
    let mut rules = String::new();
    for (i, tool) in tools.iter().enumerate() {
        let name = &tool.name;
        let (arguments, more) = tool.json(enforcement, &format!("a{i}"))?;
        // The parts equal those in JSON grammars, so that the answer's own schema may share them.
        let name = Value::from(format!("\"{name}\""));
        rules += &format!(
            r#"call_{i}: "{{" "\"name\"" ": " {name} ", " "\"arguments\"" ": " arguments_{i} "}}"
arguments_{i}: {arguments}
{more}"#
        );
    }
    let any: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let more = if many { " (\"\\n\" call)*" } else { "" };
    let start = match (calls, &answer) {
        (CallPolicy::Optional, None) => "start: TEXT | calls |\nTEXT: /[^{](?s:.)*/\n".into(),
        (CallPolicy::Optional, Some(schema)) => {
            format!("start: answer | calls\n{schema}\n")
        }
        (CallPolicy::Required, _) => "start: calls\n".to_owned(),
    };
    Ok(GrammarSource::Lark(format!("{start}calls: call{more}\ncall: {}\n{rules}", any.join(" | "))))
}

#[cfg(test)]
mod tests {
    use super::super::Grammars;
    use super::*;
    use gemma_model::models::Special;
    use gemma_model::models::tokenizer::samples::{letters, thinking_letters};
    use std::sync::Arc;

    fn tools() -> Vec<Tool> {
        let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}},
            "required": ["city"], "additionalProperties": false});
        vec![tool("weather", parameters), tool("now", Value::Null)]
    }

    fn tool(name: &str, parameters: Value) -> Tool {
        Tool { name: name.into(), description: None, parameters, strict: false }
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
        let level = Enforcement::Expressible;
        let source = source(&tools(), calls, many, &[], answer, level).unwrap();
        let grammar = grammars.compile(&source, &|| true).unwrap();
        let rule = grammar.follow(0);
        let tokens = tokenizer.encode(text, Special::AsText).unwrap();
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

    /// Most bytes of a grammar.
    const MOST_WRITTEN: usize = super::super::LONGEST;

    /// Returns the length of the grammar of a function with these parameters, or the error.
    fn written(parameters: Value) -> Result<usize, String> {
        let (tool, level) = (tool("f", parameters), Enforcement::Expressible);
        let marks = call_marks(&thinking_letters());
        let source = source(&[tool], CallPolicy::Required, false, &marks, None, level);
        match source.map_err(|error| format!("{error:#}"))? {
            GrammarSource::Lark(text) => Ok(text.len()),
            other => panic!("{other:?}"),
        }
    }

    /// The length of the written rules is bounded, regardless of references.
    #[test]
    fn references_are_not_written_out() {
        let of = |more: Value, definitions: Value| {
            let mut all = json!({"type": "object", "$defs": definitions});
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            all
        };
        let list = |n: usize, item: &dyn Fn(usize) -> Value| (0..n).map(item).collect::<Value>();
        let entries = list(2_000, &|n| json!(format!("an entry of the enumeration: {n}")));
        let enumeration = json!({"e": {"enum": entries}});
        let options = list(1_000, &|_| json!({"$ref": "#/$defs/e"}));
        // References alone share one rule. References next to another keyword are merged, within
        // limits.
        let plain = of(json!({"properties": {"a": {"anyOf": options}}}), enumeration.clone());
        assert!(written(plain).unwrap() < MOST_WRITTEN);
        let typed = json!({"properties": {"a": {"type": "string", "anyOf": options}}});
        assert!(written(of(typed, enumeration)).map_or(true, |bytes| bytes <= MOST_WRITTEN));
        // Long lists of required names are bounded too.
        let names = list(5_000, &|n| json!(format!("a long name of a property: {n}")));
        let parts = list(1_000, &|_| json!({"$ref": "#/$defs/r"}));
        let required = of(json!({"allOf": parts}), json!({"r": {"required": names}}));
        assert!(written(required).map_or(true, |bytes| bytes <= MOST_WRITTEN));
        // A chain of references needs no stack, and one rule per link.
        let links = 1_000;
        let link = |n: usize| {
            let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            (format!("d{n}"), json!({"type": "array", "items": next}))
        };
        let mut chain: serde_json::Map<String, Value> = (0..links).map(link).collect();
        chain.insert(format!("d{links}"), json!({"type": "null"}));
        let chain = of(json!({"properties": {"a": {"$ref": "#/$defs/d0"}}}), chain.into());
        assert!(written(chain).unwrap() > 20 * links);
    }

    /// Cycles terminate, even on a worker's stack, and contain one copy of the other keywords.
    #[test]
    fn cycles_of_merged_schemas_end() {
        let large: serde_json::Map<String, Value> =
            (0..2_000).map(|n| (format!("p{n}"), json!({"type": "null"}))).collect();
        for key in ["allOf", "anyOf", "oneOf"] {
            let part = json!({"type": "object", key: [{"$ref": "#/$defs/a"}]});
            let cycle = json!({"type": "object", "properties": {"x": part, "y": {"type": "object",
                "properties": large, key: [{"$ref": "#/$defs/a"}]}}, "$defs": {"a": part}});
            let worker = std::thread::Builder::new().stack_size(2 << 20);
            let outcome = worker.spawn(move || written(cycle)).unwrap().join().unwrap();
            assert!(
                outcome.as_ref().map_or(true, |bytes| *bytes <= MOST_WRITTEN),
                "{key}: {outcome:?}"
            );
        }
    }

    /// Integers beyond `f64` are written exactly.
    #[test]
    fn numbers_of_calls_are_exact() {
        let parameters = json!({"type": "object", "properties": {
            "id": {"enum": [1_234_567_890_123_456_789u64]},
            "n": {"type": "integer", "minimum": 0, "maximum": i64::MAX}},
            "required": ["id", "n"], "additionalProperties": false});
        let plain = Arc::new(letters());
        let thinking = Arc::new(thinking_letters());
        for (tokenizer, begin, end) in [
            (&plain, r#"{"name": "f", "arguments": {"id": ID, "n": N}}"#, ""),
            (&thinking, "<|tool_call>call:f{id:ID,n:N}", "<tool_call|>"),
        ] {
            let (level, marks) = (Enforcement::Expressible, call_marks(tokenizer));
            let tools = [tool("f", parameters.clone())];
            let source = source(&tools, CallPolicy::Required, false, &marks, None, level).unwrap();
            let grammars = Grammars::new(tokenizer.clone(), &[1], 1).unwrap();
            let rule = grammars.compile(&source, &|| true).unwrap().follow(0);
            let fits = |id: &str, n: &str| {
                let text = begin.replace("ID", id).replace('N', n) + end;
                let tokens = tokenizer.encode(&text, Special::Parse).unwrap();
                rule.is_complete(&tokens)
            };
            let id = "1234567890123456789";
            assert!(fits(id, "0") && fits(id, "9223372036854775807"), "{begin}");
            assert!(!fits("1234567890123456768", "0") && !fits(id, "9223372036854775808"));
        }
    }

    #[test]
    fn names_are_plain_and_differ() {
        let named = |names: &[&str]| {
            let tool = |name: &&str| Tool { name: name.to_string(), ..tools()[1].clone() };
            let tools: Vec<Tool> = names.iter().map(tool).collect();
            source(&tools, CallPolicy::Required, true, &[], None, Enforcement::Expressible)
        };
        assert!(named(&["a", "b-c_D9"]).is_ok());
        for bad in [&["a", "a"][..], &[""], &["a b"], &["a\""], &["\u{e4}"]] {
            assert!(named(bad).is_err(), "{bad:?}");
        }
    }

    /// Too many functions and too long schemas are rejected before their names are compared.
    #[test]
    fn functions_and_schemas_are_bounded() {
        let of = |n: usize| (0..n).map(|i| tool(&format!("f{i}"), Value::Null)).collect::<Vec<_>>();
        let refused = |tools: &[Tool], answer: Option<&Value>| {
            let level = Enforcement::Expressible;
            let source = source(tools, CallPolicy::Optional, true, &[], answer, level);
            source.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(refused(&of(MOST_TOOLS), None), "");
        let what = "1001 functions are given, more than the limit of 1000";
        assert_eq!(refused(&of(MOST_TOOLS + 1), None), what);
        let long = json!({"type": "object", "description": "x".repeat(MOST_BYTES)});
        for (tools, answer) in [(vec![tool("f", long.clone())], None), (of(1), Some(&long))] {
            let why = refused(&tools, answer);
            assert!(why.ends_with("more than the limit of 2097152"), "{why}");
        }
        // Lists are limited when they are read, even if no call may use them.
        let list = |n: usize| vec![json!({"type": "x"}); n];
        assert!(check_lists(&list(MOST_TOOLS), &Value::Null).is_ok());
        assert!(check_lists(&list(MOST_TOOLS + 1), &Value::Null).is_err());
        assert!(check_lists(&[], &json!({"x": long})).is_err());
    }

    /// Accepts the schemas of public MCP servers and agents: each function in its own request, and
    /// all functions of a server in one request.
    #[test]
    fn schemas_of_public_servers_are_taken() {
        let mut servers: Vec<(String, Vec<Tool>)> = Vec::new();
        for line in include_str!("../../../../../tests/serve/tools.jsonl").lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let server = line["server"].as_str().unwrap();
            if servers.last().is_none_or(|(name, _)| name != server) {
                servers.push((server.to_owned(), Vec::new()));
            }
            let tool = tool(line["name"].as_str().unwrap(), line["schema"].clone());
            servers.last_mut().unwrap().1.push(tool);
        }
        for tokenizer in [letters(), thinking_letters()].map(Arc::new) {
            let grammars = Grammars::new(tokenizer.clone(), &[1], 1).unwrap();
            let (marks, level) = (call_marks(&tokenizer), Enforcement::Expressible);
            for (server, tools) in &servers {
                for tools in tools.chunks(1).chain([&tools[..]]) {
                    let source = source(tools, CallPolicy::Optional, true, &marks, None, level);
                    let compiled = source.and_then(|source| grammars.compile(&source, &|| true));
                    if let Err(error) = compiled {
                        panic!("{server} {:?}: {error:#}", tools[0].name);
                    }
                }
            }
        }
    }

    #[test]
    fn keywords_without_a_grammar_are_dropped_or_named() {
        for (keyword, schema) in [
            ("not", json!({"not": {"const": "x"}})),
            ("propertyNames", json!({"propertyNames": {"pattern": "^a"}})),
            ("if", json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}})),
            ("uniqueItems", json!({"type": "array", "uniqueItems": true})),
            ("dependentRequired", json!({"dependentRequired": {"a": ["b"]}})),
            ("unevaluatedProperties", json!({"type": "object", "unevaluatedProperties": false})),
            ("contains", json!({"type": "array", "contains": {"const": 1}, "minContains": 2})),
            ("pattern", json!({"type": "string", "pattern": "^(?!x).*$"})),
            ("type", json!({"type": "file"})),
            ("required", json!({"type": "string", "required": true})),
            ("$ref", json!({"$ref": "https://example.org/schema"})),
        ] {
            let parameters = json!({"type": "object", "properties": {"p": schema}});
            let mut one = [tool("f", parameters)];
            let tokenizer = Arc::new(letters());
            let grammars = Grammars::new(tokenizer, &[1], 1).unwrap();
            let level = Enforcement::Expressible;
            let loose = source(&one, CallPolicy::Required, true, &[], None, level).unwrap();
            assert!(grammars.compile(&loose, &|| true).is_ok(), "{keyword}");
            one[0].strict = true;
            let error = source(&one, CallPolicy::Required, true, &[], None, level).unwrap_err();
            let says = format!(
                "function \"f\": at /properties/p: the keyword {keyword} cannot be enforced"
            );
            assert_eq!(error.to_string(), says);
        }
    }
}
