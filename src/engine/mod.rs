//! Floor 3: one model and its timelines. `forward` scores a tree without touching the cache,
//! `commit` makes a path history.

pub mod planned;
pub mod reduced;
pub mod reference;
mod rows;
pub mod timeline;
pub mod tree;

pub use planned::PlannedEngine;
pub use reduced::ReducedEngine;
pub use reference::ReferenceEngine;
pub use timeline::Timeline;
pub use tree::TokenTree;

use crate::sampler::Sampler;
use crate::tensor::Token;
use anyhow::{Result, bail};

/// Which rows of a forward pass need scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    None,
    Last,
    All,
}

/// Logits of the rows asked for.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    pub vocab: usize,
    /// f32 `[rows asked for, vocab]`
    pub logits: Vec<f32>,
    /// In place of logits, where [`Engine::want`] asked for it: the best tokens of each row asked
    /// for, best first.
    pub best: Vec<Vec<(Token, f32)>>,
}

impl Scores {
    /// The logits of the i-th row asked for.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.logits[i * self.vocab..][..self.vocab]
    }

    /// The token that `sampler` picks from the i-th row asked for, which stands at `position`.
    pub fn pick(
        &self,
        i: usize,
        sampler: &Sampler,
        position: usize,
        context: &[Token],
    ) -> Result<Token> {
        match self.best.get(i) {
            Some(best) => sampler.pick_best(position, best),
            None => sampler.pick(position, self.row(i), context),
        }
    }

    /// Takes the last `n` rows off.
    pub fn split_last(&mut self, n: usize) -> Scores {
        let at = self.rows() - n;
        let logits =
            if self.best.is_empty() { self.logits.split_off(at * self.vocab) } else { Vec::new() };
        let best = if self.best.is_empty() { Vec::new() } else { self.best.split_off(at) };
        Scores { vocab: self.vocab, logits, best }
    }

    pub fn rows(&self) -> usize {
        if !self.best.is_empty() {
            return self.best.len();
        }
        self.logits.len().checked_div(self.vocab).unwrap_or(0)
    }
}

/// Which token each column of an engine's scores is for, where that is not the token's own number.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// `[columns]`
    tokens: Vec<Token>,
    /// Column of each token, `u32::MAX` where it has none. `[tokens that the engine takes]`
    columns: Vec<u32>,
}

impl Columns {
    /// `tokens[i]` is the token of column i; the engine takes tokens below `vocab`.
    pub fn new(tokens: Vec<Token>, vocab: usize) -> Self {
        let mut columns = vec![u32::MAX; vocab];
        for (column, &token) in tokens.iter().enumerate() {
            if let Some(slot) = columns.get_mut(token as usize) {
                *slot = column as u32;
            }
        }
        Columns { tokens, columns }
    }

    pub fn token(&self, column: usize) -> Token {
        self.tokens[column]
    }

    /// `None`: the engine says nothing of this token.
    pub fn column(&self, token: Token) -> Option<usize> {
        self.columns.get(token as usize).filter(|c| **c != u32::MAX).map(|c| *c as usize)
    }
}

/// One model and the timeline of a text, or of several.
///
/// What a row computes depends on its own token path alone, bit for bit: never on the other rows,
/// the tree's shape, the thread count, or how the prompt was cut.
pub trait Engine: Send {
    /// Committed tokens.
    fn position(&self) -> usize;
    /// Most positions that fit.
    fn context(&self) -> usize;
    /// Most rows that one forward pass takes.
    fn max_rows(&self) -> usize;
    /// Tokens that it takes: all below this.
    fn vocab(&self) -> usize;
    /// Positions that a row sees directly, its own included; `None` where it sees all of them. What
    /// is older reaches it only through others.
    fn reach(&self) -> Option<usize> {
        None
    }
    /// Texts that it keeps apart, each with a cache and a position of its own.
    fn sequences(&self) -> usize {
        1
    }
    /// From now on all is about this sequence, unless it names others.
    fn select(&mut self, sequence: usize) {
        assert_eq!(sequence, 0, "there is one sequence");
    }
    /// Scores all nodes of a tree of each of these sequences in one pass, in their order, as each
    /// would be scored alone.
    fn forward_each(&mut self, _trees: &[(usize, &TokenTree)], _out: &mut Scores) -> Result<()> {
        bail!("there is one sequence")
    }
    /// [`commit`](Self::commit)s a path of each of these sequences.
    fn commit_each(&mut self, _paths: &[(usize, &[u32])]) -> Result<()> {
        bail!("there is one sequence")
    }
    /// Which token each column of its scores is for; `None` where column and token are one number.
    fn columns(&self) -> Option<&Columns> {
        None
    }
    /// Scores the tree, whose root stands at `position()`. Writes scratch keys and values only.
    fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()>;
    /// Scores the nodes `first_new..` of a tree whose earlier nodes the last pass evaluated, at the
    /// same root. `rows` counts new nodes only; `commit` and further calls see the whole tree.
    fn forward_more(
        &mut self,
        tree: &TokenTree,
        first_new: usize,
        rows: Rows,
        out: &mut Scores,
    ) -> Result<()>;
    /// Begins what [`forward`](Self::forward) does and returns while the device works; nothing else
    /// may be asked of the engine before [`finish`](Self::finish). `false` where the caller would
    /// have to wait for it: then nothing has begun.
    fn begin(&mut self, _tree: &TokenTree, _rows: Rows) -> Result<bool> {
        Ok(false)
    }
    /// Waits for the pass that was begun and gives its scores.
    fn finish(&mut self, _out: &mut Scores) -> Result<()> {
        bail!("no pass was begun")
    }
    /// Whether the pass that was begun still runs.
    fn is_busy(&self) -> bool {
        false
    }
    /// From now on the `n` best tokens of a row below `usable` will do, or with `None` all logits
    /// are wanted. An engine may give all logits anyway.
    fn want(&mut self, _best: Option<(usize, usize)>) {}
    /// From now on logits that the host can read where they are may stay there: then [`Scores`]
    /// come without, and [`lend`](Self::lend) has them.
    fn leave_logits(&mut self) {}
    /// Logits of the i-th row asked for, where they were left, until the next pass.
    fn lend(&self, _i: usize) -> Option<&[f32]> {
        None
    }
    /// Makes nodes of the last forward pass part of the cache; `path` holds node indices, root
    /// first, each the parent of the next.
    fn commit(&mut self, path: &[u32]) -> Result<()>;
    /// Takes back to `position` tokens. Refused when a sliding-window ring has lost what that
    /// needs; then reset to 0 and prefill.
    fn truncate(&mut self, position: usize) -> Result<()>;
    /// Final-norm hidden states of the rows scored last, f32 `[rows, dim]`.
    fn hidden(&mut self, out: &mut Vec<f32>) -> Result<()>;
    /// Bytes of weights, KV cache, and everything else.
    fn memory(&self) -> Memory;
    fn describe(&self) -> String;
    /// See [`crate::compute::Executor::read_bandwidth`].
    fn read_bandwidth(&mut self) -> Option<f64> {
        None
    }
    /// See [`crate::compute::Executor::upload_bandwidth`].
    fn upload_bandwidth(&mut self) -> Option<f64> {
        None
    }
    /// See [`crate::compute::Executor::loading`].
    fn loading(&self) -> Option<crate::compute::Loading> {
        None
    }
    /// See [`crate::compute::Executor::assist`].
    fn assist(&self) -> Option<crate::compute::AssistReport> {
        None
    }
    fn start_profile(&mut self) {}
    fn profile(&self) -> Vec<crate::compute::KernelTime> {
        Vec::new()
    }
}

/// Bytes by arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    pub weights: u64,
    pub kv: u64,
    pub activations: u64,
}
