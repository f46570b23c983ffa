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

    /// Forgets the proposal and calls `each(node, chance given its parent, taken)` for every node of it that the target has
    /// decided on: the children of the root and of every node taken. Returns how many nodes were taken in a line; `None` if
    /// the history is not a longer one.
    pub fn settle(&mut self, history: &[Token], mut each: impl FnMut(usize, f32, bool)) -> Option<usize> {
        let asked = std::mem::take(&mut self.asked);
        if asked == 0 || history.len() <= asked || history[asked - 1] != self.proposal.tree.tokens[0] {
            return None;
        }
        let tree = &self.proposal.tree;
        let path = tree.walk(&history[asked - 1..]);
        for (node, parent) in tree.parent.iter().enumerate() {
            let Some(level) = parent.and_then(|p| path.iter().position(|&on_path| on_path == p)) else { continue };
            // The history may end at the last node taken.
            if let Some(&next) = history.get(asked + level) {
                let before = self.proposal.chance[path[level] as usize].max(f32::MIN_POSITIVE);
                each(node, self.proposal.chance[node] / before, tree.tokens[node] == next);
            }
        }
        Some(path.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_decided_nodes_are_settled() {
        let mut p = Proposal::root(5);
        let a = p.add(0, 1, 0.5, "x");
        p.add(0, 2, 0.2, "x");
        let c = p.add(a, 3, 0.5, "x");
        p.add(c, 4, 0.5, "x");
        let mut outcome = Outcome::default();
        let settle = |outcome: &mut Outcome, history: &[Token]| {
            let mut seen = Vec::new();
            let taken = outcome.settle(history, |node, _, taken| seen.push((node, taken)));
            (taken, seen)
        };
        outcome.remember(&[8, 5], &p);
        assert_eq!(settle(&mut outcome, &[8, 5, 1, 7]), (Some(1), vec![(1, true), (2, false), (3, false)]));
        assert_eq!(settle(&mut outcome, &[8, 5, 1, 7]), (None, vec![]));
        outcome.remember(&[8, 5], &p);
        assert_eq!(settle(&mut outcome, &[8, 5, 1]), (Some(1), vec![(1, true), (2, false)]));
        outcome.remember(&[8, 5], &p);
        assert_eq!(settle(&mut outcome, &[8, 6, 1]), (None, vec![]));
    }
}
