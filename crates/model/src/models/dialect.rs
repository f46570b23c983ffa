//! A family's conventions for turns, thoughts and function calls in templates and answers.

use super::architecture::ARCHITECTURES;
use super::gemma3;

/// Conventions of an architecture's texts.
#[derive(Debug, PartialEq)]
pub struct Dialect {
    /// Control token that begins a turn. A vocabulary that contains it uses this dialect.
    pub turn: &'static str,
    /// Chat template of models without one in their files.
    pub template: &'static str,
    /// Control tokens of thoughts, if models of the family can think.
    pub thought: Option<ThoughtMarks>,
    /// Control tokens before and after a function call, and around a string in it. `None`: a call
    /// is a line of JSON.
    pub calls: Option<[&'static str; 3]>,
    /// Tokenizer type in GGUF files.
    pub gguf: &'static str,
    /// Whether GGUF files list the merges. If so, the tokenizer type alone determines the
    /// pre-tokenisation.
    pub has_merges: bool,
}

/// Control tokens of thoughts.
#[derive(Debug, PartialEq)]
pub struct ThoughtMarks {
    /// Requests a thought, in the prompt.
    pub wish: &'static str,
    pub begin: &'static str,
    pub end: &'static str,
}

impl Dialect {
    /// Returns the dialect of a vocabulary, given a test for its control tokens. If several match,
    /// the newest architecture's is used. Without a match it is that of Gemma 3.
    pub fn of_vocabulary(has: impl Fn(&str) -> bool) -> &'static Dialect {
        let mut dialects = ARCHITECTURES.into_iter().rev().map(|a| a.dialect());
        dialects.find(|dialect| has(dialect.turn)).unwrap_or(&gemma3::DIALECT)
    }

    /// Returns whether this is the template of a dialect.
    pub fn is_template(source: &str) -> bool {
        ARCHITECTURES.into_iter().any(|a| a.dialect().template == source)
    }
}
