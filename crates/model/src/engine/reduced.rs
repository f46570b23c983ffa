//! Adapter for a draft model with a reduced vocabulary. It accepts the target's tokens and maps the
//! draft model's logits to them.
//!
//! A token without its own row is fed as several rows in sequence ([`VocabMap`]). Positions in the
//! inner engine are therefore ahead of those outside. The last row of a node yields its logits.

use super::{
    Assistant, Cached, Columns, Engine, EngineExt, EngineInfo, EngineReport, Input, Output,
    PageCopy, Prefix, Rows, Scores, TokenTree,
};
use crate::models::reduced::VocabMap;
use anyhow::{Result, bail, ensure};
use gemma_base::compute::Reports;
use gemma_base::tensor::{Token, is_place};
use std::ops::Range;

pub struct VocabAdapter {
    inner: Box<dyn Engine>,
    spelling: VocabMap,
    info: EngineInfo,
    sequences: Vec<ReducedSequence>,
    /// Indices of the rows that end a node, among the rows scored last; `None` if all do.
    ends: Option<Vec<usize>>,
    /// Buffer for [`VocabMap::spell`].
    spelled: Vec<u32>,
}

/// Committed part of a sequence, and its tree in scratch.
#[derive(Clone, Debug, Default)]
struct ReducedSequence {
    /// All committed tokens; the inner engine has their spelled rows.
    tokens: Vec<Token>,
    /// The tree in scratch as rows of the inner engine
    work: TokenTree,
    /// Token and range of rows of each of its nodes
    nodes: Vec<(Token, Range<u32>)>,
}

impl ReducedSequence {
    fn forget(&mut self) {
        self.work.clear();
        self.nodes.clear();
    }

    /// Adds the nodes of a tree from `first` to `work`, which already holds the earlier nodes.
    /// `room` is a buffer for [`VocabMap::spell`].
    fn spell(&mut self, tree: &TokenTree, first: usize, spelling: &VocabMap, room: &mut Vec<u32>) {
        for node in first..tree.len() {
            let mut parent = tree.parent[node].map(|p| self.nodes[p as usize].1.end - 1);
            let begin = self.work.len() as u32;
            room.clear();
            spelling.spell(tree.tokens[node], room);
            for &row in room.iter() {
                self.work.tokens.push(row);
                self.work.parent.push(parent);
                parent = Some(self.work.len() as u32 - 1);
            }
            self.nodes.push((tree.tokens[node], begin..self.work.len() as u32));
        }
    }
}

impl VocabAdapter {
    /// Wraps an engine without history. Its vocabulary is the rows of `spelling`.
    pub fn new(inner: Box<dyn Engine>, spelling: VocabMap) -> Result<Self> {
        let (have, want) = (inner.info().vocab, spelling.rows());
        ensure!(have == want, "the draft model has {have} rows, its vocabulary lists {want}");
        let sequences = vec![ReducedSequence::default(); inner.info().sequences];
        ensure!(
            (0..sequences.len()).all(|sequence| inner.position(sequence) == 0),
            "the draft model already has a history"
        );
        let tokens = (0..want as u32).map(|row| spelling.token(row)).collect();
        let info = EngineInfo {
            vocab: spelling.vocab(),
            columns: Some(Columns::new(tokens, spelling.vocab())),
            paged: Vec::new(),
            most_rows: spelling.most_parts(),
            ..inner.info().clone()
        };
        Ok(VocabAdapter { inner, spelling, info, sequences, ends: None, spelled: Vec::new() })
    }

    /// Scores every token of the target, tokens without a row by minus infinity.
    ///
    /// The draft model can then act as a target in measurements. Each token counts as one row, and
    /// `max_rows` is reduced so that the spelled rows fit.
    pub fn whole(mut self) -> Self {
        self.info.max_rows = (self.info.max_rows / self.spelling.most_parts()).max(1);
        self.info.columns = None;
        self
    }

    /// Returns whether every token has a column in the scores.
    fn is_whole(&self) -> bool {
        self.info.columns.is_none()
    }

    /// Moves each score to its token's column, if every token has one.
    fn widen(&self, out: &mut Scores) {
        if !self.is_whole() {
            return;
        }
        let (rows, narrow, wide) = (out.rows(), out.vocab, self.spelling.vocab());
        let mut logits = vec![f32::NEG_INFINITY; rows * wide];
        for (to, from) in logits.chunks_exact_mut(wide).zip(out.logits.chunks_exact(narrow)) {
            from.iter().enumerate().for_each(|(column, &logit)| {
                to[self.spelling.token(column as u32) as usize] = logit
            });
        }
        (out.logits, out.vocab) = (logits, wide);
    }

    fn check(&self, input: &Input<'_>) -> Result<()> {
        let Input { sequence, tree, first, .. } = *input;
        ensure!(sequence < self.sequences.len(), "there are {} sequences", self.sequences.len());
        let there = self.sequences[sequence].nodes.len();
        ensure!(first == 0 || first == there, "a pass can only continue the tree of the last pass");
        let bad = tree.tokens[first.min(tree.len())..]
            .iter()
            .find(|t| **t as usize >= self.spelling.vocab() && !is_place(**t));
        ensure!(
            bad.is_none(),
            "token {} is outside the vocabulary of {}",
            bad.unwrap_or(&0),
            self.spelling.vocab()
        );
        Ok(())
    }

    /// Returns the indices of inner scored rows that end a node; `None` if all do.
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
                    for (_, node) in nodes {
                        rows += node.len();
                        ends.push(rows - 1);
                    }
                }
            }
        }
        (ends.len() < rows).then_some(ends)
    }
}

impl Engine for VocabAdapter {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Reports the room for tokens that all need the most rows.
    fn cached(&self, sequence: usize) -> Cached<'_> {
        let Cached { room, free_pages, .. } = self.inner.cached(sequence);
        let room = room / self.spelling.most_parts();
        Cached { tokens: &self.sequences[sequence].tokens, room, free_pages }
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
            Output::Lent if !self.is_whole() => Output::Lent,
            Output::Hidden => Output::Hidden,
            _ => Output::Logits,
        };
        self.inner.begin(&inside, output)
    }

    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        self.inner.finish(out)?;
        // Logits that stay inside are looked up there by index.
        if let Some(ends) = self.ends.as_ref().filter(|_| !out.logits.is_empty()) {
            let rows = out.logits.len() / out.vocab;
            for values in [&mut out.logits, &mut out.hidden] {
                let width = values.len() / rows;
                for (to, &from) in ends.iter().enumerate() {
                    values.copy_within(from * width..(from + 1) * width, to * width);
                }
                values.truncate(ends.len() * width);
            }
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
                "a committed path must start at the root of a tree in scratch"
            );
            let rows: Vec<u32> = path.iter().flat_map(|n| nodes[*n as usize].1.clone()).collect();
            inside.push((*sequence, rows));
        }
        let rows: Vec<(usize, &[u32])> = inside.iter().map(|(s, rows)| (*s, &rows[..])).collect();
        self.inner.commit(&rows)?;
        for (sequence, path) in paths {
            let own = &mut self.sequences[*sequence];
            own.tokens.extend(path.iter().map(|node| own.nodes[*node as usize].0));
            own.forget();
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: usize, position: usize) -> Result<()> {
        let own = &mut self.sequences[sequence];
        let now = own.tokens.len();
        ensure!(position <= now, "cannot truncate to {position}: only {now} tokens are committed");
        self.spelled.clear();
        own.tokens[position..].iter().for_each(|t| self.spelling.spell(*t, &mut self.spelled));
        let inside = self.inner.position(sequence) - self.spelled.len();
        self.inner.truncate(sequence, inside)?;
        own.tokens.truncate(position);
        own.forget();
        Ok(())
    }

    /// Retains nothing: inner pages do not end where outer pages do, and a draft model quickly
    /// reads its short window again.
    fn retain(&mut self, _: usize, _: usize) -> Option<Prefix> {
        None
    }

    fn resume(&mut self, _: usize, _: &Prefix, _: usize) -> Result<()> {
        bail!("an engine with a reduced vocabulary keeps no prefixes")
    }

    fn copy_page(&mut self, _: &mut Prefix, _: usize, _: usize, _: PageCopy<'_>) -> Result<bool> {
        Ok(false)
    }

    fn report(&self) -> EngineReport {
        self.inner.report()
    }

    fn device(&mut self) -> Option<&mut dyn Reports> {
        self.inner.device()
    }

    fn assistant(&mut self) -> Option<&mut dyn Assistant> {
        None
    }
}
