//! States of a grammar along a text and its draft trees.

use std::fmt;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::Grammar;
use super::machine::{MachineState, StateQuery};
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use gemma_model::sampler::{Mask, TokenRule};

/// Processor time of a mask above which a background thread computes a text's masks.
const LONG: Duration = Duration::from_millis(5);

/// The token rule of one text under a grammar. A mask depends only on the tokens before it; states
/// are cached.
pub struct GrammarRule {
    text: Arc<ConstrainedText>,
}

struct ConstrainedText {
    grammar: Grammar,
    /// Number of tokens before the constrained text.
    prompt: usize,
    /// Tokens around the thought that precedes the text, if there is one.
    thought: Option<(Token, Token)>,
    states: Mutex<States>,
    /// Set after a slow mask. From then on, background threads compute the masks, one at a time.
    slow: AtomicBool,
    at_work: AtomicBool,
    /// Set if a thread failed to compute a mask. The next request for the mask returns the error.
    failed: AtomicBool,
}

/// States after `base`, the beginning of a text. They form a tree, parents before children.
#[derive(Default)]
struct States {
    /// Run of the grammar's machine that the states belong to.
    run: u64,
    base: Vec<Token>,
    nodes: Vec<MaskNode>,
}

struct MaskNode {
    token: Token,
    parent: u32,
    /// The machine's number of the state, see [`MachineState::number`].
    number: Option<u64>,
    mask: Result<Arc<Mask>, String>,
    is_complete: bool,
}

impl GrammarRule {
    pub(super) fn new(grammar: Grammar, prompt: usize, thought: Option<(Token, Token)>) -> Self {
        let (states, slow, at_work, failed) = Default::default();
        let text = ConstrainedText { grammar, prompt, thought, states, slow, at_work, failed };
        GrammarRule { text: Arc::new(text) }
    }

    /// Behaves as after a slow mask.
    #[cfg(test)]
    pub(super) fn slowed(self) -> Self {
        self.text.slow.store(true, Ordering::Relaxed);
        self
    }

    /// Returns the tokens that may follow `history`.
    #[cfg(test)]
    pub(super) fn mask(&self, history: &[Token]) -> Result<Arc<Mask>> {
        self.text.mask(history)
    }

    /// Returns whether the text after the prompt may end here.
    pub fn is_complete(&self, history: &[Token]) -> bool {
        self.text.is_complete(history)
    }
}

impl ConstrainedText {
    /// Returns the constrained text; `None` before it begins.
    fn constrained<'h>(&self, history: &'h [Token]) -> Option<&'h [Token]> {
        let text = history.get(self.prompt..)?;
        match self.thought {
            None => Some(text),
            Some((_, end)) => Some(&text[text.iter().position(|token| *token == end)? + 1..]),
        }
    }

    /// Returns the tokens allowed before the constrained text. First only the beginning of the
    /// thought is allowed, then all tokens except those that end a text.
    fn thought_mask(&self, is_begun: bool) -> Mask {
        let words = self.grammar.tokens().div_ceil(32);
        let mut words = vec![if is_begun { u32::MAX } else { 0 }; words];
        let begin = self.thought.as_ref().map_or(&[][..], |(begin, _)| slice::from_ref(begin));
        let changed = if is_begun { self.grammar.stops() } else { begin };
        for token in changed {
            // A file may name a stop token that its tokenizer does not have.
            if let Some(word) = words.get_mut(*token as usize / 32) {
                *word ^= 1 << (token % 32);
            }
        }
        Mask::new(words, false)
    }

    fn is_complete(&self, history: &[Token]) -> bool {
        let Some(text) = self.constrained(history) else { return false };
        let mut states = self.states();
        self.find(&mut states, text).is_ok_and(|at| states.nodes[at].is_complete)
    }

    fn states(&self) -> MutexGuard<'_, States> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a query to the grammar's machine. Returns `None` if the machine has dropped the state.
    fn ask(&self, ask: StateQuery, states: &mut States) -> Result<Option<MachineState>> {
        let answer = self.grammar.ask(ask, states.run)?;
        Ok(answer.map(|(state, run)| {
            if state.time > LONG {
                self.slow.store(true, Ordering::Relaxed);
            }
            states.run = run;
            state
        }))
    }

    /// Restarts the tree of states at `base`.
    fn restart(&self, states: &mut States, base: &[Token]) -> Result<()> {
        self.drop_nodes(states.run, &std::mem::take(&mut states.nodes));
        let root =
            self.ask(StateQuery::Walk(base.to_vec()), states)?.expect("it is about no state");
        states.base = base.to_vec();
        states.nodes.push(MaskNode::new(0, 0, root));
        Ok(())
    }

    /// Returns the index of the state after `text`, computing it if necessary.
    fn find(&self, states: &mut States, text: &[Token]) -> Result<usize> {
        if states.nodes.is_empty() || !text.starts_with(&states.base) {
            // A different text is followed from its beginning.
            self.restart(states, text)?;
        }
        let mut at = 0;
        for &token in &text[states.base.len()..] {
            at = match states.child(at, token) {
                Some(child) => child,
                None => match self.step(states, at, token)? {
                    Some(state) => {
                        states.nodes.push(MaskNode::new(token, at as u32, state));
                        states.nodes.len() - 1
                    }
                    // The machine was stopped in favour of others, and restarted.
                    None => {
                        self.restart(states, text)?;
                        return Ok(0);
                    }
                },
            };
        }
        Ok(at)
    }

    /// Computes the state after one more token.
    fn step(&self, states: &mut States, at: usize, token: Token) -> Result<Option<MachineState>> {
        let MaskNode { number, is_complete, mask, .. } = &states.nodes[at];
        match *number {
            Some(from) => self.ask(StateQuery::Step { from, token }, states),
            // Only stop tokens may follow the end of a text.
            None if *is_complete && self.grammar.stops().contains(&token) => {
                let mask = mask.clone().map(|mask| (*mask).clone());
                Ok(Some(MachineState { mask, is_complete: true, ..MachineState::forbidden() }))
            }
            None => Ok(Some(MachineState::forbidden())),
        }
    }

    fn drop_nodes(&self, run: u64, nodes: &[MaskNode]) {
        self.grammar.forget(run, nodes.iter().filter_map(|node| node.number));
    }
}

impl Drop for ConstrainedText {
    fn drop(&mut self) {
        let states = std::mem::take(self.states.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.drop_nodes(states.run, &states.nodes);
    }
}

impl MaskNode {
    fn new(token: Token, parent: u32, state: MachineState) -> MaskNode {
        let MachineState { number, mask, is_complete, time: _ } = state;
        MaskNode { token, parent, number, mask: mask.map(Arc::new), is_complete }
    }
}

impl States {
    fn child(&self, at: usize, token: Token) -> Option<usize> {
        (at + 1..self.nodes.len())
            .find(|&i| self.nodes[i].parent as usize == at && self.nodes[i].token == token)
    }

    /// Returns whether the state after `text` is cached.
    fn has(&self, text: &[Token]) -> bool {
        let newer = text.strip_prefix(&self.base[..]).filter(|_| !self.nodes.is_empty());
        newer.is_some_and(|newer| {
            newer.iter().try_fold(0, |at, &token| self.child(at, token)).is_some()
        })
    }
}

/// Clears `at_work` when dropped, also after a panic.
struct AtWork(Arc<ConstrainedText>);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.at_work.store(false, Ordering::Release);
    }
}

impl TokenRule for GrammarRule {
    fn mask(&self, history: &[Token]) -> Result<Option<Arc<Mask>>> {
        self.text.mask(history).map(Some)
    }

    fn settle(&self, history: &[Token]) {
        self.text.settle(history);
    }

    fn is_slow(&self) -> bool {
        self.text.slow.load(Ordering::Relaxed)
    }

    fn is_ready(&self, history: &[Token]) -> bool {
        let Some(text) = self.text.constrained(history).filter(|_| self.is_slow()) else {
            return true;
        };
        if self.text.at_work.load(Ordering::Acquire) {
            return false;
        }
        if self.text.failed.load(Ordering::Acquire) {
            return true;
        }
        match self.text.states.try_lock() {
            Ok(states) if states.has(text) => return true,
            Err(TryLockError::WouldBlock) => return false,
            _ => {}
        }
        self.text.at_work.store(true, Ordering::Release);
        let (work, history) = (AtWork(self.text.clone()), history.to_vec());
        let work = move || {
            let failed = work.0.mask(&history).is_err();
            work.0.failed.store(failed, Ordering::Release);
        };
        // If no thread can be started, the caller computes the mask itself.
        std::thread::Builder::new().name("grammar".into()).spawn(work).is_err()
    }
}

impl ConstrainedText {
    fn mask(&self, history: &[Token]) -> Result<Arc<Mask>> {
        ensure!(
            history.len() >= self.prompt,
            "a grammar begins after {} tokens, but there are only {}",
            self.prompt,
            history.len()
        );
        let Some(text) = self.constrained(history) else {
            return Ok(Arc::new(self.thought_mask(history.len() > self.prompt)));
        };
        let mut states = self.states();
        let at = self.find(&mut states, text)?;
        states.nodes[at].mask.clone().map_err(|why| {
            let what = format!("the grammar is too complex to continue: {why}");
            Fault::usage(what).help("use fewer optional parts and repetitions").into()
        })
    }

    fn settle(&self, history: &[Token]) {
        let Some(text) = self.constrained(history) else { return };
        let mut states = self.states();
        let Ok(root @ 1..) = self.find(&mut states, text) else { return };
        // Keeps the descendants of the new root.
        let mut place: Vec<Option<u32>> = vec![None; states.nodes.len()];
        let (mut kept, mut dropped) = (Vec::new(), Vec::new());
        for (i, node) in std::mem::take(&mut states.nodes).into_iter().enumerate() {
            let parent = match i {
                _ if i < root => None,
                _ if i == root => Some(0),
                _ => place[node.parent as usize],
            };
            match parent {
                Some(parent) => {
                    place[i] = Some(kept.len() as u32);
                    kept.push(MaskNode { parent, ..node });
                }
                None => dropped.push(node),
            }
        }
        self.drop_nodes(states.run, &dropped);
        states.nodes = kept;
        states.base = text.to_vec();
    }
}

impl fmt::Debug for GrammarRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follow").field("prompt", &self.text.prompt).finish_non_exhaustive()
    }
}
