//! A family's speech: turns, thoughts and calls of functions, as templates and answers write them.

use super::architecture::ARCHITECTURES;
use super::gemma3;

/// The speech of an architecture.
#[derive(Debug, PartialEq)]
pub struct Dialect {
    /// Control token that begins a turn. A vocabulary with it is one of this dialect.
    pub turn: &'static str,
    /// Chat template of models whose files carry none.
    pub template: &'static str,
    /// Control tokens of thoughts, where models of the family can think.
    pub thought: Option<ThoughtMarks>,
    /// Control tokens before and behind a call of a function, and around a string in it. Without
    /// them a call is a line of JSON.
    pub calls: Option<[&'static str; 3]>,
    /// Kind of tokenizer in GGUF files.
    pub gguf: &'static str,
    /// Whether GGUF files list the merges, and say by the kind alone how texts are cut.
    pub has_merges: bool,
}

/// Control tokens of thoughts.
#[derive(Debug, PartialEq)]
pub struct ThoughtMarks {
    /// Asks for a thought, in the prompt.
    pub wish: &'static str,
    pub begin: &'static str,
    pub end: &'static str,
}

impl Dialect {
    /// Returns the dialect of a vocabulary that has some control tokens. Among several, the newest
    /// architecture's counts. A vocabulary without known turns speaks as Gemma 3 does.
    pub fn of_vocabulary(has: impl Fn(&str) -> bool) -> &'static Dialect {
        let mut dialects = ARCHITECTURES.into_iter().rev().map(|a| a.dialect());
        dialects.find(|dialect| has(dialect.turn)).unwrap_or(&gemma3::DIALECT)
    }

    /// Returns whether this is the template of some dialect.
    pub fn is_template(source: &str) -> bool {
        ARCHITECTURES.into_iter().any(|a| a.dialect().template == source)
    }
}
