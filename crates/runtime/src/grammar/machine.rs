//! A compiled grammar and the states of the texts that follow it.
//!
//! A machine runs in its own child process ([`super::place`]), because llguidance limits neither
//! memory nor time for an untrusted grammar. A state is a pure function of the tokens before it.

use super::GrammarSource;
use super::schema::{self, Prepared, Refusal};
use super::vocabulary::GrammarVocabulary;
use anyhow::{Result, anyhow};
use gemma_base::error::Fault;
use gemma_base::os::process::thread_time;
use gemma_base::tensor::Token;
use gemma_model::sampler::Mask;
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

/// Most work per mask, above which a grammar counts as too complex. The limits are far above
/// llguidance's defaults, so that the outcome does not depend on cached states.
const LEXER_FUEL: u64 = 20_000_000;
const ITEMS: usize = 1_000_000;

/// A query to a machine. The answer is a [`MachineState`].
#[derive(Debug, Serialize, Deserialize)]
pub enum StateQuery {
    /// Returns the state after these tokens of a text.
    Walk(Vec<Token>),
    /// Returns the state after one more token.
    Step { from: u64, token: Token },
}

/// The state of a text under a grammar.
#[derive(Clone, Debug)]
pub struct MachineState {
    /// The machine's number of the state; `None` for a forbidden text and for an ended one.
    pub number: Option<u64>,
    /// The allowed next tokens, or an error message.
    pub mask: Result<Mask, String>,
    /// Whether the text may end here.
    pub is_complete: bool,
    /// Processor time to compute the state.
    pub time: Duration,
}

pub struct GrammarMachine {
    start: Matcher,
    stops: Vec<Token>,
    /// States by number, each with whether a text may end there.
    states: HashMap<u64, (Matcher, bool)>,
    last: u64,
}

impl GrammarMachine {
    /// Compiles a grammar. An invalid grammar is a usage fault that names the location.
    pub fn compile(
        source: &GrammarSource,
        vocabulary: &GrammarVocabulary,
    ) -> Result<GrammarMachine> {
        let compiler = Compiler::new(vocabulary)?;
        let start = compiler.matcher(source).map_err(|why| compiler.explain(source, &why))?;
        let stops = vocabulary.stops().to_vec();
        let mut machine = GrammarMachine { start, stops, states: HashMap::new(), last: 0 };
        match machine.answer(&StateQuery::Walk(Vec::new())).mask {
            Ok(mask) if !mask.is_empty() => Ok(machine),
            _ => {
                let what =
                    format!("no text can follow the {}, or it is too complex", source.name());
                Err(Fault::usage(what).into())
            }
        }
    }

    pub fn answer(&mut self, ask: &StateQuery) -> MachineState {
        let begun = thread_time();
        let state = self.compute(ask);
        MachineState { time: thread_time().saturating_sub(begun), ..state }
    }

    fn compute(&mut self, ask: &StateQuery) -> MachineState {
        let matcher = match ask {
            StateQuery::Walk(tokens) => {
                let mut matcher = self.start.clone();
                for (i, token) in tokens.iter().enumerate() {
                    if self.stops.contains(token) && may_end(&mut matcher) {
                        return self.behind_end(&tokens[i + 1..]);
                    }
                    // The matcher keeps the error of a forbidden token.
                    let _ = matcher.consume_token(*token);
                }
                matcher
            }
            StateQuery::Step { from, token } => {
                let Some((before, may_end)) = self.states.get(from) else {
                    return MachineState::forbidden();
                };
                if *may_end && self.stops.contains(token) {
                    return self.behind_end(&[]);
                }
                let mut matcher = before.clone();
                let _ = matcher.consume_token(*token);
                matcher
            }
        };
        self.look(matcher)
    }

    /// Drops states that no text needs.
    pub fn forget(&mut self, states: &[u64]) {
        states.iter().for_each(|number| drop(self.states.remove(number)));
    }

    /// Returns the state after the end of a text, where only stop tokens may follow.
    fn behind_end(&self, more: &[Token]) -> MachineState {
        if more.iter().any(|token| !self.stops.contains(token)) {
            return MachineState::forbidden();
        }
        let words = self.stops.iter().max().map_or(0, |last| *last as usize / 32 + 1);
        let mut end = vec![0; words];
        self.stops.iter().for_each(|stop| end[*stop as usize / 32] |= 1 << (stop % 32));
        MachineState { mask: Ok(self.mask_of(end)), is_complete: true, ..MachineState::forbidden() }
    }

    /// Computes the mask of a new state. It is computed once, so that a state never depends on
    /// later queries of an earlier one.
    fn look(&mut self, mut matcher: Matcher) -> MachineState {
        let is_complete = may_end(&mut matcher);
        if matcher.is_error() {
            // The last token is forbidden.
            return MachineState { is_complete, ..MachineState::forbidden() };
        }
        let mask = matcher.compute_mask_or_eos().map(|mask| self.mask_of(mask.into()));
        let mask = mask.map_err(|why| brief(&why));
        let number = (!matcher.is_error()).then(|| {
            self.last += 1;
            self.states.insert(self.last, (matcher, is_complete));
            self.last
        });
        MachineState { number, mask, is_complete, time: Duration::ZERO }
    }

    fn mask_of(&self, words: Vec<u32>) -> Mask {
        let allowed: u32 = words.iter().map(|bits| bits.count_ones()).sum();
        let stops = self.stops.iter().filter(|&&stop| {
            words.get(stop as usize / 32).is_some_and(|w| w >> (stop % 32) & 1 == 1)
        });
        let ends = allowed > 0 && stops.count() == allowed as usize;
        Mask::new(words, ends)
    }
}

/// Returns whether a text may end in this state.
fn may_end(matcher: &mut Matcher) -> bool {
    matcher.is_accepting().unwrap_or(false) || !matcher.is_error() && matcher.is_stopped()
}

impl MachineState {
    /// Returns the state of a forbidden text, which no token may follow.
    pub fn forbidden() -> MachineState {
        MachineState {
            number: None,
            mask: Ok(Mask::default()),
            is_complete: false,
            time: Duration::ZERO,
        }
    }
}

struct Compiler {
    factory: ParserFactory,
}

impl Compiler {
    fn new(vocabulary: &GrammarVocabulary) -> Result<Compiler> {
        let mut factory = ParserFactory::new_simple(&vocabulary.environment())?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.step_lexer_fuel = LEXER_FUEL;
        (limits.step_max_items, limits.max_items_in_row) = (ITEMS, ITEMS);
        limits.verbose_errors = false;
        Ok(Compiler { factory })
    }

    fn matcher(&self, source: &GrammarSource) -> Result<Matcher> {
        let grammar = match source {
            GrammarSource::JsonSchema(schema) => match schema::prepared(schema)? {
                Prepared::Json(schema) => TopLevelGrammar::from_json_schema(schema),
                Prepared::Lark(rules) => TopLevelGrammar::from_lark(rules),
            },
            GrammarSource::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            GrammarSource::Regex(text) => TopLevelGrammar::from_regex(text),
        };
        let matcher = Matcher::new(self.factory.create_parser(grammar));
        match matcher.get_error() {
            Some(why) => Err(anyhow!(why)),
            None => Ok(matcher),
        }
    }

    /// Creates the fault of an invalid grammar, with the location and a remedy.
    fn explain(&self, source: &GrammarSource, why: &anyhow::Error) -> anyhow::Error {
        let help = match source {
            GrammarSource::JsonSchema(schema) => return self.explain_schema(schema, why),
            GrammarSource::Lark(_) => {
                "the notation is llguidance's: \
                https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"
            }
            GrammarSource::Regex(_) => {
                "the notation is that of Rust's regex crate, without look-around, ^ and $"
            }
        };
        let name = source.name();
        Fault::usage(format!("the {name} cannot be used: {}", brief(why))).help(help).into()
    }

    /// Creates the fault of an invalid schema, from this program's own check or from llguidance's
    /// error.
    fn explain_schema(&self, schema: &Value, why: &anyhow::Error) -> anyhow::Error {
        let refusal = match why.downcast_ref::<Refusal>() {
            Some(refusal) => refusal.clone(),
            None => {
                let why = brief(why);
                // The innermost part with the same error is the reason. If nothing can match a
                // required property, that part has its own error.
                let is_of_part = why.contains("is unsatisfiable");
                let reason = RefCell::new(why.clone());
                let is_wrong = |part: Value| {
                    let error = self.matcher(&GrammarSource::JsonSchema(part)).err();
                    let error = error.map(|error| brief(&error));
                    let error = error.filter(|error| is_of_part || why.contains(error));
                    error.is_some_and(|error| {
                        reason.replace(error);
                        true
                    })
                };
                let place = schema::place(schema, &is_wrong);
                Refusal::of_library(place, &reason.take())
            }
        };
        let place = Some(&refusal.place).filter(|place| !place.is_empty());
        let place = place.map(|place| format!(" at {place}")).unwrap_or_default();
        let what = format!("the JSON schema cannot be used{place}: {}", refusal.what);
        Fault::usage(what).help(refusal.help).into()
    }
}

/// Returns an error of llguidance without its details for developers.
fn brief(why: &anyhow::Error) -> String {
    let text = format!("{why:#}");
    let text = text.split("<non-verbose/>").next().unwrap_or_default();
    let text = text.split("\n<backtrace>").next().unwrap_or_default();
    text.trim().to_owned()
}
