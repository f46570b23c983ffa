//! Drafts while the target's device runs: the tree grows beyond the submitted nodes.
//!
//! The target adds one token to the accepted path. If the tree has a node for that token, it is a
//! node that was not submitted. The probability of this node is therefore the probability that
//! the next round starts there. The draft model evaluates the most likely of these nodes. A round
//! that starts at one of them keeps its subtree and the draft model's scratch, and its root needs
//! no pass.

use anyhow::Result;

use super::TreeBuilder;
use super::tree::{Node, SHARE, Tree, WIDTH};
use crate::draft::drafter::{DraftContext, DraftRequest};
use crate::draft::sources::FreeSources;
use crate::draft::sources::context::Match;
use crate::draft::sources::model::TreeModel;
use gemma_base::tensor::Token;

/// Probability below which a node is not worth evaluating.
const FAINTEST: f32 = 0.02;

impl TreeBuilder {
    /// Extends the trees while the target scores the proposals.
    pub(super) fn work_ahead(
        &mut self,
        requests: &[DraftRequest<'_>],
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let Some(model) = &self.shared.model else { return Ok(()) };
        let current: Vec<&DraftRequest<'_>> =
            requests.iter().filter(|request| self.trees[request.text].is_of(request)).collect();
        let mut left = model.ahead();
        while left > 0 && !current.is_empty() && more() {
            let mut chosen = Vec::with_capacity(current.len());
            let Some(model) = &mut self.shared.model else { return Ok(()) };
            let room = model.room().min(left) / current.len();
            for request in &current {
                let tree = &mut self.trees[request.text];
                let nodes = tree.likeliest_next(&request.ctx, model.as_ref(), room);
                tree.push(model.as_mut(), &nodes);
                left -= nodes.len().min(left);
                chosen.push(nodes);
            }
            if chosen.iter().all(Vec::is_empty) {
                break;
            }
            model.evaluate(&mut None)?;
            for (request, nodes) in
                current.iter().zip(&chosen).filter(|(_, nodes)| !nodes.is_empty())
            {
                let tree = &mut self.trees[request.text];
                tree.ahead = true;
                for (row, &node) in nodes.iter().enumerate() {
                    tree.expand(&mut self.shared, &request.ctx, node, Some(row))?;
                }
            }
        }
        Ok(())
    }
}

impl Tree {
    /// Returns whether this is the proposed tree and the draft model has evaluated its root.
    fn is_of(&self, request: &DraftRequest<'_>) -> bool {
        let has_row = self.nodes.first().is_some_and(|root| root.row.is_some());
        self.base_len == request.ctx.history.len()
            && has_row
            && request.out.tree.tokens[0] == request.ctx.root()
    }

    /// Returns the nodes, with at most `room` rows, at which the next round most likely starts.
    /// Leaves out nodes that are too unlikely.
    fn likeliest_next(
        &mut self,
        ctx: &DraftContext<'_>,
        model: &dyn TreeModel,
        room: usize,
    ) -> Vec<u32> {
        self.weigh(ctx.chain);
        let mut chosen: Vec<u32> = Vec::new();
        let (mut least, mut rows) = (FAINTEST, 0);
        for i in self.best(self.nodes.len()) {
            let node = &self.nodes[i as usize];
            let fits = node.depth < model.left(self.text, ctx.history.len());
            if node.row.is_none()
                && self.nodes[node.parent as usize].row.is_some()
                && fits
                && model.knows(node.token)
            {
                least = least.max(SHARE * node.chance);
                rows += model.rows_of(node.token);
                if node.chance < least || chosen.len() == WIDTH || rows > room {
                    break;
                }
                chosen.push(i);
            }
        }
        chosen
    }

    /// Returns the node that matches the end of the history, and its row in the draft model, if it
    /// was evaluated.
    pub fn find(&self, history: &[Token], base_len: usize) -> Option<(u32, u32)> {
        let newer = history.get(base_len..).filter(|newer| base_len > 0 && !newer.is_empty())?;
        let root = newer.iter().try_fold(0, |at, &token| self.child(at, token))?;
        Some((root, self.nodes[root as usize].row?))
    }

    /// Makes a node the root and drops all nodes that are not its descendants.
    pub fn take_over(&mut self, free: &FreeSources, root: u32, matched: Match) {
        let old = std::mem::take(&mut self.nodes);
        let base = old[root as usize].depth;
        let mut place: Vec<Option<u32>> = vec![None; old.len()];
        for (i, node) in old.into_iter().enumerate().skip(root as usize) {
            let parent = if i == root as usize { Some(0) } else { place[node.parent as usize] };
            let Some(parent) = parent else { continue };
            place[i] = Some(self.nodes.len() as u32);
            let depth = node.depth - base;
            // The text has grown since. Candidates without the draft model are therefore collected
            // again.
            let candidates = node.candidates.filter(|_| node.row.is_some());
            self.nodes.push(Node { parent, depth, candidates, ..node });
        }
        (self.nodes[0].own, self.nodes[0].chance, self.nodes[0].source, self.nodes[0].matched) =
            (1.0, 1.0, "", matched);
        for i in 1..self.nodes.len() {
            let before = self.nodes[self.nodes[i].parent as usize].matched;
            self.nodes[i].matched = free.step(self.text, before, self.nodes[i].token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::sources::CandidateSource;

    fn node(token: u32, parent: u32, depth: usize, row: Option<u32>) -> Node {
        let matched = Match::default();
        Node {
            own: 0.5,
            chance: 0.5,
            source: CandidateSource::Model.name(),
            row,
            ..Node::new(token, parent, depth, matched)
        }
    }

    #[test]
    fn a_part_of_the_tree_becomes_the_whole() {
        let mut tree = Tree::new(0);
        // 9 -> (1 -> 3 -> 5, 2 -> 4), and 1 -> 6 after all others.
        tree.nodes = vec![
            node(9, 0, 0, Some(0)),
            node(1, 0, 1, Some(1)),
            node(2, 0, 1, Some(2)),
            node(3, 1, 2, Some(3)),
            node(4, 2, 2, None),
            node(5, 3, 3, None),
            node(6, 1, 2, Some(4)),
        ];
        tree.take_over(&FreeSources::default(), 1, Match::default());
        let shape: Vec<_> =
            tree.nodes.iter().map(|n| (n.token, n.parent, n.depth, n.row)).collect();
        assert_eq!(
            shape,
            [(1, 0, 0, Some(1)), (3, 0, 1, Some(3)), (5, 1, 2, None), (6, 0, 1, Some(4))]
        );
        assert_eq!((tree.nodes[0].chance, tree.nodes[0].source), (1.0, ""));
    }
}
