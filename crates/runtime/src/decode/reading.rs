//! Plans each pass: the part of each prompt to read, and the texts to generate.

use super::growth::GrowingText;
use super::{Request, Scheduler};
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::is_place;
use gemma_model::engine::TokenTree;

/// Most prompt rows in a pass that also generates, so that generating texts are not delayed.
const PROMPT_ROWS: usize = 64;
/// Most prompt rows with scores in a pass: the logits of each use up to 1 MiB.
const SCORED_ROWS: usize = 64;

/// Rows of the prompt parts in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    pub rows: usize,
    /// Set if they belong to an image that leaves no room for other texts.
    pub alone: bool,
}

impl Scheduler<'_> {
    /// Fails for a request with images that the target cannot read.
    pub(super) fn check_images(&self, request: &Request) -> Result<()> {
        if !request.history.iter().any(|item| is_place(*item)) {
            return Ok(());
        }
        let Some(images) = &self.target.engine().info().images else {
            return Err(Fault::usage("the prompt has an image, but the model accepts none").into());
        };
        if request.scored.is_some() {
            let what = "the tokens of a prompt with images have no log-probabilities";
            return Err(Fault::usage(what).help("request only those of the answer").into());
        }
        images.check(&request.history)
    }

    /// Decides how many tokens of each prompt this pass reads.
    ///
    /// Prompts have equal shares; unused rows go to the next prompt. Images are not cut. An image
    /// larger than a share is read without other prompts, and without generating texts if it leaves
    /// no rows for them.
    pub(super) fn plan_reading(&mut self) -> Planned {
        let growing = self.texts.iter().flatten().filter(|text| text.grows()).count();
        let most = self.target.engine().info().max_rows - growing;
        let all = if growing > 0 { most.min(PROMPT_ROWS) } else { most };
        let reading = self.sequences_where(GrowingText::is_read);
        if let Some((sequence, rows)) = self.large_image(&reading, all) {
            for &other in &reading {
                let position = self.target.position(other);
                let text = self.texts[other].as_mut().expect("it is being read");
                let taken = if other == sequence { rows } else { 0 };
                text.chunk = TokenTree::chain(&text.past()[position..][..taken]);
            }
            return Planned { rows, alone: rows > most };
        }
        let (mut rows, mut scored) = (all, SCORED_ROWS);
        for (i, &sequence) in reading.iter().enumerate() {
            let text = self.texts[sequence].as_mut().expect("it is being read");
            let rest = &text.past()[self.target.position(sequence)..];
            let share = (rows / (reading.len() - i)).max(rows.min(1));
            let lacks_scores = text.request.lacks_scores();
            let taken = match lacks_scores {
                true => rest.len().min(share).min(scored),
                // A larger image waits for its turn.
                false => Some(self.target.fitting(rest, share)).filter(|n| *n <= rows).unwrap_or(0),
            };
            text.chunk = TokenTree::chain(&rest[..taken]);
            rows -= taken;
            scored -= if lacks_scores { taken } else { 0 };
        }
        Planned { rows: all - rows, alone: false }
    }

    /// Returns a sequence with a prompt that continues with an image of more rows than its share of
    /// `rows`, and the rows needed. If other prompts are waiting too, they get every other pass.
    fn large_image(&self, reading: &[usize], rows: usize) -> Option<(usize, usize)> {
        self.target.engine().info().images.as_ref()?;
        let share = (rows / reading.len().max(1)).max(1);
        let next = |sequence: &usize| {
            let past = self.texts[*sequence].as_ref()?.past();
            let taken = self.target.fitting(&past[self.target.position(*sequence)..], share);
            (taken > share).then_some((*sequence, taken))
        };
        let large: Vec<(usize, usize)> = reading.iter().filter_map(next).collect();
        let (turn, has_others) = (self.rounds as usize, large.len() < reading.len());
        if large.is_empty() || has_others && turn.is_multiple_of(2) {
            return None;
        }
        Some(large[turn / 2 % large.len()])
    }

    /// Returns the sequences of texts to generate in this pass; none if an image is `alone` in it.
    /// Texts with a grammar mask that is not ready are left out.
    pub(super) fn find_growing(&mut self, alone: bool) -> Vec<usize> {
        for text in self.texts.iter_mut().flatten().filter(|text| text.grows()) {
            text.rests = alone || !text.request.sampler.is_ready(&text.request.history);
            if text.rests {
                // The next pass will have no scores of its tree.
                text.scored_at = None;
            }
        }
        self.sequences_where(GrowingText::takes_part)
    }
}
