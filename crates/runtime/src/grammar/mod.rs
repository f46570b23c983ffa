//! Texts that must follow a grammar: JSON Schema, Lark's notation or a regular expression, using
//! the `llguidance` crate.
//!
//! A grammar becomes a [`TokenRule`](gemma_model::sampler::TokenRule) of the sampler: a pure
//! function from the tokens so far to the allowed next tokens. Drafts therefore change no text
//! under a grammar. White space in JSON is fixed: `, ` between items and `: ` after keys, as in
//! most training data. An answer therefore cannot loop on blanks. The fixed parts of a schema are
//! forced tokens, which drafts propose without a model.
//!
//! Each grammar is compiled and followed in its own child process ([`place`]).

mod follow;
mod machine;
mod place;
mod schema;
pub mod tools;
mod vocabulary;

pub use follow::GrammarRule;
pub use place::{COMPILING, LIMITS, ROLE, serve_parent};
pub use schema::{Enforcement, parse as parse_schema};

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use gemma_base::util::json;
use gemma_model::models::{Special, Tokenizer};
use machine::{MachineState, StateQuery};
use place::MachineHost;
use vocabulary::GrammarVocabulary;

/// Source text of a grammar.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum GrammarSource {
    JsonSchema(Value),
    /// llguidance's variant of Lark's notation.
    Lark(String),
    /// A regular expression that matches the whole text.
    Regex(String),
}

impl GrammarSource {
    /// Returns the grammar of any JSON object.
    pub fn json_object() -> GrammarSource {
        GrammarSource::JsonSchema(serde_json::json!({"type": "object"}))
    }

    fn name(&self) -> &'static str {
        match self {
            GrammarSource::JsonSchema(_) => "JSON schema",
            GrammarSource::Lark(_) => "grammar",
            GrammarSource::Regex(_) => "regular expression",
        }
    }

    /// Returns the bytes of memory that it uses.
    pub fn held(&self) -> usize {
        match self {
            GrammarSource::JsonSchema(schema) => json::held(schema),
            GrammarSource::Lark(text) | GrammarSource::Regex(text) => text.len(),
        }
    }

    /// Returns the number of bytes. Fails if it exceeds [`LONGEST`]. Callers check the size before
    /// they compare, rewrite or store a source.
    pub fn check_size(&self) -> Result<usize> {
        let bytes = match self {
            GrammarSource::JsonSchema(schema) => json::bytes(schema),
            GrammarSource::Lark(text) | GrammarSource::Regex(text) => text.len(),
        };
        if bytes > LONGEST {
            let name = self.name();
            let what = format!("the {name} has {bytes} bytes, more than the limit of {LONGEST}");
            return Err(Fault::usage(what).help("leave out what answers do not need").into());
        }
        Ok(bytes)
    }
}

/// Largest grammar in bytes.
const LONGEST: usize = 256 << 10;

/// Grammars for one tokenizer.
pub struct Grammars(Arc<SharedGrammars>);

struct SharedGrammars {
    vocabulary: GrammarVocabulary,
    /// Most machines that run at once. Starting another one ends the least recently used machine.
    most: usize,
    /// Grammars with running machines, least recently used first.
    running: Mutex<VecDeque<Weak<Compiled>>>,
}

impl Grammars {
    /// Creates a compiler of grammars. `stops` are the tokens that end a text; they are only
    /// allowed where the grammar is complete. `most` is the largest number of concurrent machines.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: &[Token], most: usize) -> Result<Grammars> {
        let count = tokenizer.vocab();
        let stops: Vec<Token> =
            stops.iter().copied().filter(|stop| (*stop as usize) < count).collect();
        if stops.is_empty() {
            let fault = Fault::model(
                "the model has no token that ends a text, so no answer under a grammar could end",
            );
            return Err(fault.help("give eos_token_id in its generation_config.json").into());
        }
        let words = tokenizer.clone();
        let encode =
            Arc::new(move |text: &str| tokenizer.encode(text, Special::AsText).unwrap_or_default());
        let vocabulary =
            GrammarVocabulary::new(count, |token| words.token_bytes(token), stops, encode);
        Ok(Grammars(Arc::new(SharedGrammars { vocabulary, most, running: Mutex::default() })))
    }

    /// Compiles a grammar. An invalid grammar is a usage fault that names the location. The work is
    /// aborted if `is_wanted` returns false.
    pub fn compile(&self, source: &GrammarSource, is_wanted: &dyn Fn() -> bool) -> Result<Grammar> {
        source.check_size()?;
        let place = MachineHost::start(source, &self.0.vocabulary, is_wanted)?;
        let grammar = Arc::new(Compiled {
            source: source.clone(),
            shared: self.0.clone(),
            machine: Mutex::new(Running { place: Some(place), run: 0 }),
            refused: OnceLock::new(),
            forgotten: Mutex::default(),
        });
        self.0.runs(&grammar);
        Ok(Grammar(grammar))
    }
}

impl SharedGrammars {
    /// Marks a grammar's machine as used now, and ends surplus machines.
    fn runs(&self, grammar: &Arc<Compiled>) {
        let ended: Vec<_> = {
            let mut running = lock(&self.running);
            running.retain(|other| {
                other.strong_count() > 0 && !other.ptr_eq(&Arc::downgrade(grammar))
            });
            running.push_back(Arc::downgrade(grammar));
            let more = running.len().saturating_sub(self.most);
            running.drain(..more).filter_map(|other| other.upgrade()).collect()
        };
        // A machine at work is skipped. It is ended when it is the oldest again.
        for other in ended {
            if let Ok(mut machine) = other.machine.try_lock() {
                machine.place = None;
            }
        }
    }
}

/// A compiled grammar.
#[derive(Clone)]
pub struct Grammar(Arc<Compiled>);

struct Compiled {
    source: GrammarSource,
    shared: Arc<SharedGrammars>,
    machine: Mutex<Running>,
    /// The fault of a grammar that exceeded its limits. Texts can no longer follow it.
    refused: OnceLock<Fault>,
    /// States that no text uses any more, each with its run number.
    forgotten: Mutex<Vec<(u64, u64)>>,
}

/// A machine, or `None` after it was ended in favour of others.
struct Running {
    place: Option<MachineHost>,
    /// Number of the machine's start. State numbers are only valid within one run.
    run: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Grammar {
    /// Returns the rule for a text that begins after `prompt` tokens.
    pub fn follow(&self, prompt: usize) -> GrammarRule {
        self.follow_behind(prompt, None)
    }

    /// Returns the rule for a text after a prompt and a thought. `thought` holds the thought's
    /// first and last token. The thought is mandatory, and its content is free.
    pub fn follow_behind(&self, prompt: usize, thought: Option<(Token, Token)>) -> GrammarRule {
        GrammarRule::new(self.clone(), prompt, thought)
    }

    /// Returns the fault of a grammar that exceeded its limits while a text followed it.
    pub fn refused(&self) -> Option<&Fault> {
        self.0.refused.get()
    }

    fn stops(&self) -> &[Token] {
        self.0.shared.vocabulary.stops()
    }

    /// Returns the number of tokens.
    fn tokens(&self) -> usize {
        self.0.shared.vocabulary.count()
    }

    /// Sends a query to the machine, starting it if necessary. Returns the state and its run, or
    /// `None` if the query refers to a state of another run.
    fn ask(&self, ask: StateQuery, run: u64) -> Result<Option<(MachineState, u64)>> {
        let Compiled { source, shared, refused, forgotten, .. } = &*self.0;
        let mut machine = lock(&self.0.machine);
        if let Some(fault) = refused.get() {
            return Err(fault.clone().into());
        }
        if machine.place.is_none() {
            machine.place = Some(MachineHost::start(source, &shared.vocabulary, &|| true)?);
            machine.run += 1;
        }
        if matches!(ask, StateQuery::Step { .. }) && run != machine.run {
            return Ok(None);
        }
        let run = machine.run;
        let place = machine.place.as_mut().expect("it was started");
        let forgotten = std::mem::take(&mut *lock(forgotten)).into_iter();
        let forgotten =
            forgotten.filter(|(owner, _)| *owner == run).map(|(_, state)| state).collect();
        match place.answer(forgotten, ask, &shared.vocabulary) {
            Ok(state) => {
                drop(machine);
                shared.runs(&self.0);
                Ok(Some((state, run)))
            }
            Err(end) => {
                machine.place = None;
                Err(refused.get_or_init(|| place::too_complex(source, end)).clone().into())
            }
        }
    }

    /// Marks states of a run as unneeded.
    fn forget(&self, run: u64, states: impl Iterator<Item = u64>) {
        lock(&self.0.forgotten).extend(states.map(|state| (run, state)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_base::error::fault_of;
    use gemma_model::models::Special;
    use gemma_model::models::tokenizer::samples::{letters, thinking_letters};
    use gemma_model::sampler::{Mask, TokenRule};
    use serde_json::json;

    const END: Token = 5;

    fn grammars() -> (Arc<Tokenizer>, Grammars) {
        let tokenizer = Arc::new(letters());
        (tokenizer.clone(), Grammars::new(tokenizer, &[1, END, 9_999_999], 2).unwrap())
    }

    fn person() -> GrammarSource {
        let name = json!({"type": "string", "maxLength": 3});
        GrammarSource::JsonSchema(json!({
            "type": "object", "required": ["name", "old"], "additionalProperties": false,
            "properties": {"name": name, "old": {"type": "boolean"}},
        }))
    }

    #[test]
    fn what_a_schema_fixes_is_forced_and_the_end_comes_where_it_is_complete() {
        let (tokenizer, grammars) = grammars();
        let grammar = grammars.compile(&person(), &|| true).unwrap();
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
        // All tokens are forced except the letters of the name and the choice of a boolean.
        assert_eq!(forced, r#"{"name": ", "old": rue}"#);
        let end = rule.mask(&history).unwrap();
        assert!(end.ends() && end.allows(1) && end.allows(END) && rule.is_complete(&history));
        history.push(END);
        assert!(rule.mask(&history).unwrap().ends());
        // A brace instead of the quote of the name's value is forbidden.
        assert!(rule.mask(&[&prompt[..], &text[..9], &text[..1]].concat()).unwrap().is_empty());
    }

    #[test]
    fn a_text_may_begin_behind_a_thought() {
        let tokenizer = Arc::new(thinking_letters());
        let grammars = Grammars::new(tokenizer.clone(), &[1, END], 1).unwrap();
        let grammar = grammars.compile(&person(), &|| true).unwrap();
        let channel = tokenizer.channel().unwrap();
        let encode = |text: &str| tokenizer.encode(text, Special::Parse).unwrap();
        let thought = [encode("<|channel>thought\n{\"x\": 1}"), vec![channel.1]].concat();
        let text = encode(r#"{"name": "a", "old": true}"#);
        let history = [&[2, 50][..], &thought, &text].concat();
        let rule = grammar.follow_behind(2, Some(channel));
        assert_eq!(rule.mask(&history[..2]).unwrap().only(), Some(channel.0));
        for n in 3..history.len() {
            let mask = rule.mask(&history[..n]).unwrap();
            let in_thought = n < 2 + thought.len();
            assert!(mask.allows(history[n]) && !mask.allows(1) && !mask.allows(END), "{n}");
            assert_eq!(mask.allows(channel.1), in_thought);
            assert!(!rule.is_complete(&history[..n]) && rule.is_ready(&history[..n]));
            rule.settle(&history[..n]);
        }
        assert!(rule.mask(&history).unwrap().ends() && rule.is_complete(&history));
        assert!(!grammar.follow(2).mask(&history[..2]).unwrap().allows(channel.0));
        // A prompt may end inside the thought.
        for prompt in 3..2 + thought.len() {
            assert_eq!(tokenizer.open_thought(&history[..prompt]), 2);
        }
        for prompt in [0, 2, 2 + thought.len(), history.len()] {
            assert_eq!(tokenizer.open_thought(&history[..prompt]), prompt);
        }
    }

    /// A mask does not depend on the order of queries, on rejected drafts, or on dropped states.
    #[test]
    fn a_mask_depends_on_the_tokens_alone() {
        let (tokenizer, grammars) = grammars();
        for source in [
            person(),
            GrammarSource::Regex("(ab|ac)*d?".into()),
            GrammarSource::Lark("start: \"x\" y+\ny: /[0-9]{2}/ \";\"".into()),
        ] {
            let grammar = grammars.compile(&source, &|| true).unwrap();
            let mut state = 7u64;
            let mut next = |n: usize| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % n
            };
            // Generates random texts that the grammar allows.
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

    /// A background thread computes the same masks, also for drafts and forbidden texts.
    #[test]
    fn a_slow_grammar_is_followed_beside() {
        let (tokenizer, grammars) = grammars();
        let grammar = grammars.compile(&person(), &|| true).unwrap();
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

    /// A machine that was ended in favour of others is restarted when its text continues.
    #[test]
    fn texts_outlive_the_machines_that_they_began_with() {
        let (tokenizer, grammars) = grammars();
        let sources =
            ["(ab)*c", "a+b", "[ab]*d", "b?a*c"].map(|text| GrammarSource::Regex(text.into()));
        let compiled = sources.each_ref().map(|s| grammars.compile(s, &|| true).unwrap());
        let alone = sources.each_ref().map(|source| {
            let (_, grammars) = self::grammars();
            grammars.compile(source, &|| true).unwrap().follow(0)
        });
        let together = compiled.each_ref().map(|grammar| grammar.follow(0));
        let text = tokenizer.encode("aabab", Special::AsText).unwrap();
        for length in 0..=text.len() {
            for (alone, together) in alone.iter().zip(&together) {
                assert_eq!(
                    alone.mask(&text[..length]).unwrap(),
                    together.mask(&text[..length]).unwrap()
                );
                together.settle(&text[..length.saturating_sub(1)]);
            }
        }
        let running = lock(&grammars.0.running).len();
        assert_eq!(running, 2);
        let machines = compiled.iter().map(|grammar| lock(&grammar.0.machine).run);
        assert!(machines.max().unwrap() > 1, "no machine was started again");
    }

    #[test]
    fn what_cannot_be_kept_is_wrong_usage_with_its_place() {
        let (_, grammars) = grammars();
        let part = |part: Value| {
            GrammarSource::JsonSchema(
                json!({"type": "object", "properties": {"a": {"type": "array", "items": part}}}),
            )
        };
        for (source, says) in [
            (part(json!({"type": "string", "not": {"const": "x"}})), " at /properties/a/items: "),
            (part(json!({"type": "strin"})), "at /properties/a/items: "),
            (part(json!({"$ref": "#/$defs/none"})), "at /properties/a/items: "),
            (
                GrammarSource::JsonSchema(json!({"$ref": "#/$defs/b",
                    "$defs": {"b": {"uniqueItems": true, "type": "array"}}})),
                "at /$defs/b: ",
            ),
            (GrammarSource::JsonSchema(json!([1])), "a schema is an object"),
            (GrammarSource::JsonSchema(json!(false)), "allows nothing"),
            (GrammarSource::JsonSchema(json!({"type": "integer", "minimum": 5, "maximum": 4})), ""),
            (GrammarSource::JsonSchema(json!({"x-guidance": 5})), "x-guidance"),
            (GrammarSource::Lark("start: \"a\" b".into()), "b"),
            (GrammarSource::Lark("start: \"a\"\nb c".into()), "2("),
            (GrammarSource::Lark(String::new()), ""),
            (GrammarSource::Regex("(a".into()), "regular expression"),
        ] {
            let error =
                grammars.compile(&source, &|| true).err().unwrap_or_else(|| panic!("{source:?}"));
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
            let error = grammars
                .compile(&GrammarSource::JsonSchema(wrong.clone()), &|| true)
                .err()
                .unwrap();
            let help = fault_of(&error).unwrap().help.clone().unwrap();
            assert!(help.contains(says), "{wrong}: {help}");
        }
        for good in [json!(true), json!({}), json!({"$comment": "x"})] {
            grammars.compile(&GrammarSource::JsonSchema(good), &|| true).unwrap();
        }
        grammars.compile(&GrammarSource::json_object(), &|| true).unwrap();
    }
}
