//! A draft model that reads the KV cache of an engine and has none of its own.
//!
//! It drafts after the committed tokens. The root of each of its trees is the next token, which the
//! target has sampled but not evaluated.

use super::{Output, Scores};
use crate::models::Angles;
use crate::models::forward::RopeTable;
use crate::models::forward::assistant::AssistantForward;
use anyhow::Result;
use gemma_base::compute::step::NO_PARENT;
use gemma_base::tensor::Token;

/// A node of an assistant's trees.
///
/// Nodes of all sequences are numbered in evaluation order, from 0 in each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssistantNode {
    pub sequence: usize,
    /// A node of an earlier pass; `None` for the root.
    pub parent: Option<u32>,
    pub token: Token,
}

/// The assistant of an engine, see [`Engine::assistant`](super::Engine::assistant).
pub trait Assistant {
    /// Returns the most nodes per round.
    fn max_nodes(&self) -> usize;
    /// Discards all nodes and starts trees for these sequences.
    ///
    /// Returns for each sequence whether it can draft: the last pass must have scored its newest
    /// committed token.
    fn begin(&mut self, sequences: &[usize]) -> Result<Vec<bool>>;
    /// Scores nodes in one pass.
    fn evaluate(&mut self, nodes: &[AssistantNode], output: Output, out: &mut Scores)
    -> Result<()>;
}

/// Rows of an assistant's trees. The first row of each sequence represents its committed tokens.
#[derive(Default)]
pub struct AssistantRows {
    pub(super) angles: Vec<Angles>,
    pub(super) tokens: Vec<Token>,
    /// Position of each row. Rows that represent the committed tokens have the root's position.
    /// Nodes are one position before it, so that they see exactly the committed tokens.
    pub(super) positions: Vec<u32>,
    pub(super) parents: Vec<u32>,
    pub(super) roots: Vec<u32>,
    pub(super) sequences: Vec<u32>,
    /// For each sequence, the index of its newest committed token among the rows scored last.
    pub(super) scored: Vec<Option<usize>>,
}

impl AssistantRows {
    /// Creates the rows for an assistant of `sequences` sequences.
    pub fn new(model: &AssistantForward, sequences: usize) -> AssistantRows {
        let angles = model.ropes.iter().map(RopeTable::angles).collect();
        AssistantRows { angles, scored: vec![None; sequences], ..AssistantRows::default() }
    }

    /// Forgets the states of one sequence, or of all.
    pub fn forget(&mut self, sequence: Option<usize>) {
        match sequence {
            Some(sequence) => self.note(sequence, None),
            None => self.scored.fill(None),
        }
    }

    /// Sets the index of the scored row that holds the state after a sequence's last token.
    pub fn note(&mut self, sequence: usize, scored: Option<usize>) {
        if let Some(slot) = self.scored.get_mut(sequence) {
            *slot = scored;
        }
    }

    /// Restarts with one row per sequence, after its committed tokens.
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
