//! The step buffer: everything that varies between passes, as u32 words at fixed places.
//!
//! `[rows, base, n_selected, n_path, first, chain, n_best, usable]`, then five arrays of `max_rows` words: tokens, positions, parents, selected, path.

use super::plan::RowSet;

/// Parent of the root.
pub const NO_PARENT: u32 = u32::MAX;

/// Words before the arrays.
const HEADER: usize = 8;

/// Places of the step buffer's parts, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLayout {
    pub max_rows: usize,
}

impl StepLayout {
    pub const fn words(self) -> usize {
        HEADER + 5 * self.max_rows
    }
    /// A typed view of the buffer's words.
    pub fn view(self, words: &[u32]) -> StepView<'_> {
        let part = |i: usize| &words[HEADER + i * self.max_rows..][..self.max_rows];
        let rows = words[0] as usize;
        StepView {
            rows,
            first: words[4] as usize,
            base: words[1] as usize,
            tokens: &part(0)[..rows],
            positions: &part(1)[..rows],
            parents: &part(2)[..rows],
            selected: &part(3)[..words[2] as usize],
            path: &part(4)[..words[3] as usize],
            n_best: words[6],
            usable: words[7],
        }
    }

    /// Writes a step into the buffer's words.
    pub fn fill(self, words: &mut [u32], step: &StepView<'_>) {
        words[0] = step.rows as u32;
        words[1] = step.base as u32;
        words[2] = step.selected.len() as u32;
        words[3] = step.path.len() as u32;
        words[4] = step.first as u32;
        words[5] = step.is_chain() as u32;
        words[6] = step.n_best;
        words[7] = step.usable;
        for (i, part) in [step.tokens, step.positions, step.parents, step.selected, step.path].into_iter().enumerate() {
            words[HEADER + i * self.max_rows..][..part.len()].copy_from_slice(part);
        }
    }
}

/// One step, as kernels read it.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepView<'a> {
    /// Rows of the tree; earlier passes may have evaluated some of them.
    pub rows: usize,
    /// First row that this pass evaluates: `first..rows` are live.
    pub first: usize,
    /// Committed positions; the root stands at this position.
    pub base: usize,
    pub tokens: &'a [u32],
    /// base + depth in the tree
    pub positions: &'a [u32],
    /// Row of the parent, always smaller than the row; [`NO_PARENT`] for the root
    pub parents: &'a [u32],
    /// Rows whose logits are wanted
    pub selected: &'a [u32],
    /// Rows to commit, root first
    pub path: &'a [u32],
    /// How many of a row's largest logits are wanted, where lists of them are
    pub n_best: u32,
    /// Tokens that such a list may name
    pub usable: u32,
}

impl StepView<'_> {
    /// The rows that an operation on `set` works on.
    pub fn live(&self, set: RowSet) -> std::ops::Range<usize> {
        match set {
            RowSet::All => self.first..self.rows,
            RowSet::Selected => 0..self.selected.len(),
        }
    }

    /// Whether each row's parent is the row before it.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().enumerate().all(|(i, p)| *p == (i as u32).wrapping_sub(1))
    }

    /// Rows on the way from the root to `row`, both included, into `path` by depth; returns how many.
    #[inline(always)]
    pub fn ancestors(&self, row: usize, path: &mut [u32]) -> usize {
        let n = self.positions[row] as usize - self.base + 1;
        let mut node = row as u32;
        for depth in (0..n).rev() {
            path[depth] = node;
            node = self.parents[node as usize];
        }
        debug_assert_eq!(node, NO_PARENT);
        n
    }
}
