//! Candidates of all sources for one place in the tree, gathered into one list.

use anyhow::Result;

use super::Proposal;
use super::automaton::{Automaton, Match};
use super::lm::{self, Lm};
use super::mix::{
    self, Candidates, ContextClass, FEATURES, Features, LAST, LONG, MISS, MODEL, Mixer, NOISE,
    PAIR, SHORT,
};
use super::table::{Key, Table};
use crate::sampler::{Mask, Sampler, Tempered};
use crate::tensor::Token;

/// Names in the statistics.
const CONTEXT: &str = "context";
const TABLE: &str = "table";
/// Candidates that a context match, a table entry and the draft model each bring.
const FROM_MATCH: usize = 6;
const FROM_TABLE: usize = 8;
const FROM_MODEL: usize = 12;
/// Assumed part of a source's share for unseen tokens that one such token has.
const UNSEEN: f32 = 0.02;

/// The sources of guesses; each may be missing.
#[derive(Clone, Copy, Default)]
pub struct Sources<'a> {
    pub context: Option<&'a Automaton>,
    pub table: Option<&'a Table>,
    /// With the text's place among those of the model.
    pub lm: Option<(&'a Lm, usize)>,
}

/// A node of the tree with its context.
#[derive(Clone, Copy, Debug)]
pub struct NodeContext {
    pub previous: Option<Token>,
    pub token: Token,
    /// Longest ending at this node that occurred before.
    pub matched: Match,
    /// Position of the token that is to be guessed.
    pub position: usize,
}

/// The target's mask and sampler.
#[derive(Clone, Copy)]
pub struct Rules<'a> {
    pub sampler: &'a Sampler,
    /// Tokens that a grammar allows here.
    pub mask: Option<&'a Mask>,
    /// Ids from here on are unknown to the target.
    pub vocab: usize,
    /// Whether candidates are ranked with the noise that the target will add.
    pub noise: bool,
}

impl Rules<'_> {
    fn noise(&self, position: usize, token: Token) -> f32 {
        if self.noise { self.sampler.noise(position, token) } else { 0.0 }
    }

    fn allow(&self, token: Token) -> bool {
        (token as usize) < self.vocab
            && self.sampler.allows(token)
            && self.mask.is_none_or(|mask| mask.allows(token))
    }
}

/// One source's list, and the share it keeps for what is not on it. Nothing is known where the list
/// is empty.
#[derive(Default)]
struct Opinion {
    list: Vec<(Token, f32)>,
    left: f32,
}

impl Opinion {
    fn set(&mut self, list: impl Iterator<Item = (Token, f32)>, least: f32) {
        self.list.clear();
        self.list.extend(list);
        self.left = (1.0 - self.list.iter().map(|c| c.1).sum::<f32>()).max(least);
    }

    fn of(&self, token: Token) -> f32 {
        let listed = self.list.iter().find(|c| c.0 == token);
        if self.list.is_empty() {
            0.0
        } else {
            mix::opinion(listed.map_or(self.left * UNSEEN, |c| c.1))
        }
    }

    fn miss(&self) -> f32 {
        if self.list.is_empty() { 0.0 } else { mix::opinion(self.left) }
    }
}

/// Collects the candidates of a node. Its buffers are kept from one node to the next.
#[derive(Default)]
pub struct CandidateCollector {
    /// By feature: the two matches and the two keys.
    opinions: [Opinion; 4],
    tempered: Tempered,
    ranked: Vec<(Token, f32)>,
    masked: Vec<f32>,
}

impl CandidateCollector {
    /// Returns the candidates to follow a node. `row` is the place of its logits in the draft
    /// model's last batch, if it was in it. `context` is the text with the node at its end where a
    /// penalty reads it.
    pub fn candidates(
        &mut self,
        s: &Sources<'_>,
        rules: Rules<'_>,
        node: NodeContext,
        row: Option<usize>,
        context: &[Token],
    ) -> Result<Candidates> {
        let [long, short, pair, last] = &mut self.opinions;
        let mut matched = 0;
        for (opinion, at) in [(&mut *long, Some(node.matched)), (&mut *short, None)] {
            opinion.list.clear();
            if let Some(automaton) = s.context {
                let at = at.unwrap_or_else(|| automaton.shorter(node.matched));
                opinion.left = automaton.continuations(at, FROM_MATCH, &mut opinion.list);
                matched = matched.max(if opinion.list.is_empty() { 0 } else { at.len });
            }
        }
        let mut seen = 0;
        let keys = [
            node.previous.map(|previous| Key::Pair(previous, node.token)),
            Some(Key::Last(node.token)),
        ];
        for (opinion, key) in [&mut *pair, &mut *last].into_iter().zip(keys) {
            opinion.list.clear();
            if let Some(slot) = s.table.zip(key).and_then(|(table, key)| table.get(key)) {
                opinion.set(slot.list().take(FROM_TABLE), 0.5 / (slot.count as f32 + 1.0));
                if let Some(Key::Pair(..)) = key {
                    seen = slot.count.max(1) as u32;
                }
            }
        }
        let logits = match (s.lm, row) {
            (Some((lm, text)), Some(row)) => Some(lm.logits(text, row)),
            _ => None,
        };
        self.ranked.clear();
        let mut sure = None;
        let columns = s.lm.and_then(|(lm, _)| lm.columns());
        let logits = match (logits, rules.mask) {
            (Some(logits), Some(mask)) => {
                let token_of = |column: usize| {
                    columns.map_or(column as Token, |columns| columns.token(column))
                };
                mask.apply(logits, token_of, &mut self.masked);
                // A draft of few rows may know none of what is allowed: then it has nothing to say.
                self.masked
                    .iter()
                    .any(|logit| *logit > f32::NEG_INFINITY)
                    .then_some(&self.masked[..])
            }
            (logits, _) => logits,
        };
        let said: Vec<Token>;
        let context = match columns {
            None => context,
            Some(columns) => {
                let columns = context.iter().filter_map(|t| columns.column(*t));
                said = columns.map(|c| c as Token).collect();
                &said
            }
        };
        // A draft whose numbers overflow has nothing to say either: it may cost time, never a text.
        let logits = logits
            .filter(|logits| rules.sampler.temper(logits, context, &mut self.tempered).is_ok());
        if logits.is_some() {
            if let Some(columns) = columns {
                self.tempered.list.iter_mut().for_each(|c| c.0 = columns.token(c.0 as usize));
            }
            sure = self.tempered.list.first().map(|c| c.1.exp());
            let allowed = self.tempered.list.iter().filter(|c| rules.allow(c.0));
            self.ranked
                .extend(allowed.map(|&(token, p)| (token, p + rules.noise(node.position, token))));
            let order =
                |a: &(Token, f32), b: &(Token, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
            if self.ranked.len() > FROM_MODEL {
                self.ranked.select_nth_unstable_by(FROM_MODEL, order);
                self.ranked.truncate(FROM_MODEL);
            }
            self.ranked.sort_unstable_by(order);
        }

        let mut tokens: Vec<Token> = Vec::with_capacity(24);
        for &(token, _) in self.ranked.iter().chain(self.opinions.iter().flat_map(|o| &o.list)) {
            if !tokens.contains(&token) && rules.allow(token) {
                tokens.push(token);
            }
        }
        let column_of =
            |token: Token| columns.map_or(Some(token as usize), |columns| columns.column(token));
        let mut features: Vec<Features> = Vec::with_capacity(tokens.len() + 1);
        let mut left = 1.0;
        for &token in &tokens {
            let mut row = [0.0; FEATURES];
            for (feature, opinion) in [LONG, SHORT, PAIR, LAST].into_iter().zip(&self.opinions) {
                row[feature] = opinion.of(token);
            }
            if let Some(logits) = logits {
                let listed = self.tempered.list.iter().find(|c| c.0 == token).map(|c| c.1);
                let p = listed
                    .or_else(|| logits.get(column_of(token)?).map(|l| self.tempered.log_prob(*l)));
                row[MODEL] = p.unwrap_or(mix::FLOOR).max(mix::FLOOR);
                left -= p.map_or(0.0, f32::exp);
            }
            row[NOISE] = rules.noise(node.position, token);
            features.push(row);
        }
        let mut miss = [0.0; FEATURES];
        for (feature, opinion) in [LONG, SHORT, PAIR, LAST].into_iter().zip(&self.opinions) {
            miss[feature] = opinion.miss();
        }
        miss[MODEL] = if logits.is_some() { mix::opinion(left) } else { 0.0 };
        miss[MISS] = 1.0;
        features.push(miss);
        let class = ContextClass::new(matched, sure, seen, !self.opinions[LAST].list.is_empty());
        Ok(Candidates { class, tokens, features })
    }
}

/// Returns whether a source's guesses cost nothing but rows of the target's pass.
pub fn is_free(name: &str) -> bool {
    [CONTEXT, TABLE, super::forced::NAME].contains(&name)
}

/// Returns the draft steps of each node of a proposal. Guesses that cost nothing take none if no
/// guess of a draft model stands before them, since they would be there without it. Every other
/// node takes one more than its parent.
pub fn draft_steps(proposal: &Proposal) -> Vec<usize> {
    let mut steps = vec![0; proposal.len()];
    for node in 1..proposal.len() {
        let parent = proposal.tree.parent[node].map_or(0, |parent| steps[parent as usize]);
        let free = parent == 0 && is_free(proposal.source[node]);
        steps[node] = if free { 0 } else { parent + 1 };
    }
    steps
}

/// Returns the source that adds most to a candidate's score against the others.
pub fn advocate(
    mixer: &Mixer,
    candidates: &Candidates,
    chances: &[f32],
    candidate: usize,
) -> &'static str {
    let parts = mixer.parts(candidates, chances, candidate);
    let voice = |f: &usize| parts[*f].unwrap_or(f32::NEG_INFINITY);
    match (LONG..=MODEL).max_by(|a, b| voice(a).total_cmp(&voice(b)).then(b.cmp(a))) {
        Some(MODEL) => lm::NAME,
        Some(PAIR | LAST) => TABLE,
        _ => CONTEXT,
    }
}
