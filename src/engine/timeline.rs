//! An engine and the tokens its cache holds, kept in step with a history by common prefix.
//!
//! History is the only truth. Nobody tells a cache what was accepted or rejected: [`Timeline::sync`] compares the history with
//! what is cached and with the tree that the last pass left in scratch, and commits, takes back or prefills what differs.

use anyhow::{Context, Result};

use super::{Engine, Rows, Scores, TokenTree};
use crate::tensor::Token;

pub struct Timeline {
    engine: Box<dyn Engine>,
    /// `[engine.position()]`
    cached: Vec<Token>,
    /// What the last forward pass has seen; empty when scratch holds nothing of use.
    scratch: TokenTree,
    /// A pass between `begin` and `finish`: which rows are wanted, and whether the engine is at it already.
    begun: Option<(Rows, bool)>,
}

impl Timeline {
    /// Takes an engine that has no history yet.
    pub fn new(engine: Box<dyn Engine>) -> Self {
        assert_eq!(engine.position(), 0, "a timeline begins with an empty cache");
        Timeline { engine, cached: Vec::new(), scratch: TokenTree::default(), begun: None }
    }

    pub fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// The engine, for whatever leaves its position and scratch alone, such as profiling.
    pub fn engine_mut(&mut self) -> &mut dyn Engine {
        &mut *self.engine
    }

    /// Tokens committed.
    pub fn position(&self) -> usize {
        self.cached.len()
    }

    /// The node of the last pass that stands for the end of `history`, if cache and scratch hold all of it.
    pub fn stands_at(&self, history: &[Token]) -> Option<u32> {
        let newer = history.strip_prefix(&self.cached[..])?;
        let path = self.scratch.walk(newer);
        path.last().copied().filter(|_| path.len() == newer.len())
    }

    /// Makes the cache agree with `history` as far as costs no pass: commits what scratch holds of it, takes back what is not
    /// in it. Returns how many tokens of it are cached.
    pub fn adopt(&mut self, history: &[Token]) -> Result<usize> {
        if !history.starts_with(&self.cached) {
            let common = history.iter().zip(&self.cached).take_while(|(a, b)| a == b).count();
            self.scratch.clear();
            // A sliding-window ring may have lost what going back needs.
            if self.engine.truncate(common).is_ok() {
                self.cached.truncate(common);
            } else {
                self.engine.truncate(0)?;
                self.cached.clear();
            }
        } else {
            let path = self.scratch.walk(&history[self.cached.len()..]);
            if !path.is_empty() {
                self.engine.commit(&path)?;
                self.cached.extend_from_slice(&history[self.cached.len()..][..path.len()]);
                self.scratch.clear();
            }
        }
        debug_assert_eq!(self.engine.position(), self.cached.len());
        Ok(self.cached.len())
    }

    /// Forgets everything.
    pub fn clear(&mut self) -> Result<()> {
        self.engine.truncate(0)?;
        self.cached.clear();
        self.scratch.clear();
        Ok(())
    }

    /// Makes the cache hold exactly `history`, in passes of as many rows as the engine takes. `on_chunk` hears how many tokens
    /// are cached after each pass and may say no to the next one. Returns whether all of `history` is cached.
    pub fn sync(&mut self, history: &[Token], on_chunk: &mut dyn FnMut(usize) -> bool) -> Result<bool> {
        let mut unused = Scores::default();
        while self.adopt(history)? < history.len() {
            let rest = &history[self.cached.len()..];
            let chunk = &rest[..rest.len().min(self.engine.max_rows())];
            self.forward(&TokenTree::chain(chunk), Rows::None, &mut unused)?;
            let cached = self.adopt(history)?;
            if !on_chunk(cached) {
                return Ok(cached == history.len());
            }
        }
        Ok(true)
    }

    /// Scores a tree whose root follows the cached tokens.
    pub fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()> {
        self.scratch.clear();
        self.engine.forward(tree, rows, out)?;
        self.scratch.clone_from(tree);
        Ok(())
    }

    /// Begins [`forward`](Self::forward). Returns whether the device works by itself now, with time to do something else;
    /// where it cannot, [`finish`](Self::finish) does it all.
    pub fn begin(&mut self, tree: &TokenTree, rows: Rows) -> Result<bool> {
        self.scratch.clear();
        self.begun = None;
        let beside = self.engine.begin(tree, rows)?;
        self.scratch.clone_from(tree);
        self.begun = Some((rows, beside));
        Ok(beside)
    }

    /// Whether the pass that was begun still runs.
    pub fn is_busy(&self) -> bool {
        self.begun.is_some_and(|(_, beside)| beside) && self.engine.is_busy()
    }

    /// Scores of the pass that was begun.
    pub fn finish(&mut self, out: &mut Scores) -> Result<()> {
        let (rows, beside) = self.begun.take().context("no pass was begun")?;
        let tree = std::mem::take(&mut self.scratch);
        if beside {
            self.engine.finish(out)?
        } else {
            self.engine.forward(&tree, rows, out)?
        };
        self.scratch = tree;
        Ok(())
    }

    /// Scores the nodes from `first_new` on of a tree that continues the one scored last.
    pub fn forward_more(&mut self, tree: &TokenTree, first_new: usize, rows: Rows, out: &mut Scores) -> Result<()> {
        debug_assert!(self.scratch.tokens == tree.tokens[..first_new] && self.scratch.parent == tree.parent[..first_new]);
        self.scratch.clear();
        self.engine.forward_more(tree, first_new, rows, out)?;
        self.scratch.clone_from(tree);
        Ok(())
    }
}
