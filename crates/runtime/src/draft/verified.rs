//! The target's scores of the last round's tree.

use gemma_base::tensor::Token;
use gemma_model::engine::{Scores, TokenTree};
use gemma_model::sampler::Sampler;

/// Number of tokens kept per row.
pub const BEST: usize = 8;

/// A tree that the target has scored.
///
/// Rows of logits are only searched by [`best`](Self::best), so a round without drafts does no more
/// work than plain decoding.
#[derive(Clone, Copy)]
pub struct Verified<'a> {
    /// Length of the history that ended with the tree's root.
    pub position: usize,
    pub tree: &'a TokenTree,
    /// One row per node of the tree, the root's at index `first`.
    pub scores: &'a Scores,
    pub first: usize,
}

impl Verified<'_> {
    /// Returns the most likely tokens after a node with their logits, best first, at most [`BEST`].
    pub fn best(&self, node: usize, sampler: &Sampler) -> Vec<(Token, f32)> {
        let row = self.first + node;
        match self.scores.list(row) {
            Some(best) => best[..best.len().min(BEST)].to_vec(),
            // A row outside the accepted path may hold NaN without being an error.
            None => sampler.best(self.scores.row(row), BEST).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_model::sampler::SamplerConfig;

    #[test]
    fn rows_and_lists_say_the_same() {
        let sampler = Sampler::new(SamplerConfig::default()).unwrap().usable(90);
        let logits: Vec<f32> =
            (0..200u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32).collect();
        let mut tree = TokenTree::root(4);
        tree.push(0, 5);
        let rows = Scores { vocab: 100, logits: logits.clone(), ..Scores::default() };
        let list = |row: &[f32]| sampler.best(row, 20).unwrap();
        let lists = Scores {
            vocab: 100,
            best: [list(&logits[..100]), list(&logits[100..])].map(Some).to_vec(),
            ..Scores::default()
        };
        let [a, b] = [&rows, &lists].map(|scores| {
            let verified = Verified { position: 2, tree: &tree, scores, first: 0 };
            [0, 1].map(|node| verified.best(node, &sampler))
        });
        assert_eq!((a[0].len(), &a), (BEST, &b));
        assert!(a.iter().flatten().all(|(token, _)| *token < 90), "padding is no token");
        assert!(a[1].windows(2).all(|w| w[0].1 > w[1].1));
    }
}
