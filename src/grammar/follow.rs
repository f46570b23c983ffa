//! A grammar followed along a text and the guesses that may continue it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use llguidance::Matcher;

use crate::sampler::{Mask, Rule};
use crate::tensor::Token;

/// A mask that takes longer is worth a thread of its own.
const LONG: Duration = Duration::from_millis(5);

/// One text under a grammar. Only the tokens decide what may follow them; states are kept so that
/// none is computed twice.
pub struct Follow {
    text: Arc<Text>,
}

struct Text {
    start: Arc<Matcher>,
    stops: Vec<Token>,
    /// Tokens before the text begins.
    prompt: usize,
    states: Mutex<States>,
    /// A mask has taken long: from then on they are made by threads, one at a time.
    slow: AtomicBool,
    at_work: AtomicBool,
}

/// States behind `base`, which is a text's beginning: a tree, parents before children.
#[derive(Default)]
struct States {
    base: Vec<Token>,
    nodes: Vec<State>,
}

struct State {
    token: Token,
    parent: u32,
    /// `None` where the grammar forbids what led here, or the text has ended.
    matcher: Option<Matcher>,
    mask: Result<Arc<Mask>, String>,
    /// The text may end here.
    complete: bool,
}

impl Follow {
    pub(super) fn new(start: Arc<Matcher>, stops: Vec<Token>, prompt: usize) -> Self {
        let (states, slow, at_work) = Default::default();
        Follow { text: Arc::new(Text { start, stops, prompt, states, slow, at_work }) }
    }

    /// As if a mask had taken long.
    #[cfg(test)]
    pub(super) fn slowed(self) -> Self {
        self.text.slow.store(true, Ordering::Relaxed);
        self
    }

    /// Whether the text behind the prompt may end here.
    pub fn is_complete(&self, history: &[Token]) -> bool {
        self.text.is_complete(history)
    }
}

impl Text {
    fn is_complete(&self, history: &[Token]) -> bool {
        let Some(text) = history.get(self.prompt..) else { return false };
        let mut states = self.states();
        let at = self.find(&mut states, text);
        states.nodes[at].complete
    }

    fn states(&self) -> MutexGuard<'_, States> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What may follow a state. Asked once, when it comes to be: a state never depends on who
    /// looked at the one before.
    fn look(&self, token: Token, parent: u32, mut matcher: Matcher) -> State {
        let begun = Instant::now();
        let mut complete = matcher.is_accepting().unwrap_or(false);
        let mask = if matcher.is_error() {
            // What was guessed here is forbidden.
            Ok(Arc::new(Mask::default()))
        } else {
            complete |= matcher.is_stopped();
            let mask =
                matcher.compute_mask_or_eos().map(|mask| Arc::new(self.mask_of(mask.into())));
            mask.map_err(|e| super::brief(&e))
        };
        if begun.elapsed() > LONG {
            self.slow.store(true, Ordering::Relaxed);
        }
        let matcher = Some(matcher).filter(|matcher| !matcher.is_error());
        State { token, parent, matcher, mask, complete }
    }

    fn mask_of(&self, words: Vec<u32>) -> Mask {
        let allowed: u32 = words.iter().map(|bits| bits.count_ones()).sum();
        let stops = self.stops.iter().filter(|&&stop| {
            words.get(stop as usize / 32).is_some_and(|w| w >> (stop % 32) & 1 == 1)
        });
        let ends = allowed > 0 && stops.count() == allowed as usize;
        Mask::new(words, ends)
    }

    /// What a token makes of a state. Behind the end of a text there is only its end.
    fn step(&self, states: &States, at: usize, token: Token) -> State {
        let parent = at as u32;
        if self.stops.contains(&token) && states.nodes[at].complete {
            let words = self.stops.iter().max().map_or(0, |last| *last as usize / 32 + 1);
            let mut end = vec![0; words];
            self.stops.iter().for_each(|stop| end[*stop as usize / 32] |= 1 << (stop % 32));
            return State {
                token,
                parent,
                matcher: None,
                mask: Ok(Arc::new(self.mask_of(end))),
                complete: true,
            };
        }
        match &states.nodes[at].matcher {
            Some(before) => {
                let mut matcher = before.clone();
                // A refusal stays in the matcher.
                let _ = matcher.consume_token(token);
                self.look(token, parent, matcher)
            }
            None => State {
                token,
                parent,
                matcher: None,
                mask: Ok(Arc::new(Mask::default())),
                complete: false,
            },
        }
    }

    /// The state behind `text`, made if need be.
    fn find(&self, states: &mut States, text: &[Token]) -> usize {
        if states.nodes.is_empty() || !text.starts_with(&states.base) {
            // Another text than before: followed from its beginning.
            *states =
                States { base: Vec::new(), nodes: vec![self.look(0, 0, (*self.start).clone())] };
            for &token in text {
                let next = self.step(states, 0, token);
                states.base.push(token);
                states.nodes = vec![State { parent: 0, ..next }];
            }
        }
        let mut at = 0;
        for &token in &text[states.base.len()..] {
            at = states.child(at, token).unwrap_or_else(|| {
                let next = self.step(states, at, token);
                states.nodes.push(next);
                states.nodes.len() - 1
            });
        }
        at
    }
}

impl States {
    fn child(&self, at: usize, token: Token) -> Option<usize> {
        (at + 1..self.nodes.len())
            .find(|&i| self.nodes[i].parent as usize == at && self.nodes[i].token == token)
    }

    /// Whether the state behind `text` is there.
    fn has(&self, text: &[Token]) -> bool {
        let newer = text.strip_prefix(&self.base[..]).filter(|_| !self.nodes.is_empty());
        newer.is_some_and(|newer| {
            newer.iter().try_fold(0, |at, &token| self.child(at, token)).is_some()
        })
    }
}

/// Says at its end that a thread is not at work any more, also where that panics.
struct AtWork(Arc<Text>);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.at_work.store(false, Ordering::Release);
    }
}

impl Rule for Follow {
    fn mask(&self, history: &[Token]) -> Result<Arc<Mask>> {
        self.text.mask(history)
    }

    fn settle(&self, history: &[Token]) {
        self.text.settle(history);
    }

    fn is_slow(&self) -> bool {
        self.text.slow.load(Ordering::Relaxed)
    }

    fn is_ready(&self, history: &[Token]) -> bool {
        let Some(text) = history.get(self.text.prompt..).filter(|_| self.is_slow()) else {
            return true;
        };
        if self.text.at_work.load(Ordering::Acquire) {
            return false;
        }
        match self.text.states.try_lock() {
            Ok(states) if states.has(text) => return true,
            Err(TryLockError::WouldBlock) => return false,
            _ => {}
        }
        self.text.at_work.store(true, Ordering::Release);
        let (work, history) = (AtWork(self.text.clone()), history.to_vec());
        let work = move || {
            // What is wrong is kept with the state, for who asks for it.
            let _ = work.0.mask(&history);
        };
        // Without a thread the caller has to wait.
        std::thread::Builder::new().name("grammar".into()).spawn(work).is_err()
    }
}

impl Text {
    fn mask(&self, history: &[Token]) -> Result<Arc<Mask>> {
        ensure!(
            history.len() >= self.prompt,
            "a grammar begins behind {} tokens, and there are {}",
            self.prompt,
            history.len()
        );
        let mut states = self.states();
        let at = self.find(&mut states, &history[self.prompt..]);
        states.nodes[at]
            .mask
            .clone()
            .map_err(|why| anyhow!(why).context("the grammar cannot go on"))
    }

    fn settle(&self, history: &[Token]) {
        let Some(text) = history.get(self.prompt..) else { return };
        let mut states = self.states();
        let root = self.find(&mut states, text);
        if root == 0 {
            return;
        }
        // Keeps what is below the new root.
        let mut place: Vec<Option<u32>> = vec![None; states.nodes.len()];
        let mut kept: Vec<State> = Vec::new();
        for (i, node) in std::mem::take(&mut states.nodes).into_iter().enumerate().skip(root) {
            let parent = if i == root { Some(0) } else { place[node.parent as usize] };
            if let Some(parent) = parent {
                place[i] = Some(kept.len() as u32);
                kept.push(State { parent, ..node });
            }
        }
        states.nodes = kept;
        states.base = text.to_vec();
    }
}

impl fmt::Debug for Follow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follow").field("prompt", &self.text.prompt).finish_non_exhaustive()
    }
}
