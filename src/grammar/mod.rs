//! Floor 3: texts that must follow a grammar: JSON Schema, Lark's notation or a regular expression,
//! by the `llguidance` crate.
//!
//! A grammar becomes a [`Rule`] of the sampler: a pure function from the tokens so far to those
//! that may follow, so that drafts change a text under a grammar as little as any other. JSON has
//! no free white space here: `, ` between items and `: ` behind keys, as most of what models have
//! read. It cannot loop on blanks, and a schema's fixed parts are forced, so they are drafted for
//! nothing.

mod follow;
mod schema;
pub mod tools;
mod vocabulary;

pub use follow::Follow;
pub use schema::parse as parse_schema;

use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;

use crate::error::{Fault, Kind};
use crate::gemma::Tokenizer;
use crate::sampler::Rule;
use crate::tensor::Token;

/// What a text must follow.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    JsonSchema(Value),
    /// llguidance's variant of Lark's notation.
    Lark(String),
    /// The whole text matches this.
    Regex(String),
}

impl Source {
    /// Any JSON object.
    pub fn json_object() -> Source {
        Source::JsonSchema(serde_json::json!({"type": "object"}))
    }

    fn name(&self) -> &'static str {
        match self {
            Source::JsonSchema(_) => "JSON schema",
            Source::Lark(_) => "grammar",
            Source::Regex(_) => "regular expression",
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Source::JsonSchema(schema) => schema.to_string().len(),
            Source::Lark(text) | Source::Regex(text) => text.len(),
        }
    }
}

/// Grammars for one tokenizer.
pub struct Grammars {
    factory: ParserFactory,
    stops: Vec<Token>,
}

/// Work on one mask that is allowed before a grammar counts as too complex. Far more than
/// llguidance's own bounds: what an answer costs must not depend on what was computed, and kept,
/// before.
const LEXER_FUEL: u64 = 20_000_000;
const ITEMS: usize = 1_000_000;

/// Bytes of a grammar at most, and of stack to compile it: llguidance descends into what refers to
/// something that refers to something, some kilobytes for each few bytes of the grammar. Of the
/// stack only what is touched takes memory.
const LONGEST: usize = 256 << 10;
const STACK: usize = 1 << 30;

impl Grammars {
    /// `stops` are the tokens that end a text; they are allowed where the grammar is complete, and
    /// nowhere else.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: &[Token]) -> Result<Grammars> {
        let stops: Vec<Token> =
            stops.iter().copied().filter(|stop| (*stop as usize) < tokenizer.vocab()).collect();
        if stops.is_empty() {
            let fault = Fault::model(
                "the model has no token that ends a text, so no answer under a grammar could end",
            );
            return Err(fault.help("give eos_token_id in its generation_config.json").into());
        }
        let vocabulary = vocabulary::environment(tokenizer, &stops);
        let mut factory = ParserFactory::new_simple(&vocabulary)
            .context("preparing the vocabulary for grammars")?;
        factory.quiet();
        let limits = factory.limits_mut();
        (limits.step_lexer_fuel, limits.step_max_items, limits.verbose_errors) =
            (LEXER_FUEL, ITEMS, false);
        Ok(Grammars { factory, stops })
    }

    /// Checks and prepares a grammar. What is wrong with it is wrong usage, with the place.
    pub fn compile(&self, source: &Source) -> Result<Grammar> {
        let (name, bytes) = (source.name(), source.bytes());
        if bytes > LONGEST {
            let what = format!("the {name} has {bytes} bytes, and {LONGEST} are taken at most");
            return Err(Fault::usage(what).help("leave out what answers do not need").into());
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
            let compiling = thread.spawn_scoped(scope, || self.checked(source)).context(
                Fault::new(Kind::Memory, format!("there is no room to compile the {name}"))
                    .help("a limit on threads (ulimit -u) or on memory (ulimit -v) is too low"),
            )?;
            compiling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn checked(&self, source: &Source) -> Result<Grammar> {
        let start = self.start(source).map_err(|why| {
            let place = match source {
                Source::JsonSchema(schema) => {
                    schema::place(schema, &|part| self.start(&Source::JsonSchema(part)).is_err())
                }
                _ => String::new(),
            };
            let fault = Fault::usage(format!(
                "the {} cannot be used{place}: \
                {}",
                source.name(),
                brief(&why)
            ));
            anyhow::Error::from(match source {
                Source::JsonSchema(_) => {
                    let remedy = schema::remedy(&fault.what);
                    fault.help(remedy)
                }
                Source::Lark(_) => fault.help(
                    "the notation is llguidance's: \
                        https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md",
                ),
                Source::Regex(_) => fault.help(
                    "the notation is that of Rust's regex crate, \
                    without look-around, ^ and $",
                ),
            })
        })?;
        let grammar = Grammar { start: Arc::new(start), stops: self.stops.clone() };
        match grammar.follow(0).mask(&[]) {
            Ok(mask) if !mask.is_empty() => Ok(grammar),
            _ => Err(Fault::usage(format!(
                "no text can follow the {}, or it is too complex",
                source.name()
            ))
            .into()),
        }
    }

    fn start(&self, source: &Source) -> Result<Matcher> {
        let grammar = match source {
            Source::JsonSchema(schema) => {
                TopLevelGrammar::from_json_schema(schema::strict(schema)?)
            }
            Source::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            Source::Regex(text) => TopLevelGrammar::from_regex(text),
        };
        let matcher = Matcher::new(self.factory.create_parser(grammar));
        match matcher.get_error() {
            Some(why) => Err(anyhow!(why)),
            None => Ok(matcher),
        }
    }
}

/// A grammar that was checked.
#[derive(Clone)]
pub struct Grammar {
    start: Arc<Matcher>,
    stops: Vec<Token>,
}

impl Grammar {
    /// The rule for a text that begins behind `prompt` tokens.
    pub fn follow(&self, prompt: usize) -> Follow {
        Follow::new(self.start.clone(), self.stops.clone(), prompt)
    }
}

/// An error of llguidance without what is meant for its developers.
fn brief(why: &anyhow::Error) -> String {
    let text = format!("{why:#}");
    let text = text.split("<non-verbose/>").next().unwrap_or_default();
    let text = text.split("\n<backtrace>").next().unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::fault_of;
    use crate::gemma::Special;
    use crate::gemma::tokenizer::tests::letters;
    use crate::sampler::Mask;
    use serde_json::json;

    const END: Token = 5;

    fn grammars() -> (Arc<Tokenizer>, Grammars) {
        let tokenizer = Arc::new(letters());
        (tokenizer.clone(), Grammars::new(tokenizer, &[1, END, 9_999_999]).unwrap())
    }

    fn person() -> Source {
        Source::JsonSchema(
            json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}, "old": {"type": "boolean"}},
            "required": ["name", "old"], "additionalProperties": false}),
        )
    }

    #[test]
    fn what_a_schema_fixes_is_forced_and_the_end_comes_where_it_is_complete() {
        let (tokenizer, grammars) = grammars();
        let grammar = grammars.compile(&person()).unwrap();
        let text = tokenizer.encode(r#"{"name": "a", "old": true}"#, Special::AsText).unwrap();
        let prompt: Vec<Token> = vec![2, 50, 60];
        let rule = grammar.follow(prompt.len());
        let mut history = prompt.clone();
        let mut forced = String::new();
        for &token in &text {
            let mask = rule.mask(&history).unwrap();
            assert!(
                mask.allows(token)
                    && !mask.ends()
                    && !mask.allows(END)
                    && !rule.is_complete(&history),
                "{}",
                tokenizer.decode(&history)
            );
            assert!(!mask.allows(1) && !mask.allows(2) && !mask.is_empty());
            if mask.only() == Some(token) {
                forced += &tokenizer.decode(&[token]);
            }
            history.push(token);
        }
        // All but the name's letters and the choice of a truth.
        assert_eq!(forced, r#"{"name": ", "old": rue}"#);
        let end = rule.mask(&history).unwrap();
        assert!(end.ends() && end.allows(1) && end.allows(END) && rule.is_complete(&history));
        history.push(END);
        assert!(rule.mask(&history).unwrap().ends());
        // Another byte for the same text, and blanks where none are due.
        assert!(rule.mask(&[&prompt[..], &text[..9], &text[..1]].concat()).unwrap().is_empty());
    }

    /// The order of questions, guesses that came to nothing, and what was let go of leave no trace.
    #[test]
    fn a_mask_depends_on_the_tokens_alone() {
        let (tokenizer, grammars) = grammars();
        for source in [
            person(),
            Source::Regex("(ab|ac)*d?".into()),
            Source::Lark("start: \"x\" y+\ny: /[0-9]{2}/ \";\"".into()),
        ] {
            let grammar = grammars.compile(&source).unwrap();
            let mut state = 7u64;
            let mut next = |n: usize| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % n
            };
            // Random texts that the grammar allows.
            let rule = grammar.follow(1);
            let mut texts: Vec<(Vec<Token>, Arc<Mask>)> = Vec::new();
            for _ in 0..6 {
                let mut text = vec![2];
                for _ in 0..25 {
                    let mask = rule.mask(&text).unwrap();
                    texts.push((text.clone(), mask.clone()));
                    let allowed: Vec<Token> = (0..tokenizer.vocab() as Token)
                        .filter(|t| mask.allows(*t) && *t != END && *t != 1)
                        .collect();
                    let Some(&token) = allowed.get(next(allowed.len().max(1))) else { break };
                    text.push(token);
                }
            }
            let other = grammar.follow(1);
            for _ in 0..300 {
                let (text, mask) = &texts[next(texts.len())];
                if next(4) == 0 {
                    other.settle(&text[..1 + next(text.len())]);
                }
                assert_eq!(other.mask(text).unwrap(), *mask, "{:?}", tokenizer.decode(text));
            }
        }
    }

    /// A thread beside makes the same masks, of guesses and of texts that were wrong too.
    #[test]
    fn a_slow_grammar_is_followed_beside() {
        let (tokenizer, grammars) = grammars();
        let grammar = grammars.compile(&person()).unwrap();
        let text = tokenizer.encode(r#"{"name": "a", "old": true}"#, Special::AsText).unwrap();
        let (quick, slow) = (grammar.follow(1), grammar.follow(1).slowed());
        assert!(!quick.is_slow() && quick.is_ready(&[2]) && slow.is_slow());
        let mut history = vec![2];
        for token in text.into_iter().chain([END, 2, 2]) {
            assert!(!slow.is_ready(&history), "nobody has asked before");
            while !slow.is_ready(&history) {
                std::thread::yield_now();
            }
            assert_eq!(slow.mask(&history).unwrap(), quick.mask(&history).unwrap());
            slow.settle(&history);
            history.push(token);
        }
    }

    /// A record of a batch, or a client, may ask for anything.
    #[test]
    fn deep_and_long_grammars_are_refused_or_followed_and_end_nothing() {
        let (_, grammars) = grammars();
        let chain = |n: usize| {
            let rule = |i| format!("r{i}: r{}\n", i + 1);
            let rules: String = (0..n).map(rule).collect();
            Source::Lark(format!("start: r0\n{rules}r{n}: \"x\"\n"))
        };
        let terminals = |n: usize| {
            let rules: String = (0..n).map(|i| format!("R{i}: R{} \"x\"\n", i + 1)).collect();
            Source::Lark(format!("start: R0\n{rules}R{n}: \"x\"\n"))
        };
        let refs = |n: usize| {
            let rule = |i| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", i + 1)}));
            let mut rules: serde_json::Map<String, Value> = (0..n).map(rule).collect();
            rules.insert(format!("a{n}"), json!({"type": "boolean"}));
            Source::JsonSchema(json!({"$defs": rules, "$ref": "#/$defs/a0"}))
        };
        let brackets = |n: usize| Source::Regex("(".repeat(n) + "a" + &")".repeat(n));
        for source in [chain(10_000), terminals(6_000), refs(5_000), brackets(100_000)] {
            if let Err(error) = grammars.compile(&source) {
                assert_eq!(fault_of(&error).unwrap().kind.exit_code(), 2, "{error:#}");
            }
        }
        let error = grammars.compile(&brackets(LONGEST)).err().unwrap();
        assert!(format!("{error:#}").contains("at most"), "{error:#}");
    }

    #[test]
    fn what_cannot_be_kept_is_wrong_usage_with_its_place() {
        let (_, grammars) = grammars();
        let part = |part: Value| {
            Source::JsonSchema(
                json!({"type": "object", "properties": {"a": {"type": "array", "items": part}}}),
            )
        };
        for (source, says) in [
            (part(json!({"type": "string", "not": {"const": "x"}})), " at /properties/a/items: "),
            (part(json!({"type": "strin"})), "at /properties/a/items: "),
            (part(json!({"$ref": "#/$defs/none"})), "at /properties/a/items: "),
            (
                Source::JsonSchema(
                    json!({"$defs": {"b": {"uniqueItems": true, "type": "array"}}, "$ref": "#/$defs/b"}),
                ),
                "at /$defs/b: ",
            ),
            (Source::JsonSchema(json!([1])), "a schema is an object"),
            (Source::JsonSchema(json!(false)), "allows nothing"),
            (Source::JsonSchema(json!({"type": "integer", "minimum": 5, "maximum": 4})), ""),
            (Source::JsonSchema(json!({"x-guidance": 5})), "x-guidance"),
            (Source::Lark("start: \"a\" b".into()), "b"),
            (Source::Lark("start: \"a\"\nb c".into()), "2("),
            (Source::Lark(String::new()), ""),
            (Source::Regex("(a".into()), "regular expression"),
        ] {
            let error = grammars.compile(&source).err().unwrap_or_else(|| panic!("{source:?}"));
            assert_eq!(fault_of(&error).unwrap().kind.exit_code(), 2, "{source:?}");
            let text = format!("{error:#}");
            assert!(
                text.contains(says) && !text.contains('<') && text.lines().count() < 9,
                "{source:?}: {text}"
            );
        }
        for (wrong, says) in [
            (json!({"type": "strin"}), "the types are"),
            (json!({"$ref": "#/$defs/none"}), "a $ref names"),
            (json!({"type": "string", "format": "nonsense"}), "leave the format out"),
            (json!({"type": "string", "pattern": "(a"}), "regular expression"),
            (json!({"type": "string", "not": {"const": "x"}}), "not supported"),
        ] {
            let error = grammars.compile(&Source::JsonSchema(wrong.clone())).err().unwrap();
            let help = fault_of(&error).unwrap().help.clone().unwrap();
            assert!(help.contains(says), "{wrong}: {help}");
        }
        for good in [json!(true), json!({}), json!({"$comment": "x"})] {
            grammars.compile(&Source::JsonSchema(good)).unwrap();
        }
        grammars.compile(&Source::json_object()).unwrap();
    }
}
