//! An engine and the tokens its cache holds, kept in step with a history by common prefix. An
//! engine of several sequences has a history of each.
//!
//! History is the only truth. Nobody tells a cache what was accepted or rejected:
//! [`Timeline::sync`] compares the history with what is cached and with the tree that the last pass
//! left in scratch, and commits, takes back or prefills what differs.

use anyhow::{Context, Result};

use super::{Engine, Rows, Scores, TokenTree};
use crate::tensor::Token;

pub struct Timeline {
    engine: Box<dyn Engine>,
    /// Those of the engine.
    sequences: Vec<Sequence>,
    /// The sequence that is selected.
    current: usize,
    /// A pass between `begin` and `finish`: which rows are wanted, and whether the engine is at it
    /// already.
    begun: Option<(Rows, bool)>,
}

/// What there is of a text.
#[derive(Clone, Debug, Default)]
struct Sequence {
    /// `[engine.position()]`
    cached: Vec<Token>,
    /// What the last forward pass has seen; empty when scratch holds nothing of use.
    scratch: TokenTree,
}

impl Timeline {
    /// Takes an engine that has no history yet.
    pub fn new(engine: Box<dyn Engine>) -> Self {
        assert_eq!(engine.position(), 0, "a timeline begins with an empty cache");
        let sequences = vec![Sequence::default(); engine.sequences()];
        Timeline { engine, sequences, current: 0, begun: None }
    }

    /// Texts that it keeps apart.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// From now on all is about this text, unless it names others.
    pub fn select(&mut self, sequence: usize) {
        self.engine.select(sequence);
        self.current = sequence;
    }

    /// Tokens at the beginning of `history` that this text's cache holds.
    pub fn common(&self, sequence: usize, history: &[Token]) -> usize {
        history.iter().zip(&self.sequences[sequence].cached).take_while(|(a, b)| a == b).count()
    }

    /// Nothing in scratch is of use any more.
    fn spend(&mut self) {
        self.sequences.iter_mut().for_each(|s| s.scratch.clear());
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
        self.sequences[self.current].cached.len()
    }

    /// The node of the last pass that stands for the end of `history`, if cache and scratch hold
    /// all of it.
    pub fn stands_at(&self, history: &[Token]) -> Option<u32> {
        let Sequence { cached, scratch } = &self.sequences[self.current];
        let newer = history.strip_prefix(&cached[..])?;
        let path = scratch.walk(newer);
        path.last().copied().filter(|_| path.len() == newer.len())
    }

    /// Makes the cache agree with `history` as far as costs no pass: commits what scratch holds of
    /// it, takes back what is not in it. Returns how many tokens of it are cached.
    pub fn adopt(&mut self, history: &[Token]) -> Result<usize> {
        let here = self.current;
        let common = self.common(here, history);
        if common < self.sequences[here].cached.len() {
            self.spend();
            // A sliding-window ring may have lost what going back needs.
            let kept = if self.engine.truncate(common).is_ok() { common } else { 0 };
            if kept < common {
                self.engine.truncate(0)?;
            }
            self.sequences[here].cached.truncate(kept);
        } else {
            self.adopt_each(&[(here, history)])?;
        }
        debug_assert_eq!(self.engine.position(), self.position());
        Ok(self.position())
    }

    /// Commits what scratch holds of these texts, all at once. Of a text that the cache has
    /// something else of, nothing.
    pub fn adopt_each(&mut self, histories: &[(usize, &[Token])]) -> Result<()> {
        let mut paths = Vec::new();
        for &(sequence, history) in histories {
            let Sequence { cached, scratch } = &self.sequences[sequence];
            let path =
                history.strip_prefix(&cached[..]).map_or(Vec::new(), |newer| scratch.walk(newer));
            if !path.is_empty() {
                paths.push((sequence, path));
            }
        }
        match &paths[..] {
            [] => return Ok(()),
            [(sequence, path)] if *sequence == self.current => self.engine.commit(path)?,
            paths => self
                .engine
                .commit_each(&paths.iter().map(|(s, path)| (*s, &path[..])).collect::<Vec<_>>())?,
        }
        for (sequence, path) in paths {
            let Sequence { cached, scratch } = &mut self.sequences[sequence];
            cached.extend(path.iter().map(|node| scratch.tokens[*node as usize]));
        }
        self.spend();
        Ok(())
    }

    /// Forgets all of the selected sequence's text.
    pub fn clear(&mut self) -> Result<()> {
        self.spend();
        self.engine.truncate(0)?;
        self.sequences[self.current].cached.clear();
        Ok(())
    }

    /// Makes the cache hold exactly `history`, in passes of as many rows as the engine takes.
    /// `on_chunk` hears how many tokens are cached after each pass and may say no to the next one.
    /// Returns whether all of `history` is cached.
    pub fn sync(
        &mut self,
        history: &[Token],
        on_chunk: &mut dyn FnMut(usize) -> bool,
    ) -> Result<bool> {
        self.sync_beside(history, on_chunk, &mut |_| Ok(()))
    }

    /// The same. While a device works by itself, `beside` may do something else, for as long as
    /// what it is given says that it does.
    pub fn sync_beside(
        &mut self,
        history: &[Token],
        on_chunk: &mut dyn FnMut(usize) -> bool,
        beside: &mut dyn FnMut(&mut dyn FnMut() -> bool) -> Result<()>,
    ) -> Result<bool> {
        let mut unused = Scores::default();
        while self.adopt(history)? < history.len() {
            let rest = &history[self.position()..];
            let chunk = &rest[..rest.len().min(self.engine.max_rows())];
            if self.begin(&TokenTree::chain(chunk), Rows::None)? {
                beside(&mut || self.is_busy())?;
            }
            self.finish(&mut unused)?;
            let cached = self.adopt(history)?;
            if !on_chunk(cached) {
                return Ok(cached == history.len());
            }
        }
        Ok(true)
    }

    /// Scores a tree whose root follows the cached tokens.
    pub fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()> {
        self.spend();
        self.engine.forward(tree, rows, out)?;
        self.sequences[self.current].scratch.clone_from(tree);
        Ok(())
    }

    /// Scores a tree of each of these texts in one pass: a row for each node, in their order.
    pub fn forward_each(&mut self, trees: &[(usize, &TokenTree)], out: &mut Scores) -> Result<()> {
        self.spend();
        self.engine.forward_each(trees, out)?;
        trees
            .iter()
            .for_each(|(sequence, tree)| self.sequences[*sequence].scratch.clone_from(tree));
        Ok(())
    }

    /// Begins [`forward`](Self::forward). Returns whether the device works by itself now, with time
    /// to do something else; where it cannot, [`finish`](Self::finish) does it all.
    pub fn begin(&mut self, tree: &TokenTree, rows: Rows) -> Result<bool> {
        self.spend();
        self.begun = None;
        let beside = self.engine.begin(tree, rows)?;
        self.sequences[self.current].scratch.clone_from(tree);
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
        let tree = std::mem::take(&mut self.sequences[self.current].scratch);
        if beside {
            self.engine.finish(out)?
        } else {
            self.engine.forward(&tree, rows, out)?
        };
        self.sequences[self.current].scratch = tree;
        Ok(())
    }

    /// Scores the nodes from `first_new` on of a tree that continues the one scored last.
    pub fn forward_more(
        &mut self,
        tree: &TokenTree,
        first_new: usize,
        rows: Rows,
        out: &mut Scores,
    ) -> Result<()> {
        let scratch = &self.sequences[self.current].scratch;
        debug_assert!(
            scratch.tokens == tree.tokens[..first_new]
                && scratch.parent == tree.parent[..first_new]
        );
        self.spend();
        self.engine.forward_more(tree, first_new, rows, out)?;
        self.sequences[self.current].scratch.clone_from(tree);
        Ok(())
    }
}
