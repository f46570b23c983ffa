//! The step buffer: all values that vary between passes, as u32 words at fixed offsets.
//!
//! `[rows, trees, n_selected, n_path, first, chain, n_best, usable]`, then seven arrays of
//! `max_rows` words: tokens, positions, parents, selected, path, roots, sequences. The page tables
//! of all sequences follow; they change only when a sequence gets another page.

use super::operand::RowSet;
use crate::tensor::{FIRST_PLACE, is_place};

/// Parent of the root.
pub const NO_PARENT: u32 = u32::MAX;

/// Number of header words, and of arrays after them.
const HEADER: usize = 8;
const ARRAYS: usize = 7;

/// Offsets of the parts of the step buffer, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLayout {
    pub max_rows: usize,
    /// Entries of all page tables
    pub tables: usize,
}

impl StepLayout {
    pub const fn words(self) -> usize {
        self.tables_at() + self.tables
    }

    /// Returns the offset of the page tables. All words before it are rewritten in each step.
    pub const fn tables_at(self) -> usize {
        HEADER + ARRAYS * self.max_rows
    }

    /// A typed view of the buffer's words.
    pub fn view(self, words: &[u32]) -> StepView<'_> {
        let part = |i: usize| &words[HEADER + i * self.max_rows..][..self.max_rows];
        let rows = words[0] as usize;
        StepView {
            rows,
            first: words[4] as usize,
            tokens: &part(0)[..rows],
            positions: &part(1)[..rows],
            parents: &part(2)[..rows],
            selected: &part(3)[..words[2] as usize],
            path: &part(4)[..words[3] as usize],
            roots: &part(5)[..rows],
            sequences: &part(6)[..rows],
            n_best: words[6],
            usable: words[7],
            tables: &words[self.tables_at()..][..self.tables],
        }
    }

    /// Writes a step into the buffer's words, except the page tables.
    pub fn fill(self, words: &mut [u32], step: &StepView<'_>) {
        words[0] = step.rows as u32;
        words[1] = step.trees() as u32;
        words[2] = step.selected.len() as u32;
        words[3] = step.path.len() as u32;
        words[4] = step.first as u32;
        words[5] = step.is_chain() as u32;
        words[6] = step.n_best;
        words[7] = step.usable;
        let parts = [
            step.tokens,
            step.positions,
            step.parents,
            step.selected,
            step.path,
            step.roots,
            step.sequences,
        ];
        for (i, part) in parts.into_iter().enumerate() {
            words[HEADER + i * self.max_rows..][..part.len()].copy_from_slice(part);
        }
    }
}

/// One step, as kernels read it.
///
/// Holds one draft tree of rows per sequence; the trees of several sequences follow each other.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepView<'a> {
    /// Rows of the trees; earlier passes may have evaluated some of them.
    pub rows: usize,
    /// First row that this pass evaluates: `first..rows` are live.
    pub first: usize,
    /// Token of each row. A live row of an image has [`FIRST_PLACE`] plus the index of the image's
    /// last row instead. From there to that last row, each row of the image is the parent of the
    /// next.
    pub tokens: &'a [u32],
    /// Position of each row: committed positions of its sequence plus its depth in the tree. A row
    /// one position before its root sees all committed positions and no row.
    pub positions: &'a [u32],
    /// Row of the parent, always smaller than the row; [`NO_PARENT`] for a root
    pub parents: &'a [u32],
    /// Rows with requested logits
    pub selected: &'a [u32],
    /// Rows to commit, each after its parent
    pub path: &'a [u32],
    /// Row of the tree's root. Rows of one tree are contiguous.
    pub roots: &'a [u32],
    /// Sequence of each row; selects its page table
    pub sequences: &'a [u32],
    /// Number of largest logits requested per row, if lists of them are read
    pub n_best: u32,
    /// Upper bound of token ids in these lists
    pub usable: u32,
    /// Page tables, see [`KvLayer::page`](super::KvLayer::page)
    pub tables: &'a [u32],
}

impl StepView<'_> {
    /// The rows that an operation on `set` works on.
    pub fn live(&self, set: RowSet) -> std::ops::Range<usize> {
        match set {
            RowSet::All => self.first..self.rows,
            RowSet::Selected => 0..self.selected.len(),
            RowSet::Slots(n) => self.first * n..self.rows * n,
        }
    }

    /// Returns whether each row's parent is the row before it, or the row is a root.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().enumerate().all(|(i, p)| *p == NO_PARENT || *p + 1 == i as u32)
    }

    /// Returns the last row of the image that a live row belongs to.
    #[inline(always)]
    pub fn image_end(&self, row: usize) -> Option<usize> {
        self.tokens[row].checked_sub(FIRST_PLACE).map(|end| end as usize)
    }

    /// Returns whether a live row belongs to an image.
    pub fn has_images(&self) -> bool {
        self.tokens[self.first..].iter().any(|token| is_place(*token))
    }

    /// Returns the number of trees.
    pub fn trees(&self) -> usize {
        self.parents.iter().filter(|p| **p == NO_PARENT).count()
    }

    /// Returns the rows from the root of the row's tree to the end of the tree.
    pub fn tree(&self, row: usize) -> std::ops::Range<usize> {
        let root = self.roots[row];
        let rest = &self.roots[row..];
        root as usize..row + rest.iter().position(|r| *r != root).unwrap_or(rest.len())
    }

    /// Returns the number of committed positions of the row's sequence.
    #[inline(always)]
    pub fn base(&self, row: usize) -> usize {
        self.positions[self.roots[row] as usize] as usize
    }

    /// Writes the rows from the root to `row`, both included, into `path` by depth. Returns their
    /// number; 0 for a row before its root.
    #[inline(always)]
    pub fn ancestors(&self, row: usize, path: &mut [u32]) -> usize {
        let n = self.positions[row] as usize + 1 - self.base(row);
        let mut node = row as u32;
        for depth in (0..n).rev() {
            path[depth] = node;
            node = self.parents[node as usize];
        }
        debug_assert!(n == 0 || node == NO_PARENT);
        n
    }
}

/// Returns the root row of each row with these parents.
pub fn roots(parents: &[u32]) -> Vec<u32> {
    let mut roots: Vec<u32> = Vec::with_capacity(parents.len());
    for (row, parent) in parents.iter().enumerate() {
        roots.push(if *parent == NO_PARENT { row as u32 } else { roots[*parent as usize] });
    }
    roots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_of_several_sequences_stand_side_by_side() {
        // 0 -> 1 -> 2 and 0 -> 3 at position 5 of sequence 2, then 4 -> 5 at position 9 of sequence
        // 0.
        let parents = [NO_PARENT, 0, 1, 0, NO_PARENT, 4];
        let (roots, positions) = (roots(&parents), [5, 6, 7, 6, 9, 10]);
        assert_eq!(roots, [0, 0, 0, 0, 4, 4]);
        let view = StepView {
            rows: 6,
            positions: &positions,
            parents: &parents,
            roots: &roots,
            sequences: &[2, 2, 2, 2, 0, 0],
            tokens: &[0; 6],
            path: &[0, 3, 4],
            ..StepView::default()
        };
        let layout = StepLayout { max_rows: 8, tables: 0 };
        let mut words = vec![0; layout.words()];
        layout.fill(&mut words, &view);
        let read = layout.view(&words);
        assert_eq!((read.base(2), read.base(5), read.trees(), read.is_chain()), (5, 9, 2, false));
        assert_eq!([0, 3, 4, 5].map(|row| read.tree(row)), [0..4, 0..4, 4..6, 4..6]);
        let mut path = [0; 8];
        assert_eq!((read.ancestors(2, &mut path), path[..3].to_vec()), (3, vec![0, 1, 2]));
        assert_eq!((read.ancestors(5, &mut path), path[..2].to_vec()), (2, vec![4, 5]));
        let chains = [NO_PARENT, 0, NO_PARENT, NO_PARENT, 3];
        assert!(StepView { rows: 5, parents: &chains, ..StepView::default() }.is_chain());
    }
}
