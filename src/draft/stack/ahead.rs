//! Drafting while the target's device works: the tree is grown on past what was submitted, where
//! its outcome is likeliest to be.
//!
//! The token that the target adds to an accepted path is a node of the tree that was not submitted,
//! if it is any. So the chance of such a node is the chance that the next round begins there. The
//! likeliest are evaluated with what follows them; the next round that begins at one of them takes
//! over its part of the tree and of the draft model's scratch, and waits for no pass to see it.

use anyhow::Result;

use super::{Node, SHARE, Stack, WIDTH};
use crate::draft::automaton::Match;
use crate::draft::{DraftContext, Proposal};

/// Less likely nodes are not worth the power.
const FAINTEST: f32 = 0.02;
/// Share of the draft model's scratch that one round's work ahead may take: the rest is for what
/// the next rounds go on with.
const PART: usize = 5;

impl Stack {
    /// Evaluates one batch of at most `most` nodes ahead. Returns how many were worth it.
    fn go_on(&mut self, ctx: &DraftContext<'_>, most: usize) -> Result<usize> {
        self.weigh(ctx.chain);
        let Some(lm) = &self.sources.lm else { return Ok(0) };
        let room = lm.room().min(most).min(WIDTH);
        let mut chosen: Vec<u32> = Vec::new();
        let mut least = FAINTEST;
        for i in self.best(self.nodes.len()) {
            let node = &self.nodes[i as usize];
            let fits = node.depth < lm.left(ctx.history.len());
            if node.row.is_none()
                && self.nodes[node.parent as usize].row.is_some()
                && fits
                && lm.knows(node.token)
            {
                least = least.max(SHARE * node.chance);
                if node.chance < least || chosen.len() == room {
                    break;
                }
                chosen.push(i);
            }
        }
        if !chosen.is_empty() {
            self.evaluate(ctx, &chosen)?;
        }
        Ok(chosen.len())
    }

    /// Grows the tree while the target looks at `proposal`.
    pub(super) fn work_ahead(
        &mut self,
        ctx: &DraftContext<'_>,
        proposal: &Proposal,
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let current = self.asked == ctx.history.len()
            && self.nodes.first().is_some_and(|root| root.row.is_some());
        if !current || proposal.tree.tokens[0] != ctx.root() {
            return Ok(());
        }
        let mut left =
            self.sources.lm.as_ref().map_or(0, |lm| lm.engine().max_rows().div_ceil(PART));
        while left > 0 && more() {
            let done = self.go_on(ctx, left)?;
            if done == 0 {
                break;
            }
            self.ahead = true;
            left -= done;
        }
        Ok(())
    }

    /// Goes on from the tree of the last round, where the draft model has seen the end of the
    /// history in it already.
    pub(super) fn resume(&mut self, ctx: &DraftContext<'_>, asked: usize, matched: Match) -> bool {
        let worked = std::mem::take(&mut self.ahead);
        let found = self.find(ctx, asked);
        self.figures.ahead += worked as u64;
        self.figures.hits += (worked && found.is_some()) as u64;
        let Some(root) = found else { return false };
        self.take_over(root, matched);
        true
    }

    /// The node at which the history stands now, if the draft model can go on from there.
    fn find(&self, ctx: &DraftContext<'_>, asked: usize) -> Option<u32> {
        let newer = ctx.history.get(asked..).filter(|newer| asked > 0 && !newer.is_empty())?;
        let root = newer.iter().try_fold(0, |at, &token| self.child(at, token))?;
        let row = self.nodes[root as usize].row?;
        self.sources.lm.as_ref()?.stands_at(ctx.history, row).then_some(root)
    }

    /// Makes a node the root and forgets all that is not below it.
    fn take_over(&mut self, root: u32, matched: Match) {
        let old = std::mem::take(&mut self.nodes);
        let base = old[root as usize].depth;
        let mut place: Vec<Option<u32>> = vec![None; old.len()];
        for (i, node) in old.into_iter().enumerate().skip(root as usize) {
            let parent = if i == root as usize { Some(0) } else { place[node.parent as usize] };
            let Some(parent) = parent else { continue };
            place[i] = Some(self.nodes.len() as u32);
            let depth = node.depth - base;
            // The text has grown since: what it offers is asked for again where the draft model has
            // said nothing.
            let choice = node.choice.filter(|_| node.row.is_some());
            self.nodes.push(Node { parent, depth, choice, ..node });
        }
        (self.nodes[0].own, self.nodes[0].chance, self.nodes[0].source, self.nodes[0].matched) =
            (1.0, 1.0, "", matched);
        if let Some(automaton) = &self.sources.context {
            for i in 1..self.nodes.len() {
                let before = self.nodes[self.nodes[i].parent as usize].matched;
                self.nodes[i].matched = automaton.step(before, self.nodes[i].token);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::Mixing;

    fn node(token: u32, parent: u32, depth: usize, row: Option<u32>) -> Node {
        let matched = Match::default();
        Node {
            own: 0.5,
            chance: 0.5,
            source: "model",
            row,
            ..Node::new(token, parent, depth, matched)
        }
    }

    #[test]
    fn a_part_of_the_tree_becomes_the_whole() {
        let mut stack = Stack::new("test", None, false, None, Mixing::default());
        // 9 -> (1 -> 3 -> 5, 2 -> 4), and 1 -> 6 behind all others.
        stack.nodes = vec![
            node(9, 0, 0, Some(0)),
            node(1, 0, 1, Some(1)),
            node(2, 0, 1, Some(2)),
            node(3, 1, 2, Some(3)),
            node(4, 2, 2, None),
            node(5, 3, 3, None),
            node(6, 1, 2, Some(4)),
        ];
        stack.take_over(1, Match::default());
        let shape: Vec<_> =
            stack.nodes.iter().map(|n| (n.token, n.parent, n.depth, n.row)).collect();
        assert_eq!(
            shape,
            [(1, 0, 0, Some(1)), (3, 0, 1, Some(3)), (5, 1, 2, None), (6, 0, 1, Some(4))]
        );
        assert_eq!((stack.nodes[0].chance, stack.nodes[0].source), (1.0, ""));
    }
}
