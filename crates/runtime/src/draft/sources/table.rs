//! Table of the target's own distributions after one or two tokens (Token Recycling, Luo et al.
//! 2024). It needs no extra pass, since every verification computes these distributions.
//!
//! Every row that the target verifies, accepted or not, stores its eight most likely tokens under
//! its last two tokens and under its last one. Rows with the same key are averaged, so the entry
//! converges to the target's distribution.

use crate::draft::verified::{BEST, Verified};
use gemma_base::tensor::Token;
use gemma_model::sampler::Sampler;

/// Classes of [`class`].
pub const CLASSES: usize = 5;

/// Returns the class of a node. `pair` is how often the table has seen the last two tokens; `last`
/// is whether it knows the last one.
pub fn class(pair: u8, last: bool) -> usize {
    match (pair, last) {
        (0, false) => 0,
        (0, true) => 1,
        (1, _) => 2,
        (2..=4, _) => 3,
        _ => 4,
    }
}

/// Associativity: number of slots where a key can be stored.
const WAYS: usize = 4;
/// Total slots: 262,144 of 40 bytes, 10.5 MB.
const SLOTS: usize = 1 << 18;
/// Number of rows after which the weight of new rows in an entry stays constant.
const STEADY: u8 = 12;
/// Largest stored count.
const MOST: u8 = 200;
/// Quantisation steps of the square root of a negated log-probability: finest near certainty, where
/// averages change little.
const STEPS: f32 = 64.0;
/// Upper bound of token ids: three bytes.
const TOKENS: u32 = 1 << 24;

/// The distribution of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableSlot {
    /// Distinguishes keys with the same slots; 0 marks an empty slot.
    pub check: u32,
    /// Number of rows seen. It decays when other keys need the slot.
    pub count: u8,
    /// Token in the upper three bytes, quantised log-probability in the lowest byte; best first, 0
    /// for none.
    pub best: [u32; BEST],
}

impl TableSlot {
    /// Returns the tokens and probabilities, best first.
    pub fn list(&self) -> impl Iterator<Item = (Token, f32)> {
        self.best
            .iter()
            .take_while(|word| **word != 0)
            .map(|word| (word >> 8, (-((word & 0xff) as f32 / STEPS).powi(2)).exp()))
    }

    /// Averages a row's distribution into this one.
    fn blend(&mut self, row: &[(Token, f32)]) {
        let share = 1.0 / (self.count.min(STEADY) as f32 + 1.0);
        let mut union: Vec<(Token, f32)> =
            self.list().map(|(token, p)| (token, p * (1.0 - share))).collect();
        for &(token, p) in row {
            match union.iter_mut().find(|(t, _)| *t == token) {
                Some((_, q)) => *q += p * share,
                None => union.push((token, p * share)),
            }
        }
        union.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        self.best = [0; BEST];
        for (word, (token, p)) in self.best.iter_mut().zip(union) {
            let steps = ((-p.clamp(1e-9, 1.0).ln()).sqrt() * STEPS).round().clamp(0.0, 255.0);
            // Token 0 with certainty would look like an empty entry.
            *word = (token << 8 | steps as u32).max(1);
        }
        self.count = self.count.saturating_add(1).min(MOST);
    }
}

/// The last tokens before a position: two, or one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Pair(Token, Token),
    Last(Token),
}

impl Key {
    /// Returns the first slot of the key's set, and its check value.
    fn place(self) -> (usize, u32) {
        let (a, b) = match self {
            Key::Pair(a, b) => (a as u64 + 1, b as u64),
            Key::Last(b) => (0, b as u64),
        };
        let mut x = (a << 32 | b).wrapping_add(0x9E37_79B9_7F4A_7C15);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        ((x as usize % (SLOTS / WAYS)) * WAYS, ((x >> 32) as u32).max(1))
    }
}

/// A hash table of fixed size.
pub struct Table {
    /// `[SLOTS]`
    slots: Vec<TableSlot>,
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

impl Table {
    pub fn new() -> Self {
        Table { slots: vec![TableSlot::default(); SLOTS] }
    }

    pub fn get(&self, key: Key) -> Option<&TableSlot> {
        let (first, check) = key.place();
        self.slots[first..first + WAYS].iter().find(|slot| slot.check == check)
    }

    /// Adds a row to a key: tokens and probabilities, best first.
    pub fn put(&mut self, key: Key, row: &[(Token, f32)]) {
        let (first, check) = key.place();
        let ways = &mut self.slots[first..first + WAYS];
        let way = ways.iter().position(|slot| slot.check == check).unwrap_or_else(|| {
            let least =
                (0..WAYS).min_by_key(|&way| (ways[way].check != 0, ways[way].count)).unwrap_or(0);
            if ways[least].check != 0 {
                // Ensures that a frequent key eventually gets a slot.
                ways.iter_mut().for_each(|slot| slot.count = slot.count.saturating_sub(1));
            }
            ways[least] = TableSlot { check, ..TableSlot::default() };
            least
        });
        ways[way].blend(row);
    }

    /// Adds every row of a tree that the target has scored.
    pub fn feed(&mut self, history: &[Token], verified: Verified<'_>, sampler: &Sampler) {
        let before = verified.position.checked_sub(2).and_then(|at| history.get(at));
        let mut row: Vec<(Token, f32)> = Vec::with_capacity(BEST);
        for node in 0..verified.tree.len() {
            let best = verified.best(node, sampler);
            let Some(&(_, max)) = best.first() else { continue };
            let sum: f32 = best.iter().map(|(_, logit)| (logit - max).exp()).sum();
            row.clear();
            row.extend(
                best.iter()
                    .filter(|(t, _)| *t < TOKENS)
                    .map(|&(token, logit)| (token, (logit - max).exp() / sum)),
            );
            let last = verified.tree.tokens[node];
            let previous = match verified.tree.parent[node] {
                Some(parent) => verified.tree.tokens.get(parent as usize),
                None => before,
            };
            if let Some(&previous) = previous {
                self.put(Key::Pair(previous, last), &row);
            }
            self.put(Key::Last(last), &row);
        }
    }

    #[cfg(test)]
    fn used(&self) -> usize {
        self.slots.iter().filter(|slot| slot.check != 0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_model::engine::{Scores, TokenTree};
    use gemma_model::sampler::SamplerConfig;

    #[test]
    fn rows_under_one_key_are_averaged() {
        let mut table = Table::new();
        let key = Key::Pair(3, 4);
        table.put(key, &[(10, 1.0)]);
        table.put(key, &[(11, 0.5), (10, 0.25), (0, 0.25)]);
        let list: Vec<_> = table.get(key).unwrap().list().collect();
        assert_eq!(list.iter().map(|c| c.0).collect::<Vec<_>>(), [10, 11, 0]);
        for ((_, p), want) in list.iter().zip([0.625, 0.25, 0.125]) {
            assert!((p / want - 1.0).abs() < 0.05, "{list:?}");
        }
        assert_eq!(
            (table.get(key).unwrap().count, table.get(Key::Pair(4, 3)), table.get(Key::Last(4))),
            (2, None, None)
        );
        // A token that always comes soon ranks first, however often others came before.
        (0..200).for_each(|_| table.put(key, &[(99, 1.0)]));
        assert!(
            table.get(key).unwrap().list().next().is_some_and(|(token, p)| token == 99 && p > 0.9)
        );
    }

    #[test]
    fn every_row_of_a_tree_is_remembered_under_two_tokens_and_under_one() {
        let mut tree = TokenTree::root(5);
        let a = tree.push(0, 6);
        tree.push(a, 7);
        let scores = Scores {
            best: [vec![(6, 2.0), (8, 1.0)], vec![(9, 0.0)], vec![]].map(Some).to_vec(),
            ..Scores::default()
        };
        let sampler = Sampler::new(SamplerConfig::default()).unwrap();
        let verified = |position| Verified { position, tree: &tree, scores: &scores, first: 0 };
        let mut table = Table::new();
        table.feed(&[4, 5, 6, 9], verified(2), &sampler);
        let first = |key| table.get(key).map(|slot| slot.list().next().unwrap().0);
        assert_eq!(
            [Key::Pair(4, 5), Key::Last(5), Key::Pair(5, 6), Key::Last(6)].map(first),
            [Some(6), Some(6), Some(9), Some(9)]
        );
        assert_eq!([Key::Pair(6, 7), Key::Last(7)].map(first), [None; 2]);
        let slot = table.get(Key::Pair(4, 5)).unwrap();
        let p: Vec<f32> = slot.list().map(|c| c.1).collect();
        assert!((p[0] / p[1]).ln() > 0.9 && (p[0] / p[1]).ln() < 1.1, "{p:?}");
        // The first token of a text has no predecessor.
        let mut table = Table::new();
        table.feed(&[5], verified(1), &sampler);
        assert!(table.get(Key::Last(5)).is_some() && table.used() == 3);
    }

    #[test]
    fn a_full_table_forgets_what_is_rare() {
        let mut table = Table::new();
        let often = Key::Pair(1, 2);
        for i in 0..3 * SLOTS as u32 {
            table.put(Key::Pair(i, i), &[(i & 0xffff, 1.0)]);
            if i % 1000 == 0 {
                table.put(often, &[(7, 1.0)]);
            }
        }
        assert!(table.used() > SLOTS * 99 / 100);
        assert_eq!(table.get(often).unwrap().list().next(), Some((7, 1.0)));
        let late = 3 * SLOTS as u32 - 1;
        assert!(table.get(Key::Pair(late, late)).is_some());
    }
}
