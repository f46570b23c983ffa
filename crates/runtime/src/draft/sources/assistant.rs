//! An assistant as a source: a draft model that reads the target's KV cache. It keeps no state
//! between rounds.

use anyhow::{Context, Result};

use super::model::{ModelRow, Start, TextStart, TreeModel};
use gemma_base::tensor::Token;
use gemma_model::engine::{Assistant, AssistantNode, Output, Scores};

/// Number of largest logits that are requested per node.
pub const BEST: usize = 64;

/// The target's assistant. A round needs the target's scores of the text's newest token.
pub struct AssistantModel {
    /// Vocabulary size: it knows the ids below this.
    vocab: usize,
    max_nodes: usize,
    /// Number of evaluated nodes in this round, and nodes queued for the next pass.
    evaluated: usize,
    waiting: Vec<AssistantNode>,
    /// Text of each row in the last pass.
    texts: Vec<usize>,
    scores: Scores,
    passes: u64,
    rows: u64,
}

impl AssistantModel {
    /// Creates the source for an assistant with this vocabulary size.
    pub fn new(vocab: usize) -> AssistantModel {
        AssistantModel {
            vocab,
            max_nodes: 0,
            evaluated: 0,
            waiting: Vec::new(),
            texts: Vec::new(),
            scores: Scores::default(),
            passes: 0,
            rows: 0,
        }
    }

    fn add(&mut self, sequence: usize, parent: Option<u32>, token: Token) -> u32 {
        self.waiting.push(AssistantNode { sequence, parent, token });
        (self.evaluated + self.waiting.len() - 1) as u32
    }
}

impl TreeModel for AssistantModel {
    fn reads_texts(&self) -> bool {
        false
    }

    fn begin(
        &mut self,
        texts: &[TextStart<'_>],
        target: &mut Option<&mut dyn Assistant>,
    ) -> Result<Vec<Start>> {
        let target = target.as_mut().context("the target has no assistant")?;
        (self.max_nodes, self.evaluated) = (target.max_nodes(), 0);
        self.waiting.clear();
        let sequences: Vec<usize> = texts.iter().map(|(text, ..)| *text).collect();
        let begun = target.begin(&sequences)?;
        let mut starts = Vec::with_capacity(texts.len());
        for (&(text, history, _), begun) in texts.iter().zip(begun) {
            // With many texts there may be too few rows for all roots.
            let can = |token: &&Token| begun && self.knows(**token) && self.room() > 0;
            starts.push(match history.last().filter(can) {
                Some(&token) => Start::Waits(self.add(text, None, token)),
                None => Start::Cannot,
            });
        }
        Ok(starts)
    }

    fn knows(&self, token: Token) -> bool {
        (token as usize) < self.vocab
    }

    fn left(&self, _: usize, _: usize) -> usize {
        usize::MAX
    }

    fn rows_of(&self, _: Token) -> usize {
        1
    }

    fn room(&self) -> usize {
        self.max_nodes.saturating_sub(self.evaluated + self.waiting.len())
    }

    fn push(&mut self, text: usize, parent: u32, token: Token) -> u32 {
        self.add(text, Some(parent), token)
    }

    fn evaluate(&mut self, target: &mut Option<&mut dyn Assistant>) -> Result<()> {
        let target = target.as_mut().context("the target has no assistant")?;
        let output = Output::Best { n: BEST, usable: self.vocab };
        target.evaluate(&self.waiting, output, &mut self.scores)?;
        self.texts = self.waiting.drain(..).map(|node| node.sequence).collect();
        self.evaluated += self.texts.len();
        self.passes += 1;
        self.rows += self.texts.len() as u64;
        Ok(())
    }

    fn row(&self, text: usize, i: usize) -> ModelRow<'_> {
        let mut rows = (0..self.texts.len()).filter(|row| self.texts[*row] == text);
        let row = rows.nth(i).expect("the text has this node");
        match self.scores.list(row) {
            Some(best) => ModelRow::Best(best),
            None => ModelRow::Logits { logits: self.scores.row(row), columns: None },
        }
    }

    fn work_done(&self) -> [u64; 2] {
        [self.passes, self.rows]
    }
}
