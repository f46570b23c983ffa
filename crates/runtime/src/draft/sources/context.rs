//! Finds earlier occurrences of the text's ending, with a suffix automaton over prompt and output.
//!
//! The automaton (Blumer et al. 1985) grows by one token at a time. Its newest state represents the
//! whole text. That state's suffix link is the longest ending that occurred before. The link's
//! transitions are all tokens that ever followed it.

use gemma_base::tensor::{Token, is_place};

/// Number of suffix links along which occurrences are counted; longer chains only occur in
/// monotonous text.
const COUNTED: usize = 32;
/// Number of suffix links followed to find a shorter ending with more distinct continuations.
const SHORTER: usize = 16;

/// Classes of [`class`].
pub const CLASSES: usize = 7;

/// Returns the class of a match length.
pub fn class(length: u32) -> usize {
    match length {
        0..=3 => length as usize,
        4..=7 => 4,
        8..=15 => 5,
        _ => 6,
    }
}

/// A set of strings that occur at the same end positions.
#[derive(Clone, Debug, Default)]
struct SuffixState {
    /// Length of the longest string.
    len: u32,
    /// State of their longest common suffix with more end positions; the root links to itself.
    link: u32,
    /// Number of end positions, as far as counted, and the latest one.
    count: u32,
    latest: u32,
    /// In ascending order of tokens.
    next: Vec<(Token, u32)>,
}

impl SuffixState {
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

/// An ending that occurred before: its state and its length in tokens. The default is the empty
/// ending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    state: u32,
    pub len: u32,
}

/// Suffix automaton of a token sequence.
#[derive(Clone, Debug)]
pub struct Automaton {
    tokens: Vec<Token>,
    states: Vec<SuffixState>,
    /// State of the whole sequence.
    last: u32,
}

impl Default for Automaton {
    fn default() -> Self {
        Self::new()
    }
}

impl Automaton {
    pub fn new() -> Self {
        Automaton { tokens: Vec::new(), states: vec![SuffixState::default()], last: 0 }
    }

    /// Appends the new tokens of `history`. Restarts if `history` is a different text.
    pub fn sync(&mut self, history: &[Token]) {
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
        let new = self.add(SuffixState { len: place, ..SuffixState::default() });
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
            self.states[new as usize].link = if self.states[target as usize].len == len {
                target
            } else {
                self.split(state, token, target, len)
            };
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

    /// Splits the strings of `target` up to length `len` from its longer ones, which have fewer end
    /// positions from now on.
    fn split(&mut self, mut state: u32, token: Token, target: u32, len: u32) -> u32 {
        let short = self.add(SuffixState { len, ..self.states[target as usize].clone() });
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

    fn add(&mut self, state: SuffixState) -> u32 {
        self.states.push(state);
        self.states.len() as u32 - 1
    }

    /// Returns the longest ending that occurred before.
    pub fn ending(&self) -> Match {
        let state = self.states[self.last as usize].link;
        Match { state, len: self.states[state as usize].len }
    }

    /// Returns the longest known ending of the matched text followed by one more token.
    pub fn step(&self, mut at: Match, token: Token) -> Match {
        loop {
            if let Some(state) = self.states[at.state as usize].step(token) {
                return Match { state, len: at.len + 1 };
            }
            if at.state == 0 {
                return Match::default();
            }
            let state = self.states[at.state as usize].link;
            at = Match { state, len: self.states[state as usize].len };
        }
    }

    /// Returns the longest shorter ending with more distinct continuations.
    pub fn shorter(&self, at: Match) -> Match {
        let kinds = self.states[at.state as usize].next.len();
        let mut state = at.state;
        for _ in 0..SHORTER {
            state = self.states[state as usize].link;
            if state == 0 {
                break;
            }
            if self.states[state as usize].next.len() > kinds {
                return Match { state, len: self.states[state as usize].len };
            }
        }
        Match::default()
    }

    /// Lists the `n` most likely tokens after a match, each with its share of the occurrences.
    ///
    /// The latest occurrence counts twice. Part of the probability is reserved for unseen tokens,
    /// with as many counts as there are distinct tokens (escape method C of prediction by partial
    /// matching). Returns the reserved part. The empty match has no continuations, and image
    /// placeholders are never listed.
    pub fn continuations(&self, at: Match, n: usize, out: &mut Vec<(Token, f32)>) -> f32 {
        out.clear();
        if at.state == 0 {
            return 1.0;
        }
        let next = &self.states[at.state as usize].next;
        let mut latest = (0, 0);
        let mut total = 0.0;
        for &(token, state) in next.iter().filter(|(token, _)| !is_place(*token)) {
            let to = &self.states[state as usize];
            latest = latest.max((to.latest, out.len()));
            total += to.count as f32;
            out.push((token, to.count as f32));
        }
        if let Some(newest) = out.get_mut(latest.1) {
            total += newest.1;
            newest.1 *= 2.0;
        }
        let kinds = out.len() as f32;
        let order = |a: &(Token, f32), b: &(Token, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if n < out.len() {
            out.select_nth_unstable_by(n, order);
            out.truncate(n);
        }
        out.sort_unstable_by(order);
        let whole = total + kinds;
        let mut left = 1.0;
        for (_, share) in out.iter_mut() {
            *share /= whole;
            left -= *share;
        }
        left
    }

    /// Returns the number of tokens read.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn automaton_of(text: &[Token]) -> Automaton {
        let mut automaton = Automaton::new();
        automaton.sync(text);
        automaton
    }

    /// Returns 300 tokens from an alphabet of four.
    fn noise() -> Vec<Token> {
        let mut state = 1u32;
        let step = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 30
        };
        std::iter::repeat_with(step).take(300).collect()
    }

    /// Returns the longest ending of `text` that also occurs in its first `n` tokens and is
    /// followed by another token. Tries all lengths.
    fn longest_ending(text: &[Token], n: usize) -> usize {
        let end = text.len();
        (1..end)
            .rev()
            .find(|&len| (len..n).any(|at| text[at - len..at] == text[end - len..]))
            .unwrap_or(0)
    }

    #[test]
    fn the_automaton_finds_the_longest_ending_and_all_that_followed() {
        let text = noise();
        let mut automaton = Automaton::new();
        for n in 1..=text.len() {
            automaton.sync(&text[..n]);
            let len = longest_ending(&text[..n], n);
            let found = automaton.ending();
            assert_eq!(found.len as usize, len);
            let ending = &text[n - len..n];
            let mut followed: Vec<Token> =
                (len..n).filter(|&e| &text[e - len..e] == ending).map(|e| text[e]).collect();
            followed.sort();
            followed.dedup();
            let mut list = Vec::new();
            let left = automaton.continuations(found, 99, &mut list);
            list.sort_by_key(|c| c.0);
            assert!(len == 0 || list.iter().map(|c| c.0).eq(followed));
            assert!(
                (left + list.iter().map(|c| c.1).sum::<f32>() - 1.0).abs() < 1e-5 && left > 0.0
            );
        }
        assert!(automaton.states.len() <= 2 * text.len());
    }

    #[test]
    fn steps_off_the_text_keep_the_longest_ending() {
        let text = noise();
        let automaton = automaton_of(&text[..200]);
        let (mut at, mut path) = (automaton.ending(), text[..200].to_vec());
        for &token in text[200..].iter().rev() {
            at = automaton.step(at, token);
            path.push(token);
            // An ending at the very end of the text is also known, although nothing follows it.
            let end = path.len();
            let longest = (1..end)
                .rev()
                .find(|&len| text[..200].windows(len).any(|w| *w == path[end - len..]))
                .unwrap_or(0);
            assert_eq!(at.len as usize, longest);
        }
    }

    #[test]
    fn the_latest_and_the_frequent_come_first_and_shorter_endings_say_more() {
        let text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 4, 7, 5, 2, 6, 1, 2];
        let automaton = automaton_of(&text);
        let (at, mut list) = (automaton.ending(), Vec::new());
        assert_eq!(at.len, 2);
        automaton.continuations(at, 2, &mut list);
        assert_eq!(list.iter().map(|c| c.0).collect::<Vec<_>>(), [4, 3]);
        let shorter = automaton.shorter(at);
        assert_eq!(shorter.len, 1);
        automaton.continuations(shorter, 9, &mut list);
        assert_eq!(list.iter().map(|c| c.0).collect::<Vec<_>>(), [4, 6, 3]);
        assert_eq!(automaton.shorter(shorter), Match::default());
    }

    #[test]
    fn another_text_begins_anew() {
        let mut automaton = automaton_of(&[1, 2, 3, 1, 2]);
        assert_eq!(automaton.ending().len, 2);
        automaton.sync(&[5, 6, 5]);
        assert_eq!((automaton.len(), automaton.ending().len), (3, 1));
        automaton.sync(&[5]);
        assert_eq!(automaton.ending(), Match::default());
    }
}
