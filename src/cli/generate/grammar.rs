//! Answers that must follow a grammar: what was asked for, checked before anything is loaded, and what became of it.

use crate::error::{Fault, Kind};
use crate::gemma::Tokenizer;
use crate::grammar::{Follow, Grammar, Grammars, Source, parse_schema};
use crate::sampler::Sampler;
use crate::tensor::Token;
use anyhow::{Result, ensure};
use clap::Args;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Constrained output")]
pub struct GrammarOptions {
    /// Answer with JSON that fits a schema
    ///
    /// The answer has every key and value that the JSON Schema asks for, and no white space but one space behind `,` and `:`. A keyword
    /// that is not supported is refused, not passed over. What the schema leaves no choice about is guessed at no cost. An answer that
    /// --max-tokens cuts off before it is complete is a failure with exit code 8. The grammar describes what is generated; --prefill
    /// comes before it.
    #[arg(long, value_name = "SCHEMA|@FILE", conflicts_with_all = ["grammar", "regex"])]
    pub json_schema: Option<String>,
    /// Answer with text that follows the grammar in FILE (llguidance's variant of Lark's notation)
    #[arg(long, value_name = "FILE", conflicts_with = "regex")]
    pub grammar: Option<PathBuf>,
    /// Answer with text that matches a regular expression as a whole
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    pub regex: Option<String>,
}

impl GrammarOptions {
    /// What the options ask for, files read.
    pub fn source(&self) -> Result<Option<Source>> {
        if let Some(schema) = &self.json_schema {
            // A schema is JSON, which is hardly ever the name of a file.
            let named = Some(schema.as_str()).filter(|name| Path::new(name).is_file());
            let (text, what) = match schema.strip_prefix('@').or(named) {
                Some(file) => (crate::cli::input::read_file(file.as_ref())?, format!("--json-schema: {file}")),
                None => (schema.clone(), "--json-schema".to_owned()),
            };
            return Ok(Some(Source::JsonSchema(parse_schema(&text, &what)?)));
        }
        if let Some(file) = &self.grammar {
            return Ok(Some(Source::Lark(crate::cli::input::read_file(file)?)));
        }
        Ok(self.regex.clone().map(Source::Regex))
    }
}

/// The most grammars kept at once: records of a batch mostly share one.
const MOST: usize = 64;

/// Grammars of one model, made when they are first asked for.
pub struct Constraints {
    tokenizer: Arc<Tokenizer>,
    stops: Vec<Token>,
    grammars: Option<Grammars>,
    known: HashMap<String, Grammar>,
}

impl Constraints {
    pub fn new(tokenizer: &Arc<Tokenizer>, stops: &[Token]) -> Constraints {
        Constraints { tokenizer: tokenizer.clone(), stops: stops.to_vec(), grammars: None, known: HashMap::new() }
    }

    /// Checks and prepares a grammar; `ignore_eos` would leave it no way to end.
    pub fn get(&mut self, source: &Source, ignore_eos: bool) -> Result<Grammar> {
        ensure!(
            !ignore_eos,
            Fault::usage("an answer ends where its grammar does, and --ignore-eos asks that it goes on")
                .help("drop one of the two")
        );
        let key = format!("{source:?}");
        if let Some(grammar) = self.known.get(&key) {
            return Ok(grammar.clone());
        }
        let grammars = match &mut self.grammars {
            Some(grammars) => grammars,
            none => none.insert(Grammars::new(self.tokenizer.clone(), &self.stops)?),
        };
        let grammar = grammars.compile(source)?;
        if self.known.len() == MOST {
            self.known.clear();
        }
        self.known.insert(key, grammar.clone());
        Ok(grammar)
    }
}

/// One answer's grammar.
pub struct Constrained(Option<Arc<Follow>>);

impl Constrained {
    /// The grammar of an answer to `prompt` tokens, if there is one.
    pub fn new(grammar: Option<&Grammar>, prompt: usize) -> Constrained {
        Constrained(grammar.map(|grammar| Arc::new(grammar.follow(prompt))))
    }

    pub fn sampler(&self, sampler: Sampler) -> Sampler {
        match &self.0 {
            Some(follow) => sampler.under(follow.clone()),
            None => sampler,
        }
    }

    /// Why a text that ended for another reason than its grammar is not what was asked for.
    pub fn check(&self, history: &[Token], completion: usize, by_stop_string: bool) -> Result<(), Fault> {
        match &self.0 {
            Some(follow) if !follow.is_complete(history) => {
                let (by, help) = match by_stop_string {
                    true => (" by a stop string", "give no --stop where a grammar says how the answer ends"),
                    false => ("", "raise --max-tokens, and --ctx-size if it was given"),
                };
                let what = format!("the answer was cut off{by} after {completion} tokens, before its grammar was complete");
                Err(Fault::new(Kind::Incomplete, what).help(help))
            }
            _ => Ok(()),
        }
    }
}
