//! One model and its timelines. A pass scores trees without touching the caches, `commit`
//! makes paths history.

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
    /// The best tokens of each row asked for, best first, where [`Output::Best`] asked for them in
    /// place of logits
    pub best: Vec<Vec<(Token, f32)>>,
    /// Final-norm hidden states of the same rows, where [`Output::Hidden`] asked for them: f32
    /// `[rows asked for, dim]`
    pub hidden: Vec<f32>,
}

impl Scores {
    /// Returns the logits of the i-th row asked for.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.logits[i * self.vocab..][..self.vocab]
    }

    /// Returns the token that `sampler` picks from the i-th row asked for, which stands at
    /// `position`.
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

    pub fn rows(&self) -> usize {
        if !self.best.is_empty() {
            return self.best.len();
        }
        self.logits.len().checked_div(self.vocab).unwrap_or(0)
    }
}

/// Tokens of the columns of an engine's scores, where a column is not the token's own number.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// `[columns]`
    tokens: Vec<Token>,
    /// Column of each token, `u32::MAX` where it has none. `[tokens that the engine takes]`
    columns: Vec<u32>,
}

impl Columns {
    /// Makes columns of which column i is for `tokens[i]`. The engine takes tokens below `vocab`.
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

    /// Returns the column of a token; `None` where the engine gives it no score.
    pub fn column(&self, token: Token) -> Option<usize> {
        self.columns.get(token as usize).filter(|c| **c != u32::MAX).map(|c| *c as usize)
    }
}

/// Input of a pass for one sequence: the nodes of a tree from `first` on. Scratch holds the nodes
/// before it since the last pass.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub sequence: usize,
    pub tree: &'a TokenTree,
    pub first: usize,
    /// The nodes evaluated that get scores.
    pub rows: Rows,
}

impl<'a> Input<'a> {
    /// Makes an input of a whole tree.
    pub fn new(sequence: usize, tree: &'a TokenTree, rows: Rows) -> Self {
        Input { sequence, tree, first: 0, rows }
    }

    /// Leaves out the nodes before `first`, which are in scratch.
    pub fn after(self, first: usize) -> Self {
        Input { first, ..self }
    }

    /// Returns the number of rows whose scores it asks for.
    pub fn scored(&self) -> usize {
        match self.rows {
            Rows::None => 0,
            Rows::Last => (self.tree.len() > self.first) as usize,
            Rows::All => self.tree.len() - self.first,
        }
    }
}

/// The form in which scores are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// All logits.
    #[default]
    Logits,
    /// The same, and the hidden states that the head reads.
    Hidden,
    /// The `n` best tokens of a row below `usable`. An engine may give all logits instead.
    Best { n: usize, usable: usize },
    /// All logits, which may stay where they are if the host can read them there. [`Scores`] then
    /// come without them, and [`Engine::lend`] has them.
    Lent,
}

/// Properties of an engine, for as long as it lives.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Texts that it keeps apart, each with a cache and a history of its own.
    pub sequences: usize,
    /// Most rows that scratch holds, and so a pass takes, of all sequences together. A pass with an
    /// image may have more, see `image_rows`.
    pub max_rows: usize,
    /// Most rows that scratch holds where the rows of an image are among them: at least `max_rows`.
    pub image_rows: usize,
    /// The images that texts may name. `None` for an engine that takes no images, or reads each
    /// place of one as some token.
    pub images: Option<Arc<Images>>,
    /// Tokens that it takes: all below this.
    pub vocab: usize,
    /// Positions that a row sees directly, its own included; `None` where it sees all of them.
    /// Older positions reach it only through others.
    pub reach: Option<usize>,
    /// Tokens of the columns of its scores; `None` where column and token are one number.
    pub columns: Option<Columns>,
    /// Rows that a token without a column of its own takes, at most. Any other takes one.
    pub most_rows: usize,
    /// Its layers by the pages that they keep, global ones first; empty for an engine without
    /// pages.
    pub paged: Vec<PagedLayers>,
}

/// The layers of an engine that keep the same pages of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedLayers {
    pub pages: Pages,
    /// Bytes of one page in all of these layers
    pub page_bytes: usize,
}

impl EngineInfo {
    /// Returns the most rows that a token takes. A place of an image takes one.
    pub fn rows_of(&self, token: Token) -> usize {
        let is_row = self.columns.as_ref().is_none_or(|c| c.column(token).is_some());
        let is_row = is_row || is_place(token);
        if is_row { 1 } else { self.most_rows }
    }
}

/// The part of a sequence that the caches hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached<'a> {
    /// All tokens committed. Their number is the position of the next one, which is kept nowhere
    /// else.
    pub tokens: &'a [Token],
    /// Tokens that fit behind them, at least, as long as there are pages.
    pub room: usize,
    /// Pages that no sequence and no prefix holds. A sequence may take one for each [`PAGE`] tokens
    /// committed. Where no page is left, prefixes have to be dropped.
    ///
    /// [`PAGE`]: gemma_base::kv::PAGE
    pub free_pages: usize,
}

/// The beginning of a text. Its keys and values stay in the caches until this is dropped, also
/// after the sequence that it was read in has gone. All sequences that begin with it share its
/// pages.
#[derive(Clone, Debug)]
pub struct Prefix {
    /// Whole pages
    tokens: Box<[Token]>,
    /// One list for each of the engine's page tables; empty where an engine has no pages.
    pages: Vec<PageList>,
}

impl Prefix {
    /// Makes a prefix without pages, for an engine that keeps tokens alone.
    pub fn of_tokens(tokens: &[Token]) -> Prefix {
        Prefix { tokens: tokens.into(), pages: Vec::new() }
    }

    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Makes it the beginning of a longer prefix, whose other pages are still to be copied in.
    pub fn extended_to(self, tokens: &[Token]) -> Prefix {
        debug_assert!(tokens.starts_with(&self.tokens));
        Prefix { tokens: tokens.into(), ..self }
    }

    /// Lets go of the pages of all layers behind some, see [`EngineInfo::paged`].
    pub fn forget_above(&mut self, layers: usize) {
        self.pages.iter_mut().skip(layers + 1).for_each(|list| *list = PageList::default());
    }
}

/// Direction in which a page is copied.
pub enum PageCopy<'a> {
    /// Appends the bytes of the caches to these.
    Out(&'a mut Vec<u8>),
    /// Fills a free page with these bytes.
    In(&'a [u8]),
}

/// One model and the caches of a text, or of several: its sequences.
///
/// A row's result depends on its own token path and on the images that the path names, bit for bit:
/// never on the other rows, the tree's shape, the thread count, or how the prompt was cut. All rows
/// of an image are in one pass, each the parent of the next.
///
/// No method has a body here: an engine around another one forwards each of them or says what it
/// does not do. [`EngineExt`] has the functions that follow from them.
pub trait Engine: Send {
    fn info(&self) -> &EngineInfo;
    fn cached(&self, sequence: usize) -> Cached<'_>;
    /// Begins a pass over nodes of a tree of each of these sequences, each evaluated as it would be
    /// alone. Keys and values go to scratch, which holds the trees named here and no others from
    /// then on; an input without new nodes keeps its tree there. Where all trees are new, scratch
    /// is empty before.
    ///
    /// Returns whether a device works by itself now, with time for the caller to do something else;
    /// nothing but [`is_busy`](Self::is_busy) may be asked before [`finish`](Self::finish).
    fn begin(&mut self, inputs: &[Input<'_>], output: Output) -> Result<bool>;
    /// Returns whether the device that was left at work still is.
    fn is_busy(&self) -> bool;
    /// Waits for the pass that was begun and gives its scores, in the order of its inputs.
    fn finish(&mut self, out: &mut Scores) -> Result<()>;
    /// Returns the logits of the i-th row asked for where they were left, until the next pass.
    fn lend(&self, i: usize) -> Option<&[f32]>;
    /// Makes nodes in scratch part of the caches. Each of these sequences gives a path of nodes,
    /// root first, each the parent of the next. The rest of its tree is forgotten; trees of other
    /// sequences stay.
    fn commit(&mut self, paths: &[(usize, &[u32])]) -> Result<()>;
    /// Takes a sequence back to `position` tokens. Fails when a sliding window has lost positions
    /// that this needs, or in the middle of a page that a prefix holds. Position 0 always succeeds.
    fn truncate(&mut self, sequence: usize, position: usize) -> Result<()>;
    /// Keeps the first `tokens` tokens of a sequence, which are whole pages, and the windows that
    /// the next token needs. Returns `None` where they do not end with a page, where windows have
    /// moved on too far, or where an engine cannot keep anything.
    fn retain(&mut self, sequence: usize, tokens: usize) -> Option<Prefix>;
    /// Replaces a sequence by the first `tokens` tokens of a prefix, which are whole pages, without
    /// computing anything. Fails where the prefix has not kept the windows that this needs. All of
    /// its tokens always succeed.
    fn resume(&mut self, sequence: usize, prefix: &Prefix, tokens: usize) -> Result<()>;
    /// Copies the nth page of a prefix in some layers ([`EngineInfo::paged`]) out of the caches, or
    /// into them. A page that is copied in extends the prefix; one that does not follow the last
    /// page replaces all. Returns false where the prefix does not hold the page, no page is free,
    /// or the bytes are not those of a page.
    fn copy_page(
        &mut self,
        prefix: &mut Prefix,
        layers: usize,
        nth: usize,
        copy: PageCopy<'_>,
    ) -> Result<bool>;
    fn report(&self) -> EngineReport;
    /// Returns the executor of its plans, to be measured; `None` where there is none.
    fn device(&mut self) -> Option<&mut dyn Reports>;
    /// Returns the draft model that reads the engine's caches; `None` where there is none.
    fn assistant(&mut self) -> Option<&mut dyn Assistant>;
}

/// Functions of all engines.
pub trait EngineExt: Engine {
    /// Returns the number of committed tokens of a sequence.
    fn position(&self, sequence: usize) -> usize {
        self.cached(sequence).tokens.len()
    }

    /// Returns the most tokens of a sequence that fit.
    fn context(&self, sequence: usize) -> usize {
        let Cached { tokens, room, free_pages: _ } = self.cached(sequence);
        tokens.len() + room
    }

    /// Runs a whole pass.
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

/// Report of an engine about itself. No pass depends on it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineReport {
    /// Such as `cpu: avx512, 2 threads`.
    pub device: String,
    /// Bytes of weights, KV cache, and everything else.
    pub memory: EngineMemory,
    /// Report of the executor; `None` where there is none.
    pub executor: Option<Report>,
}

/// Bytes by arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineMemory {
    pub weights: u64,
    pub kv: u64,
    pub activations: u64,
}
