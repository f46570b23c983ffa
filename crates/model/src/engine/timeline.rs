//! Keeps an engine's cache in step with the history of each sequence, by common prefix.
//!
//! Callers pass histories only. They do not report which tokens were accepted or rejected. The
//! timeline compares a history with the engine's cache and with the tree that the last pass left in
//! scratch. It then commits, truncates or prefills the difference.

use crate::models::images;
use anyhow::Result;

use super::{
    Assistant, Engine, EngineExt, Input, Output, PageCopy, Prefix, Rows, Scores, TokenTree,
};
use gemma_base::kv::PAGE;
use gemma_base::tensor::Token;

pub struct Timeline {
    engine: Box<dyn Engine>,
    /// Tree of each sequence in scratch; empty if scratch holds nothing useful.
    scratch: Vec<TokenTree>,
    /// Whether a device works on a pass that was started.
    works: bool,
}

impl Timeline {
    /// Wraps an engine without history.
    pub fn new(engine: Box<dyn Engine>) -> Self {
        let scratch = vec![TokenTree::default(); engine.info().sequences];
        let is_empty = (0..scratch.len()).all(|sequence| engine.position(sequence) == 0);
        assert!(is_empty, "a timeline begins with empty caches");
        Timeline { engine, scratch, works: false }
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> usize {
        self.scratch.len()
    }

    /// Returns the number of leading tokens of `history` that the sequence's cache holds.
    pub fn common(&self, sequence: usize, history: &[Token]) -> usize {
        let cached = self.engine.cached(sequence).tokens;
        history.iter().zip(cached).take_while(|(a, b)| a == b).count()
    }

    /// Returns the engine's assistant, see [`Engine::assistant`].
    pub fn assistant(&mut self) -> Option<&mut dyn Assistant> {
        self.engine.assistant()
    }

    pub fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// Returns the number of committed tokens.
    pub fn position(&self, sequence: usize) -> usize {
        self.engine.position(sequence)
    }

    /// Returns the node in scratch at the end of `history`, if cache and scratch hold all of it.
    pub fn stands_at(&self, sequence: usize, history: &[Token]) -> Option<u32> {
        let newer = history.strip_prefix(self.engine.cached(sequence).tokens)?;
        let path = self.scratch[sequence].walk(newer);
        path.last().copied().filter(|_| path.len() == newer.len())
    }

    /// Makes the caches agree with these histories as far as possible without a pass.
    ///
    /// Commits the parts that scratch holds, all at once, and truncates tokens that differ.
    pub fn adopt(&mut self, histories: &[(usize, &[Token])]) -> Result<()> {
        let mut paths = Vec::with_capacity(histories.len());
        for &(sequence, history) in histories {
            let common = self.common(sequence, history);
            let scratch = &mut self.scratch[sequence];
            if common < self.engine.position(sequence) {
                scratch.clear();
                // A sliding window may have moved too far, or a prefix may share the page.
                let page = common / PAGE * PAGE;
                let engine = &mut self.engine;
                if engine.truncate(sequence, common).is_err()
                    && engine.truncate(sequence, page).is_err()
                {
                    engine.truncate(sequence, 0)?;
                }
            } else {
                let path = scratch.walk(&history[common..]);
                if !path.is_empty() {
                    paths.push((sequence, path));
                }
            }
        }
        if !paths.is_empty() {
            let each: Vec<(usize, &[u32])> =
                paths.iter().map(|(s, path)| (*s, &path[..])).collect();
            self.engine.commit(&each)?;
        }
        paths.iter().for_each(|(sequence, _)| self.scratch[*sequence].clear());
        Ok(())
    }

    /// Retains the beginning of a cached sequence, see [`Engine::retain`].
    pub fn retain(&mut self, sequence: usize, tokens: usize) -> Option<Prefix> {
        self.engine.retain(sequence, tokens)
    }

    /// Restarts a sequence with the beginning of a prefix, see [`Engine::resume`].
    pub fn resume(&mut self, sequence: usize, prefix: &Prefix, tokens: usize) -> Result<()> {
        self.scratch[sequence].clear();
        self.engine.resume(sequence, prefix, tokens)
    }

    /// Copies a page of a prefix, see [`Engine::copy_page`].
    pub fn copy_page(
        &mut self,
        prefix: &mut Prefix,
        layers: usize,
        nth: usize,
        copy: PageCopy<'_>,
    ) -> Result<bool> {
        self.engine.copy_page(prefix, layers, nth, copy)
    }

    /// Clears a sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.scratch[sequence].clear();
        self.engine.truncate(sequence, 0)
    }

    /// Makes the cache of a sequence hold exactly `history`, in passes of as many rows as the
    /// engine accepts.
    ///
    /// After each pass, `on_chunk` receives the number of cached tokens; if it returns false, the
    /// function stops. Returns whether all of `history` is cached.
    pub fn sync(
        &mut self,
        sequence: usize,
        history: &[Token],
        on_chunk: &mut dyn FnMut(usize) -> bool,
    ) -> Result<bool> {
        let mut unused = Scores::default();
        loop {
            self.adopt(&[(sequence, history)])?;
            let rest = &history[self.position(sequence)..];
            if rest.is_empty() {
                return Ok(true);
            }
            let chunk = TokenTree::chain(&rest[..self.fitting(rest, self.engine.info().max_rows)]);
            let input = Input::new(sequence, &chunk, Rows::None);
            self.run(&[input], Output::Logits, &mut unused)?;
            self.adopt(&[(sequence, history)])?;
            let cached = self.position(sequence);
            if !on_chunk(cached) {
                return Ok(cached == history.len());
            }
        }
    }

    /// Returns the number of leading tokens that fit in `rows`, at least one.
    ///
    /// An image that does not fit is left for the next pass. An image at the start is always
    /// included completely.
    pub fn fitting(&self, tokens: &[Token], rows: usize) -> usize {
        let (info, mut taken) = (self.engine.info(), 0);
        let fits = tokens.iter().take_while(|token| {
            taken += info.rows_of(**token);
            taken <= rows
        });
        let fitting = fits.count().max(1);
        if info.images.is_some() { images::whole(tokens, fitting) } else { fitting }
    }

    /// Starts scoring trees with roots that follow the cached tokens, see [`Engine::begin`].
    pub fn begin(&mut self, inputs: &[Input<'_>], output: Output) -> Result<bool> {
        self.works = false;
        for (sequence, scratch) in self.scratch.iter_mut().enumerate() {
            if !inputs.iter().any(|input| input.sequence == sequence && input.first > 0) {
                scratch.clear();
            }
        }
        let begun = self.engine.begin(inputs, output);
        for &Input { sequence, tree, first, .. } in inputs {
            let scratch = &mut self.scratch[sequence];
            match begun.is_ok() {
                true => {
                    debug_assert!(
                        scratch.len() == first && tree.tokens.starts_with(&scratch.tokens)
                    );
                    scratch.tokens.extend_from_slice(&tree.tokens[first..]);
                    scratch.parent.extend_from_slice(&tree.parent[first..]);
                }
                false => scratch.clear(),
            }
        }
        self.works = begun?;
        Ok(self.works)
    }

    /// Returns whether a device still works on the started pass.
    pub fn is_busy(&self) -> bool {
        self.works && self.engine.is_busy()
    }

    /// Waits for the started pass and returns its scores.
    pub fn finish(&mut self, out: &mut Scores) -> Result<()> {
        self.works = false;
        let finished = self.engine.finish(out);
        if finished.is_err() {
            self.scratch.iter_mut().for_each(TokenTree::clear);
        }
        finished
    }

    /// Runs a pass to its end.
    pub fn run(&mut self, inputs: &[Input<'_>], output: Output, out: &mut Scores) -> Result<()> {
        self.begin(inputs, output)?;
        self.finish(out)
    }
}
