//! What the target said of the last round's tree: the one thing a drafter is told that the history does not hold.

use crate::engine::{Scores, TokenTree};
use crate::sampler::Sampler;
use crate::tensor::Token;

/// Tokens remembered of each row.
pub const BEST: usize = 8;

/// A tree that the target has scored, and its likeliest tokens behind each node.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// Length of the history that ended with the tree's root.
    pub position: usize,
    pub tree: TokenTree,
    /// Tokens and logits, best first, at most [`BEST`]. `[nodes]`
    pub best: Vec<Vec<(Token, f32)>>,
}

impl Verified {
    /// Takes in a round. `scores` has a row per node of `tree`, whose root stands at the end of `history`.
    pub fn record(&mut self, history: &[Token], tree: &TokenTree, scores: &Scores, sampler: &Sampler) {
        self.position = history.len();
        self.tree.clone_from(tree);
        self.best.resize_with(tree.len(), Vec::new);
        for (row, list) in self.best.iter_mut().enumerate() {
            list.clear();
            match scores.best.get(row) {
                Some(best) => list.extend(best.iter().take(BEST)),
                // A row off the accepted path may be no numbers without anyone having to know.
                None => *list = sampler.best(scores.row(row), BEST).unwrap_or_default(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SamplerConfig;

    #[test]
    fn rows_and_lists_say_the_same() {
        let sampler = Sampler::new(SamplerConfig::default()).unwrap().usable(90);
        let logits: Vec<f32> = (0..200u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32).collect();
        let mut tree = TokenTree::root(4);
        tree.push(0, 5);
        let rows = Scores { vocab: 100, logits: logits.clone(), ..Scores::default() };
        let list = |row: &[f32]| sampler.best(row, 20).unwrap();
        let lists = Scores { vocab: 100, best: vec![list(&logits[..100]), list(&logits[100..])], ..Scores::default() };
        let (mut a, mut b) = (Verified::default(), Verified::default());
        a.record(&[3, 4], &tree, &rows, &sampler);
        b.record(&[3, 4], &tree, &lists, &sampler);
        assert_eq!((a.position, a.best.len(), a.best[0].len()), (2, 2, BEST));
        assert_eq!(a.best, b.best);
        assert!(a.best.iter().flatten().all(|(token, _)| *token < 90), "padding is no token");
        assert!(a.best[1].windows(2).all(|w| w[0].1 > w[1].1));
    }
}
