//! How much to draft: as many nodes as make the most tokens per second.
//!
//! A pass over `M` rows costs `c(M)` and brings `E(M)` tokens: one, plus the chances of the nodes. With the drafts already made
//! in `d` seconds, the best size maximises `E(M) / (c(M) + d)`; plain decoding is the case `M = 1`. None of this changes text.

use std::str::FromStr;
use std::time::Instant;

use anyhow::Result;

use super::depth::Depth;
use super::outcome::Outcome;
use super::{DraftContext, Drafter, Proposal};
use crate::error::Fault;

/// Rounds before drafting is judged, and what is remembered of the past each round.
const TRIAL: u32 = 12;
const MEMORY: f32 = 0.95;
/// Plain rounds after drafting has not paid; then it is tried again.
const PAUSE: u32 = 64;

/// Seconds that a pass takes by its number of rows.
#[derive(Clone, Debug)]
pub struct CostCurve {
    /// `[rows - 1]`
    seconds: Vec<f32>,
}

impl CostCurve {
    /// From measured (rows, seconds), by ascending rows from 1 on; linear between them.
    pub fn new(points: &[(usize, f32)]) -> Self {
        assert!(points.first().is_some_and(|p| p.0 == 1), "a cost curve begins with the pass of one row");
        assert!(points.is_sorted_by(|a, b| a.0 < b.0), "a cost curve ascends");
        let mut seconds = vec![points[0].1];
        for pair in points.windows(2) {
            let [(from, low), (to, high)] = [pair[0], pair[1]];
            seconds.extend((from + 1..=to).map(|rows| low + (high - low) * (rows - from) as f32 / (to - from) as f32));
        }
        CostCurve { seconds }
    }

    /// Before anything is measured: a pass that costs nearly the same up to 8 rows.
    pub fn guess() -> Self {
        Self::new(&[(1, 0.1), (8, 0.11), (16, 0.13), (32, 0.18)])
    }

    pub fn max_rows(&self) -> usize {
        self.seconds.len()
    }

    pub fn cost(&self, rows: usize) -> f32 {
        self.seconds[rows.clamp(1, self.max_rows()) - 1]
    }

    /// Takes in a measured pass. Other sizes follow a little: the whole curve rises as the context grows.
    pub fn observe(&mut self, rows: usize, seconds: f32) {
        if rows == 0 || rows > self.max_rows() || seconds <= 0.0 {
            return;
        }
        let ratio = (seconds / self.cost(rows)).clamp(0.25, 4.0);
        for (i, cost) in self.seconds.iter_mut().enumerate() {
            *cost *= 1.0 + (ratio - 1.0) * if i + 1 == rows { 0.2 } else { 0.1 };
        }
    }
}

/// `--draft-tree`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TreeSize {
    /// As many nodes as pay.
    #[default]
    Auto,
    /// One line.
    Chain,
    /// Always this many nodes.
    Nodes(usize),
}

impl FromStr for TreeSize {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        match text {
            "auto" => Ok(TreeSize::Auto),
            "chain" => Ok(TreeSize::Chain),
            n => n.parse().ok().filter(|&n| n > 0).map(TreeSize::Nodes).ok_or_else(|| {
                Fault::usage(format!("a draft tree is `auto`, `chain` or a number of nodes, not `{n}`"))
                    .help("--draft off decodes without drafts")
            }),
        }
    }
}

/// What the user wants of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftOptions {
    pub tree: TreeSize,
    /// `--draft-tokens`: longest line drafted, and with [`TreeSize::Chain`] the only one; `None` as long as pays.
    pub tokens: Option<usize>,
}

impl DraftOptions {
    /// The number of nodes, where the user has set it.
    fn fixed(self) -> Option<usize> {
        match (self.tree, self.tokens) {
            (TreeSize::Nodes(n), _) | (TreeSize::Chain, Some(n)) => Some(n),
            _ => None,
        }
    }
}

/// Sums that fade.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    tokens: f32,
    seconds: f32,
    rounds: u32,
}

impl Rate {
    fn add(&mut self, tokens: f32, seconds: f32) {
        self.tokens = self.tokens * MEMORY + tokens;
        self.seconds = self.seconds * MEMORY + seconds;
        self.rounds += 1;
    }

    /// Tokens per second, once there is enough to tell.
    fn value(&self) -> Option<f32> {
        (self.rounds >= TRIAL && self.seconds > 0.0).then(|| self.tokens / self.seconds)
    }
}

/// A drafter that proposes as much of another's guesses as pays.
pub struct Paced {
    inner: Box<dyn Drafter>,
    curve: CostCurve,
    options: DraftOptions,
    /// Whether decisions may depend on measured times.
    clock: bool,
    /// What the inner drafter proposed, and what was kept of it.
    offered: Outcome,
    kept: Outcome,
    /// Seconds that the round before spent on drafting.
    drafting: f32,
    /// Nodes that the target decided on: how many it was expected to take, and took; fading.
    expected: f32,
    realised: f32,
    rate: Rate,
    paused: u32,
    /// The last round was left plain by the clock.
    plain: bool,
    /// Nodes that paid lately, fading.
    size: f32,
    /// How deep to draft, where the clock may say so.
    depth: Depth,
}

impl Paced {
    /// `clock: false` decides by `curve` alone, for tests that want the same trees each time.
    pub fn new(inner: Box<dyn Drafter>, curve: CostCurve, options: DraftOptions, clock: bool) -> Self {
        Paced {
            inner,
            curve,
            options,
            clock,
            offered: Outcome::default(),
            kept: Outcome::default(),
            drafting: 0.0,
            expected: 1.0,
            realised: 1.0,
            rate: Rate::default(),
            paused: 0,
            plain: false,
            size: 8.0,
            depth: Depth::default(),
        }
    }

    /// The cost curve as the rounds have made it.
    pub fn curve(&self) -> &CostCurve {
        &self.curve
    }

    /// How far chances are trusted: nodes taken of those expected to be.
    fn reliability(&self) -> f32 {
        (self.realised / self.expected.max(1e-3)).clamp(0.2, 1.0)
    }

    /// Takes in what became of the round before.
    fn learn(&mut self, ctx: &DraftContext<'_>) {
        let pass = ctx.last_pass.filter(|_| self.clock);
        if let Some(pass) = pass {
            self.curve.observe(pass.rows, pass.time.as_secs_f32());
        }
        let drafted = self.offered.levels();
        let (mut expected, mut realised) = (0.0, 0.0);
        self.offered.settle(ctx.history, |_, chance, taken| {
            expected += chance;
            realised += taken as u8 as f32;
        });
        let rows = self.kept.rows();
        let levels = self.kept.levels();
        let Some(taken) = self.kept.settle(ctx.history, |_, _, _| {}) else { return };
        self.expected = self.expected * MEMORY + expected;
        self.realised = self.realised * MEMORY + realised;
        if self.clock {
            // Guesses that were all thrown away count as one level that failed.
            self.depth.observe(if drafted > 0 { levels.max(1) } else { 0 }, taken, rows - 1, drafted, self.drafting);
        }
        let pass = pass.map_or(self.curve.cost(rows), |p| p.time.as_secs_f32());
        self.rate.add(1.0 + taken as f32, pass + self.drafting);
        let plain = 1.0 / self.curve.cost(1);
        if self.options.fixed().is_some() || self.paused > 0 || self.rate.value().is_none_or(|rate| rate >= 0.95 * plain) {
            return;
        }
        if self.clock {
            self.rate = Rate::default();
            self.depth.stop();
        } else {
            self.paused = PAUSE;
        }
    }

    /// The number of nodes that makes the most tokens per second.
    fn best_size(&self, out: &Proposal, drafting: f32) -> usize {
        let trust = self.reliability();
        let mut tokens = 1.0;
        let mut best = (0, 1.0 / (self.curve.cost(1) + drafting));
        for (i, node) in out.by_chance().into_iter().enumerate() {
            tokens += trust * out.chance[node as usize];
            let rate = tokens / (self.curve.cost(i + 2) + drafting);
            if rate > best.1 {
                best = (i + 1, rate);
            }
        }
        best.0
    }
}

impl Drafter for Paced {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        self.learn(ctx);
        if self.paused > 0 {
            self.paused -= 1;
            if self.paused == 0 {
                self.rate = Rate::default();
            }
            return Ok(());
        }
        let most = ctx.nodes.min(self.curve.max_rows() - 1);
        let fixed = self.options.fixed().map(|n| n.min(ctx.nodes));
        let by_clock = self.clock && fixed.is_none();
        let levels = if by_clock { self.depth.choose(&self.curve) } else { usize::MAX };
        self.plain = levels == 0;
        if self.plain {
            return Ok(());
        }
        let asked = DraftContext {
            nodes: fixed.unwrap_or(most.min(2 * self.size as usize + 6)),
            depth: ctx.depth.min(self.options.tokens.unwrap_or(usize::MAX)).min(levels),
            chain: ctx.chain || self.options.tree == TreeSize::Chain,
            pace: by_clock.then(|| 1.0 / self.curve.cost(1)),
            ..*ctx
        };
        let start = Instant::now();
        self.inner.propose(&asked, out)?;
        self.drafting = if self.clock { start.elapsed().as_secs_f32() } else { 0.0 };
        out.limit(&asked);
        self.offered.remember(ctx.history, out);
        if fixed.is_none() {
            let size = self.best_size(out, self.drafting);
            out.keep_best(size);
            self.size += 0.1 * (size as f32 - self.size);
        }
        self.kept.remember(ctx.history, out);
        Ok(())
    }

    fn prepare(&mut self, history: &[crate::tensor::Token]) -> Result<()> {
        self.inner.prepare(history)
    }

    fn reads_target(&self) -> bool {
        self.inner.reads_target()
    }

    fn save(&self) -> Result<()> {
        self.inner.save()
    }

    fn note(&self) -> Option<String> {
        let own = (self.plain || self.paused > 0).then(|| "drafting rests: it does not pay on this text".to_owned());
        let notes: Vec<String> = own.into_iter().chain(self.inner.note()).collect();
        (!notes.is_empty()).then(|| notes.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::{Sampler, SamplerConfig};
    use crate::tensor::Token;

    /// Proposes the chain 1, 1, 1, ... with a constant chance per token.
    struct Ones(f32);

    impl Drafter for Ones {
        fn name(&self) -> &'static str {
            "ones"
        }

        fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
            (0..ctx.nodes.min(ctx.depth) as u32).for_each(|node| {
                out.add(node, 1, self.0, "ones");
            });
            Ok(())
        }
    }

    fn paced(chance: f32, points: &[(usize, f32)], options: DraftOptions) -> Paced {
        Paced::new(Box::new(Ones(chance)), CostCurve::new(points), options, false)
    }

    /// Nodes proposed after `history`.
    fn size(drafter: &mut Paced, history: &[Token]) -> usize {
        let sampler = Sampler::new(SamplerConfig::default()).unwrap();
        let ctx = DraftContext {
            history,
            sampler: &sampler,
            nodes: 100,
            depth: 100,
            vocab: 9,
            chain: false,
            pace: None,
            last_pass: None,
            verified: None,
        };
        let mut out = Proposal::root(ctx.root());
        drafter.propose(&ctx, &mut out).unwrap();
        out.len() - 1
    }

    #[test]
    fn the_size_follows_cost_and_chance() {
        let flat = [(1, 1.0), (32, 1.0)];
        let steep = [(1, 1.0), (32, 32.0)];
        let knee = [(1, 1.0), (8, 1.0), (9, 2.0), (32, 5.0)];
        let auto = DraftOptions::default();
        assert_eq!(size(&mut paced(0.9, &flat, auto), &[5]), 22); // all that was asked for
        assert_eq!(size(&mut paced(0.9, &steep, auto), &[5]), 0);
        assert_eq!(size(&mut paced(0.7, &knee, auto), &[5]), 7);
        let fixed = DraftOptions { tree: TreeSize::Nodes(5), tokens: None };
        assert_eq!(size(&mut paced(0.1, &steep, fixed), &[5]), 5);
        let chain = DraftOptions { tree: TreeSize::Chain, tokens: Some(3) };
        assert_eq!(size(&mut paced(0.1, &steep, chain), &[5]), 3);
        let short = DraftOptions { tree: TreeSize::Auto, tokens: Some(2) };
        assert_eq!(size(&mut paced(0.9, &flat, short), &[5]), 2);
    }

    #[test]
    fn drafting_pauses_when_it_does_not_pay_and_is_tried_again() {
        // Claims 0.9, is never right, and eight rows cost one and a half: trust sinks and the pause comes.
        let mut drafter = paced(0.9, &[(1, 1.0), (8, 1.5), (32, 4.0)], DraftOptions::default());
        let mut history = vec![5];
        let sizes: Vec<usize> = (0..200)
            .map(|_| {
                let size = size(&mut drafter, &history);
                history.push(2);
                size
            })
            .collect();
        assert!(sizes[0] > 0);
        let first = sizes.iter().position(|&s| s == 0).unwrap();
        assert!(first <= TRIAL as usize, "{sizes:?}");
        assert!(sizes[first..first + PAUSE as usize].iter().all(|&s| s == 0), "{sizes:?}");
        assert!(drafter.reliability() < 0.5);
    }

    #[test]
    fn the_curve_follows_measurements() {
        let mut curve = CostCurve::new(&[(1, 1.0), (4, 1.0), (8, 2.0)]);
        assert_eq!((curve.max_rows(), curve.cost(6), curve.cost(50)), (8, 1.5, 2.0));
        (0..100).for_each(|_| curve.observe(4, 1.6));
        assert!((curve.cost(4) - 1.6).abs() < 0.01 && curve.cost(1) > 1.0 && curve.cost(8) > 2.0);
    }

    #[test]
    fn options_are_read_from_words() {
        assert_eq!("auto".parse::<TreeSize>().unwrap(), TreeSize::Auto);
        assert_eq!("chain".parse::<TreeSize>().unwrap(), TreeSize::Chain);
        assert_eq!("12".parse::<TreeSize>().unwrap(), TreeSize::Nodes(12));
        assert!("0".parse::<TreeSize>().is_err() && "tree".parse::<TreeSize>().is_err());
    }
}
