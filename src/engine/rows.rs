//! Trees of several sequences as the rows of one pass.

use super::TokenTree;
use crate::compute::step::{NO_PARENT, StepView, roots};
use crate::tensor::Token;

/// Trees of several sequences as rows of one pass, one tree after the other.
#[derive(Clone, Debug, Default)]
pub struct Trees {
    /// Each sequence and its first row, in the order of the rows.
    of: Vec<(usize, usize)>,
    pub tokens: Vec<Token>,
    /// Of the sequence, and the depth in its tree
    pub positions: Vec<u32>,
    parents: Vec<u32>,
    roots: Vec<u32>,
    sequences: Vec<u32>,
}

impl Trees {
    /// `position_of` gives each sequence's committed tokens.
    pub fn new(trees: &[(usize, &TokenTree)], position_of: impl Fn(usize) -> usize) -> Trees {
        let mut all = Trees::default();
        for &(sequence, tree) in trees {
            let first = all.tokens.len();
            all.of.push((sequence, first));
            all.tokens.extend(&tree.tokens);
            all.positions.extend(tree.depths().iter().map(|d| position_of(sequence) as u32 + d));
            all.parents
                .extend(tree.parent.iter().map(|p| p.map_or(NO_PARENT, |p| first as u32 + p)));
            all.sequences.resize(all.tokens.len(), sequence as u32);
        }
        all.roots = roots(&all.parents);
        all
    }

    /// Whether this pass begins with all rows of that one.
    pub fn continues(&self, before: &Trees) -> bool {
        let same =
            self.tokens.starts_with(&before.tokens) && self.parents.starts_with(&before.parents);
        same && self.of == before.of && self.positions.starts_with(&before.positions)
    }

    /// A step over all rows.
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

    /// The rows of a path of nodes of a sequence's tree; `None` unless it leads down from the root.
    pub fn rows(&self, sequence: usize, path: &[u32]) -> Option<Vec<u32>> {
        let first = self.of.iter().find(|of| of.0 == sequence)?.1 as u32;
        let rows: Vec<u32> =
            path.iter().map(|node| first.checked_add(*node)).collect::<Option<_>>()?;
        let parent_of = |row: u32| self.parents.get(row as usize).copied();
        let linked = rows.windows(2).all(|w| parent_of(w[1]) == Some(w[0]));
        (rows.first() == Some(&first) && parent_of(first) == Some(NO_PARENT) && linked)
            .then_some(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_rows_of_their_own_tree() {
        let mut fork = TokenTree::chain(&[7, 8]);
        fork.push(0, 9);
        let chain = TokenTree::chain(&[1, 2]);
        let trees = Trees::new(&[(2, &fork), (0, &chain)], |sequence| 10 * sequence);
        assert_eq!(
            (&trees.tokens[..], &trees.positions[..]),
            (&[7, 8, 9, 1, 2][..], &[20, 21, 21, 0, 1][..])
        );
        assert_eq!(
            (trees.step().parents, trees.step().sequences),
            (&[NO_PARENT, 0, 0, NO_PARENT, 3][..], &[2, 2, 2, 0, 0][..])
        );
        assert_eq!(
            (trees.rows(2, &[0, 2]), trees.rows(0, &[0, 1])),
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
            assert_eq!(trees.rows(sequence, path), None, "{sequence}, {path:?}");
        }
        let mut longer = fork.clone();
        longer.push(1, 4);
        let of = |tree| Trees::new(&[(2, tree)], |_| 20);
        assert!(
            of(&longer).continues(&of(&fork))
                && !of(&fork).continues(&of(&longer))
                && !trees.continues(&of(&fork))
        );
    }
}
