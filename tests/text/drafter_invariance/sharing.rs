//! Texts that share passes: drafts for each, and the reading of prompts.

use super::*;
use anyhow::bail;
use gemma::draft::{CandidateSource, DraftModel, Mixing};
use gemma::sampler::{Mask, TokenRule};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Generates all texts, as many at once as the target has sequences. Returns the results by number.
fn grow(texts: &mut Scheduler<'_>, cases: &[Case]) -> Vec<(Vec<u32>, Stats)> {
    let mut grown: HashMap<usize, (Vec<u32>, Stats)> = HashMap::new();
    let (mut waiting, mut seated) = (0..cases.len(), HashMap::new());
    while grown.len() < cases.len() {
        while let Some(next) = if texts.has_room() { waiting.next() } else { None } {
            seated.insert(texts.admit(request(&cases[next])).unwrap(), next);
        }
        for ended in texts.step(&mut |_, _| Flow::Continue).unwrap() {
            assert_eq!(ended.stop.unwrap(), StopReason::Length);
            grown.insert(seated[&ended.sequence], (ended.text.history, ended.text.stats));
        }
    }
    (0..cases.len()).map(|n| grown.remove(&n).unwrap()).collect()
}

/// One draft model drafts for all texts in shared passes. Each text takes as many passes of the
/// target as it does alone.
#[test]
fn a_draft_model_guesses_of_each_text_what_it_does_alone() {
    let target = Toy { order: 3, max_rows: 4000, ..Toy::new(5) };
    let draft = Toy { max_rows: 1 << 16, ..draft_of(&target, 0.2) };
    let cases: Vec<Case> = settings()
        .into_iter()
        .chain(settings())
        .enumerate()
        .map(|(i, config)| {
            let prompt: Vec<u32> = (0..4 + 23 * i as u32).map(|n| n * n % 39).collect();
            let max_tokens = 30 + 7 * (i % 5);
            Case { max_tokens, ..Case::new(&prompt, SamplerConfig { seed: i as u64, ..config }) }
        })
        .collect();
    let drafter = |texts: usize| {
        let model = Some(DraftModel::new(draft.engine_for(texts)));
        let mixing = Mixing { rate: 0.0, ..Mixing::default() };
        TreeBuilder::new(model, &[CandidateSource::Context], mixing)
    };
    let never = AtomicBool::new(false);
    let mut passes = Vec::new();
    let mut alone = Vec::new();
    let all = cases.len();
    for (sequences, busy_polls) in [(1, None), (5, None), (all, None), (all, Some(3))] {
        let toy = Toy { busy_polls, ..target.clone() };
        let mut timeline = Timeline::new(toy.engine_for(sequences));
        let (mut builder, mut policy) =
            (drafter(sequences), invariance::policy(TreeSize::Nodes(7), None));
        let mut texts = Scheduler::new(&mut timeline, &mut builder, &mut policy, &[], &never);
        let got = grow(&mut texts, &cases);
        let mut figures = DraftFigures::default();
        builder.figures(&mut figures);
        if busy_polls.is_some() {
            assert!(figures.ahead > 0 && figures.hits > 0, "{figures:?}");
            got.iter().zip(&alone).for_each(|(got, alone): (&_, &(_, Stats))| {
                assert_eq!(got.0, alone.0);
            });
            continue;
        }
        passes.push(figures.draft_passes);
        if alone.is_empty() {
            alone = got;
            continue;
        }
        for (i, (got, alone)) in got.iter().zip(&alone).enumerate() {
            assert_eq!(got.0, alone.0, "text {i} of {sequences}");
            assert_eq!(got.1.lengths, alone.1.lengths, "text {i} of {sequences}");
            assert_eq!(got.1.total, alone.1.total, "text {i} of {sequences}");
        }
    }
    let tokens: u64 = alone.iter().map(|text| text.1.tokens).sum();
    let rounds: u64 = alone.iter().map(|text| text.1.passes).sum();
    assert!(rounds * 5 < tokens * 4, "{rounds} rounds for {tokens} tokens");
    // Five texts at a time, and all at once. They have unequal lengths, so not all passes are
    // shared.
    assert!(passes[1] * 2 < passes[0] && passes[2] * 5 < passes[0], "{passes:?}");
}

/// If the draft model has little scratch memory, it drafts less and no text changes.
#[test]
fn a_draft_model_without_room_for_all_texts_is_only_less_useful() {
    let target = Toy::new(6);
    let cases: Vec<Case> = (0..7)
        .map(|seed| {
            let config = SamplerConfig { temperature: 1.0, seed, ..SamplerConfig::default() };
            Case { max_tokens: 25, ..Case::new(&[1, 2, seed as u32], config) }
        })
        .collect();
    let never = AtomicBool::new(false);
    let plain: Vec<Vec<u32>> = cases
        .iter()
        .map(|case| run(&mut Timeline::new(target.engine()), &mut NoDraft, case).0.history)
        .collect();
    for max_rows in [1, 3, 7, 12, 40] {
        let draft = Toy { max_rows, ..draft_of(&target, 0.1) };
        let mut timeline = Timeline::new(target.engine_for(5));
        let mut builder = TreeBuilder::of_both(draft.engine_for(5));
        let mut policy = invariance::policy(TreeSize::Nodes(4), None);
        let mut texts = Scheduler::new(&mut timeline, &mut builder, &mut policy, &[], &never);
        let got = grow(&mut texts, &cases);
        assert!(got.iter().map(|text| &text.0).eq(&plain), "{max_rows} rows");
    }
}

/// A drafter that cannot read texts, or cannot draft for them.
struct Broken {
    reads: bool,
}

impl Drafter for Broken {
    fn propose(
        &mut self,
        _: &mut [DraftRequest<'_>],
        _: Option<&mut dyn Assistant>,
    ) -> Result<usize> {
        bail!("the drafter drafts nothing")
    }

    fn prepare(&mut self, _: usize, _: &[u32], _: Duration) -> Result<()> {
        if self.reads { Ok(()) } else { bail!("the drafter reads nothing") }
    }
}

/// If a pass fails, the texts that it has ended are returned before the error.
#[test]
fn a_pass_that_fails_drops_no_text_that_has_ended() {
    let case = |max_tokens| Case { max_tokens, ..Case::new(&[1], SamplerConfig::default()) };
    for (reads, says) in [(false, "reads nothing"), (true, "drafts nothing")] {
        let mut timeline = Timeline::new(Toy::new(9).engine_for(2));
        let mut broken = Broken { reads };
        let mut policy = invariance::policy(TreeSize::Nodes(4), None);
        let never = AtomicBool::new(false);
        let mut texts = Scheduler::new(&mut timeline, &mut broken, &mut policy, &[], &never);
        let whole = texts.admit(request(&case(0))).unwrap();
        let other = texts.admit(request(&case(5))).unwrap();
        let mut step = || texts.step(&mut |_, _| Flow::Continue);
        let ended: Vec<usize> = step().unwrap().iter().map(|ended| ended.sequence).collect();
        assert_eq!(ended, [whole], "{says}");
        let error = step().err().expect("the pass failed");
        assert!(error.to_string().contains(says), "{error}");
        assert!(texts.cancel(other).is_some());
    }
}

/// While a long prompt is read, growing texts continue with every pass, and a short prompt that
/// arrives gets its first token within three passes.
#[test]
fn a_long_prompt_holds_nobody_up() {
    let target = Toy { max_rows: 512, ..Toy::new(9) };
    let mut timeline = Timeline::new(target.engine_for(3));
    let (mut none, mut policy, never) = (NoDraft, Policy::off(), AtomicBool::new(false));
    let mut texts = Scheduler::new(&mut timeline, &mut none, &mut policy, &[], &never);
    let case = |prompt: usize| {
        let prompt: Vec<u32> = (0..prompt as u32).map(|n| n % 37).collect();
        Case { max_tokens: 200, ..Case::new(&prompt, SamplerConfig::default()) }
    };
    let grows = texts.admit(request(&case(4))).unwrap();
    let step = |texts: &mut Scheduler<'_>| {
        let mut events = Vec::new();
        let ended = texts.step(&mut |sequence, event| {
            events.push((sequence, event));
            Flow::Continue
        });
        assert!(ended.unwrap().is_empty());
        events
    };
    assert_eq!(step(&mut texts), [(grows, Event::Prefill(3, 3))]);
    let long = texts.admit(request(&case(2000))).unwrap();
    let (mut read, mut steps, mut short, mut short_steps) = (0, 0, None, 0);
    while read < 1999 {
        if steps == 5 {
            short = Some(texts.admit(request(&case(64))).unwrap());
        }
        let events = step(&mut texts);
        assert!(events.iter().any(|e| matches!(e, (s, Event::Token(_)) if *s == grows)));
        for event in &events {
            match event {
                (s, Event::Prefill(done, 1999)) if *s == long => {
                    assert!((1..=64).contains(&(done - read)), "{read} to {done}");
                    read = *done;
                }
                (s, Event::Token(_)) if Some(*s) == short && short_steps == 0 => {
                    short_steps = steps - 4;
                }
                _ => {}
            }
        }
        steps += 1;
    }
    assert!((31..=33).contains(&steps) && (1..=3).contains(&short_steps), "{steps}, {short_steps}");
    assert_eq!(texts.cancel(long).unwrap().text.history.len(), 2000);
}

/// Long prompts that are read together fill passes and do not overfill them, with drafts too.
#[test]
fn prompts_that_are_read_together_share_the_rows_of_a_pass() {
    let target = Toy { max_rows: 24, ..Toy::new(11) };
    let case = |prompt: u32| {
        let prompt: Vec<u32> = (0..prompt).map(|n| n % 11).collect();
        Case { max_tokens: 30, ..Case::new(&prompt, SamplerConfig::default()) }
    };
    let cases = [90, 4, 75, 100, 3, 61].map(case);
    let alone = cases
        .each_ref()
        .map(|case| run(&mut Timeline::new(target.engine()), &mut NoDraft, case).0.history);
    let mut timeline = Timeline::new(target.engine_for(4));
    let (mut drafter, mut policy) = (TreeBuilder::of_text(), invariance::everything());
    let never = AtomicBool::new(false);
    let mut texts = Scheduler::new(&mut timeline, &mut drafter, &mut policy, &[], &never);
    let grown = grow(&mut texts, &cases);
    assert!(grown.iter().map(|(text, _)| text).eq(&alone));
}

/// Allows tokens that are not a multiple of the text's length, and is polled a few times before it
/// has its mask.
#[derive(Debug, Default)]
struct Late {
    is_late: bool,
    asked: Mutex<HashMap<usize, usize>>,
}

const ASKED: usize = 4;

impl TokenRule for Late {
    fn mask(&self, history: &[u32]) -> Result<Option<Arc<Mask>>> {
        let n = history.len() as u32;
        let allows = (0..40).filter(|token| token % n.min(7) != 0);
        let mut words = vec![0, 0];
        allows.for_each(|token| words[token as usize / 32] |= 1 << (token % 32));
        Ok(Some(Arc::new(Mask::new(words, false))))
    }

    fn is_slow(&self) -> bool {
        self.is_late
    }

    fn is_ready(&self, history: &[u32]) -> bool {
        let mut asked = self.asked.lock().unwrap();
        let times = asked.entry(history.len()).or_default();
        *times += 1;
        !self.is_late || *times >= ASKED
    }
}

/// A text with a slow grammar skips passes, and the others continue with each pass. All texts are
/// the same as alone.
#[test]
fn a_slow_grammar_holds_nobody_up() {
    let target = Toy { order: 3, max_rows: 400, ..Toy::new(6) };
    let case = |prompt: &[u32], max_tokens| {
        let config = SamplerConfig { temperature: 1.0, ..SamplerConfig::default() };
        Case { max_tokens, ..Case::new(prompt, config) }
    };
    let run = |late: bool, draft: &dyn Fn() -> Box<dyn Drafter>| {
        let mut timeline = Timeline::new(target.engine_for(2));
        let never = AtomicBool::new(false);
        let mut drafter = draft();
        let mut policy = invariance::policy(TreeSize::Nodes(4), None);
        let mut texts = Scheduler::new(&mut timeline, drafter.as_mut(), &mut policy, &[], &never);
        let mut slow = request(&case(&[5, 9, 2, 6], 30));
        let rule = Late { is_late: late, ..Late::default() };
        slow.sampler = slow.sampler.under(Arc::new(rule));
        let slow = texts.admit(slow).unwrap();
        let other = texts.admit(request(&case(&[1, 2, 3, 4], 80))).unwrap();
        let (mut histories, mut steps) = (HashMap::new(), [0, 0]);
        while texts.running() > 0 {
            let both = texts.running() == 2;
            let mut came = [0, 0];
            let ended = texts.step(&mut |sequence, event| {
                came[(sequence == other) as usize] += matches!(event, Event::Token(_)) as usize;
                Flow::Continue
            });
            for ended in ended.unwrap() {
                histories.insert(ended.sequence, ended.text.history);
            }
            if both && came != [0, 0] {
                assert!(came[1] > 0, "the other one waited");
                steps[0] += (came[0] > 0) as usize;
                steps[1] += 1;
            }
        }
        (histories.remove(&slow).unwrap(), histories.remove(&other).unwrap(), steps)
    };
    let none = || -> Box<dyn Drafter> { Box::new(NoDraft) };
    let (slow, other, _) = run(false, &none);
    let (late, neighbour, [own, all]) = run(true, &none);
    assert_eq!((&late, &neighbour), (&slow, &other));
    assert!(own * (ASKED - 1) <= all && own > 5, "{own} of {all} passes");
    let drafted = || -> Box<dyn Drafter> { Box::new(TreeBuilder::of_text()) };
    let (late, neighbour, _) = run(true, &drafted);
    assert_eq!((late, neighbour), (slow, other));
}
