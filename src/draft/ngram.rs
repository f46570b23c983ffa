//! What followed the last time the text ended like this: continuations found by a suffix automaton over prompt and output.
//!
//! The automaton (Blumer et al. 1985) grows by one token at a time. Its newest state stands for the whole history, so that
//! state's suffix link is the longest ending that occurred before, and the link's transitions are all that ever followed it.

use anyhow::Result;

use super::calibrate::Outcome;
use super::{DraftContext, Drafter, Proposal};
use crate::tensor::Token;

const NAME: &str = "ngram";
/// Shorter and shorter endings looked at when the longest one offers too little.
const BACKOFF: usize = 3;
/// Suffix links along which occurrences are counted; longer chains only appear in monotonous text.
const COUNTED: usize = 32;
/// Continuations of one state that are considered.
const BRANCHES: usize = 4;
/// Paths less likely than this are not followed.
const LEAST: f32 = 0.02;
/// How much a reliability moves with each outcome.
const RATE: f32 = 0.03;

/// All strings that end at the same places.
#[derive(Clone, Debug, Default)]
struct State {
    /// Length of the longest one.
    len: u32,
    /// The state of their longest common suffix that ends at more places; the root's is itself.
    link: u32,
    /// Places where they end, as far as counted, and the latest one.
    count: u32,
    latest: u32,
    /// By ascending token.
    next: Vec<(Token, u32)>,
}

impl State {
    fn step(&self, token: Token) -> Option<u32> {
        self.next.binary_search_by_key(&token, |&(t, _)| t).ok().map(|i| self.next[i].1)
    }

    fn set(&mut self, token: Token, state: u32) {
        match self.next.binary_search_by_key(&token, |&(t, _)| t) {
            Ok(i) => self.next[i].1 = state,
            Err(i) => self.next.insert(i, (token, state)),
        }
    }
}

/// Suffix automaton of a token sequence.
#[derive(Clone, Debug)]
struct Automaton {
    tokens: Vec<Token>,
    states: Vec<State>,
    /// The state of the whole sequence.
    last: u32,
}

impl Automaton {
    fn new() -> Self {
        Automaton { tokens: Vec::new(), states: vec![State::default()], last: 0 }
    }

    /// Appends what `history` has more; begins anew if it is another text.
    fn sync(&mut self, history: &[Token]) {
        if !history.starts_with(&self.tokens) {
            *self = Self::new();
        }
        for &token in &history[self.tokens.len()..] {
            self.push(token);
        }
    }

    fn push(&mut self, token: Token) {
        self.tokens.push(token);
        let place = self.tokens.len() as u32;
        let new = self.add(State { len: place, ..State::default() });
        let mut at = Some(self.last);
        let mut hit = None;
        while let Some(state) = at {
            if let Some(target) = self.states[state as usize].step(token) {
                hit = Some((state, target));
                break;
            }
            self.states[state as usize].set(token, new);
            at = (state != 0).then(|| self.states[state as usize].link);
        }
        if let Some((state, target)) = hit {
            let len = self.states[state as usize].len + 1;
            self.states[new as usize].link =
                if self.states[target as usize].len == len { target } else { self.split(state, token, target, len) };
        }
        self.last = new;
        let mut state = new;
        for _ in 0..COUNTED {
            let here = &mut self.states[state as usize];
            here.count += 1;
            here.latest = place;
            if state == 0 {
                break;
            }
            state = here.link;
        }
    }

    /// Parts the strings of `target` up to length `len` from its longer ones, which end at fewer places from now on.
    fn split(&mut self, mut state: u32, token: Token, target: u32, len: u32) -> u32 {
        let short = self.add(State { len, ..self.states[target as usize].clone() });
        self.states[target as usize].link = short;
        while self.states[state as usize].step(token) == Some(target) {
            self.states[state as usize].set(token, short);
            if state == 0 {
                break;
            }
            state = self.states[state as usize].link;
        }
        short
    }

    fn add(&mut self, state: State) -> u32 {
        self.states.push(state);
        self.states.len() as u32 - 1
    }

    /// The longest ending that occurred before, then its shorter ones, with their lengths. Never empty strings.
    fn endings(&self) -> impl Iterator<Item = (u32, u32)> {
        let mut state = self.last;
        std::iter::from_fn(move || {
            state = self.states[state as usize].link;
            (state != 0).then(|| (state, self.states[state as usize].len))
        })
    }

    /// What followed `state`, likeliest first: each token's share of the occurrences, where the latest counts twice.
    fn continuations(&self, state: u32) -> Vec<(Token, u32, f32)> {
        let next = &self.states[state as usize].next;
        let latest = next.iter().map(|&(_, s)| self.states[s as usize].latest).max();
        let mut list: Vec<(Token, u32, f32)> = next
            .iter()
            .map(|&(token, s)| {
                let to = &self.states[s as usize];
                (token, s, to.count as f32 + if Some(to.latest) == latest { to.count as f32 + 1.0 } else { 0.0 })
            })
            .collect();
        let total: f32 = list.iter().map(|&(_, _, weight)| weight).sum();
        list.sort_by(|a, b| b.2.total_cmp(&a.2).then(a.0.cmp(&b.0)));
        list.truncate(BRANCHES);
        list.iter_mut().for_each(|c| c.2 /= total);
        list
    }
}

/// The class of a match: 1, 2, 3, 4-7, 8-15, 16 and more tokens.
fn class(len: u32) -> usize {
    match len {
        0..=3 => (len as usize).saturating_sub(1),
        4..=7 => 3,
        8..=15 => 4,
        _ => 5,
    }
}

pub struct NgramDrafter {
    automaton: Automaton,
    /// How often a continuation holds, by class of match.
    reliability: [f32; 6],
    outcome: Outcome,
    /// Parent and class of match of each node proposed. `[nodes]`
    group: Vec<(u32, usize)>,
}

impl Default for NgramDrafter {
    fn default() -> Self {
        Self::new()
    }
}

impl NgramDrafter {
    pub fn new() -> Self {
        NgramDrafter {
            automaton: Automaton::new(),
            reliability: [0.12, 0.3, 0.5, 0.65, 0.8, 0.9],
            outcome: Outcome::default(),
            group: Vec::new(),
        }
    }

    /// Compares the last proposal with what came: of each node's continuations by one match, did any hold?
    fn learn(&mut self, history: &[Token]) {
        let mut judged: Vec<((u32, usize), bool)> = Vec::new();
        self.outcome.settle(history, |node, _, taken| match judged.iter_mut().find(|(group, _)| *group == self.group[node]) {
            Some((_, held)) => *held |= taken,
            None => judged.push((self.group[node], taken)),
        });
        for ((_, class), held) in judged {
            let value = &mut self.reliability[class];
            *value = (*value + RATE * (held as u8 as f32 - *value)).clamp(0.03, 0.98);
        }
    }
}

impl Drafter for NgramDrafter {
    fn name(&self) -> &'static str {
        NAME
    }

    fn prepare(&mut self, history: &[Token]) -> Result<()> {
        self.automaton.sync(history);
        Ok(())
    }

    fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        self.learn(ctx.history);
        self.automaton.sync(ctx.history);
        self.group.clear();
        self.group.push((0, 0));
        // Nodes to continue: (node, state, matched length, depth).
        let mut open: Vec<(u32, u32, u32, usize)> = Vec::new();
        let mut left = 1.0;
        let branches = if ctx.chain { 1 } else { BRANCHES };
        let mut continue_from =
            |out: &mut Proposal, node: u32, state: u32, len: u32, depth: usize, share: f32, open: &mut Vec<_>| {
                let held = self.reliability[class(len)] * share;
                for (token, next, part) in self.automaton.continuations(state).into_iter().take(branches) {
                    let before = out.len();
                    let child = out.add(node, token, held * part, NAME);
                    if out.len() > before {
                        self.group.push((node, class(len)));
                        open.push((child, next, len + 1, depth + 1));
                    }
                }
                held
            };
        if ctx.depth > 0 && ctx.nodes > 0 {
            for (state, len) in self.automaton.endings().take(if ctx.chain { 1 } else { BACKOFF }) {
                left *= 1.0 - continue_from(out, 0, state, len, 0, left, &mut open);
            }
        }
        // Best first, until the likeliest open node cannot be among the nodes asked for.
        let mut closed = 0;
        while let Some(best) = (0..open.len()).max_by(|&a, &b| {
            let chance = |i: usize| out.chance[open[i].0 as usize];
            chance(a).total_cmp(&chance(b)).then(open[b].0.cmp(&open[a].0))
        }) {
            let (node, state, len, depth) = open.swap_remove(best);
            closed += 1;
            if closed > ctx.nodes || out.chance[node as usize] < LEAST {
                break;
            }
            if depth < ctx.depth {
                continue_from(out, node, state, len, depth, 1.0, &mut open);
            }
        }
        self.outcome.remember(ctx.history, out);
        out.keep_best(ctx.nodes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::{Sampler, SamplerConfig};

    fn propose(drafter: &mut NgramDrafter, history: &[Token], nodes: usize, chain: bool) -> Proposal {
        let sampler = Sampler::new(SamplerConfig::default()).unwrap();
        let (depth, vocab, sampler) = (nodes, 999, &sampler);
        let ctx = DraftContext { history, sampler, nodes, depth, vocab, chain, pace: None, last_pass: None, verified: None };
        let mut out = Proposal::root(ctx.root());
        drafter.propose(&ctx, &mut out).unwrap();
        out
    }

    /// Longest ending of `text` that also ends earlier, by trying all.
    fn longest_ending(text: &[Token]) -> usize {
        let n = text.len();
        (1..n).rev().find(|&len| (len..n).any(|end| text[end - len..end] == text[n - len..])).unwrap_or(0)
    }

    #[test]
    fn the_automaton_finds_the_longest_ending_and_all_that_followed() {
        let mut state = 1u32;
        let text: Vec<Token> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 30
        })
        .take(300)
        .collect();
        let mut automaton = Automaton::new();
        for n in 1..=text.len() {
            automaton.sync(&text[..n]);
            let len = longest_ending(&text[..n]);
            let found = automaton.endings().next();
            assert_eq!(found.map_or(0, |(_, len)| len as usize), len);
            if let Some((state, _)) = found {
                let ending = &text[n - len..n];
                let mut followed: Vec<Token> = (len..n).filter(|&e| &text[e - len..e] == ending).map(|e| text[e]).collect();
                followed.sort();
                followed.dedup();
                let next: Vec<Token> = automaton.states[state as usize].next.iter().map(|&(t, _)| t).collect();
                assert_eq!(next, followed);
            }
        }
        assert!(automaton.states.len() <= 2 * text.len());
    }

    #[test]
    fn a_repeated_passage_is_continued_as_a_chain() {
        let text: Vec<Token> = (0..40).chain([100]).chain(10..20).collect();
        let p = propose(&mut NgramDrafter::new(), &text, 8, true);
        assert_eq!(p.tree.tokens, [19, 20, 21, 22, 23, 24, 25, 26, 27]);
        assert!(p.chance.windows(2).all(|w| w[0] >= w[1]));
    }

    #[test]
    fn several_continuations_become_branches() {
        let text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 4, 7, 1, 2];
        let p = propose(&mut NgramDrafter::new(), &text, 8, false);
        let (frequent, rare) = (p.tree.child(0, 4).unwrap(), p.tree.child(0, 3).unwrap());
        assert!(p.chance[frequent as usize] > p.chance[rare as usize]);
    }

    #[test]
    fn another_history_begins_anew() {
        let mut drafter = NgramDrafter::new();
        propose(&mut drafter, &[1, 2, 3, 1, 2], 4, false);
        let p = propose(&mut drafter, &[5, 6, 5], 4, true);
        assert_eq!(p.tree.tokens[..2], [5, 6]);
        assert!(propose(&mut drafter, &[7], 4, false).is_empty());
    }

    #[test]
    fn reliability_falls_with_misses() {
        let mut drafter = NgramDrafter::new();
        let mut history: Vec<Token> = vec![];
        let before = drafter.reliability[0];
        for i in 0..60 {
            history.extend([1, 10 + i]); // what follows 1 never comes twice
            propose(&mut drafter, &history, 4, false);
            history.push(1);
            propose(&mut drafter, &history, 4, false);
            history.pop();
        }
        let p = propose(&mut drafter, &[history.clone(), vec![1]].concat(), 4, false);
        assert!(p.chance[1] < before, "{:?}", drafter.reliability);
    }
}
