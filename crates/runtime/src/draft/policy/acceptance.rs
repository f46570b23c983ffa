//! Acceptance rates of draft nodes.
//!
//! Nodes are divided into classes by the number of draft steps that they need
//! ([`draft_steps`](crate::draft::sources::draft_steps)). Class 0 has the nodes that need only rows
//! of a pass.

use crate::draft::figures::Habits;

/// Limit for the number of draft steps that are considered.
const DEEPEST: usize = 24;
/// Factor by which each new round reduces the weight of older ones.
const MEMORY: f32 = 0.98;
/// Weight of the prior, in rounds or nodes.
const PRIOR: f32 = 4.0;
/// Prior: the chance that one more step adds a token.
const FIRST: f32 = 0.65;

/// Counts of nodes of one class, in which older rounds fade.
#[derive(Clone, Copy, Debug, Default)]
struct ArmStats {
    /// Rounds with nodes of this class or a deeper one.
    rounds: f32,
    /// Nodes of this class, and the accepted ones among them.
    nodes: f32,
    tokens: f32,
}

/// Acceptance rates of draft nodes.
#[derive(Clone, Debug, Default)]
pub struct AcceptanceRates {
    classes: [ArmStats; DEEPEST + 1],
    /// Sum of the chances of kept nodes, and number of accepted nodes among them. Older rounds
    /// fade.
    promised: f32,
    came: f32,
}

impl AcceptanceRates {
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

    /// Returns the factor that corrects chances: the ratio of accepted to promised nodes, at most
    /// 1.
    pub fn trust(&self) -> f32 {
        ((self.came + PRIOR) / (self.promised + PRIOR)).min(1.0)
    }

    /// Returns the expected nodes and accepted tokens of a text, both without the root, for each
    /// number of draft steps from 0 on.
    pub fn expected(&self) -> [(f32, f32); DEEPEST + 1] {
        let (mut sum, mut before, mut first) = ((0.0, 0.0), 1.0, FIRST);
        std::array::from_fn(|step| {
            let class = self.classes[step];
            let known = |sum: f32, guess: f32| (sum + PRIOR * guess) / (class.rounds + PRIOR);
            let mut tokens = known(class.tokens, before * first);
            if step > 0 {
                // The prior of a step: the step before it, times the ratio that the first step had.
                tokens = tokens.min(before);
                (before, first) = (tokens, if step == 1 { tokens } else { first });
            }
            sum = (sum.0 + known(class.nodes, 1.0), sum.1 + tokens);
            sum
        })
    }

    /// Records the outcome of a text's nodes. `used_model` is whether a draft model was used.
    /// `classes` and `path` include the root.
    pub fn observe(&mut self, used_model: bool, classes: &[usize], path: &[u32]) {
        // If all nodes of a round were dropped, it counts as one failed step.
        let deepest = classes.iter().copied().max().unwrap_or(0).max(used_model as usize);
        let tried = if used_model { self.classes.len() } else { 1 };
        for (i, class) in self.classes[..tried].iter_mut().enumerate() {
            let is = |class: usize| (class == i) as u8 as f32;
            let nodes: f32 = classes[1..].iter().map(|class| is(*class)).sum();
            let tokens: f32 = path[1..].iter().map(|node| is(classes[*node as usize])).sum();
            // Deep classes fade too if they are no longer tried.
            class.rounds = MEMORY * class.rounds + (i <= deepest) as u8 as f32;
            class.nodes = MEMORY * class.nodes + nodes;
            class.tokens = MEMORY * class.tokens + tokens;
        }
    }

    /// Records a round: the sum of the chances of its nodes, and the number of accepted nodes.
    pub fn settle(&mut self, promised: f32, came: f32) {
        self.promised = MEMORY * self.promised + promised;
        self.came = MEMORY * self.came + came;
    }
}
