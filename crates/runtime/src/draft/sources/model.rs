//! Models as a source: the interface, and a small language model with its own KV cache. It reads
//! each history once, and evaluates the nodes of all trees in shared passes.

use std::time::{Duration, Instant};

use anyhow::Result;

use gemma_base::tensor::{Token, is_place};
use gemma_model::engine::{
    Assistant, Columns, Engine, EngineExt, Input, Output, Rows, Scores, Timeline, TokenTree,
};

/// Most unread tokens that are read in the first pass of a round instead of a prefill.
const PENDING: usize = 16;
/// Prompt tokens that are read before the time per row is known; also the least number to read.
const FIRST: usize = 32;
/// Divisor: one round's work ahead may use this fraction of the scratch rows. The rest is for the
/// next rounds.
const AHEAD: usize = 5;
/// Weight of a measurement in the mean time per row.
const ROW_RATE: f32 = 0.2;

/// Classes of [`class`].
pub const CLASSES: usize = 6;

/// Returns the class of the model's probability of its best token; `None` means no model.
pub fn class(best: Option<f32>) -> usize {
    const BOUNDS: [f32; 4] = [0.25, 0.5, 0.75, 0.92];
    best.map_or(0, |p| 1 + BOUNDS.iter().filter(|bound| p >= **bound).count())
}

/// A text to draft for: its index, its history, and the node of its newest token in the last
/// round's tree, if it continues there.
pub type TextStart<'h> = (usize, &'h [Token], Option<u32>);

/// A model that scores nodes of the texts' trees. Nodes are identified by the model's own numbers.
pub trait TreeModel {
    /// Returns whether the model reads the texts itself.
    ///
    /// If so, a pass may evaluate a node together with its children, the first pass of a round may
    /// read many tokens, and a round may continue the tree of the previous one. Otherwise the model
    /// reads the target's state.
    fn reads_texts(&self) -> bool;
    /// Starts a round for these texts. Returns how each starts.
    fn begin(
        &mut self,
        texts: &[TextStart<'_>],
        target: &mut Option<&mut dyn Assistant>,
    ) -> Result<Vec<Start>>;
    /// Returns whether the model knows the token.
    fn knows(&self, token: Token) -> bool;
    /// Returns the number of tokens that fit after a history of this length.
    fn left(&self, text: usize, history: usize) -> usize;
    /// Returns the most rows that a token needs.
    fn rows_of(&self, token: Token) -> usize;
    /// Returns the number of free rows in this round.
    fn room(&self) -> usize;
    /// Returns the most rows for one round's work ahead.
    fn ahead(&self) -> usize {
        0
    }
    /// Queues a node of a text for the next pass, below an evaluated or queued node. Returns the
    /// model's number of the node.
    fn push(&mut self, text: usize, parent: u32, token: Token) -> u32;
    /// Evaluates all queued nodes. [`row`](Self::row) then has a row for each of them. A text that
    /// was restarted has a row only for its newest token.
    fn evaluate(&mut self, target: &mut Option<&mut dyn Assistant>) -> Result<()>;
    /// Returns the scores after the i-th of a text's nodes in the last pass.
    fn row(&self, text: usize, i: usize) -> ModelRow<'_>;
    /// Reads a prompt before the first round, as long as `more` returns true.
    fn read_ahead(
        &mut self,
        _text: usize,
        _history: &[Token],
        _more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        Ok(())
    }
    /// Reads as much of a prompt's end as takes about `most`. Later rounds read at most that much
    /// at once.
    fn read_within(&mut self, _text: usize, _history: &[Token], _most: Duration) -> Result<()> {
        Ok(())
    }
    /// Returns the numbers of passes and rows so far, without reading prompts.
    fn work_done(&self) -> [u64; 2];
    /// Returns why nothing is being proposed, if so.
    fn note(&self) -> Option<String> {
        None
    }
}

/// A model's scores after a node.
#[derive(Clone, Copy)]
pub enum ModelRow<'a> {
    Logits {
        logits: &'a [f32],
        /// Token of each logit; `None` if logit i is for token i.
        columns: Option<&'a Columns>,
    },
    /// The largest logits, best first.
    Best(&'a [(Token, f32)]),
}

pub struct DraftModel {
    timeline: Timeline,
    /// By sequence.
    texts: Vec<DraftText>,
    /// Texts of this round. Passes keep their trees in scratch.
    round: Vec<usize>,
    /// Number of used scratch rows, and of rows queued for the next pass.
    filled: usize,
    waiting: usize,
    scores: Scores,
    passes: u64,
    rows: u64,
    /// Seconds per row when reading; 0 before the first measurement.
    row_time: f32,
}

/// The part of a text that the model reads.
#[derive(Clone, Debug, Default)]
struct DraftText {
    /// Position in the history where the part starts.
    from: usize,
    /// Most tokens of it that are read at once.
    window: usize,
    /// Rows for the engine: a chain of tokens newer than the cache, then nodes of the tree. `done`
    /// is the number of evaluated rows.
    work: TokenTree,
    done: usize,
    /// Index, among the scores of the last pass, of this text's first node.
    row: usize,
}

impl DraftModel {
    /// Creates a draft model for as many texts as the engine has sequences. The engine must use the
    /// target's tokenizer; its number of rows may differ.
    pub fn new(engine: Box<dyn Engine>) -> Self {
        DraftModel {
            texts: vec![
                DraftText { window: usize::MAX, ..DraftText::default() };
                engine.info().sequences
            ],
            timeline: Timeline::new(engine),
            round: Vec::new(),
            filled: 0,
            waiting: 0,
            scores: Scores::default(),
            passes: 0,
            rows: 0,
            row_time: 0.0,
        }
    }

    pub fn engine(&self) -> &dyn Engine {
        self.timeline.engine()
    }

    /// Returns the part of a history that the model reads.
    ///
    /// A model with a bounded reach reads the last half of its reach of a long unread text, or less
    /// if time is short. A long prompt then takes no longer than a short one, and the cache never
    /// overflows. After the first 10,000 characters of 30 held-out texts, the small bundled draft
    /// model yielded 2.28 tokens per pass with half of its reach, 2.27 after reading everything,
    /// and 2.25 with a quarter.
    fn part<'h>(&mut self, text: usize, history: &'h [Token]) -> &'h [Token] {
        if let Some(reach) = self.engine().info().reach {
            let part = history.get(self.texts[text].from..).unwrap_or_default();
            let read = self.timeline.common(text, part);
            let most = self.engine().context(text);
            let window = self.texts[text].window.min(reach.div_ceil(2));
            if read == 0 || part.len() - read > window || part.len() > most {
                self.texts[text].from = history.len().saturating_sub(window);
            }
        }
        &history[self.texts[text].from..]
    }

    fn read(
        &mut self,
        text: usize,
        history: &[Token],
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let part = self.part(text, history);
        let known = part.iter().all(|&token| self.knows(token));
        if !known || part.len() >= self.engine().context(text) || !more() {
            return Ok(());
        }
        let (begun, unread) = (Instant::now(), part.len() - self.timeline.common(text, part));
        if self.timeline.sync(text, part, &mut |_| more())? && unread >= FIRST / 2 {
            let seconds = begun.elapsed().as_secs_f32() / unread as f32;
            let (usual, rate) = match self.row_time {
                0.0 => (seconds, 1.0),
                usual => (usual, ROW_RATE),
            };
            self.row_time += rate * (seconds.min(2.0 * usual) - self.row_time);
        }
        Ok(())
    }

    /// Returns the number of rows of a text that the cache does not hold.
    fn unread(&self, text: usize, part: &[Token]) -> usize {
        let new = &part[self.timeline.position(text)..];
        new.iter().map(|token| self.rows_of(*token)).sum()
    }

    /// Returns the node of a text's newest token, if it is evaluated.
    fn stands_at(&self, text: usize, history: &[Token]) -> Option<u32> {
        let part = history.get(self.texts.get(text)?.from..).unwrap_or_default();
        self.timeline.stands_at(text, part)
    }

    /// Starts a round for these texts. Returns how each starts.
    ///
    /// Each text comes with the node of its newest token in the last round's tree, if it continues
    /// there. Most accepted tokens are then still in scratch and cost nothing.
    fn begin_round<'h>(&mut self, texts: &[TextStart<'h>]) -> Result<Vec<Start>> {
        self.round = texts.iter().map(|(text, ..)| *text).collect();
        self.waiting = 0;
        let most = self.engine().info().max_rows;
        let goes_on = |(text, history, place): &TextStart<'_>| {
            place.is_some() && self.stands_at(*text, history) == *place
        };
        let mut starts: Vec<Start> = texts
            .iter()
            .map(|text| if goes_on(text) { Start::GoesOn } else { Start::Cannot })
            .collect();
        let some_go_on = starts.contains(&Start::GoesOn);
        let room = if some_go_on { most - most.min(self.filled + most.div_ceil(8)) } else { most };

        // Unread parts of the other histories, which the first pass must read.
        let mut fresh: Vec<(usize, &'h [Token])> = Vec::new();
        for (&(text, history, _), start) in texts.iter().zip(&starts) {
            if *start == Start::Cannot {
                let part = self.part(text, history);
                let read = self.timeline.common(text, part);
                let is_known = part[read..].iter().all(|&token| self.knows(token));
                if is_known && part.len() <= self.engine().context(text) {
                    fresh.push((text, part));
                }
            }
        }
        let past = |part: &'h [Token]| &part[..part.len() - 1];
        let pasts: Vec<_> = fresh.iter().map(|(text, part)| (*text, past(part))).collect();
        self.timeline.adopt(&pasts)?;
        let longest = PENDING.min(most / 4).max(1);
        loop {
            let unread_of =
                |(text, part): &(usize, &[Token])| part.len() - self.timeline.position(*text);
            let rows: usize = fresh.iter().map(|(text, part)| self.unread(*text, part)).sum();
            let Some(most_unread) = (0..fresh.len()).max_by_key(|i| unread_of(&fresh[*i])) else {
                break;
            };
            let unread = unread_of(&fresh[most_unread]);
            if rows <= room && unread <= longest {
                break;
            }
            if some_go_on {
                return self.begin_round(&all_fresh(texts));
            }
            match unread {
                // There are more texts than scratch rows.
                1 => drop(fresh.remove(most_unread)),
                _ => {
                    let (text, part) = fresh[most_unread];
                    self.timeline.sync(text, past(part), &mut |_| true)?;
                }
            }
        }
        if some_go_on && self.filled + most.div_ceil(8) > most {
            return self.begin_round(&all_fresh(texts));
        }
        if !some_go_on {
            self.filled = 0;
        }
        self.waiting = fresh.iter().map(|(text, part)| self.unread(*text, part)).sum();
        for (&(text, ..), start) in texts.iter().zip(&mut starts) {
            if *start == Start::GoesOn {
                continue;
            }
            let own = &mut self.texts[text];
            (own.done, own.row) = (0, 0);
            own.work.clear();
            if let Some((_, part)) = fresh.iter().find(|(other, _)| *other == text) {
                own.work = TokenTree::chain(&part[self.timeline.position(text)..]);
                *start = Start::Waits(own.work.len() as u32 - 1);
            }
        }
        Ok(starts)
    }
}

impl TreeModel for DraftModel {
    fn reads_texts(&self) -> bool {
        true
    }

    fn begin(
        &mut self,
        texts: &[TextStart<'_>],
        _: &mut Option<&mut dyn Assistant>,
    ) -> Result<Vec<Start>> {
        self.begin_round(texts)
    }

    fn knows(&self, token: Token) -> bool {
        // The model reads an image placeholder as some token.
        (token as usize) < self.engine().info().vocab || is_place(token)
    }

    fn left(&self, text: usize, history: usize) -> usize {
        (self.engine().context(text) + self.texts[text].from).saturating_sub(history)
    }

    fn rows_of(&self, token: Token) -> usize {
        self.engine().info().rows_of(token)
    }

    fn room(&self) -> usize {
        self.engine().info().max_rows.saturating_sub(self.filled + self.waiting)
    }

    fn ahead(&self) -> usize {
        self.engine().info().max_rows.div_ceil(AHEAD)
    }

    fn push(&mut self, text: usize, parent: u32, token: Token) -> u32 {
        self.waiting += self.rows_of(token);
        self.texts[text].work.push(parent, token)
    }

    fn evaluate(&mut self, _: &mut Option<&mut dyn Assistant>) -> Result<()> {
        let mut inputs = Vec::with_capacity(self.round.len());
        let mut scored = 0;
        for &text in &self.round {
            let own = &mut self.texts[text];
            if own.work.is_empty() {
                continue;
            }
            own.row = scored;
            let rows = if own.done == 0 { Rows::Last } else { Rows::All };
            inputs.push((text, own.done, rows));
            scored += Input::new(text, &own.work, rows).after(own.done).scored();
            self.rows += (own.work.len() - own.done) as u64;
            own.done = own.work.len();
        }
        let inputs: Vec<Input<'_>> = inputs
            .into_iter()
            .map(|(text, done, rows)| Input::new(text, &self.texts[text].work, rows).after(done))
            .collect();
        self.timeline.run(&inputs, Output::Lent, &mut self.scores)?;
        self.passes += 1;
        self.filled += std::mem::take(&mut self.waiting);
        Ok(())
    }

    fn row(&self, text: usize, i: usize) -> ModelRow<'_> {
        let row = self.texts[text].row + i;
        let logits = self.engine().lend(row).unwrap_or_else(|| self.scores.row(row));
        ModelRow::Logits { logits, columns: self.engine().info().columns.as_ref() }
    }

    fn read_ahead(
        &mut self,
        text: usize,
        history: &[Token],
        more: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.texts[text].window = usize::MAX;
        self.read(text, history, more)
    }

    fn read_within(&mut self, text: usize, history: &[Token], most: Duration) -> Result<()> {
        let rows = |row_time: f32| ((most.as_secs_f32() / row_time) as usize).max(FIRST);
        let known = self.row_time;
        self.texts[text].window = match most {
            Duration::MAX => usize::MAX,
            _ if known > 0.0 => rows(known),
            _ => FIRST,
        };
        self.read(text, history, &mut || true)?;
        // The first rows may show that there is time to read the tokens before them.
        let is_cut = self.texts[text].from > 0;
        if known == 0.0 && is_cut && self.row_time > 0.0 && rows(self.row_time) >= 2 * FIRST {
            self.texts[text].window = rows(self.row_time);
            self.timeline.adopt(&[(text, &[])])?;
            self.read(text, history, &mut || true)?;
        }
        Ok(())
    }

    fn work_done(&self) -> [u64; 2] {
        [self.passes, self.rows]
    }

    fn note(&self) -> Option<String> {
        let is_full = |text| self.timeline.position(text) + 1 >= self.engine().context(text);
        let full = self.engine().info().reach.is_none() && (0..self.texts.len()).any(is_full);
        full.then(|| "the draft model's context is full".into())
    }
}

/// Returns the same texts without nodes in a tree, so that all are restarted.
fn all_fresh<'h>(texts: &[TextStart<'h>]) -> Vec<TextStart<'h>> {
    texts.iter().map(|(text, history, _)| (*text, *history, None)).collect()
}

/// How a text starts a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// It continues the tree of the previous round.
    GoesOn,
    /// Its newest token is queued as this node and must be evaluated first.
    Waits(u32),
    /// It cannot use the model.
    Cannot,
}
