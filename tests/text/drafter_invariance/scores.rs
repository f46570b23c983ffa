//! Log-probabilities of prompts, and penalties of paused answers, depend neither on drafts, nor on
//! other texts, kept prefixes or pauses.

use super::*;
use gemma::decode::TokenLogProbs;
use gemma::engine::EngineExt;

const TEXTS: usize = 4;

/// Computes the log-probabilities of a text by definition: a row for each token.
fn by_the_book(target: &Toy, text: &[u32], n: usize) -> Vec<TokenLogProbs> {
    let (mut engine, mut scores) = (Toy { max_rows: 4000, ..target.clone() }.engine(), None);
    let rows = scores.get_or_insert_with(Scores::default);
    engine.forward(&TokenTree::chain(text), Rows::All, rows).unwrap();
    let entry = |at: usize| TokenLogProbs::new(rows.row(at - 1), text[at], n).unwrap();
    [TokenLogProbs::first(text[0])].into_iter().chain((1..text.len()).map(entry)).collect()
}

/// Generates texts with scored prompts. After the steps that `pauses` lists with a sequence, that
/// sequence's text pauses and continues. Returns the histories and log-probabilities.
fn grow(
    texts: &mut Scheduler<'_>,
    requests: Vec<Request>,
    pauses: &dyn Fn(usize) -> Option<usize>,
) -> Vec<(Vec<u32>, Vec<TokenLogProbs>)> {
    let mut got = vec![(Vec::new(), Vec::new()); requests.len()];
    let (mut waiting, mut places) = (requests.into_iter().enumerate(), [usize::MAX; TEXTS]);
    for step in 0.. {
        while let Some((number, request)) = if texts.has_room() { waiting.next() } else { None } {
            places[texts.admit(request).unwrap()] = number;
        }
        if texts.running() == 0 {
            return got;
        }
        for ended in texts.step(&mut |_, _| Flow::Continue).unwrap() {
            ended.stop.unwrap();
            let (history, scores) = &mut got[places[ended.sequence]];
            *history = ended.text.history;
            scores.extend(ended.log_probs);
        }
        if let Some(paused) = pauses(step).and_then(|sequence| texts.cancel(sequence)) {
            let number = places[paused.sequence];
            got[number].1.extend(paused.log_probs);
            places[texts.admit(paused.text).unwrap()] = number;
        }
    }
    unreachable!()
}

#[test]
fn prompts_have_the_scores_of_their_rows_whatever_happens() {
    let target = Toy { order: 3, max_rows: 90, ..Toy::new(11) };
    let shared: Vec<u32> = (0..520).map(|n| n * n % 39).collect();
    let requests = || {
        settings().into_iter().chain(settings()).enumerate().map(|(i, config)| {
            let own = [i as u32 % 40, 3, 5];
            // Prompts of one token, of less than a pass, and of kept pages.
            let prompt = [&shared[..[0, 30, 300, 515][i % 4]], &own[..1 + i % 3]].concat();
            let max_tokens = if i % 5 == 0 { 0 } else { 12 };
            let config = SamplerConfig { seed: i as u64, ..config };
            let text = request(&Case { max_tokens, ..Case::new(&prompt, config) });
            Request { top_log_probs: Some(i % 3), scored: (i % 6 != 5).then_some(0), ..text }
        })
    };
    let plain: Vec<Vec<u32>> = requests()
        .map(|Request { history, sampler, max_tokens, .. }| {
            let case = Case { max_tokens, ..Case::new(&history, sampler.config().clone()) };
            run(&mut Timeline::new(target.engine()), &mut NoDraft, &case).0.history
        })
        .collect();
    let never = AtomicBool::new(false);
    for (drafts, pause) in [(false, usize::MAX), (true, usize::MAX), (false, 3), (true, 2)] {
        let draft = Toy { max_rows: 900, ..draft_of(&target, 0.2) };
        let mut drafter: Box<dyn Drafter> = match drafts {
            true => Box::new(TreeBuilder::of_both(draft.engine_for(TEXTS))),
            false => Box::new(NoDraft),
        };
        let mut policy = invariance::policy(TreeSize::Nodes(4), None);
        let mut timeline = Timeline::new(target.engine_for(TEXTS));
        let mut texts = Scheduler::new(&mut timeline, drafter.as_mut(), &mut policy, &[], &never)
            .keeping_prefixes();
        let pauses =
            |step| (step < 80 && step % pause == pause - 1).then_some(step / pause % TEXTS);
        let got = grow(&mut texts, requests().collect(), &pauses);
        for (i, ((history, scores), request)) in got.into_iter().zip(requests()).enumerate() {
            assert_eq!(history, plain[i], "text {i}, drafts {drafts}, pauses {pause}");
            let want = by_the_book(&target, &history, i % 3);
            let first = if request.scored.is_some() { 0 } else { request.history.len() };
            assert_eq!(scores, want[first..], "text {i}, drafts {drafts}, pauses {pause}");
        }
    }
}

/// The token that ends a text has log-probabilities if the prompt has.
#[test]
fn a_scored_text_has_the_score_of_its_end() {
    let target = Toy::new(3);
    let prompt = [3, 1, 4];
    let plain = run(
        &mut Timeline::new(target.engine()),
        &mut NoDraft,
        &Case { max_tokens: 1, ..Case::new(&prompt, SamplerConfig::default()) },
    );
    let end = plain.0.history[3];
    for scored in [Some(0), None] {
        let (never, mut policy) = (AtomicBool::new(false), Policy::off());
        let (mut timeline, mut none, ends) =
            (Timeline::new(target.engine_for(TEXTS)), NoDraft, [end]);
        let mut texts = Scheduler::new(&mut timeline, &mut none, &mut policy, &ends, &never);
        let text = request(&Case::new(&prompt, SamplerConfig::default()));
        let text = Request { top_log_probs: Some(1), scored, ..text };
        let got = grow(&mut texts, vec![text], &|_| None).remove(0);
        let want = by_the_book(&target, &plain.0.history, 1);
        assert_eq!(got, (prompt.to_vec(), if scored.is_some() { want } else { Vec::new() }));
    }
}
