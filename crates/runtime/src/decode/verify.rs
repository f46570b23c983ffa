//! Verification by equality: a node is accepted if it is the token that the sampler picks there.

use anyhow::Result;

use gemma_base::tensor::Token;
use gemma_model::engine::{Scores, TokenTree};
use gemma_model::sampler::Sampler;

/// Result of a round for one tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted nodes, root first.
    pub path: Vec<u32>,
    /// The target's own token after them.
    pub next: Token,
}

impl Verdict {
    /// Returns the tokens to add to the history.
    pub fn tokens(&self, tree: &TokenTree) -> Vec<Token> {
        self.path[1..].iter().map(|&node| tree.tokens[node as usize]).chain([self.next]).collect()
    }
}

/// Follows the picked tokens from the root as long as the tree has them.
///
/// `scores` has one row per node, starting at row `first`. `history` ends with the root. The
/// sampler's rule is only evaluated along the accepted path.
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
        // Row 0 prefers token 1; every other row prefers 1 slightly over 3.
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
        // With 1 in the path, its penalised logit is below that of 3.
        assert_eq!(verdict(2.0), Verdict { path: vec![0, a], next: 3 });
    }
}
