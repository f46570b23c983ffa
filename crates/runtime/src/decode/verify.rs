//! Verification is equality: a node is accepted if it is the token that the sampler picks there.

use anyhow::Result;

use gemma_base::tensor::Token;
use gemma_model::engine::{Scores, TokenTree};
use gemma_model::sampler::Sampler;

/// Outcome of a round for one tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted nodes, root first.
    pub path: Vec<u32>,
    /// The target's token after them.
    pub next: Token,
}

impl Verdict {
    /// Returns the tokens that the history grows by.
    pub fn tokens(&self, tree: &TokenTree) -> Vec<Token> {
        self.path[1..].iter().map(|&node| tree.tokens[node as usize]).chain([self.next]).collect()
    }
}

/// Walks from the root to the child that carries the token picked, for as long as there is one.
///
/// `scores` has a row per node from row `first` on, `history` ends with the root. The sampler's
/// rule is asked along the accepted path alone.
pub fn verify(
    tree: &TokenTree,
    scores: &Scores,
    first: usize,
    sampler: &Sampler,
    history: &[Token],
) -> Result<Verdict> {
    let mut context = if sampler.reads_context() { history.to_vec() } else { Vec::new() };
    let mut path = vec![0];
    loop {
        let node = path[path.len() - 1];
        let (row, position) = (first + node as usize, history.len() + path.len() - 1);
        let next = scores.pick(row, sampler, position, &context)?;
        match tree.child(node, next) {
            Some(child) => path.push(child),
            None => return Ok(Verdict { path, next }),
        }
        if sampler.reads_context() {
            context.push(next);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_model::sampler::SamplerConfig;

    #[test]
    fn the_walk_follows_the_picks_and_the_penalty_sees_the_path() {
        let mut tree = TokenTree::root(9);
        let a = tree.push(0, 1);
        tree.push(0, 2);
        tree.push(a, 2);
        let c = tree.push(a, 1);
        // Row 0 prefers 1; every other row prefers 1 a little over 3.
        let logits =
            [[0., 5., 1., 2.], [0., 5., 1., 4.], [0.; 4], [0.; 4], [0., 5., 1., 4.]].concat();
        let scores = Scores { vocab: 4, logits, ..Scores::default() };
        let verdict = |repeat_penalty| {
            let sampler =
                Sampler::new(SamplerConfig { repeat_penalty, ..Default::default() }).unwrap();
            verify(&tree, &scores, 0, &sampler, &[9]).unwrap()
        };
        assert_eq!(verdict(1.0), Verdict { path: vec![0, a, c], next: 1 });
        assert_eq!(verdict(1.0).tokens(&tree), [1, 1, 1]);
        // Once 1 stands in the path it falls behind 3.
        assert_eq!(verdict(2.0), Verdict { path: vec![0, a], next: 3 });
    }
}
