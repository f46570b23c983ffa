use super::*;
use crate::draft::costs::CostCurve;

type Points = &'static [(usize, f32)];
const FLAT: Points = &[(1, 1.0), (32, 1.0)];
const STEEP: Points = &[(1, 1.0), (32, 32.0)];
const KNEE: Points = &[(1, 1.0), (8, 1.0), (9, 2.0), (32, 5.0)];

fn policy(points: Points, options: DraftOptions, clock: bool) -> Policy {
    Policy::new(Costs::new(CostCurve::new(points), 0), options, clock)
}

fn round(texts: usize) -> Round {
    Round { texts, position: 10, most: 100, recent_match: false }
}

/// Returns a root with children of these chances.
fn fan(chances: &[f32]) -> Proposal {
    let mut proposal = Proposal::root(1);
    chances.iter().enumerate().for_each(|(i, chance)| {
        proposal.add(0, 10 + i as u32, *chance, "context");
    });
    proposal
}

/// Returns a chain of the allowed length. Each token has this chance.
fn line(chance: f32, allowed: Allowance) -> Proposal {
    let mut line = Proposal::root(2);
    let most = allowed.nodes.min(allowed.depth).min(allowed.draft_steps);
    (0..most as u32 * !allowed.only_forced as u32).for_each(|node| {
        line.add(node, 1, chance, "line");
    });
    line
}

/// Returns the number of nodes that each text keeps.
fn kept(points: Points, options: DraftOptions, chances: &[&[f32]]) -> Vec<usize> {
    let mut policy = policy(points, options, false);
    policy.allow(&round(chances.len()));
    let mut all: Vec<Proposal> = chances.iter().map(|chances| fan(chances)).collect();
    policy.choose(&mut all.iter_mut().collect::<Vec<_>>(), Duration::ZERO, 0);
    all.iter().map(|proposal| proposal.len() - 1).collect()
}

#[test]
fn the_likeliest_guesses_of_all_texts_are_kept() {
    let six: Points = &[(1, 1.0), (6, 1.0), (7, 5.0), (32, 9.0)];
    let auto = DraftOptions::default();
    // Three of the six rows belong to the texts themselves.
    assert_eq!(kept(six, auto, &[&[0.9, 0.2], &[0.1], &[0.8, 0.5, 0.3]]), [1, 0, 2]);
    assert_eq!(kept(six, auto, &[&[0.2], &[], &[]]), [1, 0, 0]);
    assert_eq!(kept(STEEP, auto, &[&[0.9], &[0.9]]), [0, 0], "rows have their price");
    let chances = [0.9f32; 9];
    assert_eq!(kept(KNEE, auto, &[&chances]), [7], "no more than what costs nothing");
    // There are more texts than rows in the curve.
    assert_eq!(kept(&[(1, 1.0), (2, 1.0)], auto, &[&[0.9], &[0.9], &[0.9]]), [0, 0, 0]);
}

#[test]
fn what_the_user_has_set_is_drafted_whatever_it_costs() {
    let fixed = |tree, tokens| {
        let mut policy = policy(STEEP, DraftOptions { tree, tokens }, false);
        let allowed = policy.allow(&round(1));
        let mut line = line(0.1, allowed);
        policy.choose(&mut [&mut line], Duration::ZERO, 5);
        (line.len() - 1, allowed.chain)
    };
    assert_eq!(fixed(TreeSize::Nodes(5), None), (5, false));
    assert_eq!(fixed(TreeSize::Chain, Some(3)), (3, true));
    let short = DraftOptions { tree: TreeSize::Auto, tokens: Some(2) };
    assert_eq!(policy(FLAT, short, false).allow(&round(1)).depth, 2);
    let four = DraftOptions { tree: TreeSize::Nodes(30), tokens: None };
    assert_eq!(policy(FLAT, four, false).allow(&round(4)).nodes, 25, "of the hundred there are");
}

#[test]
fn plain_decoding_asks_for_nothing() {
    let mut off = Policy::off();
    let allowed = off.allow(&round(1));
    assert_eq!((allowed.nodes, allowed.only_forced, off.ahead()), (0, true, None));
}

#[test]
fn what_cannot_fail_is_kept_where_guesses_do_not_pay() {
    let mut policy = policy(&[(1, 1.0), (4, 1.5), (32, 32.0)], DraftOptions::default(), false);
    policy.allow(&round(1));
    let mut proposal = Proposal::root(1);
    let forced = proposal.add(0, 5, 1.0, grammar::NAME);
    proposal.add(forced, 6, 0.05, "context");
    policy.choose(&mut [&mut proposal], Duration::ZERO, 0);
    assert_eq!(proposal.tree.tokens, [1, 5]);
}

#[test]
fn guesses_before_the_first_of_a_draft_model_are_free() {
    let mut proposal = Proposal::root(1);
    let a = proposal.add(0, 2, 0.5, "context");
    let b = proposal.add(a, 3, 0.5, "model");
    proposal.add(b, 4, 0.5, "context");
    proposal.add(a, 5, 0.1, "table");
    assert_eq!(draft_steps(&proposal), [0, 0, 1, 2, 0]);
}

/// The source states a chance of .9 but always fails, and eight rows cost one and a half passes.
/// Losses end drafting, and it is tried again. Without a clock, all decisions are reproducible.
#[test]
fn drafting_rests_where_it_does_not_pay_and_is_tried_again() {
    let points: Points = &[(1, 1.0), (8, 1.5), (32, 4.0)];
    let sizes = || -> Vec<usize> {
        let mut policy = policy(points, DraftOptions::default(), false);
        let sizes = (0..1000)
            .map(|_| {
                let mut line = line(0.9, policy.allow(&round(1)));
                policy.choose(&mut [&mut line], Duration::from_millis(7), 1);
                let pass = Pass { rows: line.len(), ..Pass::default() };
                policy.observe(&RoundOutcome { pass, paths: &[vec![0]] });
                line.len() - 1
            })
            .collect();
        let mut figures = DraftFigures::default();
        policy.figures(&mut figures);
        assert!(figures.realised == figures.rounds as f64 && figures.predicted > figures.realised);
        assert_eq!((figures.plain_tokens, figures.plain_seconds), (1000, 1000.0));
        sizes
    };
    let all = sizes();
    assert!(all[0] > 0, "{all:?}");
    let curve = CostCurve::new(points);
    let lost: f32 = all.iter().map(|&nodes| curve.cost(nodes + 1) - 1.0).sum();
    assert!(lost < 0.01 * 1000.0, "{lost} passes of 1000 were lost");
    let rested = all.iter().position(|&nodes| nodes == 0).unwrap();
    assert!(all[rested..].iter().any(|&nodes| nodes > 0), "tried again");
    assert_eq!(sizes(), all);
}

/// The same with a clock.
#[test]
fn a_text_on_which_drafts_fail_is_told() {
    let points: Points = &[(1, 1.0), (8, 1.5), (32, 4.0)];
    let mut policy = policy(points, DraftOptions::default(), true);
    let mut told = 0;
    for _ in 0..300 {
        let allowed = policy.allow(&round(1));
        told += policy.note().is_some() as usize;
        let mut line = match allowed.only_forced {
            true => Proposal::root(2),
            false => line(0.9, allowed),
        };
        let steps = allowed.draft_steps.min(1);
        policy.choose(&mut [&mut line], Duration::from_millis(5 + 45 * steps as u64), steps);
        let time = Duration::from_secs_f32(CostCurve::new(points).cost(line.len()));
        let pass = Pass { rows: line.len(), time, ..Pass::default() };
        policy.observe(&RoundOutcome { pass, paths: &[vec![0]] });
    }
    assert!(told > 100, "{told}");
}

#[test]
fn what_was_learnt_is_where_the_next_run_begins() {
    let steps = |policy: &mut Policy| policy.allow(&round(1)).draft_steps;
    let habits = |share: f32| Habits {
        survival: (1..20).map(|step| (share.powi(step), 50.0)).collect(),
        level: 0.1,
    };
    let with = |habits: &Habits| policy(FLAT, DraftOptions::default(), true).with(habits);
    assert!(steps(&mut with(&habits(0.95))) > steps(&mut with(&habits(0.5))));
    let mut figures = DraftFigures::default();
    with(&habits(0.5)).figures(&mut figures);
    assert_eq!((figures.habits.level, figures.habits.survival[0].0), (0.1, 0.5));
    // Invalid values are ignored.
    let odd =
        Habits { survival: vec![(f32::NAN, 3.0), (2.0, 1.0), (0.5, -1.0)], level: f32::INFINITY };
    with(&odd).figures(&mut figures);
    assert_eq!(figures.habits, Habits::default());
}

/// Drafting ahead hides 2 ms of drafting. It makes the pass `stretch` times as long.
#[test]
fn work_ahead_stays_where_it_pays() {
    let ahead = |wish: Ahead, stretch: f64| {
        let mut policy = policy(&[(1, 0.01), (32, 0.01)], DraftOptions::default(), true)
            .with(&Habits { level: 0.002, ..Habits::default() })
            .working_ahead(wish);
        let (mut hidden, mut count) = (false, 0);
        for _ in 0..1000 {
            let allowed = policy.allow(&round(1));
            let mut line =
                line(0.9, Allowance { draft_steps: allowed.draft_steps.min(1), ..allowed });
            let steps = line.len() - 1;
            let drafting = if hidden { 0.0 } else { 0.002 * steps as f64 };
            policy.choose(&mut [&mut line], Duration::from_secs_f64(drafting), steps);
            hidden = policy.ahead().is_some();
            count += hidden as usize;
            let time = Duration::from_secs_f64(if hidden { 0.01 * stretch } else { 0.01 });
            let path = (0..line.len() as u32).collect();
            let pass = Pass { rows: line.len(), time, ..Pass::default() };
            policy.observe(&RoundOutcome { pass, paths: &[path] });
        }
        count
    };
    let [good, bad] = [1.05, 1.5].map(|stretch| ahead(Ahead::Auto, stretch));
    assert!(good > 900 && bad < 100, "{good} {bad}");
    assert!(ahead(Ahead::Never, 1.0) == 0 && ahead(Ahead::Always, 1.3) > 900);
}
