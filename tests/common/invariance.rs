//! Test harness of promise 4 for any engine: one prompt and seed give one text with many drafters.

#![allow(dead_code)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Result;
use gemma::checkpoint::Checkpoint;
use gemma::decode::{
    Event, Flow, GenerationLimits, Request, Scheduler, Stats, StopReason, generate,
};
use gemma::draft::{
    AssistantModel, CandidateSource, CostCurve, Costs, DraftContext, DraftFigures, DraftModel,
    DraftOptions, DraftRequest, Drafter, Mixing, NoDraft, Policy, Proposal, TreeBuilder, TreeSize,
};
use gemma::engine::{Assistant, Engine, Input, Output, Rows, Scores, Timeline, TokenTree};
use gemma::models::Weights;
use gemma::sampler::{Mask, Sampler, SamplerConfig, TokenRule};
use gemma::tensor::Token;

/// Makes equal engines.
pub type Factory<'a> = &'a dyn Fn() -> Box<dyn Engine>;

/// Input of a run.
#[derive(Clone, Debug)]
pub struct Case {
    pub prompt: Vec<Token>,
    pub config: SamplerConfig,
    pub max_tokens: usize,
    pub stop_ids: Vec<Token>,
    /// The receiver stops the text after this many tokens.
    pub patience: usize,
    pub rule: Option<Arc<dyn TokenRule>>,
}

impl Case {
    pub fn new(prompt: &[Token], config: SamplerConfig) -> Self {
        Case {
            prompt: prompt.to_vec(),
            config,
            max_tokens: 60,
            stop_ids: Vec::new(),
            patience: usize::MAX,
            rule: None,
        }
    }
}

/// Allows a set of tokens that depends on the last token and the length: one, a few, or half of
/// them.
#[derive(Debug)]
pub struct Strict {
    pub vocab: usize,
}

impl Strict {
    /// Whether the rule allows `token` after `history`.
    pub fn allows(&self, history: &[Token], token: Token) -> bool {
        let last = history[history.len() - 1] as usize;
        let place = last * 31 + history.len() / 2 * 7;
        match place % 5 {
            0..=2 => token as usize == place * 13 % self.vocab,
            3 => (token as usize + place).is_multiple_of(7),
            _ => (token as usize + place).is_multiple_of(2),
        }
    }
}

impl TokenRule for Strict {
    fn mask(&self, history: &[Token]) -> Result<Option<Arc<Mask>>> {
        let mut words = vec![0; self.vocab.div_ceil(32)];
        let allowed = (0..self.vocab as Token).filter(|token| self.allows(history, *token));
        allowed.for_each(|token| words[token as usize / 32] |= 1 << (token % 32));
        Ok(Some(Arc::new(Mask::new(words, false))))
    }
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    pub history: Vec<Token>,
    pub heard: Vec<Token>,
    pub stop: StopReason,
}

/// A drafter, and the policy that decides how many of its tokens are verified.
pub type Drafting = (Box<dyn Drafter>, Policy);

/// Generates one text. All proposed tokens are verified.
pub fn run(timeline: &mut Timeline, drafter: &mut dyn Drafter, case: &Case) -> (Text, Stats) {
    run_by(timeline, drafter, &mut everything(), case)
}

/// Generates one text. `policy` decides which proposed tokens are verified.
pub fn run_by(
    timeline: &mut Timeline,
    drafter: &mut dyn Drafter,
    policy: &mut Policy,
    case: &Case,
) -> (Text, Stats) {
    let sampler = Sampler::new(case.config.clone()).unwrap();
    let sampler = case.rule.iter().fold(sampler, |sampler, rule| sampler.under(rule.clone()));
    let mut history = case.prompt.clone();
    let mut heard = Vec::new();
    let mut stats = Stats::default();
    let limits = GenerationLimits {
        max_tokens: case.max_tokens,
        stop_ids: &case.stop_ids,
        interrupt: &AtomicBool::new(false),
    };
    let mut listen = |event| {
        if let Event::Token(token) = event {
            heard.push(token);
        }
        if heard.len() >= case.patience { Flow::Stop } else { Flow::Continue }
    };
    let stop = generate(
        timeline,
        drafter,
        policy,
        &sampler,
        &mut history,
        &limits,
        &mut stats,
        &mut listen,
    )
    .unwrap();
    assert_eq!(history[case.prompt.len()..], heard);
    assert_eq!(stats.tokens, heard.len() as u64);
    assert_eq!(stats.lengths.iter().sum::<u64>(), stats.passes);
    (Text { history, heard, stop }, stats)
}

/// Proposes the tokens that the target will pick, computed by a second target.
///
/// As a liar, it proposes any other tokens instead.
pub struct Oracle {
    target: Timeline,
    lie: bool,
}

impl Oracle {
    pub fn new(target: Box<dyn Engine>, lie: bool) -> Self {
        Oracle { target: Timeline::new(target), lie }
    }
}

impl Drafter for Oracle {
    fn propose(
        &mut self,
        asks: &mut [DraftRequest<'_>],
        _: Option<&mut dyn Assistant>,
    ) -> Result<usize> {
        asks.iter_mut().try_for_each(|ask| self.guess(&ask.ctx, ask.out))?;
        Ok(0)
    }
}

impl Oracle {
    fn guess(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        let mut scores = Scores::default();
        let mut text = ctx.history.to_vec();
        for node in 0..ctx.nodes.min(ctx.depth).min(6) as u32 {
            self.target.sync(0, &text[..text.len() - 1], &mut |_| true)?;
            let root = TokenTree::root(text[text.len() - 1]);
            let input = Input::new(0, &root, Rows::Last);
            self.target.run(&[input], Output::Logits, &mut scores)?;
            let pick = ctx.sampler.pick(text.len(), scores.row(0), &text)?;
            let token = if self.lie { (pick + 1) % scores.vocab as Token } else { pick };
            out.add(node, token, 0.9, "oracle");
            text.push(token);
        }
        Ok(())
    }
}

/// Proposes random trees, including trees that are deeper and larger than allowed.
pub struct Random {
    pub state: u64,
    pub vocab: usize,
}

impl Drafter for Random {
    fn propose(
        &mut self,
        asks: &mut [DraftRequest<'_>],
        _: Option<&mut dyn Assistant>,
    ) -> Result<usize> {
        asks.iter_mut().for_each(|ask| self.guess(ask.out));
        Ok(0)
    }
}

impl Random {
    fn guess(&mut self, out: &mut Proposal) {
        let mut next = |n: usize| {
            self.state = self
                .state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 33) as usize % n
        };
        for _ in 0..next(80) {
            let parent = next(out.len()) as u32;
            let chance = next(100) as f32 / 100.0;
            out.add(parent, next(self.vocab) as Token, chance, "random");
        }
    }
}

/// Returns costs by which a pass of up to 8 rows takes nearly the same time.
pub fn costs() -> Costs {
    Costs::new(CostCurve::new(&[(1, 0.1), (8, 0.11), (16, 0.13), (32, 0.18)]), 0)
}

/// Returns a policy that verifies as much as pays, a chain, or a number of nodes. It uses no clock.
pub fn policy(tree: TreeSize, tokens: Option<usize>) -> Policy {
    Policy::new(costs(), DraftOptions { tree, tokens }, false)
}

/// Returns a policy that verifies all that is proposed.
pub fn everything() -> Policy {
    policy(TreeSize::Nodes(usize::MAX), None)
}

/// Returns all kinds of drafters, made from a target and a draft model.
pub fn drafters(target: Factory<'_>, draft: Factory<'_>) -> Vec<(&'static str, Drafting)> {
    let vocab = target().info().vocab;
    let model = || -> Box<dyn Drafter> { Box::new(TreeBuilder::of_model(draft())) };
    let ngram = || -> Box<dyn Drafter> { Box::new(TreeBuilder::of_text()) };
    let both = || -> Box<dyn Drafter> { Box::new(TreeBuilder::of_both(draft())) };
    let mixed = |prior, rate, noise| -> Box<dyn Drafter> {
        let model = Some(DraftModel::new(draft()));
        Box::new(TreeBuilder::of_all(model, Mixing { prior, rate, noise }))
    };
    let (auto, chain) = (policy(TreeSize::Auto, None), || policy(TreeSize::Chain, None));
    let by_the_clock = Policy::new(costs(), DraftOptions::default(), true);
    vec![
        ("none", (Box::new(NoDraft), Policy::off())),
        ("oracle", (Box::new(Oracle::new(target(), false)), everything())),
        ("liar", (Box::new(Oracle::new(target(), true)), everything())),
        ("random", (Box::new(Random { state: 1, vocab }), everything())),
        ("ngram", (ngram(), everything())),
        ("ngram chain", (ngram(), chain())),
        ("model", (model(), everything())),
        ("model auto", (model(), auto)),
        ("model chain of 4", (model(), policy(TreeSize::Chain, Some(4)))),
        ("model tree of 11", (model(), policy(TreeSize::Nodes(11), None))),
        ("target as model", (Box::new(TreeBuilder::of_model(target())), everything())),
        ("model and ngram", (both(), everything())),
        ("model and ngram chain", (both(), chain())),
        ("model and ngram by the clock", (both(), by_the_clock)),
        ("untaught", (mixed(false, 0.0, true), everything())),
        ("without noise", (mixed(true, 0.05, false), everything())),
    ]
}

/// Runs a case with every drafter. Returns the text, and the statistics by drafter.
pub fn check(
    target: Factory<'_>,
    draft: Factory<'_>,
    case: &Case,
) -> (Text, Vec<(&'static str, Stats)>) {
    let mut figures = Vec::new();
    let mut plain = None;
    for (name, (mut drafter, mut policy)) in drafters(target, draft) {
        let (text, stats) = run_by(&mut Timeline::new(target()), &mut *drafter, &mut policy, case);
        let want = plain.get_or_insert_with(|| text.clone());
        assert_eq!(text, *want, "with drafter `{name}`, {case:?}");
        figures.push((name, stats));
    }
    (plain.unwrap(), figures)
}

/// Makes random targets of Gemma 4 with an assistant from the golden vectors: a dense model and a
/// mixture of experts.
pub fn assisted_pairs() -> [Weights; 2] {
    let open = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        Weights::open(Checkpoint::open(&folder).unwrap()).unwrap()
    };
    ["gemma4-unified", "gemma4-mixture"]
        .map(|name| open(name).assisted_by(Some(open("assistant-unified"))))
}

/// Runs a case without drafts and with the target's assistant, in trees and chains, alone and mixed
/// with the free sources. Then runs it together with two other texts in one scheduler.
///
/// Rounds have at most `nodes` drafts.
pub fn check_assisted(target: &dyn Fn(usize) -> Box<dyn Engine>, case: &Case, nodes: usize) {
    let vocab = target(1).info().vocab;
    let assisted = |sources: &[CandidateSource]| {
        TreeBuilder::assisted(AssistantModel::new(vocab), sources, Mixing::default())
    };
    let all: Vec<CandidateSource> = CandidateSource::mixed().collect();
    let (plain, _) = run(&mut Timeline::new(target(1)), &mut NoDraft, case);
    let by_the_clock = Policy::new(costs(), DraftOptions::default(), true);
    let tree = || policy(TreeSize::Nodes(nodes), None);
    let mut ways: Vec<(&str, &[CandidateSource], Policy)> = vec![
        ("a tree", &[], tree()),
        ("a chain", &[], policy(TreeSize::Chain, Some(nodes.min(4)))),
    ];
    if nodes > 8 {
        ways.push(("all sources", &all, policy(TreeSize::Auto, None)));
        ways.push(("all by the clock", &all, by_the_clock));
    }
    let mut timeline = Timeline::new(target(1));
    for (name, sources, mut policy) in ways {
        let mut builder = assisted(sources);
        let (text, stats) = run_by(&mut timeline, &mut builder, &mut policy, case);
        assert_eq!(text, plain, "with the assistant, {name}");
        let mut figures = DraftFigures::default();
        builder.figures(&mut figures);
        // The first round of a text has no hidden state to draft from.
        if sources.is_empty() {
            assert!(figures.draft_passes > 0 && stats.total.drafted > 0, "{name}: {figures:?}");
        }
    }
    let prompts = [&case.prompt[..], &case.prompt[1..], &case.prompt[2..]];
    let cases = prompts.map(|prompt| Case { prompt: prompt.to_vec(), ..case.clone() });
    let alone = cases
        .each_ref()
        .map(|case| run(&mut Timeline::new(target(1)), &mut NoDraft, case).0.history);
    let mut timeline = Timeline::new(target(3));
    let (mut builder, mut policy, never) = (assisted(&[]), tree(), AtomicBool::new(false));
    let mut texts = Scheduler::new(&mut timeline, &mut builder, &mut policy, &[], &never);
    let mut grown = [const { Vec::new() }; 3];
    let places = cases.each_ref().map(|case| {
        let sampler = Sampler::new(case.config.clone()).unwrap();
        let sampler = case.rule.iter().fold(sampler, |s, rule| s.under(rule.clone()));
        let request = Request::new(case.prompt.clone(), sampler, case.max_tokens);
        texts.admit(request).unwrap_or_else(|refused| panic!("{:#}", refused.error))
    });
    while texts.running() > 0 {
        for ended in texts.step(&mut |_, _| Flow::Continue).unwrap() {
            let place = places.iter().position(|place| *place == ended.sequence).unwrap();
            assert_eq!(ended.stop.unwrap(), StopReason::Length);
            grown[place] = ended.text.history;
        }
    }
    assert_eq!(grown, alone, "three texts at once");
    let mut figures = DraftFigures::default();
    builder.figures(&mut figures);
    assert!(figures.draft_rows > figures.draft_passes, "texts share draft passes: {figures:?}");
}
