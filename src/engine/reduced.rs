//! A draft model of few rows in front of a target of many tokens: takes the target's tokens, and
//! says which token each of its logits is for.
//!
//! A token without a row of its own goes in as several rows in a line ([`Spelling`]), so positions
//! inside run ahead of those outside. The logits of a node are those behind the last of its rows.

use super::{Columns, Engine, Memory, Rows, Scores, TokenTree};
use crate::compute::KernelTime;
use crate::gemma::reduced::Spelling;
use anyhow::{Result, ensure};
use std::ops::Range;

pub struct ReducedEngine {
    inner: Box<dyn Engine>,
    spelling: Spelling,
    columns: Columns,
    /// Where each committed token begins inside, and where the next one will. `[position + 1]`
    starts: Vec<usize>,
    /// The last tree in rows, and the rows of each of its nodes.
    work: TokenTree,
    nodes: Vec<Range<u32>>,
    /// Of the rows scored last, those that end a node; all of them where `None`.
    ends: Option<Vec<usize>>,
    /// Room of [`Spelling::spell`].
    spelled: Vec<u32>,
    /// Scores have a place for every token.
    whole: bool,
}

impl ReducedEngine {
    /// Wraps an engine without history whose vocabulary is the spelling's rows.
    pub fn new(inner: Box<dyn Engine>, spelling: Spelling) -> Result<Self> {
        let (have, want) = (inner.vocab(), spelling.rows());
        ensure!(have == want, "the draft model has {have} rows, its vocabulary lists {want}");
        ensure!(inner.position() == 0, "the draft model has a history already");
        let columns = Columns::new(
            (0..want as u32).map(|row| spelling.token(row)).collect(),
            spelling.vocab(),
        );
        Ok(ReducedEngine {
            inner,
            columns,
            spelling,
            starts: vec![0],
            work: TokenTree::default(),
            nodes: Vec::new(),
            ends: None,
            spelled: Vec::new(),
            whole: false,
        })
    }

    /// Scores every token of the target, those without a row by minus infinity: a draft model as a
    /// target, to measure others with.
    pub fn whole(self) -> Self {
        ReducedEngine { whole: true, ..self }
    }

    /// Puts each score where its token is, if all tokens are to have one.
    fn widen(&self, out: &mut Scores) {
        if !self.whole {
            return;
        }
        let (rows, narrow, wide) = (out.rows(), out.vocab, self.spelling.vocab());
        let mut logits = vec![f32::NEG_INFINITY; rows * wide];
        for (to, from) in logits.chunks_exact_mut(wide).zip(out.logits.chunks_exact(narrow)) {
            from.iter()
                .enumerate()
                .for_each(|(column, &logit)| to[self.columns.token(column) as usize] = logit);
        }
        (out.logits, out.vocab) = (logits, wide);
    }

    /// Puts the nodes from `first` on into `work`, which holds those before.
    fn spell(&mut self, tree: &TokenTree, first: usize) {
        self.nodes.truncate(first);
        let rows = self.nodes.last().map_or(0, |n| n.end as usize);
        self.work.tokens.truncate(rows);
        self.work.parent.truncate(rows);
        for node in first..tree.len() {
            let mut parent = tree.parent[node].map(|p| self.nodes[p as usize].end - 1);
            let begin = self.work.len() as u32;
            self.spelled.clear();
            self.spelling.spell(tree.tokens[node], &mut self.spelled);
            for &row in &self.spelled {
                self.work.tokens.push(row);
                self.work.parent.push(parent);
                parent = Some(self.work.len() as u32 - 1);
            }
            self.nodes.push(begin..self.work.len() as u32);
        }
    }

    /// Keeps of the rows scored last those that end a node from `first` on.
    fn keep_ends(&mut self, first: usize, rows: Rows, out: &mut Scores) {
        self.ends = None;
        let begin = self.nodes.get(first).map_or(0, |n| n.start);
        let new = self.work.len() - begin as usize;
        if rows != Rows::All || new == self.nodes.len() - first {
            return;
        }
        let ends: Vec<usize> =
            self.nodes[first..].iter().map(|n| (n.end - 1 - begin) as usize).collect();
        // Those that were left inside are found there by their place.
        if !out.logits.is_empty() {
            for (to, &from) in ends.iter().enumerate() {
                out.logits.copy_within(from * out.vocab..(from + 1) * out.vocab, to * out.vocab);
            }
            out.logits.truncate(ends.len() * out.vocab);
        }
        self.ends = Some(ends);
    }

    fn check(&self, tree: &TokenTree, first: usize) -> Result<()> {
        let bad = tree.tokens[first.min(tree.len())..]
            .iter()
            .find(|t| **t as usize >= self.spelling.vocab());
        ensure!(
            bad.is_none(),
            "token {} is outside the vocabulary of {}",
            bad.unwrap_or(&0),
            self.spelling.vocab()
        );
        ensure!(
            tree.len() <= self.max_rows(),
            "a pass takes 1 to {} rows, got {}",
            self.max_rows(),
            tree.len()
        );
        Ok(())
    }
}

impl Engine for ReducedEngine {
    fn position(&self) -> usize {
        self.starts.len() - 1
    }

    /// As if all tokens to come took the most rows that one can take.
    fn context(&self) -> usize {
        let left = self.inner.context().saturating_sub(self.inner.position());
        self.position() + left / self.spelling.most_parts()
    }

    fn max_rows(&self) -> usize {
        (self.inner.max_rows() / self.spelling.most_parts()).max(1)
    }

    fn reach(&self) -> Option<usize> {
        self.inner.reach()
    }

    /// Of the target: what it takes. Its scores have a column for each row of the model only, see
    /// [`Engine::columns`].
    fn vocab(&self) -> usize {
        self.spelling.vocab()
    }

    fn columns(&self) -> Option<&Columns> {
        (!self.whole).then_some(&self.columns)
    }

    fn leave_logits(&mut self) {
        if !self.whole {
            self.inner.leave_logits();
        }
    }

    fn lend(&self, i: usize) -> Option<&[f32]> {
        let i = self.ends.as_ref().map_or(Some(i), |ends| ends.get(i).copied());
        self.inner.lend(i?)
    }

    fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()> {
        self.check(tree, 0)?;
        self.spell(tree, 0);
        self.inner.forward(&self.work, rows, out)?;
        self.keep_ends(0, rows, out);
        self.widen(out);
        Ok(())
    }

    fn forward_more(
        &mut self,
        tree: &TokenTree,
        first_new: usize,
        rows: Rows,
        out: &mut Scores,
    ) -> Result<()> {
        self.check(tree, first_new)?;
        ensure!(first_new == self.nodes.len(), "forward_more continues the tree of the last pass");
        let first_row = self.work.len();
        self.spell(tree, first_new);
        self.inner.forward_more(&self.work, first_row, rows, out)?;
        self.keep_ends(first_new, rows, out);
        self.widen(out);
        Ok(())
    }

    fn commit(&mut self, path: &[u32]) -> Result<()> {
        ensure!(
            path.iter().all(|n| (*n as usize) < self.nodes.len()),
            "a commit takes a path from the root of the last pass"
        );
        let rows: Vec<u32> = path.iter().flat_map(|n| self.nodes[*n as usize].clone()).collect();
        self.inner.commit(&rows)?;
        for node in path {
            let end = self.starts[self.starts.len() - 1] + self.nodes[*node as usize].len();
            self.starts.push(end);
        }
        self.nodes.clear();
        self.work.clear();
        Ok(())
    }

    fn truncate(&mut self, position: usize) -> Result<()> {
        ensure!(
            position <= self.position(),
            "cannot truncate to {position}: only {} tokens are committed",
            self.position()
        );
        self.inner.truncate(self.starts[position])?;
        self.starts.truncate(position + 1);
        self.nodes.clear();
        self.work.clear();
        Ok(())
    }

    fn hidden(&mut self, out: &mut Vec<f32>) -> Result<()> {
        self.inner.hidden(out)?;
        if let Some(ends) = &self.ends {
            let dim = out.len() / (ends.last().map_or(0, |last| last + 1)).max(1);
            for (to, &from) in ends.iter().enumerate() {
                out.copy_within(from * dim..(from + 1) * dim, to * dim);
            }
            out.truncate(ends.len() * dim);
        }
        Ok(())
    }

    fn memory(&self) -> Memory {
        self.inner.memory()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn read_bandwidth(&mut self) -> Option<f64> {
        self.inner.read_bandwidth()
    }

    fn upload_bandwidth(&mut self) -> Option<f64> {
        self.inner.upload_bandwidth()
    }

    fn loading(&self) -> Option<crate::compute::Loading> {
        self.inner.loading()
    }

    fn start_profile(&mut self) {
        self.inner.start_profile();
    }

    fn profile(&self) -> Vec<KernelTime> {
        self.inner.profile()
    }
}
