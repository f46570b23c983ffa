//! Promise 4: for one seed the text is the same whatever drafter, draft length or tree is used, at
//! every temperature.

mod scores;
mod sharing;
mod thoughts;
mod vocabulary;

use crate::{invariance, reduced, toy};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use gemma::decode::{
    Event, Flow, GenerationLimits, Request, Scheduler, Stats, StopReason, generate,
};
use gemma::draft::{
    DraftContext, DraftFigures, DraftRequest, Drafter, NoDraft, Policy, Proposal, TreeBuilder,
    TreeSize,
};
use gemma::engine::{Assistant, Engine, Rows, Scores, Timeline, TokenTree, VocabAdapter};
use gemma::error::{Kind, fault_of};
use gemma::models::ReducedVocabulary;
use gemma::sampler::{Sampler, SamplerConfig};
use invariance::{Case, Oracle, Random, Strict, check, run};
use toy::Toy;

fn settings() -> Vec<SamplerConfig> {
    let greedy = SamplerConfig::default();
    let warm = SamplerConfig { temperature: 1.0, ..greedy.clone() };
    vec![
        greedy.clone(),
        warm.clone(),
        SamplerConfig { temperature: 0.7, top_k: 8, ..greedy.clone() },
        SamplerConfig { top_k: 64, top_p: 0.95, ..warm.clone() },
        SamplerConfig { top_p: 0.8, ..warm.clone() },
        SamplerConfig { min_p: 0.1, ..warm.clone() },
        SamplerConfig { repeat_penalty: 1.3, ..greedy.clone() },
        SamplerConfig { repeat_penalty: 1.2, top_k: 20, ..warm.clone() },
        SamplerConfig { presence_penalty: 0.8, frequency_penalty: 0.4, ..greedy },
        SamplerConfig {
            repeat_penalty: 1.3,
            repeat_last_n: 5,
            presence_penalty: 1.5,
            frequency_penalty: -0.3,
            logit_bias: vec![(3, 2.5), (7, -100.0), (11, -1.5)],
            ..warm
        },
    ]
}

/// Removes biases that ban tokens, because a rule may allow only a banned token.
fn without_bans(config: &SamplerConfig) -> SamplerConfig {
    let kept = config.logit_bias.iter().filter(|bias| bias.1 > -100.0);
    SamplerConfig { logit_bias: kept.copied().collect(), ..config.clone() }
}

fn draft_of(target: &Toy, error: f32) -> Toy {
    Toy { error, ..target.clone() }
}

#[test]
fn every_drafter_gives_the_plain_text() {
    for (i, config) in settings().into_iter().enumerate() {
        for seed in 0..4 {
            let target = Toy { order: [1, 2, 3, usize::MAX][seed as usize], ..Toy::new(seed) };
            let draft = draft_of(&target, 0.25);
            let case = Case::new(
                &[3, 1, 4, 1, 5, 9, 2, 6],
                SamplerConfig { seed: seed + 100 * i as u64, ..config.clone() },
            );
            let (text, figures) = check(&|| target.engine(), &|| draft.engine(), &case);
            assert_eq!((text.heard.len(), text.stop), (60, StopReason::Length));
            for (name, stats) in figures {
                match name {
                    "oracle" => assert_eq!(
                        stats.total.drafted, stats.total.accepted,
                        "all that an oracle drafts is accepted"
                    ),
                    "liar" => assert_eq!((stats.total.accepted, stats.passes), (0, 60)),
                    "none" => assert_eq!((stats.total.drafted, stats.passes), (0, 60)),
                    "target as model" => {
                        assert!(stats.accepted_length() > 3.0, "{}", stats.accepted_length())
                    }
                    _ => {}
                }
            }
        }
    }
}

/// The same under a rule. Its forced tokens cost no pass, with any other drafts.
#[test]
fn a_rule_is_kept_whatever_drafts() {
    let mut passes = 0;
    for (i, config) in settings().into_iter().enumerate() {
        for busy_polls in [None, Some(2)] {
            let target = Toy { order: 3, busy_polls, ..Toy::new(60 + i as u64) };
            let draft = draft_of(&target, 0.3);
            let rule = std::sync::Arc::new(Strict { vocab: target.vocab });
            let config = SamplerConfig { seed: i as u64, ..without_bans(&config) };
            let case = Case { rule: Some(rule.clone()), ..Case::new(&[3, 1, 4], config) };
            let (text, figures) = check(&|| target.engine(), &|| draft.engine(), &case);
            assert!(
                (3..text.history.len())
                    .all(|at| rule.allows(&text.history[..at], text.history[at])),
                "{text:?}"
            );
            for (name, stats) in figures {
                let grammar = stats
                    .by_source
                    .iter()
                    .find(|source| source.0 == "grammar")
                    .map(|source| source.1);
                match name {
                    "none" => assert_eq!((stats.passes, grammar), (60, None)),
                    "oracle" => assert_eq!(stats.total.drafted, stats.total.accepted),
                    "ngram" => {
                        let grammar = grammar.expect("forced tokens are drafted");
                        assert!(grammar.accepted > 10 && stats.passes < 50, "{stats:?}");
                        passes += stats.passes;
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(passes < 16 * 40, "{passes} passes for {} tokens", 16 * 60);
}

#[test]
fn texts_end_at_the_same_token_inside_a_tree() {
    let mut ends = std::collections::HashSet::new();
    for seed in 0..12 {
        let target = Toy::new(50 + seed);
        let draft = draft_of(&target, 0.1);
        let config =
            SamplerConfig { temperature: (seed % 3) as f32 / 2.0, seed, ..Default::default() };
        let mut case = Case::new(&[1, 2], config);
        match seed % 3 {
            0 => case.max_tokens = 1 + seed as usize * 2,
            1 => case.stop_ids = (0..40).filter(|t| t % 9 == seed as u32 % 9).collect(),
            _ => case.patience = 5 + seed as usize,
        }
        let (text, _) = check(&|| target.engine(), &|| draft.engine(), &case);
        assert!(!text.heard.iter().any(|t| case.stop_ids.contains(t)));
        ends.insert(std::mem::discriminant(&text.stop));
    }
    assert_eq!(ends.len(), 3, "each way to end was met");
}

#[test]
fn a_full_context_ends_the_text() {
    let target = Toy { context: 30, ..Toy::new(3) };
    let draft = draft_of(&target, 0.1);
    for context in [30, 20] {
        let draft = Toy { context, ..draft.clone() };
        let case = Case::new(&[1, 2, 3], SamplerConfig::default());
        let (text, _) = check(&|| target.engine(), &|| draft.engine(), &case);
        assert_eq!((text.history.len(), text.stop), (30, StopReason::Length));
    }
    let long = Case::new(&[1; 30], SamplerConfig::default());
    let sampler = Sampler::new(long.config.clone()).unwrap();
    let limits =
        GenerationLimits { max_tokens: 5, stop_ids: &[], interrupt: &AtomicBool::new(false) };
    let try_prompt = |mut history: Vec<u32>| {
        let mut timeline = Timeline::new(target.engine());
        let mut quiet = |_| Flow::Continue;
        generate(
            &mut timeline,
            &mut NoDraft,
            &mut Policy::off(),
            &sampler,
            &mut history,
            &limits,
            &mut Stats::default(),
            &mut quiet,
        )
        .unwrap_err()
    };
    assert_eq!(fault_of(&try_prompt(long.prompt.clone())).unwrap().kind, Kind::Context);
    assert_eq!(fault_of(&try_prompt(vec![])).unwrap().kind, Kind::Usage);
}

/// A separate drafter for each text.
struct Each(Vec<Box<dyn Drafter>>);

impl Drafter for Each {
    fn prepare(&mut self, text: usize, history: &[u32], most: Duration) -> Result<()> {
        self.0[text].prepare(0, history, most)
    }

    fn propose(
        &mut self,
        asks: &mut [DraftRequest<'_>],
        _: Option<&mut dyn Assistant>,
    ) -> Result<usize> {
        for DraftRequest { text, ctx, out } in asks {
            self.0[*text].propose(&mut [DraftRequest { text: 0, ctx: *ctx, out }], None)?;
        }
        Ok(0)
    }

    fn reads_target(&self) -> bool {
        true
    }
}

fn request(case: &Case) -> Request {
    let sampler = Sampler::new(case.config.clone()).unwrap();
    let sampler = case.rule.iter().fold(sampler, |sampler, rule| sampler.under(rule.clone()));
    Request::new(case.prompt.clone(), sampler, case.max_tokens)
}

/// Returns three texts with each setting, some under a rule, some with a receiver that stops early.
fn cases_of_all_settings(vocab: usize) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for (i, config) in settings().into_iter().enumerate() {
        for seed in 0..3 {
            let mut case = Case::new(
                &[3, 1, 4, 1, 5, (seed + i as u64) as u32],
                SamplerConfig { seed, ..config.clone() },
            );
            (case.max_tokens, case.patience) =
                (1 + (7 * i + 11 * seed as usize) % 40, if seed == 2 { 9 } else { usize::MAX });
            case.stop_ids = vec![17];
            if seed == 1 || i == 3 {
                case.rule = Some(std::sync::Arc::new(Strict { vocab }));
                case.config = without_bans(&case.config);
            }
            cases.push(case);
        }
    }
    cases
}

/// Texts that share passes are the same as alone, with any drafts and whichever other texts start
/// and end at the same time.
#[test]
fn texts_in_one_pass_are_those_alone() {
    let target = Toy::new(21);
    let cases = cases_of_all_settings(target.vocab);
    let alone: Vec<_> = cases
        .iter()
        .map(|case| run(&mut Timeline::new(target.engine()), &mut NoDraft, case).0)
        .collect();
    let never = AtomicBool::new(false);
    let mut shortest = usize::MAX;
    for (seats, tree) in [
        (1, TreeSize::Auto),
        (3, TreeSize::Auto),
        (8, TreeSize::Auto),
        (4, TreeSize::Nodes(5)),
        (8, TreeSize::Chain),
    ] {
        let drafters = (0..seats).map(|seat| -> Box<dyn Drafter> {
            match seat % 4 {
                0 => Box::new(Oracle::new(target.engine(), false)),
                1 => Box::new(Random { state: seat as u64, vocab: target.vocab }),
                2 => Box::new(TreeBuilder::of_text()),
                _ => Box::new(NoDraft),
            }
        });
        let mut timeline = Timeline::new(target.engine_for(seats));
        let (mut each, mut policy) = (Each(drafters.collect()), invariance::policy(tree, None));
        let mut texts = Scheduler::new(&mut timeline, &mut each, &mut policy, &[17], &never);
        let mut got: Vec<Option<(Vec<u32>, StopReason)>> = vec![None; cases.len()];
        let (mut next, mut seated, mut heard) = (0, vec![usize::MAX; seats], vec![0; cases.len()]);
        while next < cases.len() || texts.running() > 0 {
            while next < cases.len() && texts.has_room() {
                let case = &cases[next];
                // A request that cannot be admitted does not affect the others.
                let nothing = Request { history: vec![], ..request(case) };
                assert_eq!(
                    fault_of(&texts.admit(nothing).unwrap_err().error).unwrap().kind,
                    Kind::Usage
                );
                // A cancelled request does not affect them either.
                let gone = texts.admit(request(&cases[0])).unwrap();
                assert_eq!(texts.cancel(gone).unwrap().text.history, cases[0].prompt);
                assert!(texts.cancel(gone).is_none());
                seated[texts.admit(request(case)).unwrap()] = next;
                next += 1;
            }
            let mut listen = |seat: usize, event| {
                heard[seated[seat]] += matches!(event, Event::Token(_)) as usize;
                if heard[seated[seat]] >= cases[seated[seat]].patience {
                    Flow::Stop
                } else {
                    Flow::Continue
                }
            };
            for ended in texts.step(&mut listen).unwrap() {
                assert_eq!(ended.text.stats.tokens as usize, heard[seated[ended.sequence]]);
                got[seated[ended.sequence]] = Some((ended.text.history, ended.stop.unwrap()));
            }
        }
        for ((got, alone), case) in got.into_iter().zip(&alone).zip(&cases) {
            assert_eq!(
                got.unwrap(),
                (alone.history.clone(), alone.stop),
                "{seats} at once, {tree:?}, {case:?}"
            );
        }
        shortest = shortest.min(texts.passes() as usize);
    }
    let tokens: usize = alone.iter().map(|text| text.heard.len()).sum();
    assert!(shortest * 5 < tokens, "{shortest} passes for {tokens} tokens");
}

#[test]
fn a_draft_of_another_size_is_only_less_useful() {
    let target = Toy::new(8);
    let case = Case::new(&[1, 2, 3], SamplerConfig { temperature: 1.0, ..Default::default() });
    for draft in [
        Toy { vocab: 20, ..draft_of(&target, 0.2) },
        Toy { vocab: 60, ..draft_of(&target, 0.2) },
        Toy { max_rows: 1, ..draft_of(&target, 0.2) },
        Toy { max_rows: 6, ..draft_of(&target, 0.2) },
    ] {
        check(&|| target.engine(), &|| draft.engine(), &case);
    }
    // The target's passes have one row, few rows or many.
    let mut texts = Vec::new();
    for max_rows in [1, 2, 5, 64] {
        let target = Toy { max_rows, ..target.clone() };
        texts.push(check(&|| target.engine(), &|| draft_of(&target, 0.2).engine(), &case).0);
    }
    assert!(texts.windows(2).all(|w| w[0] == w[1]));
}

/// A session in which the history is continued, cut back and replaced gives the results of new
/// engines.
#[test]
fn caches_follow_an_edited_history() {
    let slacks = [0, 10, usize::MAX];
    for slack in slacks {
        let target = Toy { slack, max_rows: 16, ..Toy::new(21) };
        let draft = Toy { slack, ..draft_of(&target, 0.15) };
        let mut drafters: Vec<Box<dyn Drafter>> = vec![
            Box::new(NoDraft),
            Box::new(TreeBuilder::of_both(draft.engine())),
            Box::new(TreeBuilder::of_text()),
            Box::new(Oracle::new(target.engine(), false)),
            Box::new(Random { state: 3, vocab: 40 }),
        ];
        let mut timeline = Timeline::new(target.engine());
        let mut prompt: Vec<u32> = (0..50).map(|i| i * 7 % 40).collect();
        for step in 0..40 {
            let config =
                SamplerConfig { temperature: 1.0, top_k: 10, seed: step, ..Default::default() };
            let case = Case { max_tokens: 9, ..Case::new(&prompt, config) };
            let (want, fresh) = run(&mut Timeline::new(target.engine()), &mut NoDraft, &case);
            let which = step as usize % drafters.len();
            let (got, stats) = run(&mut timeline, &mut *drafters[which], &case);
            assert_eq!(got, want, "step {step}, slack {slack}");
            assert_eq!(fresh.prefilled, prompt.len() as u64 - 1);
            assert!(stats.prefilled <= fresh.prefilled);
            match step % 4 {
                0 => prompt = got.history, // goes on: nothing to prefill
                1 => prompt.truncate(prompt.len() - 5),
                2 => prompt[20] = step as u32,
                _ => prompt.extend([1, 2, 3]),
            }
            if step % 4 == 1 {
                assert!(stats.prefilled <= 1, "{} tokens were prefilled again", stats.prefilled);
            }
        }
    }
}

#[test]
fn an_interrupt_stops_between_chunks_and_between_rounds() {
    let target = Toy { max_rows: 8, ..Toy::new(4) };
    let sampler = Sampler::new(SamplerConfig::default()).unwrap();
    let flag = AtomicBool::new(false);
    let limits = GenerationLimits { max_tokens: 50, stop_ids: &[], interrupt: &flag };
    let mut history = vec![1; 40];
    let mut timeline = Timeline::new(target.engine());
    let mut stats = Stats::default();
    let mut chunks = Vec::new();
    let mut in_prefill = |event| {
        let Event::Prefill(done, of) = event else { panic!("no token yet") };
        chunks.push((done, of));
        flag.store(done >= 16, Ordering::Relaxed);
        Flow::Continue
    };
    let stop = generate(
        &mut timeline,
        &mut NoDraft,
        &mut Policy::off(),
        &sampler,
        &mut history,
        &limits,
        &mut stats,
        &mut in_prefill,
    )
    .unwrap();
    assert_eq!((stop, history.len(), timeline.position(0)), (StopReason::Interrupt, 40, 16));
    assert_eq!(chunks, [(8, 39), (16, 39)]);

    flag.store(false, Ordering::Relaxed);
    let mut heard = 0;
    let mut in_decode = |event| {
        heard += matches!(event, Event::Token(_)) as usize;
        flag.store(heard == 3, Ordering::Relaxed);
        Flow::Continue
    };
    let stop = generate(
        &mut timeline,
        &mut NoDraft,
        &mut Policy::off(),
        &sampler,
        &mut history,
        &limits,
        &mut stats,
        &mut in_decode,
    )
    .unwrap();
    assert_eq!((stop, history.len()), (StopReason::Interrupt, 43));
}

/// Drafting while the target's device works finds the start of the next round, and does not change
/// the text.
#[test]
fn drafting_ahead_saves_passes_of_the_draft_and_changes_no_text() {
    let mut sums = [0; 3];
    for (i, config) in settings().into_iter().enumerate() {
        let target = Toy { order: 3, ..Toy::new(30 + i as u64) };
        let draft = draft_of(&target, 0.2);
        let case = Case::new(&[3, 1, 4, 1, 5], SamplerConfig { seed: i as u64, ..config });
        let want = check(&|| target.engine(), &|| draft.engine(), &case).0;
        for looks in [0, 1, 2, 9] {
            let busy = Toy { busy_polls: Some(looks), ..target.clone() };
            let (got, figures) = check(&|| busy.engine(), &|| draft.engine(), &case);
            assert_eq!(got, want, "a device that is busy for {looks} looks");
            let hidden =
                |name: &str| !figures.iter().find(|f| f.0 == name).unwrap().1.hidden_time.is_zero();
            assert_eq!(
                (hidden("none"), hidden("model tree of 11")),
                (false, looks > 0),
                "busy for {looks} looks"
            );
        }
        // A draft model with few rows has to start again more often.
        for max_rows in [1, 8, 20, 64, 400] {
            let small = Toy { max_rows, ..draft.clone() };
            let busy = Toy { busy_polls: Some(3), ..target.clone() };
            let mut drafter = TreeBuilder::of_model(small.engine());
            let (got, stats) = run(&mut Timeline::new(busy.engine()), &mut drafter, &case);
            assert_eq!(got, want);
            let mut figures = DraftFigures::default();
            drafter.figures(&mut figures);
            assert!(figures.hits <= figures.ahead && figures.ahead < stats.passes);
            if max_rows == 400 {
                sums = [sums[0] + stats.passes, sums[1] + figures.ahead, sums[2] + figures.hits];
            }
        }
    }
    let [passes, ahead, hits] = sums;
    assert!(ahead * 2 > passes && hits * 5 > ahead, "{hits} right of {ahead}, in {passes} passes");
}

/// Drafts save passes: on a predictable pair, tokens per pass are well above 1, and trees are
/// better than chains.
#[test]
fn better_drafts_need_fewer_passes() {
    let mut length = std::collections::HashMap::new();
    for seed in 0..6 {
        let target = Toy { order: 3, spread: 3.0, ..Toy::new(seed) };
        let draft = draft_of(&target, 0.2);
        let config =
            SamplerConfig { temperature: 1.0, top_k: 64, top_p: 0.95, seed, ..Default::default() };
        let case = Case { max_tokens: 150, ..Case::new(&[1, 2, 3], config) };
        for (name, stats) in check(&|| target.engine(), &|| draft.engine(), &case).1 {
            *length.entry(name).or_insert(0.0) += stats.accepted_length() / 6.0;
        }
    }
    assert!(length["model"] > 2.0, "{length:?}");
    assert!(length["model tree of 11"] > length["model chain of 4"], "{length:?}");
    assert!(length["model auto"] > 1.5, "{length:?}");
    assert!(length["model and ngram"] > length["without noise"] + 0.3, "{length:?}");
}

/// The target's habits are learnt: new prompts need fewer passes after others were answered. The
/// texts stay the same.
#[test]
fn the_table_learns_from_the_target() {
    let target = Toy { vocab: 300, order: 2, spread: 3.0, ..Toy::new(77) };
    // Contexts repeat between the prompts, but no prompt does.
    let prompts =
        |first: u32| (first..first + 25).map(|i| vec![i, i * 7 % 300, 3]).collect::<Vec<_>>();
    let pass = |builder: &mut TreeBuilder, prompts: Vec<Vec<u32>>, temperature: f32| {
        let mut sum = Stats::default();
        for prompt in prompts {
            let config = SamplerConfig { temperature, top_k: 20, seed: 5, ..Default::default() };
            let case = Case { max_tokens: 40, ..Case::new(&prompt, config) };
            let plain = run(&mut Timeline::new(target.engine()), &mut NoDraft, &case).0;
            let (text, stats) = run(&mut Timeline::new(target.engine()), builder, &case);
            assert_eq!(text, plain);
            sum.add_rounds(&stats);
        }
        sum.accepted_length()
    };
    for temperature in [0.0, 0.7] {
        let (mut first, unseen) = (TreeBuilder::of_text(), prompts(200));
        let before = pass(&mut TreeBuilder::of_text(), unseen.clone(), temperature);
        pass(&mut first, prompts(0), temperature);
        pass(&mut first, prompts(100), temperature);
        let after = pass(&mut first, unseen, temperature);
        assert!(
            after > before + 0.1,
            "temperature {temperature}: {before} tokens a pass before, {after} after"
        );
    }
}
