//! How many guesses come true.
//!
//! Guesses that cost nothing but rows are of class 0, as long as no guess of the draft model stands
//! before them: they would be there without it. The others are of class 1, 2, ..., by how many such
//! guesses lead to them: class d takes d draft steps.

use super::super::{Proposal, source};

/// Draft steps that are considered at most.
const DEEPEST: usize = 24;
/// What each round leaves of the memory of those before.
const MEMORY: f32 = 0.98;
/// Rounds, or guesses, that what is believed beforehand weighs as much as.
const PRIOR: f32 = 4.0;
/// What is believed beforehand: the chance that one more step brings a token.
const FIRST: f32 = 0.65;

/// Guesses of one class, fading.
#[derive(Clone, Copy, Debug, Default)]
struct ArmStats {
    /// Rounds that had some.
    rounds: f32,
    /// Nodes in them, and tokens that came of them.
    nodes: f32,
    tokens: f32,
}

/// What is worth remembering from one text to the next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Habits {
    /// Tokens that a draft step brings, and the rounds behind it; by step.
    pub survival: Vec<(f32, f32)>,
    /// Seconds that the target waits for one draft step.
    pub level: f32,
}

/// How many guesses come true.
#[derive(Clone, Debug, Default)]
pub struct Acceptance {
    classes: [ArmStats; DEEPEST + 1],
    /// Tokens that kept guesses promised, and brought, fading.
    promised: f32,
    came: f32,
}

impl Acceptance {
    pub fn inherit(&mut self, habits: &Habits) {
        for (class, &(share, rounds)) in self.classes[1..].iter_mut().zip(&habits.survival) {
            if (0.0..=1.0).contains(&share) && rounds > 0.0 {
                class.rounds = rounds.min(PRIOR);
                class.tokens = share * class.rounds;
            }
        }
    }

    pub fn survival(&self) -> Vec<(f32, f32)> {
        let seen = self.classes[1..].iter().take_while(|class| class.rounds > 0.0);
        seen.map(|class| (class.tokens / class.rounds, class.rounds)).collect()
    }

    /// What to multiply the chances of guesses by: how far earlier ones came true.
    pub fn trust(&self) -> f32 {
        ((self.came + PRIOR) / (self.promised + PRIOR)).min(1.0)
    }

    /// By draft steps, from 0 on: nodes and tokens, beside the root's, of a text.
    pub fn expected(&self) -> [(f32, f32); DEEPEST + 1] {
        let (mut sum, mut before, mut first) = ((0.0, 0.0), 1.0f32, FIRST);
        let mut step = 0;
        self.classes.map(|class| {
            // Another step brings as much of what the one before does as the first one brings.
            let guess = if step == 0 { FIRST } else { before * first };
            let tokens = (class.tokens + PRIOR * guess) / (class.rounds + PRIOR);
            if step > 0 {
                before = tokens.min(before);
                first = if step == 1 { before } else { first };
            }
            sum.0 += (class.nodes + PRIOR) / (class.rounds + PRIOR);
            sum.1 += if step == 0 { tokens } else { before };
            step += 1;
            sum
        })
    }

    /// Takes in what became of a text's guesses, for which a draft model was asked or not: `kept`
    /// are their classes, `taken` those of the accepted ones.
    pub fn observe(&mut self, asked: bool, kept: &[usize], taken: impl Iterator<Item = usize>) {
        // Guesses that were all thrown away count as one step that failed.
        let deepest = kept.iter().copied().max().unwrap_or(0).max(asked as usize).min(DEEPEST);
        let all = if asked { DEEPEST } else { 0 };
        for (i, class) in self.classes.iter_mut().enumerate().take(all + 1) {
            // What is not tried any more is forgotten too.
            for sum in [&mut class.rounds, &mut class.nodes, &mut class.tokens] {
                *sum *= MEMORY;
            }
            class.rounds += (i <= deepest) as u8 as f32;
        }
        kept.iter().for_each(|class| self.classes[(*class).min(DEEPEST)].nodes += 1.0);
        taken.for_each(|class| self.classes[class.min(DEEPEST)].tokens += 1.0);
    }

    /// Takes in a round: tokens that the chances of its guesses promised, and that came of them.
    pub fn settle(&mut self, promised: f32, came: f32) {
        self.promised = MEMORY * self.promised + promised;
        self.came = MEMORY * self.came + came;
    }
}

/// The class of each node of a proposal; 0 at the root.
pub fn classes(proposal: &Proposal) -> Vec<usize> {
    let mut classes = vec![0; proposal.len()];
    for node in 1..proposal.len() {
        let parent = proposal.tree.parent[node].map_or(0, |parent| classes[parent as usize]);
        let free = parent == 0 && source::is_free(proposal.source[node]);
        classes[node] = if free { 0 } else { parent + 1 };
    }
    classes
}
