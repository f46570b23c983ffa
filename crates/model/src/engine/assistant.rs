//! A draft model that reads the caches of an engine and has none of its own.
//!
//! It drafts behind what is committed. Its trees begin with the token that follows, which the
//! target has picked and not read.

use super::{Output, Scores};
use crate::models::Angles;
use crate::models::forward::RopeTable;
use crate::models::forward::assistant::AssistantForward;
use anyhow::Result;
use gemma_base::compute::step::NO_PARENT;
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
    pub(super) angles: Vec<Angles>,
    pub(super) tokens: Vec<Token>,
    /// Position of the root, for the rows that stand for what is committed. Nodes stand one
    /// position in front of it: they see what is committed.
    pub(super) positions: Vec<u32>,
    pub(super) parents: Vec<u32>,
    pub(super) roots: Vec<u32>,
    pub(super) sequences: Vec<u32>,
    /// The row among those scored last of each sequence's newest committed token.
    pub(super) scored: Vec<Option<usize>>,
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

    /// Starts anew with a row of each sequence, behind its committed tokens.
    pub(super) fn clear(&mut self, committed: impl Iterator<Item = usize>) {
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
    pub(super) fn push(&mut self, token: Token, position: u32, parent: u32, sequence: u32) {
        self.tokens.push(token);
        self.positions.push(position);
        self.parents.push(parent);
        self.roots.push(sequence);
        self.sequences.push(sequence);
    }
}
