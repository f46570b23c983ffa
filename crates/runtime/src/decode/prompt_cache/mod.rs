//! Prompt cache on disk: keys and values of prompts from earlier runs.
//!
//! After a prompt is read, its whole pages are written to files, one after each pass. A later text
//! with the same beginning copies the pages back, as far as they extend the prefix in memory.
//! Sliding-window layers only need the last pages of a prefix. Their pages are written for the last
//! two page ends of a prompt, and where a later prompt diverges from an earlier one.
//!
//! The cache changes no text. The name of a file hashes everything that determines a page's bytes:
//! the engine, all tokens and the digests of images. An unusable file is ignored, with at most one
//! note.

pub mod files;

pub use files::PageDirectory;

use anyhow::Result;
use files::{HEAD, PageKey, StoredPage, keys};
use gemma_base::kv::PAGE;
use gemma_base::tensor::Token;
use gemma_base::util::units::bytes;
use gemma_model::engine::{EngineInfo, PageCopy, PagedLayers, Prefix, Timeline};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that are read between two passes; at least one page is read.
const READ_AT_ONCE: usize = 64 << 20;
/// Most prompts queued for writing.
const MOST_WRITINGS: usize = 16;

/// A page of a text, for one group of layers that keep the same pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageId {
    pub key: PageKey,
    /// Index of the layer group in [`EngineInfo::paged`].
    pub layers: usize,
    /// Index of the page in the text.
    pub nth: usize,
}

/// A prefix that is being copied from files to the KV cache.
struct PageReading {
    sequence: usize,
    prefix: Prefix,
    /// Pages to read, in reverse order.
    pages: Vec<PageId>,
}

/// Pages of a prompt that are queued for writing.
struct PageWriting {
    /// Prefixes that hold them.
    prefixes: Vec<Prefix>,
    /// Pages to write, in reverse order; pages of windows are written before those of global
    /// layers.
    pages: Vec<PageId>,
}

/// The prompt cache of one engine.
pub struct PromptCache {
    directory: PageDirectory,
    /// Hash of everything that determines a page's bytes, except the tokens.
    engine: [u8; 32],
    reading: Option<PageReading>,
    writings: VecDeque<PageWriting>,
    /// Set after a damaged file could not be removed.
    is_off: bool,
    note: Option<String>,
    is_noted: bool,
}

impl PromptCache {
    /// Creates the cache of an engine. `engine` is a hash of everything that affects its results.
    pub fn new(directory: PageDirectory, engine: [u8; 32]) -> PromptCache {
        PromptCache {
            directory,
            engine,
            reading: None,
            writings: VecDeque::new(),
            is_off: false,
            note: None,
            is_noted: false,
        }
    }

    /// Returns a note about a problem, once.
    pub fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    fn say(&mut self, note: String) {
        if !std::mem::replace(&mut self.is_noted, true) {
            self.note = Some(note);
        }
    }

    /// Returns the sequence with a prefix that is being copied from files.
    pub fn reads(&self) -> Option<usize> {
        self.reading.as_ref().map(|reading| reading.sequence)
    }

    /// Starts to copy a prefix of a text from files, if they extend the sequence by at least one
    /// page. Clears the sequence. Returns the number of pages that will be copied.
    pub fn begin(
        &mut self,
        target: &mut Timeline,
        sequence: usize,
        past: &[Token],
    ) -> Result<Option<usize>> {
        let paged = target.engine().info().paged.clone();
        let held = target.position(sequence) / PAGE;
        if self.is_off || paged.is_empty() || past.len() / PAGE <= held {
            return Ok(None);
        }
        let base = Some(held).filter(|held| *held > 0);
        let base = base.and_then(|held| target.retain(sequence, held * PAGE));
        let kept = base.as_ref().map_or(0, |_| held);
        let keys = keys(self.engine, past, target.engine().info().images.as_deref());
        let Some((end, pages)) = self.longest(&paged, &keys, held, kept) else { return Ok(None) };
        target.clear(sequence)?;
        let tokens = &past[..end * PAGE];
        let prefix = match base {
            Some(base) => base.extended_to(tokens),
            None => Prefix::of_tokens(tokens),
        };
        self.reading = Some(PageReading { sequence, prefix, pages });
        Ok(Some(end - kept))
    }

    /// Returns the end of the longest prefix that files and the `kept` pages in memory cover, and
    /// the pages to read for it. Requires more than `held` pages.
    fn longest(
        &self,
        paged: &[PagedLayers],
        keys: &[PageKey],
        held: usize,
        kept: usize,
    ) -> Option<(usize, Vec<PageId>)> {
        let page = |layers, nth| PageId { key: keys[nth], layers, nth };
        let holds = |layers, nth| nth >= kept && self.directory.holds(&page(layers, nth));
        let there: Vec<Vec<bool>> = (0..paged.len())
            .map(|layers| (0..keys.len()).map(|nth| holds(layers, nth)).collect())
            .collect();
        let needed = |layers: usize, end: usize| {
            let first = paged[layers].pages.first_visible(end * PAGE) / PAGE;
            first.max(kept).min(end)..end
        };
        let is_there =
            |end: &usize| (0..paged.len()).all(|l| needed(l, *end).all(|nth| there[l][nth]));
        let end = (held + 1..=keys.len()).rev().find(is_there)?;
        let of_layers = |layers| needed(layers, end).rev().map(move |nth| page(layers, nth));
        Some((end, (0..paged.len()).flat_map(of_layers).collect()))
    }

    /// Copies more pages of the current prefix.
    ///
    /// Returns whether the rest of the text can be read now: the prefix is complete, or there is no
    /// room for it. After an unusable file, another prefix may be started.
    pub fn read(&mut self, target: &mut Timeline) -> Result<bool> {
        let Some(mut reading) = self.reading.take() else { return Ok(true) };
        let mut copied = 0;
        while copied < READ_AT_ONCE {
            let Some(page) = reading.pages.pop() else {
                let tokens = reading.prefix.tokens().len();
                target.resume(reading.sequence, &reading.prefix, tokens)?;
                return Ok(true);
            };
            let size = target.engine().info().paged[page.layers].page_bytes;
            match self.directory.read(&page, size) {
                Ok(StoredPage::Whole(file)) => {
                    self.directory.touch(&page);
                    copied += size;
                    let (content, prefix) = (PageCopy::In(&file[HEAD..]), &mut reading.prefix);
                    if !target.copy_page(prefix, page.layers, page.nth, content)? {
                        return Ok(true);
                    }
                }
                Ok(StoredPage::Missing) => return Ok(false),
                Ok(StoredPage::Damaged) => {
                    // The remaining files are removed too, so that they are written again.
                    reading.pages.iter().for_each(|page| self.directory.remove(page));
                    self.say("damaged files of the prompt cache are removed".into());
                    return Ok(false);
                }
                Err(error) => {
                    self.say(format!("the prompt cache cannot be used: {error}"));
                    self.is_off = true;
                    return Ok(false);
                }
            }
        }
        self.reading = Some(reading);
        Ok(false)
    }

    /// Abandons the copy into a sequence.
    pub fn cancel(&mut self, sequence: usize) {
        self.reading.take_if(|reading| reading.sequence == sequence);
    }

    /// Returns how many tokens of `past` were read before, in whole pages, even if windows are
    /// missing.
    pub fn fork(&self, info: &EngineInfo, past: &[Token]) -> usize {
        if info.paged.first().is_none_or(|layers| layers.pages.window.is_some()) {
            return 0;
        }
        let page = |(nth, key)| PageId { key, layers: 0, nth };
        let pages =
            keys(self.engine, past, info.images.as_deref()).into_iter().enumerate().map(page);
        pages.take_while(|page| self.directory.holds(page)).count() * PAGE
    }

    /// Queues the pages of a sequence's first `tokens` tokens that have no files.
    pub fn store(&mut self, target: &mut Timeline, sequence: usize, tokens: usize) {
        let (paged, end) = (target.engine().info().paged.clone(), tokens / PAGE);
        if end == 0 || self.is_off {
            return;
        }
        let (engine, tokens) = (target.engine(), end * PAGE);
        let images = engine.info().images.as_deref();
        let keys = keys(self.engine, &engine.cached(sequence).tokens[..tokens], images);
        let end = keys.len();
        if end == 0 {
            return;
        }
        let (mut pages, mut all, mut missing) = (Vec::new(), 0, 0);
        for (layers, PagedLayers { pages: places, page_bytes }) in paged.iter().enumerate() {
            let size = (HEAD + page_bytes) as u64;
            for nth in places.first_visible((end - 1) * PAGE) / PAGE..end {
                let page = PageId { key: keys[nth], layers, nth };
                all += size;
                if !self.directory.touch(&page) {
                    missing += size;
                    pages.push(page);
                }
            }
        }
        let most = self.directory.most;
        if all > most {
            let (all, most) = (bytes(all), bytes(most));
            self.say(format!("a prompt takes {all} in the prompt cache, which may have {most}"));
            return;
        }
        if pages.is_empty() {
            return;
        }
        self.directory.make_room(missing);
        let ends = [end, end - 1].into_iter().filter(|end| *end > 0);
        let prefixes = ends.filter_map(|end| target.retain(sequence, end * PAGE)).collect();
        if self.writings.len() == MOST_WRITINGS {
            self.writings.pop_front();
        }
        self.writings.push_back(PageWriting { prefixes, pages });
        self.let_go();
    }

    /// Writes one queued page. Returns whether there was one.
    pub fn write(&mut self, target: &mut Timeline) -> Result<bool> {
        let Some(writing) = self.writings.front_mut() else { return Ok(false) };
        let page = writing.pages.pop().expect("no writing is kept without pages");
        let mut file = vec![0; HEAD];
        // Another text or process may have written it in the meantime.
        if !self.directory.holds(&page) {
            for prefix in &mut writing.prefixes {
                if target.copy_page(prefix, page.layers, page.nth, PageCopy::Out(&mut file))? {
                    break;
                }
            }
        }
        if file.len() > HEAD
            && let Err(error) = self.directory.write(&page, &mut file)
        {
            self.writings.pop_front();
            self.say(format!("the prompt cache is not written: {error}"));
        }
        self.let_go();
        Ok(true)
    }

    /// Writes all queued pages, unless interrupted.
    pub fn finish(&mut self, target: &mut Timeline, interrupt: &AtomicBool) -> Result<()> {
        while !interrupt.load(Ordering::Relaxed) && self.write(target)? {}
        self.writings.clear();
        Ok(())
    }

    /// Releases queued pages that sequences need; pages of windows are written first. Returns
    /// whether there were any.
    pub fn release(&mut self, target: &mut Timeline) -> Result<bool> {
        match self.writings.front().and_then(|writing| writing.pages.last()) {
            Some(page) if page.layers > 0 => self.write(target),
            Some(_) => Ok(self.writings.pop_front().is_some()),
            None => Ok(false),
        }
    }

    /// Drops prefixes with no pages left to write.
    fn let_go(&mut self) {
        self.writings.retain_mut(|writing| {
            let Some(next) = writing.pages.last() else { return false };
            writing.prefixes.iter_mut().for_each(|prefix| prefix.forget_above(next.layers));
            true
        });
    }
}
