//! Reuse of prefixes that were read before, from memory and disk.

use super::growth::GrowingText;
use super::prefixes::{common, whole_pages};
use super::{PromptCache, Scheduler};
use anyhow::Result;

impl<'a> Scheduler<'a> {
    /// Keeps prefixes of texts in unused pages.
    pub fn keeping_prefixes(mut self) -> Self {
        self.prefixes.start();
        self
    }

    /// Also keeps prompts on disk.
    pub fn with_prompt_cache(mut self, prompts: Option<&'a mut PromptCache>) -> Self {
        self.prompts = prompts;
        self
    }

    /// Returns the prompt cache on disk, if there is one.
    pub fn prompt_cache(&mut self) -> Option<&mut PromptCache> {
        self.prompts.as_deref_mut()
    }

    /// Writes one page to the prompt cache. Returns whether there was one to write.
    pub fn write_page(&mut self) -> Result<bool> {
        self.prompts.as_mut().map_or(Ok(false), |prompts| prompts.write(self.target))
    }
}

impl Scheduler<'_> {
    /// Returns whether a text shares a longer prefix with a text that is being read than its
    /// sequence holds. It then waits, so that the shared part is read only once.
    fn waits(&self, sequence: usize) -> bool {
        let past = self.texts[sequence].as_ref().map_or(&[][..], GrowingText::past);
        let held = self.target.position(sequence);
        let reads_more = |other: &usize| {
            let others = self.texts[*other].as_ref().map_or(&[][..], GrowingText::past);
            let shared = whole_pages(common(others, past));
            shared > held && self.target.position(*other) < shared
        };
        self.prefixes.is_on() && self.sequences_where(GrowingText::is_read).iter().any(reads_more)
    }

    /// Loads the longest prefix of an admitted text from memory or disk into its sequence. Returns
    /// whether the rest can be read now.
    pub(super) fn find_prefix(&mut self, sequence: usize) -> Result<bool> {
        let text = self.texts[sequence].as_ref().expect("it is admitted");
        if text.request.lacks_scores() {
            // Its whole prompt must be read.
            self.target.clear(sequence)?;
            return Ok(true);
        }
        let past = text.past();
        match self.prompts.as_ref().and_then(|prompts| prompts.reads()) {
            // Only one prefix is copied at a time, possibly that of this text.
            Some(other) if other != sequence => return Ok(false),
            Some(_) => {}
            None => {
                self.target.adopt(&[(sequence, past)])?;
                if self.waits(sequence) {
                    return Ok(false);
                }
                self.prefixes.resume(self.target, sequence, past);
                let Some(prompts) = &mut self.prompts else { return Ok(true) };
                let Some(pages) = prompts.begin(self.target, sequence, past)? else {
                    return Ok(true);
                };
                self.prefixes.make_room(self.target, pages, |s| self.texts[s].is_none())?;
            }
        }
        self.prompts.as_mut().map_or(Ok(true), |prompts| prompts.read(self.target))
    }

    /// Keeps the first tokens of a sequence in memory and on disk.
    pub(super) fn keep(&mut self, sequence: usize, tokens: usize) {
        self.prefixes.retain(self.target, sequence, tokens);
        if let Some(prompts) = &mut self.prompts {
            prompts.store(self.target, sequence, tokens);
        }
    }
}
