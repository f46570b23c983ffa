//! A draft model of few rows in front of a target of many tokens: takes the target's tokens, and
//! says which token each of its logits is for.
//!
//! A token without a row of its own goes in as several rows in a line ([`Spelling`]), so positions
//! inside run ahead of those outside. The logits of a node are those behind the last of its rows.

use super::{Columns, Engine, Input, Memory, Output, Rows, Scores, TokenTree};
use crate::compute::Executor;
use crate::gemma::reduced::Spelling;
use crate::tensor::Token;
use anyhow::{Result, ensure};
use std::ops::Range;

pub struct ReducedEngine {
    inner: Box<dyn Engine>,
    spelling: Spelling,
    columns: Columns,
    sequences: Vec<Sequence>,
    /// Of the rows scored last, those that end a node; all of them where `None`.
    ends: Option<Vec<usize>>,
    /// Room of [`Spelling::spell`].
    spelled: Vec<u32>,
    /// Scores have a place for every token.
    whole: bool,
}

/// What there is of a text.
#[derive(Clone, Debug, Default)]
struct Sequence {
    /// Where the committed tokens behind the first begin inside, and where the next one will.
    /// `[position]`
    starts: Vec<usize>,
    /// The tree in scratch as rows, and the rows of each of its nodes.
    work: TokenTree,
    nodes: Vec<Range<u32>>,
}

impl Sequence {
    /// Where the committed token at `position` begins inside, or the next one will.
    fn start(&self, position: usize) -> usize {
        position.checked_sub(1).map_or(0, |at| self.starts[at])
    }

    fn forget(&mut self) {
        self.work.clear();
        self.nodes.clear();
    }

    /// Puts the nodes of a tree from `first` on into `work`, which holds those before. `room` is
    /// that of [`Spelling::spell`].
    fn spell(&mut self, tree: &TokenTree, first: usize, spelling: &Spelling, room: &mut Vec<u32>) {
        for node in first..tree.len() {
            let mut parent = tree.parent[node].map(|p| self.nodes[p as usize].end - 1);
            let begin = self.work.len() as u32;
            room.clear();
            spelling.spell(tree.tokens[node], room);
            for &row in room.iter() {
                self.work.tokens.push(row);
                self.work.parent.push(parent);
                parent = Some(self.work.len() as u32 - 1);
            }
            self.nodes.push(begin..self.work.len() as u32);
        }
    }
}

impl ReducedEngine {
    /// Wraps an engine without history whose vocabulary is the spelling's rows.
    pub fn new(inner: Box<dyn Engine>, spelling: Spelling) -> Result<Self> {
        let (have, want) = (inner.vocab(), spelling.rows());
        ensure!(have == want, "the draft model has {have} rows, its vocabulary lists {want}");
        let sequences = vec![Sequence::default(); inner.sequences()];
        ensure!(
            (0..sequences.len()).all(|sequence| inner.position(sequence) == 0),
            "the draft model has a history already"
        );
        let columns = Columns::new(
            (0..want as u32).map(|row| spelling.token(row)).collect(),
            spelling.vocab(),
        );
        Ok(ReducedEngine {
            inner,
            columns,
            spelling,
            sequences,
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

    fn check(&self, input: &Input<'_>) -> Result<()> {
        let Input { sequence, tree, first, .. } = *input;
        ensure!(sequence < self.sequences.len(), "there are {} sequences", self.sequences.len());
        let there = self.sequences[sequence].nodes.len();
        ensure!(first == 0 || first == there, "a pass continues the tree of the last one");
        let bad = tree.tokens[first.min(tree.len())..]
            .iter()
            .find(|t| **t as usize >= self.spelling.vocab());
        ensure!(
            bad.is_none(),
            "token {} is outside the vocabulary of {}",
            bad.unwrap_or(&0),
            self.spelling.vocab()
        );
        Ok(())
    }

    /// Which of the rows scored inside end a node, where others are scored too.
    fn ends_of(&self, inputs: &[Input<'_>]) -> Option<Vec<usize>> {
        let (mut ends, mut rows) = (Vec::new(), 0);
        for input in inputs {
            let nodes = &self.sequences[input.sequence].nodes[input.first..];
            match input.rows {
                Rows::None => {}
                Rows::Last if nodes.is_empty() => {}
                Rows::Last => {
                    ends.push(rows);
                    rows += 1;
                }
                Rows::All => {
                    for node in nodes {
                        rows += node.len();
                        ends.push(rows - 1);
                    }
                }
            }
        }
        (ends.len() < rows).then_some(ends)
    }
}

impl Engine for ReducedEngine {
    fn sequences(&self) -> usize {
        self.sequences.len()
    }

    fn position(&self, sequence: usize) -> usize {
        self.sequences[sequence].starts.len()
    }

    /// As if all tokens to come took the most rows that one can take.
    fn context(&self, sequence: usize) -> usize {
        let left = self.inner.context(sequence).saturating_sub(self.inner.position(sequence));
        self.position(sequence) + left / self.spelling.most_parts()
    }

    /// In the target's place all tokens count as one row, for which there is room whatever they
    /// take.
    fn max_rows(&self) -> usize {
        let parts = if self.whole { self.spelling.most_parts() } else { 1 };
        (self.inner.max_rows() / parts).max(1)
    }

    fn rows_of(&self, token: Token) -> usize {
        let is_row = self.whole || self.spelling.row(token).is_some();
        if is_row { 1 } else { self.spelling.most_parts() }
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

    fn begin(&mut self, inputs: &[Input<'_>], output: Output) -> Result<bool> {
        inputs.iter().try_for_each(|input| self.check(input))?;
        let mut firsts = Vec::with_capacity(inputs.len());
        for &Input { sequence, tree, first, .. } in inputs {
            let own = &mut self.sequences[sequence];
            if first == 0 {
                own.forget();
            }
            firsts.push(own.work.len());
            own.spell(tree, first, &self.spelling, &mut self.spelled);
        }
        self.ends = self.ends_of(inputs);
        let inside: Vec<Input<'_>> = inputs
            .iter()
            .zip(firsts)
            .map(|(input, first)| Input {
                tree: &self.sequences[input.sequence].work,
                first,
                ..*input
            })
            .collect();
        // The best rows of the model are not the target's best tokens.
        let output = match output {
            Output::Lent if !self.whole => Output::Lent,
            _ => Output::Logits,
        };
        self.inner.begin(&inside, output)
    }

    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        self.inner.finish(out)?;
        // Those that were left inside are found there by their place.
        if let Some(ends) = self.ends.as_ref().filter(|_| !out.logits.is_empty()) {
            for (to, &from) in ends.iter().enumerate() {
                out.logits.copy_within(from * out.vocab..(from + 1) * out.vocab, to * out.vocab);
            }
            out.logits.truncate(ends.len() * out.vocab);
        }
        self.widen(out);
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.inner.is_busy()
    }

    fn lend(&self, i: usize) -> Option<&[f32]> {
        let i = self.ends.as_ref().map_or(Some(i), |ends| ends.get(i).copied());
        self.inner.lend(i?)
    }

    fn commit(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        let mut inside = Vec::with_capacity(paths.len());
        for (sequence, path) in paths {
            let nodes = self.sequences.get(*sequence).map_or(&[][..], |own| &own.nodes);
            ensure!(
                path.iter().all(|n| (*n as usize) < nodes.len()),
                "a commit takes a path from the root of a tree in scratch"
            );
            let rows: Vec<u32> = path.iter().flat_map(|n| nodes[*n as usize].clone()).collect();
            inside.push((*sequence, rows));
        }
        let rows: Vec<(usize, &[u32])> = inside.iter().map(|(s, rows)| (*s, &rows[..])).collect();
        self.inner.commit(&rows)?;
        for (sequence, path) in paths {
            let own = &mut self.sequences[*sequence];
            let mut end = own.start(own.starts.len());
            for node in *path {
                end += own.nodes[*node as usize].len();
                own.starts.push(end);
            }
            own.forget();
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: usize, position: usize) -> Result<()> {
        let own = &mut self.sequences[sequence];
        let now = own.starts.len();
        ensure!(position <= now, "cannot truncate to {position}: only {now} tokens are committed");
        self.inner.truncate(sequence, own.start(position))?;
        own.starts.truncate(position);
        own.forget();
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

    fn executor(&self) -> Option<&dyn Executor> {
        self.inner.executor()
    }

    fn executor_mut(&mut self) -> Option<&mut dyn Executor> {
        self.inner.executor_mut()
    }
}
