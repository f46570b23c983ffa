//! Promise 4 with real models: with the bundled pair, one seed gives one text with any drafter,
//! tree and number of threads.
//!
//! 40 prompts are answered at 3 temperatures, with 3 seeds in turn, by 6 drafters on one thread.
//! Every eighth prompt also runs on two threads. The slowest drafter gets every fourth prompt.

use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions, Pool};
use gemma::decode::{Flow, GenerationLimits, Stats, generate};
use gemma::draft::{
    CostCurve, Costs, DraftContext, DraftOptions, DraftRequest, Drafter, NoDraft, Policy, Proposal,
    TreeBuilder, TreeSize,
};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, PlannedEngine, Timeline};
use gemma::models::gemma3::bundled::{self, DraftSize};
use gemma::models::{
    ChatTemplate, Config, Message, ReducedVocabulary, Special, Tokenizer, Weights,
};
use gemma::runtime::model::partner::Partner;
use gemma::sampler::{Sampler, SamplerConfig};
use gemma::tensor::Format;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const PROMPTS: [&str; 40] = [
    "What is photosynthesis?",
    "Give me three tips for sleeping better.",
    "Write a Python function that adds two numbers.",
    "Explain what a hash map is.",
    "Tell me a short story about a fox.",
    "What is 12 times 7?",
    "List the days of the week.",
    "How do I boil an egg?",
    "What does a compiler do?",
    "Translate to French: good morning.",
    "Write a haiku about rain.",
    "Why is the sky blue?",
    "What is a prime number?",
    "Describe a sunset.",
    "What is the difference between TCP and UDP?",
    "Write a SQL query that counts users.",
    "Who are you?",
    "Say hello.",
    "Count from one to twenty.",
    "Repeat this: red green blue red green blue red green blue",
    "What is a verb?",
    "How does a bicycle stay upright?",
    "Write a shell command that finds large files.",
    "What causes tides?",
    "Explain recursion.",
    "Name five animals.",
    "What is inflation?",
    "Write a polite email to a landlord.",
    "How many legs does a spider have?",
    "What is a database index?",
    "Give a recipe for pancakes.",
    "What is the capital of Italy?",
    "Write a JSON object for a person.",
    "Explain gravity to a child.",
    "What is unit testing?",
    "Summarise: the cat sat on the mat, the cat slept on the mat, the cat left the mat.",
    "How do vaccines work?",
    "What is an API?",
    "Write a limerick.",
    "What is the boiling point of water?",
];

const TOKENS: usize = 16;

struct Pair {
    tokenizer: Tokenizer,
    target: Weights,
    draft: Weights,
    prompts: Vec<Vec<u32>>,
}

fn pair() -> Pair {
    let checkpoint = bundled::target().unwrap();
    let tokenizer =
        Tokenizer::from_bytes(&checkpoint.side_file("tokenizer.json").unwrap().unwrap()).unwrap();
    let template =
        ChatTemplate::from_checkpoint(&checkpoint, &gemma::models::gemma3::DIALECT).unwrap();
    let encode = |text: &str| {
        let message = Message::new("user", text);
        template.encode(&tokenizer, &[message], None, Special::AsText, None).unwrap()
    };
    let prompts = PROMPTS.into_iter().map(encode).collect();
    Pair {
        tokenizer,
        target: Weights::open(checkpoint).unwrap(),
        draft: Weights::open(bundled::draft().unwrap()).unwrap(),
        prompts,
    }
}

fn engine(weights: &Weights, pool: &Arc<Pool>) -> Box<dyn Engine> {
    engine_of(weights, pool, 256)
}

fn engine_of(weights: &Weights, pool: &Arc<Pool>, context: usize) -> Box<dyn Engine> {
    let exec = CpuExecutor::on(pool.clone(), CpuOptions::default());
    Box::new(
        PlannedEngine::new(weights, Box::new(exec), EngineOptions { context, kv: KvFormat::F16 })
            .unwrap(),
    )
}

/// A drafter, and the policy that decides how many of its tokens are verified.
type Drafting = (Box<dyn Drafter>, Policy);

/// Returns costs by which a pass of up to 8 rows takes nearly the same time.
fn costs() -> Costs {
    Costs::new(CostCurve::new(&[(1, 0.1), (8, 0.11), (16, 0.13), (32, 0.18)]), 0)
}

/// Returns the drafters of `--draft` and `--draft-tree`, with policies that use no clock.
fn drafters(pair: &Pair, pool: &Arc<Pool>) -> Vec<(&'static str, Drafting)> {
    let model = || Box::new(TreeBuilder::of_model(engine(&pair.draft, pool)));
    let both = || Box::new(TreeBuilder::of_both(engine(&pair.draft, pool)));
    let by = |drafter: Box<dyn Drafter>, tree| {
        let options = DraftOptions { tree, tokens: None };
        (drafter, Policy::new(costs(), options, false))
    };
    let itself = Box::new(TreeBuilder::of_model(engine(&pair.target, pool)));
    vec![
        ("ngram", by(Box::new(TreeBuilder::of_text()), TreeSize::Auto)),
        ("bundled", by(model(), TreeSize::Auto)),
        ("auto", by(both(), TreeSize::Auto)),
        ("chain", by(both(), TreeSize::Chain)),
        ("tree of 12", by(both(), TreeSize::Nodes(12))),
        ("the target itself", by(itself, TreeSize::Nodes(usize::MAX))),
    ]
}

/// Returns the text of one prompt, and the number of its passes.
fn run(
    pair: &Pair,
    target: &mut Timeline,
    drafter: &mut dyn Drafter,
    policy: &mut Policy,
    prompt: &[u32],
    (temperature, seed): (f32, u64),
) -> (Vec<u32>, u64) {
    let config =
        SamplerConfig { temperature, top_k: 64, top_p: 0.95, seed, ..SamplerConfig::default() };
    let sampler = Sampler::new(config).unwrap().usable(pair.tokenizer.vocab());
    let (mut history, mut stats, never) =
        (prompt.to_vec(), Stats::default(), AtomicBool::new(false));
    let limits = GenerationLimits { max_tokens: TOKENS, stop_ids: &[1, 106], interrupt: &never };
    let go_on = &mut |_| Flow::Continue;
    generate(target, drafter, policy, &sampler, &mut history, &limits, &mut stats, go_on).unwrap();
    (history.split_off(prompt.len()), stats.passes)
}

/// Returns temperatures and seeds for a prompt. Each temperature gets all seeds in turn.
fn draws(number: usize) -> [(f32, u64); 3] {
    [(0.0, 1), (0.7, 1 + number as u64 % 3), (1.0, 1 + number as u64 / 3 % 3)]
}

/// A text without drafts, and the number of its passes.
type Plain = (Vec<u32>, u64);

/// A prompt with its number.
type Numbered<'a> = (usize, &'a [u32]);

/// Returns the texts of these prompts without drafts, one for each of their [`draws`].
fn plain(pair: &Pair, pool: &Arc<Pool>, prompts: &[Numbered<'_>]) -> Vec<Plain> {
    let mut target = Timeline::new(engine(&pair.target, pool));
    let runs = prompts.iter().flat_map(|(number, prompt)| draws(*number).map(|d| (prompt, d)));
    runs.map(|(prompt, draw)| {
        run(pair, &mut target, &mut NoDraft, &mut Policy::off(), prompt, draw)
    })
    .collect()
}

/// Compares the texts of all drafters with those without drafts. Returns the passes of each
/// drafter, and the passes without drafts of the same texts.
fn drafted(
    pair: &Pair,
    pool: &Arc<Pool>,
    prompts: &[Numbered<'_>],
    texts: &[Plain],
) -> Vec<(&'static str, u64, u64)> {
    let mut target = Timeline::new(engine(&pair.target, pool));
    let mut set: Vec<_> =
        drafters(pair, pool).into_iter().map(|(name, drafter)| (name, drafter, 0, 0)).collect();
    let mut texts = texts.iter();
    for (number, prompt) in prompts {
        for (temperature, seed) in draws(*number) {
            let (want, plain) = texts.next().unwrap();
            for (name, (drafter, policy), passes, of_plain) in &mut set {
                // It takes as long as all other drafters together.
                if *name == "the target itself" && number % 4 != 0 {
                    continue;
                }
                let drafter = drafter.as_mut();
                let draw = (temperature, seed);
                let (got, n) = run(pair, &mut target, drafter, policy, prompt, draw);
                let (asked, threads) = (pair.tokenizer.decode(prompt), pool.threads());
                assert_eq!(
                    got, *want,
                    "{name}, temperature {temperature}, seed {seed}, {threads} threads: {asked:?}"
                );
                *passes += n;
                *of_plain += plain;
            }
        }
    }
    set.into_iter().map(|(name, _, passes, plain)| (name, passes, plain)).collect()
}

#[test]
fn one_seed_gives_one_text_whatever_drafts() {
    let pair = pair();
    let pool = |threads| Arc::new(Pool::new(threads).unwrap());
    let prompts: Vec<Numbered<'_>> =
        pair.prompts.iter().map(|prompt| &prompt[..]).enumerate().collect();
    // Engines of one thread run in parallel, each with half of the prompts.
    let halves: Vec<&[Numbered<'_>]> = prompts.chunks(prompts.len() / 2).collect();
    let found: Vec<_> = std::thread::scope(|scope| {
        let half = |prompts| {
            let pool = pool(1);
            let texts = plain(&pair, &pool, prompts);
            let drafted = drafted(&pair, &pool, prompts, &texts);
            (texts, drafted)
        };
        let running: Vec<_> =
            halves.iter().map(|prompts| scope.spawn(move || half(prompts))).collect();
        running.into_iter().map(|half| half.join().unwrap()).collect()
    });
    let texts: Vec<Plain> = found.iter().flat_map(|half| half.0.clone()).collect();
    let (some, of_some): (Vec<_>, Vec<_>) =
        prompts.iter().copied().zip(texts.chunks(3)).step_by(8).unzip();
    drafted(&pair, &pool(2), &some, &of_some.concat());

    // Makes sure that the test can fail: drafts were accepted, and the target agrees with itself.
    for (a, b) in found[0].1.iter().zip(&found[1].1) {
        let (name, n, plain) = (a.0, a.1 + b.1, a.2 + b.2);
        assert!(
            name == "ngram" || n * 10 < plain * 9,
            "{name}: {n} passes, {plain} without drafts"
        );
        assert!(
            name != "the target itself" || n * 3 < plain,
            "the target as its own draft took {n} of {plain} passes"
        );
    }
}

/// Returns the draft model for Gemma 3's tokenizer in one of its sizes.
fn gemma_draft(size: DraftSize) -> (Weights, ReducedVocabulary) {
    let weights = Weights::open(bundled::gemma_draft(size).unwrap()).unwrap();
    let vocabulary = ReducedVocabulary::of(weights.checkpoint().unwrap(), weights.config().vocab)
        .unwrap()
        .unwrap();
    (weights, vocabulary)
}

#[test]
fn the_drafts_for_gemma_open_and_know_whom_they_fit() {
    let demo = Tokenizer::from_bytes(
        &bundled::target().unwrap().side_file("tokenizer.json").unwrap().unwrap(),
    )
    .unwrap();
    for size in [DraftSize::Small, DraftSize::Medium] {
        let (weights, vocabulary) = gemma_draft(size);
        assert!(
            (24_576..=49_152).contains(&vocabulary.rows())
                && weights.config().global_layers().is_empty()
        );
        let why = vocabulary.mismatch(&demo).unwrap();
        assert!(why.contains("255999") && why.contains("16384"), "{why}");
    }
    // The demo's own draft model is chosen for any time of a pass.
    for seconds in [0.001, 10.0] {
        assert_eq!(
            Partner::bundled(&demo, seconds).unwrap().unwrap().weights.config().vocab,
            16_384
        );
    }
}

/// Returns a configuration of two small layers with Gemma's vocabulary.
fn config_of_gemma() -> Config {
    Config::from_json(&serde_json::json!({
        "model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 262_208, "sliding_window": 64,
        "query_pre_attn_scalar": 32,
    }))
    .unwrap()
}

/// With Gemma's own tokenizer, which is not in this repository, and a random model with Gemma's
/// vocabulary.
#[test]
fn the_drafts_for_gemma_change_no_text_of_a_model_with_its_tokenizer() {
    let Some(path) = std::env::var_os("GEMMA_TEST_TOKENIZER") else {
        eprintln!("SKIPPED: GEMMA_TEST_TOKENIZER does not name Gemma 3's tokenizer.json");
        return;
    };
    let tokenizer = Tokenizer::from_bytes(&std::fs::read(path).unwrap()).unwrap();
    let pool = Arc::new(Pool::new(2).unwrap());
    let target = Weights::synthetic(config_of_gemma(), |_| Format::I8_ROW, 5);
    let prompt = "<bos>Zażółć gęślą jaźń: 漢字かな, hello there! def f(x):\n\treturn x";
    let prompt = tokenizer.encode(prompt, Special::Parse).unwrap();
    for (size, seconds) in [(DraftSize::Small, 0.001), (DraftSize::Medium, 0.2)] {
        let (weights, vocabulary) = gemma_draft(size);
        assert_eq!(vocabulary.mismatch(&tokenizer), None);
        let partner = Partner::bundled(&tokenizer, seconds).unwrap().unwrap();
        assert_eq!(partner.weights.config(), weights.config());
        let spelling = vocabulary.spelling(&tokenizer);
        assert!(
            prompt.iter().any(|t| spelling.row(*t).is_none()),
            "some of the prompt is outside the vocabulary"
        );
        let inner = engine_of(&weights, &pool, partner.context(256));
        let mut draft = TreeBuilder::of_model(partner.engine(inner).unwrap());
        for temperature in [0.0, 1.0] {
            let sampler = SamplerConfig {
                temperature,
                top_k: 64,
                top_p: 0.95,
                seed: 3,
                ..SamplerConfig::default()
            };
            let sampler = Sampler::new(sampler).unwrap().usable(tokenizer.vocab());
            let text = |drafter: &mut dyn Drafter| {
                let (mut history, mut stats, never) =
                    (prompt.clone(), Stats::default(), AtomicBool::new(false));
                let limits = GenerationLimits { max_tokens: 24, stop_ids: &[], interrupt: &never };
                let mut target = Timeline::new(engine(&target, &pool));
                let options = DraftOptions { tree: TreeSize::Nodes(15), tokens: None };
                let mut policy = Policy::new(costs(), options, false);
                generate(
                    &mut target,
                    drafter,
                    &mut policy,
                    &sampler,
                    &mut history,
                    &limits,
                    &mut stats,
                    &mut |_| Flow::Continue,
                )
                .unwrap();
                (history, stats.total.drafted)
            };
            let (want, _) = text(&mut NoDraft);
            let (got, drafted) = text(&mut draft);
            assert!(got == want && drafted > 24, "{size:?} at {temperature}: {drafted} drafted");
        }
        let sampler = Sampler::new(SamplerConfig::default()).unwrap();
        let mut out = Proposal::default();
        out.reset(prompt[prompt.len() - 1]);
        let ctx = DraftContext {
            history: &prompt,
            sampler: &sampler,
            nodes: 24,
            depth: 8,
            vocab: 262_208,
            chain: false,
            draft_steps: usize::MAX,
            rate: None,
            verified: None,
        };
        draft.propose(&mut [DraftRequest { text: 0, ctx, out: &mut out }], None).unwrap();
        assert!(
            out.len() > 8 && out.tree.tokens[1..].iter().all(|t| spelling.row(*t).is_some()),
            "{:?}",
            out.tree.tokens
        );
    }
}
