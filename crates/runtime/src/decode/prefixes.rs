//! Prefix cache: beginnings of texts that were read before. Prefixes are kept where texts ended,
//! began to grow, or parted; sequences in use count too.
//!
//! A sliding window forgets the keys that going back needs, so a text can go on only from the
//! places whose windows were kept. Prefixes share pages with the sequences that they were read in.
//! The least recently used prefix goes first when sequences need pages.

use anyhow::Result;
use gemma_base::kv::{PAGE, SLACK};
use gemma_base::tensor::Token;
use gemma_model::engine::{Prefix, Timeline};

/// Prefixes at most: each is compared with each new text.
const MOST: usize = 256;

/// Returns the number of tokens of the whole pages among so many.
pub(super) fn whole_pages(tokens: usize) -> usize {
    tokens / PAGE * PAGE
}

pub(super) fn common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

struct KeptPrefix {
    prefix: Prefix,
    /// When it was of use last, in the same count as sequences.
    used: u64,
}

/// Prefixes of one target, and when each of its sequences was of use last.
pub struct Prefixes {
    is_on: bool,
    kept: Vec<KeptPrefix>,
    /// By sequence.
    used: Vec<u64>,
    now: u64,
}

impl Prefixes {
    /// Makes an empty cache for so many sequences. Nothing is kept before [`start`](Self::start).
    pub fn new(sequences: usize) -> Prefixes {
        Prefixes { is_on: false, kept: Vec::new(), used: vec![0; sequences], now: 0 }
    }

    pub fn is_on(&self) -> bool {
        self.is_on
    }

    pub fn start(&mut self) {
        self.is_on = true;
    }

    /// Marks a sequence as used now.
    pub fn touch(&mut self, sequence: usize) {
        self.now += 1;
        self.used[sequence] = self.now;
    }

    /// Returns the time of a sequence's last use.
    pub fn last_use(&self, sequence: usize) -> u64 {
        self.used[sequence]
    }

    /// Returns the number of tokens that a text need not read if it takes this sequence.
    pub fn gain(&self, target: &Timeline, sequence: usize, history: &[Token]) -> usize {
        let common = target.common(sequence, history);
        // Behind a window that has moved on nothing is left; a prefix may hold it.
        let is_lost = self.is_on && target.position(sequence) - common > SLACK;
        if is_lost { 0 } else { common }
    }

    /// Keeps what a sequence holds of its first `tokens` tokens in whole pages.
    pub fn retain(&mut self, target: &mut Timeline, sequence: usize, tokens: usize) {
        let tokens = whole_pages(tokens);
        if !self.is_on || tokens == 0 {
            return;
        }
        self.now += 1;
        let held = &target.engine().cached(sequence).tokens[..tokens];
        if let Some(kept) = self.kept.iter_mut().find(|kept| kept.prefix.tokens() == held) {
            kept.used = self.now;
            return;
        }
        let Some(prefix) = target.retain(sequence, tokens) else { return };
        if self.kept.len() == MOST {
            self.drop_oldest();
        }
        self.kept.push(KeptPrefix { prefix, used: self.now });
    }

    /// Puts the longest prefix of `past` into a sequence that holds less of it: a kept one, or what
    /// another sequence holds at this moment.
    pub fn resume(&mut self, target: &mut Timeline, sequence: usize, past: &[Token]) {
        if !self.is_on {
            return;
        }
        let held = target.position(sequence);
        let others = (0..target.sequences()).filter(|other| *other != sequence);
        let pages = |other| (whole_pages(target.common(other, past)), other);
        if let Some((pages, other)) = others.map(pages).max().filter(|(pages, _)| *pages > held) {
            self.retain(target, other, pages);
        }
        let longer = |(i, kept): (usize, &KeptPrefix)| {
            let pages = whole_pages(common(kept.prefix.tokens(), past));
            (pages > held).then_some((pages, i))
        };
        let mut found: Vec<_> = self.kept.iter().enumerate().filter_map(longer).collect();
        found.sort_unstable_by(|a, b| b.cmp(a));
        for (pages, i) in found {
            // A prefix may lack the windows that its beginnings need.
            if target.resume(sequence, &self.kept[i].prefix, pages).is_ok() {
                self.now += 1;
                self.kept[i].used = self.now;
                break;
            }
        }
    }

    /// Returns how far `past` was read before, in whole pages, whether or not a text can go on
    /// from there. Others may part from it there too.
    pub fn fork(&self, target: &Timeline, sequence: usize, past: &[Token]) -> usize {
        if !self.is_on {
            return 0;
        }
        let kept = self.kept.iter().map(|kept| common(kept.prefix.tokens(), past));
        let others = (0..target.sequences()).filter(|other| *other != sequence);
        let held = others.map(|other| target.common(other, past));
        whole_pages(kept.chain(held).max().unwrap_or(0))
    }

    /// Lets go of what was of use longest ago until so many pages are free; `is_idle` says which
    /// sequences have no text.
    pub fn make_room(
        &mut self,
        target: &mut Timeline,
        pages: usize,
        is_idle: impl Fn(usize) -> bool,
    ) -> Result<()> {
        while self.is_on && target.engine().cached(0).free_pages < pages {
            let idle = |s: &usize| is_idle(*s) && target.position(*s) > 0;
            let sequence = (0..self.used.len()).filter(idle).min_by_key(|s| self.used[*s]);
            let oldest = self.kept.iter().map(|kept| kept.used).min();
            match (sequence, oldest) {
                (None, None) => break,
                (Some(s), oldest) if oldest.is_none_or(|used| self.used[s] < used) => {
                    target.clear(s)?
                }
                _ => self.drop_oldest(),
            }
        }
        Ok(())
    }

    fn drop_oldest(&mut self) {
        let oldest = (0..self.kept.len()).min_by_key(|i| self.kept[*i].used);
        oldest.map(|i| self.kept.swap_remove(i));
    }
}
