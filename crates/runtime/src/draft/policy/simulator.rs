//! Simulation of drafting on synthetic texts and devices. The simulated clock only advances by
//! computed work. `cargo test --lib draft::policy::simulator -- --nocapture` prints the table.

use std::time::Duration;

use super::*;
use crate::draft::costs::CostCurve;

/// Random numbers between 0 and 1, the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / (1 << 24) as f64
    }
}

/// Seconds of a pass by number of rows.
type Points = &'static [(usize, f32)];
const FLAT: Points = &[(1, 1.0), (16, 1.1), (32, 1.3)];
const KNEE: Points = &[(1, 1.0), (4, 1.1), (8, 1.6), (32, 5.0)];
const STEEP: Points = &[(1, 1.0), (2, 1.8), (8, 6.0), (32, 22.0)];

/// A device, and a source of drafts. It proposes the chain 1, 1, 1, ...: first some free tokens,
/// then one token per draft step.
#[derive(Clone, Copy, Debug)]
struct Case {
    points: Points,
    /// Seconds of a draft step.
    step: f64,
    /// The chance that the source states for each token.
    claim: f32,
    /// Maximum relative error of measured times.
    noise: f64,
    /// Initial estimate of the cost of rows beyond the first, as a share of the true cost.
    belief: f32,
    /// Number of free tokens, which come before the others.
    free: usize,
    /// Setting for work ahead. The simulation saves no time by it.
    ahead: Ahead,
    /// Seconds of a request in addition to the draft steps, and relative slowdown of the pass after
    /// it.
    ask: f64,
    pollution: f64,
    /// Additional seconds of the first draft.
    once: f64,
    /// Seconds in which the draft model reads one token that it missed in plain rounds, up to its
    /// limit.
    unread: f64,
    /// Delay by other programs: half of all passes and draft steps take longer by at least this
    /// share.
    load: f64,
    seed: u64,
}

const USUAL: Case = Case {
    points: FLAT,
    step: 0.03,
    claim: 0.8,
    noise: 0.1,
    belief: 1.0,
    free: 0,
    ahead: Ahead::Never,
    ask: 0.0,
    pollution: 0.0,
    once: 0.0,
    unread: 0.0,
    load: 0.0,
    seed: 1,
};

/// Returns how many tokens of a chain are accepted, by the text, the length of the chain and the
/// tokens so far.
type Takes<'a> = &'a mut dyn FnMut(usize, usize, usize, &mut Dice) -> usize;
/// Returns a factor and additional seconds of a pass, by its rows and the time so far.
type Weather<'a> = &'a mut dyn FnMut(usize, f64) -> (f64, f64);

/// Returns the speed relative to plain decoding, for some texts of `tokens` tokens each. Time that
/// drafts do not cause is subtracted: noise, and initial costs. Delays that also affect plain
/// decoding count for both.
fn speed_in(case: &Case, texts: usize, tokens: usize, takes: Takes, weather: Weather) -> f64 {
    let curve = CostCurve::new(case.points);
    let believed: Vec<_> =
        case.points.iter().map(|(rows, cost)| (*rows, 1.0 + case.belief * (cost - 1.0))).collect();
    let habits = Habits { level: case.step as f32, ..Habits::default() };
    let mut policy =
        Policy::new(Costs::new(CostCurve::new(&believed), 0), DraftOptions::default(), true)
            .with(&habits)
            .working_ahead(case.ahead);
    (0..texts).for_each(|_| policy.begin_text());
    let mut dice = Dice(case.seed);
    let (mut clock, mut excused, mut plain) = (0.0, 0.0, 0.0);
    let (mut once, mut unread, mut made) = (case.once, 0, vec![0; texts]);
    while made.iter().any(|n| *n < tokens) {
        let running: Vec<usize> = (0..texts).filter(|text| made[*text] < tokens).collect();
        let n = running.len();
        let position = made.iter().max().unwrap() + 1;
        let allowed =
            policy.allow(&Round { texts: n, position, most: 32 - n, recent_match: false });
        let (mut drafting, mut steps) = (0.0, 0);
        let mut all: Vec<Proposal> = Vec::new();
        for text in &running {
            let mut line = Proposal::root(2);
            let left = (tokens - made[*text] - 1).min(allowed.nodes);
            for node in 0..left.min(case.free + allowed.draft_steps.min(31)) as u32 {
                let is_free = (node as usize) < case.free;
                line.add(node, 1, case.claim, if is_free { "context" } else { "line" });
            }
            steps = steps.max((line.len() - 1).saturating_sub(case.free));
            all.push(line);
        }
        if allowed.only_forced {
            (all, steps) = (vec![Proposal::root(2); n], 0);
        } else {
            drafting = case.ask + steps as f64 * case.step;
            let held = drafting * held_up(case.load, &mut dice);
            drafting += held;
            excused += held;
            if steps > 0 {
                let plain = curve.cost(n) as f64;
                drafting += (case.unread * unread as f64).min(READING as f64 * plain);
                unread = 0;
                excused += once;
                drafting += std::mem::take(&mut once);
            }
        }
        let mut chosen: Vec<&mut Proposal> = all.iter_mut().collect();
        policy.choose(&mut chosen, Duration::from_secs_f64(drafting), steps);
        let rows = all.iter().map(Proposal::len).sum();
        let (times, extra) = weather(rows, clock + drafting);
        let pollution = if allowed.only_forced { 0.0 } else { case.pollution };
        let quiet = curve.cost(rows) as f64 * (1.0 + pollution) * times;
        let noise = case.noise * (2.0 * dice.roll() - 1.0) + held_up(case.load, &mut dice);
        let extra = extra + quiet * noise;
        let time = quiet + extra;
        let paths: Vec<Vec<u32>> = (running.iter().zip(&all))
            .map(|(text, line)| {
                let most = line.len() - 1;
                let taken = takes(*text, most, made[*text] + 1, &mut dice).min(most);
                made[*text] += taken + 1;
                (0..=taken as u32).collect()
            })
            .collect();
        let pass = Pass { rows, time: Duration::from_secs_f64(time), ..Pass::default() };
        policy.observe(&RoundOutcome { pass, paths: &paths });
        clock += drafting + time;
        excused += extra;
        let brought: usize = paths.iter().map(Vec::len).sum();
        unread += if steps == 0 { brought / n } else { 0 };
        plain += brought as f64 / n as f64 * curve.cost(n) as f64 * times;
    }
    plain / (clock - excused)
}

/// Returns the relative delay by other programs: mostly small, sometimes large.
fn held_up(load: f64, dice: &mut Dice) -> f64 {
    if load == 0.0 { 0.0 } else { load * (1.0 / (1.0 - dice.roll()) - 1.0).min(20.0) }
}

/// Returns the relative speed without delays.
fn speed(case: &Case, texts: usize, tokens: usize, takes: Takes) -> f64 {
    speed_in(case, texts, tokens, takes, &mut |_, _| (1.0, 0.0))
}

/// Accepts each token of a chain with the chance `alpha`.
fn coins(alpha: f64) -> impl FnMut(usize, usize, usize, &mut Dice) -> usize {
    move |_, most, _, dice| (0..most).take_while(|_| dice.roll() < alpha).count()
}

/// Returns the minimum and the mean of a measurement over several seeds, because one text depends
/// on chance.
fn over_seeds(case: Case, measure: impl Fn(&Case) -> f64) -> (f64, f64) {
    let all = (0..12).map(|i| measure(&Case { seed: 1 + i * 0x9e37_79b9, ..case }));
    all.fold((f64::INFINITY, 0.0), |(least, sum), speed| (least.min(speed), sum + speed / 12.0))
}

fn mean(case: Case, measure: impl Fn(&Case) -> f64) -> f64 {
    over_seeds(case, measure).1
}

/// A kind of case, and its relative speeds.
struct Trace {
    kind: &'static str,
    least: f64,
    mean: f64,
    worst: String,
}

/// The table: the minimum and the mean of the speed relative to plain decoding, by kind.
#[derive(Default)]
struct SpeedTable(Vec<Trace>);

impl SpeedTable {
    /// Measures a case over several seeds.
    fn add(&mut self, kind: &'static str, case: Case, what: &str, measure: impl Fn(&Case) -> f64) {
        let (least, mean) = over_seeds(case, measure);
        let worst = format!("{what}, {case:?}");
        match self.0.iter_mut().find(|trace| trace.kind == kind) {
            Some(trace) if trace.least <= least => trace.mean = trace.mean.min(mean),
            Some(trace) => *trace = Trace { kind, least, mean: trace.mean.min(mean), worst },
            None => self.0.push(Trace { kind, least, mean, worst }),
        }
    }

    /// Prints the table. Panics if a kind is slower than `floor`, relative to plain decoding.
    fn check(&self, title: &str, floor: f64) {
        for Trace { kind, least, mean, .. } in &self.0 {
            println!("{title:24} {kind:34} least {least:.3}, least mean {mean:.3}");
        }
        for Trace { kind, least, worst, .. } in &self.0 {
            assert!(*least >= floor, "{title}, {kind}: {least:.4} < {floor}: {worst}");
        }
    }
}

/// Returns all combinations of curves, costs of a draft step and stated chances.
fn cases() -> impl Iterator<Item = Case> {
    let steps = [0.0, 0.03, 0.2, 0.6];
    let all = [FLAT, KNEE, STEEP].into_iter().flat_map(move |points| steps.map(|s| (points, s)));
    all.flat_map(|(points, step)| [0.3, 0.9].map(|claim| Case { points, step, claim, ..USUAL }))
}

/// Measures the losses on a host where asking takes `ask`, displaced caches cost `pollution`, and
/// reading a token takes `unread`.
fn losses(ask: f64, pollution: f64, unread: f64) -> SpeedTable {
    let mut table = SpeedTable::default();
    for case in cases().map(|case| Case { ask, pollution, unread, ..case }) {
        for (tokens, alpha) in [128, 1000]
            .into_iter()
            .flat_map(|n| [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0].map(|a| (n, a)))
        {
            let what = format!("comes true {alpha}, {tokens} tokens");
            table.add("coins", case, &what, |c| speed(c, 1, tokens, &mut coins(alpha)));
        }
        for (belief, alpha) in
            [0.8, 1.25].into_iter().flat_map(|b| [0.0, 0.3, 0.6, 0.9].map(|alpha| (b, alpha)))
        {
            let (case, what) = (Case { belief, ..case }, format!("comes true {alpha}"));
            table.add("prices misjudged", case, &what, |c| speed(c, 1, 256, &mut coins(alpha)));
        }
        for every in [20, 100] {
            let changing = |_: usize, most: usize, at: usize, _: &mut Dice| {
                if (at / every).is_multiple_of(2) { most } else { 0 }
            };
            let what = format!("every {every}");
            table.add("text changes", case, &what, |c| speed(c, 1, 400, &mut { changing }));
        }
        // Accepts short chains, to encourage drafting, and nothing of long ones.
        let spiteful =
            |_: usize, most: usize, _: usize, _: &mut Dice| if most <= 3 { most } else { 0 };
        table.add("means harm", case, "small ones", |c| speed(c, 1, 400, &mut { spiteful }));
        table.add("means harm", case, "three of seven", |c| {
            let mut rounds = 0;
            speed(c, 1, 400, &mut |_, most, _, _| {
                rounds += 1;
                if rounds % 7 < 3 { most } else { 0 }
            })
        });
        let case = Case { free: 8, ..case };
        for (texts, alpha) in
            [8, 32].into_iter().flat_map(|n| [0.0, 0.3, 0.6, 0.9].map(|alpha| (n, alpha)))
        {
            let what = format!("{texts}, comes true {alpha}");
            table.add("several texts", case, &what, |c| speed(c, texts, 128, &mut coins(alpha)));
        }
    }
    table
}

/// With plain passes of 5 ms and more, asking takes at most 50 us.
#[test]
fn no_text_of_a_large_target_is_slower_than_plain_decoding_by_more_than_four_percent() {
    losses(0.0, 0.0, 0.0).check("asking takes nothing", 0.96);
    losses(0.01, 0.0, 1e-3).check("asking takes .01", 0.96);
}

/// Plain passes of half a millisecond.
#[test]
fn nor_of_a_toy_by_more_than_six() {
    losses(0.06, 0.03, 0.02).check("asking takes .06", 0.94);
}

#[test]
fn what_pays_is_not_given_away() {
    // A chain of nine tokens with a chance of .8 for each would yield 4.3 tokens for 1.06 passes
    // and nine draft steps.
    for (points, step, alpha, least) in [
        (FLAT, 0.03, 0.8, 3.0),
        (KNEE, 0.03, 0.8, 2.0),
        (FLAT, 0.03, 0.5, 1.5),
        (KNEE, 0.2, 0.6, 1.2),
    ] {
        let found = mean(Case { points, step, ..USUAL }, |c| speed(c, 1, 1000, &mut coins(alpha)));
        assert!(found > least, "{found:.3}: {points:?}, {step}, {alpha}");
    }
}

/// A draft model adds tokens after two free ones that are accepted. If it is expensive and adds
/// nothing, the speed is that without it. If it adds enough, it is used.
#[test]
fn an_expensive_draft_model_has_to_add_to_what_is_free() {
    for points in [FLAT, KNEE] {
        let found = |step: f64, deep: usize| {
            mean(Case { points, step, claim: 0.9, free: 2, ..USUAL }, |c| {
                speed(c, 1, 400, &mut |_, most, _, dice| {
                    if dice.roll() < 0.8 { most.min(deep) } else { 0 }
                })
            })
        };
        let alone = 2.6 / CostCurve::new(points).cost(3) as f64;
        let (free_only, used) = (found(0.3, 2), found(0.15, 5));
        assert!(free_only > 0.96 * alone, "{free_only:.3} instead of {alone:.3}: {points:?}");
        assert!(used > 1.05 * alone, "{used:.3} instead of {alone:.3}: {points:?}");
    }
}

/// Returns additional seconds for the first pass of each size, in which its kernels are compiled.
fn cold(once: f64) -> impl FnMut(usize, f64) -> (f64, f64) {
    let mut met = Vec::new();
    move |rows, _| {
        let size = rows.next_power_of_two();
        let first = !met.contains(&size);
        met.push(size);
        (1.0, if first { once } else { 0.0 })
    }
}

/// Delays pass number `pass` of a text.
fn once_at(pass: usize, seconds: f64) -> impl FnMut(usize, f64) -> (f64, f64) {
    let mut passes = 0;
    move |_, _| {
        passes += 1;
        (1.0, if passes == pass { seconds } else { 0.0 })
    }
}

#[test]
fn what_a_pass_or_a_draft_needs_once_is_not_paid_for_by_those_that_follow() {
    for (points, step, alpha) in
        [(FLAT, 0.03, 0.8), (FLAT, 0.2, 0.7), (KNEE, 0.03, 0.8), (KNEE, 0.2, 0.7)]
    {
        for ahead in [Ahead::Never, Ahead::Always] {
            for tokens in [100, 800] {
                let case = Case { points, step, claim: alpha as f32, ahead, ..USUAL };
                let still = mean(case, |c| speed(c, 1, tokens, &mut coins(alpha)));
                for seconds in [0.7, 3.0, 400.0] {
                    let found = [
                        mean(case, |c| {
                            speed_in(c, 1, tokens, &mut coins(alpha), &mut cold(seconds))
                        }),
                        mean(case, |c| {
                            speed_in(c, 1, tokens, &mut coins(alpha), &mut once_at(1, seconds))
                        }),
                        mean(case, |c| {
                            speed_in(c, 1, tokens, &mut coins(alpha), &mut once_at(20, seconds))
                        }),
                        mean(Case { once: seconds, ..case }, |c| {
                            speed(c, 1, tokens, &mut coins(alpha))
                        }),
                    ];
                    assert!(
                        found.iter().all(|speed| *speed >= 0.85 * still),
                        "kernels, pass 1, pass 20, first draft: {found:.3?}, not {still:.3}; \
                         {points:?}, {step}, {seconds} s once, {tokens} tokens, {ahead:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_machine_that_is_slow_for_a_while_does_not_end_drafting() {
    for (points, ahead) in
        [FLAT, KNEE].into_iter().flat_map(|p| [(p, Ahead::Never), (p, Ahead::Always)])
    {
        let case = Case { points, ahead, ..USUAL };
        let still = mean(case, |c| speed(c, 1, 400, &mut coins(0.8)));
        for (from, to, times) in
            [(0.0, 100.0, 2.0), (0.0, 100.0, 4.0), (20.0, 120.0, 2.0), (20.0, 120.0, 4.0)]
        {
            let found = mean(case, |c| {
                speed_in(c, 1, 400, &mut coins(0.8), &mut |_, clock| {
                    (if (from..to).contains(&clock) { times } else { 1.0 }, 0.0)
                })
            });
            assert!(
                found >= 0.85 * still,
                "{found:.3} instead of {still:.3}: {points:?}, {times} times from {from} to {to}, \
                 {ahead:?}"
            );
        }
        // Plain passes take four times as long at first, so that drafts that fail seem to pay.
        let found = mean(case, |c| {
            speed_in(c, 1, 800, &mut coins(0.0), &mut |rows, clock| {
                (if rows == 1 && clock < 60.0 { 4.0 } else { 1.0 }, 0.0)
            })
        });
        assert!(found >= 0.95, "{found:.3}: {points:?}, {ahead:?}");
    }
}

/// The assumption that more rows cost nothing, or ten times their true cost, is corrected.
#[test]
fn costs_that_were_measured_in_a_bad_moment_are_found_to_be_wrong() {
    for (belief, step, alpha, least) in [(0.0, 0.03, 0.9, 0.87), (10.0, 0.2, 0.6, 0.84)] {
        let case = Case { points: KNEE, step, claim: alpha as f32, ..USUAL };
        let found = mean(case, |c| {
            speed(&Case { belief, ..*c }, 1, 1000, &mut coins(alpha))
                / speed(c, 1, 1000, &mut coins(alpha))
        });
        assert!(found >= least, "{found:.3} of the speed where {belief} times is believed");
    }
}

/// Other programs run at the same time: half of all passes and draft steps take 1.1, 1.3 or 2 times
/// as long, or more.
#[test]
fn a_busy_machine_does_not_end_drafting() {
    for (points, step) in [(FLAT, 0.03), (FLAT, 0.1), (KNEE, 0.03), (KNEE, 0.1)] {
        for alpha in [0.5, 0.7, 0.9] {
            let case = Case { points, step, claim: alpha as f32, ask: 0.01, ..USUAL };
            let still = mean(case, |c| speed(c, 1, 400, &mut coins(alpha)));
            for (load, least) in [(0.1, 0.88), (0.3, 0.88), (1.0, 0.78)] {
                let found = mean(Case { load, ..case }, |c| speed(c, 1, 400, &mut coins(alpha)));
                assert!(
                    found > least * still,
                    "{found:.3} instead of {still:.3}: {points:?}, {step}, {alpha}, load {load}"
                );
            }
        }
    }
}
