//! One model and its sequences. A pass scores trees without changing the KV cache; `commit` appends
//! paths to it.

pub mod assistant;
mod pages;
pub mod planned;
pub mod reduced;
mod rows;
mod sight;
pub mod timeline;
pub mod tree;

pub use assistant::{Assistant, AssistantNode};
pub use planned::PlannedEngine;
pub use reduced::VocabAdapter;
pub use timeline::Timeline;
pub use tree::TokenTree;

use crate::models::Images;
use crate::sampler::Sampler;
use anyhow::Result;
use gemma_base::compute::{Report, Reports};
use gemma_base::kv::{PageList, Pages};
use gemma_base::tensor::{Token, is_place};
use std::sync::Arc;

/// Rows of a forward pass that need scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    None,
    Last,
    All,
}

/// Logits of the scored rows.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    pub vocab: usize,
    /// f32 `[scored rows without a list, vocab]`
    pub logits: Vec<f32>,
    /// List of the best tokens of each scored row, best first, if [`Output::Best`] was requested.
    /// Rows with [`Input::whole`] have none. Nor have rows with too many good tokens for a list, or
    /// with a logit that is not finite.
    pub best: Vec<Option<Vec<(Token, f32)>>>,
    /// Final-norm hidden states of the scored rows, if [`Output::Hidden`] was requested: f32
    /// `[scored rows, dim]`
    pub hidden: Vec<f32>,
}

impl Scores {
    /// Returns the logits of the i-th scored row, which has no list.
    pub fn row(&self, i: usize) -> &[f32] {
        assert!(self.list(i).is_none(), "row {i} has a list");
        let lists = self.best.iter().take(i).flatten().count();
        &self.logits[(i - lists) * self.vocab..][..self.vocab]
    }

    /// Returns the best tokens of the i-th scored row, if it has a list.
    pub fn list(&self, i: usize) -> Option<&[(Token, f32)]> {
        self.best.get(i)?.as_deref()
    }

    /// Returns the token that `sampler` picks from the i-th scored row, which has position
    /// `position`.
    pub fn pick(
        &self,
        i: usize,
        sampler: &Sampler,
        position: usize,
        context: &[Token],
    ) -> Result<Token> {
        match self.list(i) {
            Some(best) => sampler.pick_best(position, best),
            None => sampler.pick(position, self.row(i), context),
        }
    }

    pub fn rows(&self) -> usize {
        if !self.best.is_empty() {
            return self.best.len();
        }
        self.logits.len().checked_div(self.vocab).unwrap_or(0)
    }
}

/// Maps columns of an engine's scores to tokens, if a column is not the token's id.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// `[columns]`
    tokens: Vec<Token>,
    /// Column of each token, `u32::MAX` if it has none. `[tokens that the engine accepts]`
    columns: Vec<u32>,
}

impl Columns {
    /// Creates the map: column i belongs to `tokens[i]`. The engine accepts tokens below `vocab`.
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

    /// Returns the column of a token; `None` if the engine does not score it.
    pub fn column(&self, token: Token) -> Option<usize> {
        self.columns.get(token as usize).filter(|c| **c != u32::MAX).map(|c| *c as usize)
    }
}

/// Input of a pass for one sequence: the nodes of a tree from index `first`. Scratch still holds
/// the earlier nodes from the last pass.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub sequence: usize,
    pub tree: &'a TokenTree,
    pub first: usize,
    /// The evaluated nodes that need scores.
    pub rows: Rows,
    /// Whether they need all logits, even if lists of the best tokens are requested.
    pub whole: bool,
}

impl<'a> Input<'a> {
    /// Creates an input of a whole tree.
    pub fn new(sequence: usize, tree: &'a TokenTree, rows: Rows) -> Self {
        Input { sequence, tree, first: 0, rows, whole: false }
    }

    /// Leaves out the nodes before `first`, which are still in scratch.
    pub fn after(self, first: usize) -> Self {
        Input { first, ..self }
    }

    /// Requests all logits, even if lists of the best tokens are requested.
    pub fn with_logits(self, whole: bool) -> Self {
        Input { whole, ..self }
    }

    /// Returns the number of rows that need scores.
    pub fn scored(&self) -> usize {
        match self.rows {
            Rows::None => 0,
            Rows::Last => (self.tree.len() > self.first) as usize,
            Rows::All => self.tree.len() - self.first,
        }
    }
}

/// The requested form of the scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// All logits.
    #[default]
    Logits,
    /// All logits, and the hidden states that the head reads.
    Hidden,
    /// The `n` best tokens of a row below `usable`. An engine may return all logits instead.
    Best { n: usize, usable: usize },
    /// All logits, which may stay in the engine if the host can read them there. [`Scores`] then
    /// has none; read them with [`Engine::lend`].
    Lent,
}

/// Constant properties of an engine.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Number of sequences, each with its own cache and history.
    pub sequences: usize,
    /// Most rows in scratch, and therefore per pass, of all sequences together. A pass with an
    /// image may have more, see `image_rows`.
    pub max_rows: usize,
    /// Most rows in scratch if they include an image: at least `max_rows`.
    pub image_rows: usize,
    /// The images that texts may contain. `None` for an engine that accepts no images, or treats
    /// image placeholders as some token.
    pub images: Option<Arc<Images>>,
    /// Accepted tokens: all ids below this.
    pub vocab: usize,
    /// Positions that a row attends directly, including its own; `None` for all. Older positions
    /// affect it only through others.
    pub reach: Option<usize>,
    /// Maps columns of scores to tokens; `None` if column and token id are equal.
    pub columns: Option<Columns>,
    /// Most rows of a token without a column. Any other token has one row.
    pub most_rows: usize,
    /// Layers grouped by page count, global ones first; empty for an engine without pages.
    pub paged: Vec<PagedLayers>,
}

/// Layers of an engine that keep the same pages of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedLayers {
    pub pages: Pages,
    /// Bytes of one page over all of these layers
    pub page_bytes: usize,
}

impl EngineInfo {
    /// Returns the most rows of a token. An image placeholder has one.
    pub fn rows_of(&self, token: Token) -> usize {
        let is_row = self.columns.as_ref().is_none_or(|c| c.column(token).is_some());
        let is_row = is_row || is_place(token);
        if is_row { 1 } else { self.most_rows }
    }
}

/// The committed part of a sequence in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached<'a> {
    /// All committed tokens. Their number is the position of the next one, which is stored nowhere
    /// else.
    pub tokens: &'a [Token],
    /// Minimum number of tokens that still fit, if there are pages.
    pub room: usize,
    /// Pages that no sequence and no prefix owns. A sequence needs one per [`PAGE`] committed
    /// tokens. If no page is left, the caller must drop prefixes.
    ///
    /// [`PAGE`]: gemma_base::kv::PAGE
    pub free_pages: usize,
}

/// The beginning of a text, kept in the cache until this is dropped.
///
/// It survives the sequence that it was read in. All sequences that begin with it share its pages.
#[derive(Clone, Debug)]
pub struct Prefix {
    /// Whole pages
    tokens: Box<[Token]>,
    /// One list per page table of the engine; empty if the engine has no pages.
    pages: Vec<PageList>,
}

impl Prefix {
    /// Creates a prefix without pages, for an engine that keeps only tokens.
    pub fn of_tokens(tokens: &[Token]) -> Prefix {
        Prefix { tokens: tokens.into(), pages: Vec::new() }
    }

    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Turns it into the beginning of a longer prefix. The additional pages must then be copied in.
    pub fn extended_to(self, tokens: &[Token]) -> Prefix {
        debug_assert!(tokens.starts_with(&self.tokens));
        Prefix { tokens: tokens.into(), ..self }
    }

    /// Drops the pages of all layers after `layers`, see [`EngineInfo::paged`].
    pub fn forget_above(&mut self, layers: usize) {
        self.pages.iter_mut().skip(layers + 1).for_each(|list| *list = PageList::default());
    }
}

/// Direction in which a page is copied.
pub enum PageCopy<'a> {
    /// Appends the page's bytes to this vector.
    Out(&'a mut Vec<u8>),
    /// Fills a free page with these bytes.
    In(&'a [u8]),
}

/// One model with the KV caches of one or several sequences.
///
/// A row's result depends, bit for bit, only on its own token path and on the images in that path.
/// It does not depend on other rows, the tree's shape, the thread count, or how the prompt was cut.
/// All rows of an image are in one pass, each the parent of the next.
///
/// The trait has no default methods, so a wrapping engine handles each one explicitly.
/// [`EngineExt`] adds functions built on these methods.
pub trait Engine: Send {
    fn info(&self) -> &EngineInfo;
    fn cached(&self, sequence: usize) -> Cached<'_>;
    /// Starts a pass over nodes of one tree per sequence. Each sequence's result is as if it ran
    /// alone.
    ///
    /// Keys and values go to scratch, which afterwards holds only the trees of `inputs`. An input
    /// without new nodes keeps its tree there. If all trees are new, scratch is cleared first.
    ///
    /// Returns whether a device now works in the background, so that the caller has time for other
    /// work. Until [`finish`](Self::finish), only [`is_busy`](Self::is_busy) may be called.
    fn begin(&mut self, inputs: &[Input<'_>], output: Output) -> Result<bool>;
    /// Returns whether the device still works on the pass.
    fn is_busy(&self) -> bool;
    /// Waits for the pass and returns its scores, in the order of its inputs.
    fn finish(&mut self, out: &mut Scores) -> Result<()>;
    /// Returns the i-th scored row's logits in the engine's own memory, until the next pass.
    fn lend(&self, i: usize) -> Option<&[f32]>;
    /// Moves nodes from scratch to the KV cache.
    ///
    /// Each sequence has a path of nodes from the root, each the parent of the next. The rest of
    /// its tree is discarded. Trees of other sequences stay.
    fn commit(&mut self, paths: &[(usize, &[u32])]) -> Result<()>;
    /// Truncates a sequence to `position` tokens.
    ///
    /// Fails if a sliding window has dropped required positions, or in the middle of a page that a
    /// prefix shares. Position 0 always succeeds.
    fn truncate(&mut self, sequence: usize, position: usize) -> Result<()>;
    /// Retains the first `tokens` tokens of a sequence, with the windows that the next token needs.
    ///
    /// Returns `None` if they are not whole pages, if windows have moved too far, or if the engine
    /// cannot retain anything.
    fn retain(&mut self, sequence: usize, tokens: usize) -> Option<Prefix>;
    /// Replaces a sequence by the first `tokens` tokens of a prefix, without computation.
    ///
    /// `tokens` must be whole pages. Fails if the prefix lacks the windows that this needs. The
    /// whole prefix always succeeds.
    fn resume(&mut self, sequence: usize, prefix: &Prefix, tokens: usize) -> Result<()>;
    /// Copies the nth page of a prefix for some layers ([`EngineInfo::paged`]) out of the cache or
    /// into it.
    ///
    /// A page that is copied in extends the prefix, or replaces it if it does not follow the last
    /// page. Returns false if the prefix lacks the page, no page is free, or the bytes have the
    /// wrong size.
    fn copy_page(
        &mut self,
        prefix: &mut Prefix,
        layers: usize,
        nth: usize,
        copy: PageCopy<'_>,
    ) -> Result<bool>;
    fn report(&self) -> EngineReport;
    /// Returns the executor of its plans, for measurements; `None` if there is none.
    fn device(&mut self) -> Option<&mut dyn Reports>;
    /// Returns the draft model that reads the engine's caches; `None` if there is none.
    fn assistant(&mut self) -> Option<&mut dyn Assistant>;
}

/// Convenience functions of all engines.
pub trait EngineExt: Engine {
    /// Returns the number of committed tokens of a sequence.
    fn position(&self, sequence: usize) -> usize {
        self.cached(sequence).tokens.len()
    }

    /// Returns the most tokens that fit in a sequence.
    fn context(&self, sequence: usize) -> usize {
        let Cached { tokens, room, free_pages: _ } = self.cached(sequence);
        tokens.len() + room
    }

    /// Runs a pass to its end.
    fn run(&mut self, inputs: &[Input<'_>], output: Output, out: &mut Scores) -> Result<()> {
        self.begin(inputs, output)?;
        self.finish(out)
    }

    /// Runs a pass over a tree of the first sequence.
    fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()> {
        self.run(&[Input::new(0, tree, rows)], Output::Logits, out)
    }
}

impl<E: Engine + ?Sized> EngineExt for E {}

/// Report of an engine about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineReport {
    /// Description such as `cpu: avx512, 2 threads`.
    pub device: String,
    /// Bytes of weights, KV cache, and other buffers.
    pub memory: EngineMemory,
    /// Report of the executor; `None` if there is none.
    pub executor: Option<Report>,
}

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineMemory {
    pub weights: u64,
    pub kv: u64,
    pub activations: u64,
}
