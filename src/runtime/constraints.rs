//! Answers that must follow a grammar: the grammars of a model, and what became of an answer.

use crate::error::{Fault, Kind};
use crate::gemma::Tokenizer;
use crate::grammar::{Follow, Grammar, Grammars, Source};
use crate::sampler::Sampler;
use crate::tensor::Token;
use anyhow::{Result, ensure};
use std::collections::HashMap;
use std::sync::Arc;

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
        Constraints {
            tokenizer: tokenizer.clone(),
            stops: stops.to_vec(),
            grammars: None,
            known: HashMap::new(),
        }
    }

    /// Checks and prepares a grammar; `ignore_eos` would leave it no way to end.
    pub fn get(&mut self, source: &Source, ignore_eos: bool) -> Result<Grammar> {
        ensure!(
            !ignore_eos,
            Fault::usage(
                "an answer ends where its grammar does, and --ignore-eos asks that it goes on"
            )
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
    pub fn check(
        &self,
        history: &[Token],
        completion: usize,
        by_stop_string: bool,
    ) -> Result<(), Fault> {
        match &self.0 {
            Some(follow) if !follow.is_complete(history) => {
                let (by, help) = match by_stop_string {
                    true => (
                        " by a stop string",
                        "give no --stop where a grammar says how the answer ends",
                    ),
                    false => ("", "raise --max-tokens, and --ctx-size if it was given"),
                };
                let what = format!(
                    "the answer was cut off{by} after {completion} tokens, before its grammar was \
                        complete"
                );
                Err(Fault::new(Kind::Incomplete, what).help(help))
            }
            _ => Ok(()),
        }
    }
}
