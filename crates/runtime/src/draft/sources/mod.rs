//! Sources of draft candidates: one row each in [`SOURCES`].
//!
//! A source assigns log-probabilities to the candidates of a node. Each kind of log-probability is
//! a feature of the mixer. A source that needs no model pass is a field of [`FreeSources`], and
//! provides its opinions in [`FreeSources::opine`].

pub mod assistant;
pub mod context;
pub mod grammar;
pub mod model;
pub mod table;

use super::proposal::Proposal;
use super::verified::Verified;
use context::{Automaton, Match};
use gemma_base::tensor::Token;
use gemma_model::sampler::Sampler;
use table::{Key, Table};

/// Log-probabilities of one candidate, by feature.
pub type FeatureRow = [f32; FEATURES];
pub const FEATURES: usize = 7;

/// Log-probability after the longest ending of the text that occurred before.
pub const LONG: usize = 0;
/// Log-probability after a shorter ending with more distinct continuations.
pub const SHORT: usize = 1;
/// The target's earlier log-probability after the last two tokens.
pub const PAIR: usize = 2;
/// The target's earlier log-probability after the last token.
pub const LAST: usize = 3;
/// Log-probability of the draft model.
pub const MODEL: usize = 4;
/// Sampling noise shared by target and drafter. It belongs to no source.
pub const NOISE: usize = 5;
/// 1 for the candidate "none of these". It belongs to no source.
pub const MISS: usize = 6;

/// Lower bound of a source's log-probability of a token.
pub const FLOOR: f32 = -7.0;

/// Most candidates from a context match and from a table entry.
const FROM_MATCH: usize = 6;
const FROM_TABLE: usize = 8;
/// Assumed share of one unseen token in a source's probability for unseen tokens.
const UNSEEN: f32 = 0.02;

/// A source of draft candidates: its index in [`SOURCES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandidateSource {
    /// Earlier positions of the text with the same ending.
    Context,
    /// The draft model, or the target's assistant.
    Model,
    /// The target's own earlier distributions after the last one or two tokens.
    Table,
    /// Tokens forced by the grammar.
    Grammar,
}

/// Properties of a source for the mixer and the policy.
pub struct SourceRow {
    pub source: CandidateSource,
    /// Name in the statistics and in `--sources`.
    pub name: &'static str,
    /// Whether its candidates cost only rows of the target's pass.
    pub is_free: bool,
    /// Features, each with its initial weight.
    pub features: &'static [(usize, f32)],
    /// Number of confidence classes. The mixer has one set of weights per class.
    pub classes: usize,
}

/// All sources, in the order of [`CandidateSource`]. New sources are appended, so that the weights
/// in [`prior`](super::mix::prior) keep their indices.
pub const SOURCES: [SourceRow; 4] = [
    SourceRow {
        source: CandidateSource::Context,
        name: "context",
        is_free: true,
        features: &[(LONG, 0.4), (SHORT, 0.2)],
        classes: context::CLASSES,
    },
    SourceRow {
        source: CandidateSource::Model,
        name: "model",
        is_free: false,
        features: &[(MODEL, 1.0)],
        classes: model::CLASSES,
    },
    SourceRow {
        source: CandidateSource::Table,
        name: "table",
        is_free: true,
        features: &[(PAIR, 0.4), (LAST, 0.2)],
        classes: table::CLASSES,
    },
    SourceRow {
        source: CandidateSource::Grammar,
        name: grammar::NAME,
        is_free: true,
        features: &[],
        classes: 0,
    },
];

impl CandidateSource {
    /// Returns the sources that mix their candidates into the tree: all but the grammar.
    pub fn mixed() -> impl Iterator<Item = CandidateSource> {
        SOURCES.iter().filter(|row| !row.features.is_empty()).map(|row| row.source)
    }

    pub fn name(self) -> &'static str {
        SOURCES[self as usize].name
    }
}

/// Class of a node's context: each source's confidence, which is known before its candidates are
/// read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextClass([u8; SOURCES.len()]);

impl ContextClass {
    pub fn set(&mut self, source: CandidateSource, class: usize) {
        debug_assert!(class < SOURCES[source as usize].classes);
        self.0[source as usize] = class as u8;
    }

    /// Returns the weight sets that apply: the first one, and one per source with classes.
    pub fn sets(self) -> impl Iterator<Item = usize> {
        let mut first = 1;
        let of_source = move |(row, class): (&SourceRow, u8)| {
            let set = first + class as usize;
            first += row.classes;
            (row.classes > 0).then_some(set)
        };
        std::iter::once(0).chain(SOURCES.iter().zip(self.0).filter_map(of_source))
    }
}

/// A node of the tree with its context.
#[derive(Clone, Copy, Debug)]
pub struct NodeContext {
    /// Index of the text.
    pub text: usize,
    pub previous: Option<Token>,
    pub token: Token,
    /// Longest ending at this node that occurred earlier in the text.
    pub matched: Match,
    /// Position of the token after the node.
    pub position: usize,
}

/// A feature's candidates with their probabilities, and its probability for all other tokens. An
/// empty list means no opinion.
#[derive(Default)]
pub struct Opinion {
    pub list: Vec<(Token, f32)>,
    rest: f32,
}

impl Opinion {
    fn set(&mut self, list: impl Iterator<Item = (Token, f32)>, least: f32) {
        self.list.extend(list);
        self.rest = (1.0 - self.list.iter().map(|c| c.1).sum::<f32>()).max(least);
    }

    /// Returns the log-probability of a candidate; 0 if there is no opinion.
    pub fn of_token(&self, token: Token) -> f32 {
        let listed = self.list.iter().find(|c| c.0 == token);
        match self.list.is_empty() {
            true => 0.0,
            false => bounded_log(listed.map_or(self.rest * UNSEEN, |c| c.1)),
        }
    }

    /// Returns the log-probability of all unlisted tokens; 0 if there is no opinion.
    pub fn of_rest(&self) -> f32 {
        if self.list.is_empty() { 0.0 } else { bounded_log(self.rest) }
    }
}

/// Returns the logarithm of a probability, bounded below by [`FLOOR`].
pub fn bounded_log(p: f32) -> f32 {
    p.max(f32::MIN_POSITIVE).ln().max(FLOOR)
}

/// Sources that need no model pass, for all texts.
#[derive(Default)]
pub struct FreeSources {
    /// By text.
    context: Option<Vec<Automaton>>,
    table: Option<Table>,
}

impl FreeSources {
    /// Creates the free sources among `sources`.
    pub fn new(sources: &[CandidateSource]) -> FreeSources {
        FreeSources {
            context: sources.contains(&CandidateSource::Context).then(Vec::new),
            table: sources.contains(&CandidateSource::Table).then(Table::new),
        }
    }

    /// Returns whether a source uses [`learn`](Self::learn).
    pub fn reads_target(&self) -> bool {
        self.table.is_some()
    }

    /// Learns from the target's scores of the last round's tree.
    pub fn learn(&mut self, history: &[Token], verified: Verified<'_>, sampler: &Sampler) {
        if let Some(table) = &mut self.table {
            table.feed(history, verified, sampler);
        }
    }

    /// Reads the new tokens of a text. Returns its longest ending that occurred before.
    pub fn follow(&mut self, text: usize, history: &[Token]) -> Match {
        let Some(texts) = &mut self.context else { return Match::default() };
        if texts.len() <= text {
            texts.resize_with(text + 1, Automaton::new);
        }
        texts[text].sync(history);
        texts[text].ending()
    }

    /// Returns the longest known ending of a match followed by one more token.
    pub fn step(&self, text: usize, matched: Match, token: Token) -> Match {
        let automaton = self.context.as_ref().and_then(|texts| texts.get(text));
        automaton.map_or(Match::default(), |automaton| automaton.step(matched, token))
    }

    /// Collects the opinions on the token after a node, by feature. Returns the class of the
    /// context.
    pub fn opine(&self, node: NodeContext, opinions: &mut [Opinion; FEATURES]) -> ContextClass {
        opinions.iter_mut().for_each(|opinion| opinion.list.clear());
        let mut class = ContextClass::default();
        if let Some(automaton) = self.context.as_ref().and_then(|texts| texts.get(node.text)) {
            let mut matched = 0;
            let endings = [(LONG, node.matched), (SHORT, automaton.shorter(node.matched))];
            for (feature, ending) in endings {
                let Opinion { list, rest } = &mut opinions[feature];
                *rest = automaton.continuations(ending, FROM_MATCH, list);
                matched = matched.max(if list.is_empty() { 0 } else { ending.len });
            }
            class.set(CandidateSource::Context, context::class(matched));
        }
        if let Some(table) = &self.table {
            let mut seen = 0;
            let pair = node.previous.map(|previous| Key::Pair(previous, node.token));
            for (feature, key) in [(PAIR, pair), (LAST, Some(Key::Last(node.token)))] {
                let Some(slot) = key.and_then(|key| table.get(key)) else { continue };
                opinions[feature]
                    .set(slot.list().take(FROM_TABLE), 0.5 / (slot.count as f32 + 1.0));
                if feature == PAIR {
                    seen = slot.count.max(1);
                }
            }
            class.set(CandidateSource::Table, table::class(seen, !opinions[LAST].list.is_empty()));
        }
        class
    }
}

/// Returns the number of draft steps of each node in a proposal.
///
/// Nodes of free sources need none if no ancestor is from a draft model, since they would exist
/// without it. Every other node needs one more than its parent.
pub fn draft_steps(proposal: &Proposal) -> Vec<usize> {
    let is_free = |name| SOURCES.iter().any(|row| row.name == name && row.is_free);
    let mut steps = vec![0; proposal.len()];
    for node in 1..proposal.len() {
        let parent = proposal.tree.parent[node].map_or(0, |parent| steps[parent as usize]);
        let costs_nothing = parent == 0 && is_free(proposal.source[node]);
        steps[node] = if costs_nothing { 0 } else { parent + 1 };
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_sources_is_in_order() {
        for (place, row) in SOURCES.iter().enumerate() {
            assert_eq!((row.source as usize, row.source.name()), (place, row.name));
        }
        let mut features: Vec<usize> =
            SOURCES.iter().flat_map(|row| row.features).map(|(feature, _)| *feature).collect();
        features.extend([NOISE, MISS]);
        features.sort();
        assert_eq!(features, (0..FEATURES).collect::<Vec<_>>(), "each feature has one source");
    }

    #[test]
    fn classes_are_told_apart() {
        let sets = |length, sure, record| {
            let mut class = ContextClass::default();
            class.set(CandidateSource::Context, context::class(length));
            class.set(CandidateSource::Model, model::class(sure));
            class.set(CandidateSource::Table, record);
            class.sets().collect::<Vec<_>>()
        };
        assert_eq!(sets(0, None, table::class(0, false)), [0, 1, 8, 14]);
        assert_eq!(sets(99, Some(1.0), table::class(99, true)), [0, 7, 13, 18]);
        assert_ne!(sets(1, None, table::class(0, false)), sets(1, None, table::class(0, true)));
    }
}
