//! A draft tree with the probability and the source of each node.

use gemma_base::tensor::Token;
use gemma_model::engine::TokenTree;

/// Draft tree of one round. Node 0 is the newest token of the history.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proposal {
    pub tree: TokenTree,
    /// Estimated probability that the target accepts the whole path to the node: 1 for the root,
    /// never above the parent's. `[nodes]`
    pub chance: Vec<f32>,
    /// Name of the source that determined the node's probability; empty for the root. `[nodes]`
    pub source: Vec<&'static str>,
}

impl Proposal {
    /// Creates a proposal with only a root.
    pub fn root(token: Token) -> Self {
        Proposal { tree: TokenTree::root(token), chance: vec![1.0], source: vec![""] }
    }

    /// Resets it to a root, keeping its buffers.
    pub fn reset(&mut self, token: Token) {
        self.tree.clear();
        self.tree.tokens.push(token);
        self.tree.parent.push(None);
        self.chance.clear();
        self.chance.push(1.0);
        self.source.clear();
        self.source.push("");
    }

    /// Returns the number of nodes, including the root.
    pub fn len(&self) -> usize {
        self.tree.len()
    }

    /// Returns whether there are no nodes besides the root.
    pub fn is_empty(&self) -> bool {
        self.len() <= 1
    }

    /// Adds a child with this probability given its parent. If an equal child exists, it keeps the
    /// higher probability. Returns its index.
    pub fn add(
        &mut self,
        parent: u32,
        token: Token,
        chance_given_parent: f32,
        source: &'static str,
    ) -> u32 {
        let chance = self.chance[parent as usize] * chance_given_parent.clamp(0.0, 1.0);
        let node = self.tree.insert(parent, token);
        if node as usize == self.chance.len() {
            self.chance.push(chance);
            self.source.push(source);
        } else if chance > self.chance[node as usize] {
            self.chance[node as usize] = chance;
            self.source[node as usize] = source;
        }
        node
    }

    /// Returns the expected number of accepted tokens, without the root.
    pub fn expected(&self) -> f32 {
        self.chance[1..].iter().sum()
    }

    /// Returns the nodes without the root, most likely first; parents come before children.
    pub fn by_chance(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (1..self.len() as u32).collect();
        // The sort is stable, so that a parent precedes a child of equal probability.
        order.sort_by(|&a, &b| self.chance[b as usize].total_cmp(&self.chance[a as usize]));
        order
    }

    /// Keeps the `n` most likely nodes, in addition to the root.
    pub fn keep_best(&mut self, n: usize) {
        if self.len() > n + 1 {
            let mut keep = vec![false; self.len()];
            keep[0] = true;
            self.by_chance()[..n].iter().for_each(|&node| keep[node as usize] = true);
            self.keep(&keep);
        }
    }

    /// Drops nodes deeper than `most_depth` and ids from `vocab` upwards, then the least likely
    /// nodes beyond `nodes`.
    pub fn limit(&mut self, nodes: usize, most_depth: usize, vocab: usize) {
        let allowed = |(&depth, &token): (&u32, &Token)| {
            depth == 0 || depth as usize <= most_depth && (token as usize) < vocab
        };
        let keep: Vec<bool> =
            self.tree.depths().iter().zip(&self.tree.tokens).map(allowed).collect();
        if keep.contains(&false) {
            self.keep(&keep);
        }
        self.keep_best(nodes);
    }

    /// Drops unwanted nodes and their descendants.
    fn keep(&mut self, wanted: &[bool]) {
        let mut kept = Proposal::root(self.tree.tokens[0]);
        let mut place: Vec<Option<u32>> = vec![Some(0)];
        for (node, &wanted) in wanted.iter().enumerate().skip(1) {
            let parent = self.tree.parent[node].and_then(|p| place[p as usize]);
            place.push(parent.filter(|_| wanted).map(|parent| {
                kept.chance.push(self.chance[node]);
                kept.source.push(self.source[node]);
                kept.tree.push(parent, self.tree.tokens[node])
            }));
        }
        *self = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Proposal {
        let mut p = Proposal::root(9);
        let a = p.add(0, 1, 0.6, "x"); // .6
        p.add(a, 2, 0.5, "x"); // .3
        let c = p.add(0, 3, 0.35, "x"); // .35
        p.add(c, 4, 0.2, "x"); // .07
        p
    }

    #[test]
    fn the_best_nodes_form_a_tree() {
        let mut p = sample();
        p.keep_best(3);
        assert_eq!(p.tree.tokens, [9, 1, 2, 3]);
        assert_eq!(p.tree.parent, [None, Some(0), Some(1), Some(0)]);
        p.keep_best(1);
        assert_eq!((p.tree.tokens.clone(), p.expected()), (vec![9, 1], 0.6));
        p.keep_best(0);
        assert!(p.is_empty());
    }

    #[test]
    fn equal_chances_keep_parents_first() {
        let mut p = Proposal::root(0);
        let mut at = 0;
        for token in 1..6 {
            at = p.add(at, token, 1.0, "x");
        }
        p.keep_best(3);
        assert_eq!(p.tree, TokenTree::chain(&[0, 1, 2, 3]));
    }

    #[test]
    fn limits_hold() {
        let limited = |nodes, depth, vocab| {
            let mut p = sample();
            p.limit(nodes, depth, vocab);
            p.tree.tokens
        };
        assert_eq!(limited(10, 9, 5), [9, 1, 2, 3, 4]);
        assert_eq!(limited(10, 1, 5), [9, 1, 3]);
        assert_eq!(limited(10, 9, 3), [9, 1, 2]);
        assert_eq!(limited(2, 9, 5), [9, 1, 3]);
        assert_eq!(limited(10, 0, 5), [9]);
    }
}
