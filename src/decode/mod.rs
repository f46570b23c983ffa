//! Floor 5: the loop. Draft, score, verify, and let the history grow; plain decoding is the same
//! loop with `NoDraft`.

pub mod parallel;
pub mod stats;
pub mod text;
pub mod verify;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;

pub use parallel::{Admitted, Parallel};
pub use stats::{Stats, Tally};
pub use verify::{Verdict, verify};

use crate::draft::{
    DraftContext, Drafter, Figures, Outcome, Pass, Policy, Proposal, Round, Verified, forced,
    verified,
};
use crate::engine::{Rows, Scores, Timeline, TokenTree};
use crate::error::{Fault, Kind};
use crate::sampler::Sampler;
use crate::tensor::Token;

/// Where generation ends by itself.
pub struct Limits<'a> {
    pub max_tokens: usize,
    /// Tokens that end the text; they are not part of it.
    pub stop_ids: &'a [Token],
    /// Looked at between prefill chunks and between rounds.
    pub interrupt: &'a AtomicBool,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The target picked this stop id.
    Token(Token),
    /// Enough tokens, or the context is full.
    Length,
    /// The receiver of the events said so.
    Receiver,
    Interrupt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Tokens of the prompt that are cached, of how many.
    Prefill(usize, usize),
    /// The text grew by this token.
    Token(Token),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Continue,
    Stop,
}

/// Grows `history` until something stops it. For one seed the text is the same whatever the
/// drafter proposes and the policy takes of it.
///
/// The target's cache may hold anything: it is brought in line with `history` first. An empty
/// history is an error, and so is one that leaves no room in the context.
pub fn generate(
    target: &mut Timeline,
    drafter: &mut dyn Drafter,
    policy: &mut Policy,
    sampler: &Sampler,
    history: &mut Vec<Token>,
    limits: &Limits<'_>,
    stats: &mut Stats,
    on_event: &mut dyn FnMut(Event) -> Flow,
) -> Result<Stop> {
    let start = Instant::now();
    let mut left = limits.max_tokens.min(room(target, history)?);
    // A list that is long enough to pick from may still be too short to learn from.
    let learns = drafter.reads_target();
    let listed = if learns { verified::BEST } else { 1 };
    target.engine_mut().want(sampler.decisive().map(|(n, usable)| (n.max(listed), usable)));
    let interrupted = || limits.interrupt.load(Ordering::Relaxed);
    stats.prompt_tokens += history.len() as u64;
    if left == 0 {
        return Ok(Stop::Length);
    }
    let past = history.len() - 1;
    stats.prefilled += (past - target.adopt(&history[..past])?) as u64;
    let mut go_on = |done| on_event(Event::Prefill(done, past)) == Flow::Continue && !interrupted();
    let mut beside = |more: &mut dyn FnMut() -> bool| match policy.works_ahead() {
        true => drafter.read_ahead(&history[..past], more),
        false => Ok(()),
    };
    if !target.sync_beside(&history[..past], &mut go_on, &mut beside)? {
        return Ok(if interrupted() { Stop::Interrupt } else { Stop::Receiver });
    }
    drafter.prepare(&history[..past])?;
    policy.begin_text();
    stats.prefill_time += start.elapsed();

    let decoding = Instant::now();
    let (mut proposal, mut scores) = (Proposal::default(), Scores::default());
    // The tree of the last round and the length of its history, where `scores` is still what the
    // target said of it.
    let (mut scored, mut asked_at) = (TokenTree::default(), None);
    let stop = 'rounds: loop {
        if interrupted() {
            break Stop::Interrupt;
        }
        // What the last round accepted is in scratch: agreeing with the history commits it.
        target.sync(&history[..history.len() - 1], &mut |_| true)?;

        let asked = Instant::now();
        let round = Round {
            texts: 1,
            position: history.len(),
            most: target.engine().max_rows() - 1,
            recent_match: drafter.has_recent_match(history),
        };
        let allowed = policy.allow(&round);
        let ctx = DraftContext {
            history,
            sampler,
            nodes: allowed.nodes,
            depth: allowed.depth.min(left - 1),
            vocab: target.engine().vocab(),
            chain: allowed.chain,
            draft_steps: allowed.draft_steps,
            rate: allowed.rate,
            verified: None,
        };
        proposal.reset(ctx.root());
        let verified =
            asked_at.map(|position| Verified { position, tree: &scored, scores: &scores });
        let before = draft_passes(drafter);
        if allowed.only_forced {
            forced::chain(&ctx, &mut proposal);
        } else {
            drafter.propose(&DraftContext { verified, ..ctx }, &mut proposal)?;
        }
        proposal.limit(&ctx);
        let steps = draft_passes(drafter) - before;
        policy.choose(&mut [&mut proposal], asked.elapsed(), steps);

        let begun = Instant::now();
        let pass = score(target, drafter, policy, &ctx, &proposal, &mut scores)?;
        let verdict = verify(&proposal.tree, &scores, sampler, history)?;
        let pass = Pass { time: begun.elapsed(), ..pass };
        policy.observe(&Outcome { pass, paths: std::slice::from_ref(&verdict.path) });

        if learns {
            scored.clone_from(&proposal.tree);
            asked_at = Some(history.len());
        }
        stats.round(&proposal, &verdict, begun - asked, pass);
        for token in verdict.tokens(&proposal.tree) {
            if limits.stop_ids.contains(&token) {
                break 'rounds Stop::Token(token);
            }
            history.push(token);
            stats.tokens += 1;
            left -= 1;
            stats.first_token.get_or_insert_with(|| start.elapsed());
            if on_event(Event::Token(token)) == Flow::Stop {
                break 'rounds Stop::Receiver;
            }
            if left == 0 {
                break 'rounds Stop::Length;
            }
        }
    };
    stats.decode_time += decoding.elapsed();
    Ok(stop)
}

/// Passes that the draft model has made.
fn draft_passes(drafter: &dyn Drafter) -> usize {
    let mut figures = Figures::default();
    drafter.figures(&mut figures);
    figures.draft_passes as usize
}

/// Scores the tree. While the target's device does, the drafter may work ahead.
fn score(
    target: &mut Timeline,
    drafter: &mut dyn Drafter,
    policy: &Policy,
    ctx: &DraftContext<'_>,
    proposal: &Proposal,
    scores: &mut Scores,
) -> Result<Pass> {
    let mut pass = Pass { rows: proposal.len(), ..Pass::default() };
    let begun = target.begin(&proposal.tree, Rows::All)?;
    if let Some(usual) = policy.ahead().filter(|_| begun) {
        let start = Instant::now();
        let (mut at_work, mut looked) = (start, false);
        let mut last = Duration::ZERO;
        drafter.meanwhile(ctx, proposal, &mut || {
            let (busy, now) = (target.is_busy(), start.elapsed());
            (at_work, looked) = (if busy { start + now } else { at_work }, true);
            // Half of a batch may run on after the pass: it is not lost if the guess is right.
            let batch = now - std::mem::replace(&mut last, now);
            usual == Duration::MAX || busy && now + batch / 2 < usual
        })?;
        if looked {
            pass.ahead = start.elapsed();
            // Nobody has looked since: the device may have been done for a while.
            pass.late = if target.is_busy() {
                Duration::ZERO
            } else {
                pass.ahead.saturating_sub(at_work - start)
            };
        }
    }
    target.finish(scores)?;
    Ok(pass)
}

/// Tokens that the context has room for after `history`.
fn room(target: &Timeline, history: &[Token]) -> Result<usize> {
    let context = target.engine().context();
    if history.is_empty() {
        return Err(Fault::usage("the prompt is empty")
            .help("give at least one token, such as BOS")
            .into());
    }
    if history.len() >= context {
        let what =
            format!("the prompt has {} tokens, and the context holds {context}", history.len());
        return Err(Fault::new(Kind::Context, what)
            .help("raise --ctx-size or shorten the prompt")
            .into());
    }
    Ok(context - history.len())
}
