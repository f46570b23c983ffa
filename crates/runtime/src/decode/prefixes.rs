//! Prefix cache in memory. It keeps prefixes of texts at the positions where texts ended, started
//! generating, or diverged. Sequences in use also serve as prefixes.
//!
//! A sliding window drops the keys that a rollback needs, so a text can only continue at positions
//! with retained windows. Prefixes share pages with the sequences that they were read in. When
//! sequences need pages, the least recently used prefix is dropped first.

use anyhow::Result;
use gemma_base::kv::{PAGE, SLACK};
use gemma_base::tensor::Token;
use gemma_model::engine::{Prefix, Timeline};

/// Most prefixes: each is compared with each new text.
const MOST: usize = 256;

/// Rounds a number of tokens down to whole pages.
pub(super) fn whole_pages(tokens: usize) -> usize {
    tokens / PAGE * PAGE
}

pub(super) fn common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

struct KeptPrefix {
    prefix: Prefix,
    /// Time of its last use, on the same clock as `Prefixes::used`.
    used: u64,
}

/// Retained prefixes of one target, and the last use of its sequences.
pub struct Prefixes {
    is_on: bool,
    kept: Vec<KeptPrefix>,
    /// Time of last use, by sequence.
    used: Vec<u64>,
    now: u64,
}

impl Prefixes {
    /// Creates an empty cache for `sequences` sequences. Nothing is kept before
    /// [`start`](Self::start).
    pub fn new(sequences: usize) -> Prefixes {
        Prefixes { is_on: false, kept: Vec::new(), used: vec![0; sequences], now: 0 }
    }

    pub fn is_on(&self) -> bool {
        self.is_on
    }

    pub fn start(&mut self) {
        self.is_on = true;
    }

    /// Sets a sequence's last use to now.
    pub fn touch(&mut self, sequence: usize) {
        self.now += 1;
        self.used[sequence] = self.now;
    }

    /// Returns the time of a sequence's last use.
    pub fn last_use(&self, sequence: usize) -> u64 {
        self.used[sequence]
    }

    /// Returns the number of tokens that need not be read if a text with `history` uses this
    /// sequence.
    pub fn gain(&self, target: &Timeline, sequence: usize, history: &[Token]) -> usize {
        let common = target.common(sequence, history);
        // A window that moved past this point is lost in the sequence; a retained prefix may have
        // it.
        let is_lost = self.is_on && target.position(sequence) - common > SLACK;
        if is_lost { 0 } else { common }
    }

    /// Retains the whole pages of a sequence's first `tokens` tokens.
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

    /// Replaces a sequence by the longest available prefix of `past`, if it is longer than what the
    /// sequence holds. The prefix is a retained one, or currently in another sequence.
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
            // A prefix may lack the windows for shorter parts of it.
            if target.resume(sequence, &self.kept[i].prefix, pages).is_ok() {
                self.now += 1;
                self.kept[i].used = self.now;
                break;
            }
        }
    }

    /// Returns how many tokens of `past` were read before, in whole pages, even if a text cannot
    /// continue there. Other texts may also diverge there.
    pub fn fork(&self, target: &Timeline, sequence: usize, past: &[Token]) -> usize {
        if !self.is_on {
            return 0;
        }
        let kept = self.kept.iter().map(|kept| common(kept.prefix.tokens(), past));
        let others = (0..target.sequences()).filter(|other| *other != sequence);
        let held = others.map(|other| target.common(other, past));
        whole_pages(kept.chain(held).max().unwrap_or(0))
    }

    /// Drops the least recently used prefixes and idle sequences until `pages` pages are free.
    /// `is_idle` returns whether a sequence has no text.
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
