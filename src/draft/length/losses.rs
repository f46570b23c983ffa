//! What drafting may cost a text, with a clock that only moves when something is computed: never more than 3 % of plain decoding, however
//! steep the target's passes and however badly guesses come true.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::*;
use crate::draft::Pass;
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;

/// Proposes the line 1, 1, 1, ..., one token a level, each of which takes its time.
struct Line {
    clock: Rc<Cell<f64>>,
    level: f64,
    claim: f32,
}

impl Drafter for Line {
    fn name(&self) -> &'static str {
        "line"
    }

    fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        let levels = ctx.pace.map_or(usize::MAX, |pace| pace.levels);
        for node in 0..ctx.nodes.min(ctx.depth).min(levels) as u32 {
            self.clock.set(self.clock.get() + self.level);
            out.add(node, 1, self.claim, "line");
        }
        Ok(())
    }
}

/// Numbers between 0 and 1, the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / (1 << 24) as f64
    }
}

/// What passes take, by rows.
type Points<'a> = &'a [(usize, f32)];
const FLAT: Points<'_> = &[(1, 1.0), (16, 1.1), (32, 1.3)];
const KNEE: Points<'_> = &[(1, 1.0), (4, 1.1), (8, 1.6), (32, 5.0)];
const STEEP: Points<'_> = &[(1, 1.0), (2, 1.8), (8, 6.0), (32, 22.0)];
const CURVES: [Points<'_>; 3] = [FLAT, KNEE, STEEP];

#[derive(Clone, Copy)]
struct Case<'a> {
    points: Points<'a>,
    level: f64,
    claim: f32,
    /// How far measured times are off, at most.
    noise: f64,
    /// What passes over several rows are first believed to cost beyond one row, as a share of what they do.
    belief: f32,
}

/// Speed over that of plain decoding for a text of `tokens`. `takes(length of the line, tokens so far, dice)` says how many of a line's
/// tokens come true.
fn speed(case: &Case<'_>, tokens: usize, mut takes: impl FnMut(usize, usize, &mut Dice) -> usize) -> f64 {
    let curve = CostCurve::new(case.points);
    let clock = Rc::new(Cell::new(0.0));
    let believed: Vec<_> = case.points.iter().map(|(rows, cost)| (*rows, 1.0 + case.belief * (cost - 1.0))).collect();
    let believed = CostCurve::new(&believed);
    let line = Line { clock: clock.clone(), level: case.level, claim: case.claim };
    let hands = clock.clone();
    let mut drafter = Paced::new(Box::new(line), believed.clone(), DraftOptions::default(), true)
        .timed_by(Box::new(move || hands.get()))
        .with(Costs::new(believed, 0), &Habits { level: case.level as f32, ..Habits::default() })
        .ahead(Ahead::Never);
    let sampler = Sampler::new(SamplerConfig::default()).unwrap();
    let (mut history, mut last_pass): (Vec<Token>, _) = (vec![2], None);
    let mut dice = Dice(1);
    drafter.prepare(&[]).unwrap();
    while history.len() <= tokens {
        let ctx = DraftContext {
            history: &history,
            sampler: &sampler,
            nodes: 31,
            depth: tokens - history.len(),
            vocab: 9,
            chain: false,
            pace: None,
            last_pass,
            verified: None,
        };
        let mut out = Proposal::root(2);
        drafter.propose(&ctx, &mut out).unwrap();
        let time = curve.cost(out.len()) as f64 * (1.0 + case.noise * (2.0 * dice.roll() - 1.0));
        clock.set(clock.get() + time);
        last_pass = Some(Pass { rows: out.len(), time: Duration::from_secs_f64(time), ..Pass::default() });
        let taken = takes(out.len() - 1, history.len(), &mut dice).min(out.len() - 1);
        history.extend(std::iter::repeat_n(1, taken));
        history.push(2);
    }
    (history.len() - 1) as f64 / clock.get()
}

/// Each token of a line comes true with this chance.
fn coins(alpha: f64) -> impl FnMut(usize, usize, &mut Dice) -> usize {
    move |most, _, dice| (0..most).take_while(|_| dice.roll() < alpha).count()
}

fn cases() -> impl Iterator<Item = Case<'static>> {
    let levels = [0.0, 0.03, 0.2, 0.6];
    let all = CURVES.into_iter().flat_map(move |points| levels.map(|level| (points, level)));
    all.flat_map(|(points, level)| [0.3, 0.9].map(|claim| Case { points, level, claim, noise: 0.1, belief: 1.0 }))
}

const LEAST: f64 = 0.97;

#[test]
fn no_text_is_slower_than_plain_decoding_by_more_than_three_percent() {
    for case in cases() {
        for tokens in [128, 1000] {
            for alpha in [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0] {
                let speed = speed(&case, tokens, coins(alpha));
                assert!(
                    speed >= LEAST,
                    "{speed:.3}: {:?}, level {}, claims {}, comes true {alpha}, {tokens} tokens",
                    case.points,
                    case.level,
                    case.claim
                );
            }
        }
    }
}

#[test]
fn prices_may_be_misjudged() {
    for case in cases().flat_map(|case| [0.8, 1.25].map(|belief| Case { belief, ..case })) {
        for alpha in [0.0, 0.3, 0.6, 0.9] {
            let speed = speed(&case, 256, coins(alpha));
            assert!(
                speed >= LEAST,
                "{speed:.3}: {:?} believed {}, level {}, claims {}, comes true {alpha}",
                case.points,
                case.belief,
                case.level,
                case.claim
            );
        }
    }
}

#[test]
fn nor_is_one_that_changes_or_means_harm() {
    for case in cases() {
        let switching =
            |every: usize| move |most: usize, at: usize, _: &mut Dice| if (at / every).is_multiple_of(2) { most } else { 0 };
        // Takes what is small, to lead on, and nothing of what is large.
        let spiteful = |most: usize, _: usize, _: &mut Dice| if most <= 3 { most } else { 0 };
        let mut good = 0;
        let teasing = move |most: usize, _: usize, _: &mut Dice| {
            good = (good + 1) % 7;
            if good < 3 { most } else { 0 }
        };
        let speeds = [
            speed(&case, 400, switching(20)),
            speed(&case, 400, switching(100)),
            speed(&case, 400, spiteful),
            speed(&case, 400, teasing),
        ];
        assert!(
            speeds.iter().all(|s| *s >= LEAST),
            "{speeds:.3?}: {:?}, level {}, claims {}",
            case.points,
            case.level,
            case.claim
        );
    }
}

#[test]
fn what_pays_is_not_given_away() {
    // A line of nine tokens of which each comes true in .8 of all cases would bring 4.3 tokens for 1.06 and 9 levels.
    let case = |points, level| Case { points, level, claim: 0.8, noise: 0.1, belief: 1.0 };
    assert!(speed(&case(FLAT, 0.03), 1000, coins(0.8)) > 3.0);
    assert!(speed(&case(KNEE, 0.03), 1000, coins(0.8)) > 2.0);
    assert!(speed(&case(FLAT, 0.03), 1000, coins(0.5)) > 1.5);
    assert!(speed(&case(KNEE, 0.2), 1000, coins(0.6)) > 1.2);
}
