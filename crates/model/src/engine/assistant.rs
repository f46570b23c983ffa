//! A draft model that reads the caches of an engine and has none of its own.
//!
//! It drafts behind what is committed. Its trees begin with the token that follows, which the
//! target has picked and not read.

use super::planned::PlannedEngine;
use super::{Output, Scores};
use crate::models::Angles;
use crate::models::forward::RopeTable;
use crate::models::forward::assistant::AssistantForward;
use anyhow::{Context, Result, ensure};
use gemma_base::compute::best;
use gemma_base::compute::step::{NO_PARENT, StepView};
use gemma_base::tensor::Token;

/// A node of an assistant's trees. Nodes of all texts are numbered in the order in which they are
/// evaluated, from 0 in each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssistantNode {
    pub sequence: usize,
    /// An earlier pass evaluated it; `None` at the root.
    pub parent: Option<u32>,
    pub token: Token,
}

/// The assistant of an engine, see [`Engine::assistant`](super::Engine::assistant).
pub trait Assistant {
    /// Returns the most nodes of a round.
    fn max_nodes(&self) -> usize;
    /// Forgets all nodes and begins trees of these sequences. Returns for each whether it can: the
    /// last pass must have scored its newest committed token.
    fn begin(&mut self, sequences: &[usize]) -> Result<Vec<bool>>;
    /// Scores nodes in one pass.
    fn evaluate(&mut self, nodes: &[AssistantNode], output: Output, out: &mut Scores)
    -> Result<()>;
}

/// The rows of an assistant's trees. The first row of each sequence stands for what is committed.
#[derive(Default)]
pub struct AssistantRows {
    angles: Vec<Angles>,
    tokens: Vec<Token>,
    /// Position of the root, for the rows that stand for what is committed. Nodes stand one
    /// position in front of it: they see what is committed.
    positions: Vec<u32>,
    parents: Vec<u32>,
    roots: Vec<u32>,
    sequences: Vec<u32>,
    /// The row among those scored last of each sequence's newest committed token.
    scored: Vec<Option<usize>>,
}

impl AssistantRows {
    /// Makes the rows for an assistant and so many sequences.
    pub fn new(model: &AssistantForward, sequences: usize) -> AssistantRows {
        let angles = model.ropes.iter().map(RopeTable::angles).collect();
        AssistantRows { angles, scored: vec![None; sequences], ..AssistantRows::default() }
    }

    /// Forgets the states of all sequences, or of one.
    pub fn forget(&mut self, sequence: Option<usize>) {
        match sequence {
            Some(sequence) => self.note(sequence, None),
            None => self.scored.fill(None),
        }
    }

    /// Notes which row among those scored has the state behind a sequence.
    pub fn note(&mut self, sequence: usize, scored: Option<usize>) {
        if let Some(slot) = self.scored.get_mut(sequence) {
            *slot = scored;
        }
    }

    fn clear(&mut self, committed: impl Iterator<Item = usize>) {
        let rows = [
            &mut self.tokens,
            &mut self.positions,
            &mut self.parents,
            &mut self.roots,
            &mut self.sequences,
        ];
        rows.into_iter().for_each(Vec::clear);
        for (sequence, committed) in committed.enumerate() {
            self.push(0, committed as u32, NO_PARENT, sequence as u32);
        }
    }

    /// Adds a row of a sequence.
    fn push(&mut self, token: Token, position: u32, parent: u32, sequence: u32) {
        self.tokens.push(token);
        self.positions.push(position);
        self.parents.push(parent);
        self.roots.push(sequence);
        self.sequences.push(sequence);
    }
}

impl Assistant for PlannedEngine {
    fn max_nodes(&self) -> usize {
        self.info.max_rows - self.info.sequences
    }

    fn begin(&mut self, sequences: &[usize]) -> Result<Vec<bool>> {
        let committed: Vec<usize> = self.sequences.iter().map(|own| own.tokens.len()).collect();
        let model = self.model.assistant.as_ref().context("there is no assistant")?;
        let assist = &mut self.assist;
        assist.clear(committed.iter().copied());
        let width = 4 * self.model.config.dim;
        let mut state = vec![0; width];
        let mut begun = Vec::with_capacity(sequences.len());
        for &sequence in sequences {
            let scored = assist.scored[sequence].filter(|_| committed[sequence] > 0);
            if let Some(row) = scored {
                self.exec.read(self.model.hidden, row * width, &mut state)?;
                self.exec.write(model.states, sequence * width, &state)?;
            }
            begun.push(scored.is_some());
        }
        Ok(begun)
    }

    fn evaluate(
        &mut self,
        nodes: &[AssistantNode],
        output: Output,
        out: &mut Scores,
    ) -> Result<()> {
        let model = self.model.assistant.as_ref().context("there is no assistant")?;
        let assist = &mut self.assist;
        let (first, texts) = (assist.tokens.len(), self.sequences.len());
        let vocab = self.model.config.vocab;
        for &AssistantNode { sequence, parent, token } in nodes {
            let row = parent.map_or(sequence, |node| texts + node as usize);
            let is_below = sequence < texts && row < first;
            ensure!(is_below, "a node follows another one of an earlier pass");
            ensure!((token as usize) < vocab, "token {token} is outside the vocabulary");
            let position = assist.positions[sequence].checked_sub(1);
            let position = position.context("nothing is committed")?;
            assist.push(token, position, row as u32, sequence as u32);
        }
        let rows = assist.tokens.len();
        ensure!(first < rows && rows <= self.info.max_rows, "too many nodes");
        let selected: Vec<u32> = (first as u32..rows as u32).collect();
        let wanted = match output {
            Output::Best { n, usable } => Some((n, usable.min(vocab))),
            _ => None,
        };
        let wanted = wanted.filter(|wanted| wanted.0 <= best::CHUNKS);
        let step = StepView {
            rows,
            first,
            tokens: &assist.tokens,
            positions: &assist.positions,
            parents: &assist.parents,
            selected: &selected,
            roots: &assist.roots,
            sequences: &assist.sequences,
            n_best: wanted.map_or(0, |w| w.0 as u32),
            usable: wanted.map_or(0, |w| w.1 as u32),
            ..StepView::default()
        };
        self.model.layout.fill(&mut self.words, &step);
        self.exec.write(self.model.step, 0, bytemuck::cast_slice(&self.words))?;
        for (angles, table) in assist.angles.iter().zip(&model.ropes) {
            self.row_angles.clear();
            for root in &assist.roots[first..] {
                let position = assist.positions[*root as usize] as usize;
                angles.push(position, &mut self.row_angles);
            }
            let offset = first * table.head_dim * 4;
            self.exec.write(table.buffer, offset, bytemuck::cast_slice(&self.row_angles))?;
        }
        let lists = self.model.best.zip(model.pass_with_best).filter(|_| wanted.is_some());
        let plan = lists.map_or(model.pass, |(_, plan)| plan);
        let lists = lists.map(|(best, _)| best.lists);
        self.run_scored(plan, selected.len(), lists, out)
    }
}
