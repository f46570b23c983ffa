//! The contents of scratch: trees of several sequences as rows of passes.

use super::{Input, Rows};
use anyhow::{Result, ensure};
use gemma_base::compute::step::{NO_PARENT, StepView};
use gemma_base::tensor::Token;

/// The rows of scratch, in the order in which passes evaluated them.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// For each sequence with a tree, the row of each node
    trees: Vec<(usize, Vec<u32>)>,
    pub tokens: Vec<Token>,
    /// Position in the sequence: its committed tokens plus the depth in its tree
    pub positions: Vec<u32>,
    parents: Vec<u32>,
    roots: Vec<u32>,
    sequences: Vec<u32>,
    /// Rows with scores requested from the last pass
    pub selected: Vec<u32>,
    /// Which of them need all logits
    pub whole: Vec<bool>,
}

impl Scratch {
    /// Adds the inputs of a pass and returns the first new row. `position_of` returns the number of
    /// a sequence's committed tokens. After an error scratch is empty.
    pub fn take(
        &mut self,
        inputs: &[Input<'_>],
        position_of: impl Fn(usize) -> usize,
    ) -> Result<usize> {
        let taken = self.try_take(inputs, position_of);
        if taken.is_err() {
            self.clear();
        }
        taken
    }

    fn try_take(
        &mut self,
        inputs: &[Input<'_>],
        position_of: impl Fn(usize) -> usize,
    ) -> Result<usize> {
        let is_once = |(i, input): (usize, &Input<'_>)| {
            inputs[..i].iter().all(|other| other.sequence != input.sequence)
        };
        ensure!(inputs.iter().enumerate().all(is_once), "a pass has at most one tree per sequence");
        if inputs.iter().all(|input| input.first == 0) {
            self.clear();
        }
        let goes_on = |sequence| inputs.iter().any(|i| i.sequence == sequence && i.first > 0);
        self.trees.retain(|(sequence, _)| goes_on(*sequence));
        let first_new = self.tokens.len();
        self.selected.clear();
        self.whole.clear();
        for input in inputs {
            self.add(input, position_of(input.sequence) as u32)?;
            self.whole.resize(self.selected.len(), input.whole);
        }
        Ok(first_new)
    }

    fn add(&mut self, input: &Input<'_>, position: u32) -> Result<()> {
        let Input { sequence, tree, first, rows, .. } = *input;
        let at = match self.trees.iter().position(|(s, _)| *s == sequence) {
            Some(at) => at,
            None => {
                self.trees.push((sequence, Vec::with_capacity(tree.len())));
                self.trees.len() - 1
            }
        };
        let nodes = &mut self.trees[at].1;
        let is_same = nodes.len() == first
            && tree.len() >= first.max(1)
            && nodes.iter().zip(&tree.tokens).all(|(row, t)| self.tokens[*row as usize] == *t);
        ensure!(is_same, "a pass can only continue trees that are in scratch");
        for node in first..tree.len() {
            let row = self.tokens.len() as u32;
            let parent = tree.parent[node].map(|parent| nodes[parent as usize]);
            self.tokens.push(tree.tokens[node]);
            self.positions.push(parent.map_or(position, |p| self.positions[p as usize] + 1));
            self.parents.push(parent.unwrap_or(NO_PARENT));
            self.roots.push(parent.map_or(row, |p| self.roots[p as usize]));
            self.sequences.push(sequence as u32);
            nodes.push(row);
        }
        let new = &nodes[first..];
        match rows {
            Rows::None => {}
            Rows::Last => self.selected.extend(new.last()),
            Rows::All => self.selected.extend(new),
        }
        Ok(())
    }

    pub fn clear(&mut self) {
        self.trees.clear();
        self.selected.clear();
        self.whole.clear();
        self.tokens.clear();
        [&mut self.positions, &mut self.parents, &mut self.roots, &mut self.sequences]
            .into_iter()
            .for_each(Vec::clear);
    }

    /// Removes the tree of a sequence.
    pub fn forget(&mut self, sequence: usize) {
        self.trees.retain(|(other, _)| *other != sequence);
    }

    /// Returns a step over all rows.
    pub fn step(&self) -> StepView<'_> {
        StepView {
            rows: self.tokens.len(),
            tokens: &self.tokens,
            positions: &self.positions,
            parents: &self.parents,
            roots: &self.roots,
            sequences: &self.sequences,
            ..StepView::default()
        }
    }

    /// Returns the rows of a path in a sequence's tree; `None` unless it starts at the root and
    /// follows parents.
    pub fn path(&self, sequence: usize, path: &[u32]) -> Option<Vec<u32>> {
        let nodes = &self.trees.iter().find(|tree| tree.0 == sequence)?.1;
        let rows: Vec<u32> =
            path.iter().map(|node| nodes.get(*node as usize).copied()).collect::<Option<_>>()?;
        let parent_of = |row: u32| self.parents[row as usize];
        let linked = rows.windows(2).all(|w| parent_of(w[1]) == w[0]);
        (parent_of(*rows.first()?) == NO_PARENT && linked).then_some(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::super::TokenTree;
    use super::*;

    fn inputs<'a>(trees: &[(usize, &'a TokenTree, usize)]) -> Vec<Input<'a>> {
        trees.iter().map(|(s, tree, first)| Input::new(*s, tree, Rows::All).after(*first)).collect()
    }

    #[test]
    fn paths_are_rows_of_their_own_tree() {
        let mut fork = TokenTree::chain(&[7, 8]);
        fork.push(0, 9);
        let chain = TokenTree::chain(&[1, 2]);
        let mut scratch = Scratch::default();
        let take = |scratch: &mut Scratch, trees: &[(usize, &TokenTree, usize)]| {
            scratch.take(&inputs(trees), |sequence| 10 * sequence)
        };
        assert_eq!(take(&mut scratch, &[(2, &fork, 0), (0, &chain, 0)]).unwrap(), 0);
        assert_eq!(
            (&scratch.tokens[..], &scratch.positions[..]),
            (&[7, 8, 9, 1, 2][..], &[20, 21, 21, 0, 1][..])
        );
        assert_eq!(
            (scratch.step().parents, scratch.step().sequences),
            (&[NO_PARENT, 0, 0, NO_PARENT, 3][..], &[2, 2, 2, 0, 0][..])
        );
        assert_eq!(
            (scratch.path(2, &[0, 2]), scratch.path(0, &[0, 1])),
            (Some(vec![0, 2]), Some(vec![3, 4]))
        );
        for (sequence, path) in [
            (0, &[][..]),
            (0, &[1]),
            (0, &[0, 2]),
            (0, &[u32::MAX]),
            (2, &[0, 1, 2]),
            (2, &[0, 3]),
            (1, &[0]),
        ] {
            assert_eq!(scratch.path(sequence, path), None, "{sequence}, {path:?}");
        }

        // One tree grows, one stays, one is new: rows are appended after all others.
        let mut longer = fork.clone();
        longer.push(1, 4);
        let other = TokenTree::chain(&[5]);
        let more = [(1, &other, 0), (2, &longer, 3), (0, &chain, 2)];
        assert_eq!(take(&mut scratch, &more).unwrap(), 5);
        assert_eq!(scratch.step().parents[5..], [NO_PARENT, 1]);
        assert_eq!(
            (&scratch.step().roots[5..], &scratch.positions[5..]),
            (&[5, 0][..], &[10, 22][..])
        );
        assert_eq!(
            (&scratch.selected[..], scratch.path(2, &[0, 1, 3])),
            (&[5, 6][..], Some(vec![0, 1, 6]))
        );
        assert_eq!(scratch.path(0, &[0, 1]), Some(vec![3, 4]));
        // A pass removes trees that it does not name. A tree that it continues must exist.
        let longest = TokenTree::chain(&[5, 6]);
        assert_eq!(take(&mut scratch, &[(1, &longest, 1)]).unwrap(), 7);
        assert_eq!((scratch.path(2, &[0]), scratch.path(1, &[0, 1])), (None, Some(vec![5, 7])));
        for bad in [&[(2, &longer, 3)][..], &[(1, &fork, 2)], &[(1, &other, 0), (1, &other, 0)]] {
            assert!(take(&mut scratch.clone(), bad).is_err());
        }
        assert_eq!(take(&mut scratch, &[(2, &longer, 0)]).unwrap(), 0, "all new");
    }
}
