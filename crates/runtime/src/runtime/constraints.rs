//! Grammars of a model, and completeness checks of the answers that follow them.

use crate::grammar::{Grammar, GrammarRule, GrammarSource, Grammars};
use anyhow::{Result, ensure};
use gemma_base::error::{Fault, Kind, fault_of};
use gemma_base::tensor::Token;
use gemma_model::models::Tokenizer;
use gemma_model::sampler::{Sampler, ThoughtBudget};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Limits of cached grammars: their number and their sources' bytes. Records of a batch mostly
/// share one grammar.
const MOST: usize = 64;
const MOST_BYTES: usize = 4 << 20;
/// Most machines that keep running without a text.
const IDLE: usize = 4;

/// Grammars of one model, compiled on first use. A rejected grammar is not compiled again.
pub struct Constraints {
    tokenizer: Arc<Tokenizer>,
    stops: Vec<Token>,
    /// Most texts at once.
    texts: usize,
    grammars: OnceLock<Grammars>,
    known: Mutex<KnownGrammars>,
}

/// Results of compilations, by the digests of their sources.
#[derive(Default)]
struct KnownGrammars {
    outcomes: HashMap<SourceDigest, Result<Grammar, Fault>>,
    /// Bytes of the sources.
    bytes: usize,
}

type SourceDigest = [u8; 32];

impl KnownGrammars {
    /// Stores the result for a source of `bytes` bytes. Drops all others if the limits are
    /// exceeded.
    fn keep(&mut self, digest: SourceDigest, bytes: usize, outcome: Result<Grammar, Fault>) {
        if self.outcomes.len() >= MOST || self.bytes + bytes > MOST_BYTES {
            *self = KnownGrammars::default();
        }
        self.bytes += bytes;
        self.outcomes.insert(digest, outcome);
    }
}

impl Constraints {
    /// Creates an empty set for `texts` texts at once.
    pub fn new(tokenizer: &Arc<Tokenizer>, stops: &[Token], texts: usize) -> Constraints {
        Constraints {
            tokenizer: tokenizer.clone(),
            stops: stops.to_vec(),
            texts,
            grammars: OnceLock::new(),
            known: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownGrammars> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a compiled grammar, or its error; `None` if the source was not compiled before.
    pub fn recall(&self, source: &GrammarSource) -> Option<Result<Grammar, Fault>> {
        let digest = digest(source);
        let mut known = self.known();
        let entry = known.outcomes.get_mut(&digest)?;
        if let Some(fault) = entry.as_ref().ok().and_then(|grammar| grammar.refused()).cloned() {
            *entry = Err(fault);
        }
        Some(entry.clone())
    }

    /// Compiles a grammar or returns it from the cache. Fails with `ignore_eos`, which leaves it no
    /// way to end. Other callers do not wait for the work, which is aborted if `is_wanted` returns
    /// false.
    pub fn get(
        &self,
        source: &GrammarSource,
        ignore_eos: bool,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Grammar> {
        ensure!(
            !ignore_eos,
            Fault::usage(
                "an answer ends when its grammar is complete, but --ignore-eos forbids that"
            )
            .help("drop one of the two")
        );
        let bytes = source.check_size()?;
        if let Some(known) = self.recall(source) {
            return Ok(known?);
        }
        let grammars = match self.grammars.get() {
            Some(grammars) => grammars,
            None => {
                let new = Grammars::new(self.tokenizer.clone(), &self.stops, self.texts + IDLE)?;
                self.grammars.get_or_init(|| new)
            }
        };
        let compiled = grammars.compile(source, is_wanted);
        let entry = match &compiled {
            Ok(grammar) => Ok(grammar.clone()),
            // Other errors are not stored, since the next attempt may succeed.
            Err(error) => match fault_of(error).filter(|fault| fault.kind == Kind::Usage) {
                Some(fault) if is_wanted() => Err(fault.clone()),
                _ => return compiled,
            },
        };
        self.known().keep(digest(source), bytes, entry);
        compiled
    }
}

/// Returns the digest of a source without copying it.
fn digest(source: &GrammarSource) -> SourceDigest {
    let mut hash = Sha256::new();
    serde_json::to_writer(&mut hash, source).expect("a digest takes any bytes");
    hash.finalize().into()
}

/// Grammar and thought limit of one answer.
#[derive(Default)]
pub struct Constrained {
    grammar: Option<Arc<GrammarRule>>,
    budget: Option<ThoughtBudget>,
}

impl Constrained {
    /// Returns the rules for an answer to `prompt`. If the model `thinks`, the grammar begins after
    /// the thought, which may begin in the prompt. `budget` limits the tokens of thoughts.
    pub fn new(
        grammar: Option<&Grammar>,
        prompt: &[Token],
        tokenizer: &Tokenizer,
        thinks: bool,
        budget: Option<usize>,
    ) -> Constrained {
        let marks = tokenizer.channel().filter(|_| thinks);
        let begin = marks.map_or(prompt.len(), |_| tokenizer.open_thought(prompt));
        let follow = |grammar: &Grammar| Arc::new(grammar.follow_behind(begin, marks));
        let limit = |(most, marks)| ThoughtBudget::new(begin, marks, most);
        Constrained { grammar: grammar.map(follow), budget: budget.zip(marks).map(limit) }
    }

    pub fn sampler(&self, sampler: Sampler) -> Sampler {
        match (&self.grammar, &self.budget) {
            (None, None) => sampler,
            (Some(follow), None) => sampler.under(follow.clone()),
            (None, Some(budget)) => sampler.under(Arc::new(budget.clone())),
            (Some(follow), Some(budget)) => {
                sampler.under(Arc::new(budget.clone().with(follow.clone())))
            }
        }
    }

    /// Returns an error if the text ended before its grammar was complete.
    pub fn check(
        &self,
        history: &[Token],
        completion: usize,
        by_stop_string: bool,
    ) -> Result<(), Fault> {
        match &self.grammar {
            Some(follow) if !follow.is_complete(history) => {
                let (by, help) = match by_stop_string {
                    true => (
                        " by a stop string",
                        "drop --stop: the grammar decides where the answer ends",
                    ),
                    false => ("", "raise --max-tokens, and --ctx-size if it was given"),
                };
                let what = format!(
                    "the answer was cut off{by} after {completion} tokens, \
                        before its grammar was complete"
                );
                Err(Fault::new(Kind::Incomplete, what).help(help))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_model::models::tokenizer::samples::letters;
    use serde_json::json;

    fn refused(constraints: &Constraints, source: &GrammarSource) -> String {
        constraints.get(source, false, &|| true).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn refusals_keep_a_digest_and_no_long_source_at_all() {
        let constraints = Constraints::new(&Arc::new(letters()), &[1], 1);
        let long = GrammarSource::JsonSchema(json!({"enum": ["x".repeat(300_000)]}));
        assert!(refused(&constraints, &long).contains("more than the limit"));
        assert!(constraints.recall(&long).is_none());
        assert!(constraints.known().outcomes.is_empty());
        assert_eq!(constraints.known().bytes, 0);
        let wrong = GrammarSource::JsonSchema(json!({"type": "strin"}));
        let why = refused(&constraints, &wrong);
        assert_eq!(constraints.recall(&wrong).unwrap().err().unwrap().to_string(), why);
        // Number and bytes of cached sources are limited.
        for bytes in [200_000, 1] {
            let mut known = KnownGrammars::default();
            for n in 0..200u8 {
                known.keep([n; 32], bytes, Err(Fault::usage("wrong")));
                assert!(known.bytes <= MOST_BYTES && known.outcomes.len() <= MOST);
                assert_eq!(known.bytes, bytes * known.outcomes.len());
            }
        }
        // Sources of different kinds have different digests.
        let text = "start: \"a\"".to_owned();
        let kinds = [GrammarSource::Lark(text.clone()), GrammarSource::Regex(text.clone())];
        assert_ne!(digest(&kinds[0]), digest(&kinds[1]));
        assert_ne!(digest(&kinds[0]), digest(&GrammarSource::JsonSchema(text.into())));
    }
}
