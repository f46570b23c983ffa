//! What became of a proposal, read off the history that followed.

use super::Proposal;
use crate::tensor::Token;

/// What was proposed at the end of some history, to be compared with a longer one.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Length of the history that was proposed on; 0 for none.
    asked: usize,
    proposal: Proposal,
}

impl Outcome {
    pub fn remember(&mut self, history: &[Token], proposal: &Proposal) {
        self.asked = history.len();
        self.proposal.clone_from(proposal);
    }

    /// Nodes of the proposal, the root included.
    pub fn rows(&self) -> usize {
        self.proposal.len()
    }

    /// Depth of the proposal's deepest node.
    pub fn levels(&self) -> usize {
        self.proposal.tree.depths().into_iter().max().unwrap_or(0) as usize
    }

    /// Forgets the proposal and returns the nodes of it that the history went on with, in a line
    /// from below the root; `None` if the history is not a longer one.
    pub fn settle(&mut self, history: &[Token]) -> Option<Vec<u32>> {
        let asked = std::mem::take(&mut self.asked);
        if asked == 0
            || history.len() <= asked
            || history[asked - 1] != self.proposal.tree.tokens[0]
        {
            return None;
        }
        let mut path = self.proposal.tree.walk(&history[asked - 1..]);
        path.remove(0);
        Some(path)
    }

    /// Who proposed a node.
    pub fn source(&self, node: u32) -> &'static str {
        self.proposal.source[node as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_is_known_once() {
        let mut p = Proposal::root(5);
        let a = p.add(0, 1, 0.5, "x");
        p.add(0, 2, 0.2, "x");
        let c = p.add(a, 3, 0.5, "y");
        p.add(c, 4, 0.5, "x");
        let mut outcome = Outcome::default();
        outcome.remember(&[8, 5], &p);
        assert_eq!(outcome.settle(&[8, 5, 1, 7]), Some(vec![a]));
        assert_eq!(outcome.settle(&[8, 5, 1, 7]), None);
        outcome.remember(&[8, 5], &p);
        assert_eq!(outcome.settle(&[8, 5, 1, 3]), Some(vec![a, c]));
        assert_eq!((outcome.source(a), outcome.source(c), outcome.rows()), ("x", "y", 5));
        outcome.remember(&[8, 5], &p);
        assert_eq!(outcome.settle(&[8, 6, 1]), None);
    }
}
