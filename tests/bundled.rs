//! Promise 4 on the real engines: with the bundled pair, one seed gives one text, whatever drafts, whatever tree, however many
//! threads. 40 prompts, 3 temperatures, 3 seeds, 6 drafters, 1 and 2 threads: each with each.

use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions, Pool};
use gemma::decode::{Flow, Limits, Stats, generate};
use gemma::draft::{CostCurve, DraftOptions, Drafter, NoDraft, Paced, Stack, TreeSize};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, PlannedEngine, Timeline};
use gemma::gemma::{ChatTemplate, Message, Special, Tokenizer, Weights, bundled};
use gemma::sampler::{Sampler, SamplerConfig};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const PROMPTS: &str = "What is photosynthesis?|Give me three tips for sleeping better.|Write a Python function that adds two numbers.|\
Explain what a hash map is.|Tell me a short story about a fox.|What is 12 times 7?|List the days of the week.|How do I boil an egg?|\
What does a compiler do?|Translate to French: good morning.|Write a haiku about rain.|Why is the sky blue?|What is a prime number?|\
Describe a sunset.|What is the difference between TCP and UDP?|Write a SQL query that counts users.|Who are you?|Say hello.|\
Count from one to twenty.|Repeat this: red green blue red green blue red green blue|What is a verb?|How does a bicycle stay upright?|\
Write a shell command that finds large files.|What causes tides?|Explain recursion.|Name five animals.|What is inflation?|\
Write a polite email to a landlord.|How many legs does a spider have?|What is a database index?|Give a recipe for pancakes.|\
What is the capital of Italy?|Write a JSON object for a person.|Explain gravity to a child.|What is unit testing?|\
Summarise: the cat sat on the mat, the cat slept on the mat, the cat left the mat.|How do vaccines work?|What is an API?|\
Write a limerick.|What is the boiling point of water?";

const TOKENS: usize = 16;

struct Pair {
    tokenizer: Tokenizer,
    target: Weights,
    draft: Weights,
    prompts: Vec<Vec<u32>>,
}

fn pair() -> Pair {
    let checkpoint = bundled::target().unwrap();
    let tokenizer = Tokenizer::from_bytes(&checkpoint.side_file("tokenizer.json").unwrap().unwrap()).unwrap();
    let template = ChatTemplate::from_checkpoint(&checkpoint).unwrap();
    let encode = |text: &str| {
        let message = Message { role: "user".into(), content: text.into() };
        template.encode(&tokenizer, &[message], None, Special::AsText, None).unwrap()
    };
    let prompts: Vec<_> = PROMPTS.split('|').map(encode).collect();
    assert_eq!(prompts.len(), 40);
    Pair {
        tokenizer,
        target: Weights::open(checkpoint).unwrap(),
        draft: Weights::open(bundled::draft().unwrap()).unwrap(),
        prompts,
    }
}

fn engine(weights: &Weights, pool: &Arc<Pool>) -> Box<dyn Engine> {
    let exec = CpuExecutor::on(pool.clone(), CpuOptions::default());
    Box::new(PlannedEngine::new(weights, Box::new(exec), EngineOptions { context: 256, kv: KvFormat::F16 }).unwrap())
}

/// The drafters that `--draft` and `--draft-tree` make, with decisions that never look at a clock.
fn drafters(pair: &Pair, pool: &Arc<Pool>) -> Vec<(&'static str, Box<dyn Drafter>)> {
    let model = || Box::new(Stack::of_model("model", engine(&pair.draft, pool)));
    let both = || Box::new(Stack::of_both("model", engine(&pair.draft, pool)));
    let paced = |inner: Box<dyn Drafter>, tree| {
        let options = DraftOptions { tree, tokens: None };
        Box::new(Paced::new(inner, CostCurve::guess(), options, false)) as Box<dyn Drafter>
    };
    vec![
        ("ngram", paced(Box::new(Stack::of_text()), TreeSize::Auto)),
        ("bundled", paced(model(), TreeSize::Auto)),
        ("auto", paced(both(), TreeSize::Auto)),
        ("chain", paced(both(), TreeSize::Chain)),
        ("tree of 12", paced(both(), TreeSize::Nodes(12))),
        ("the target itself", Box::new(Stack::of_model("oracle", engine(&pair.target, pool)))),
    ]
}

/// What one prompt gives, and how many passes that took.
fn run(
    pair: &Pair,
    target: &mut Timeline,
    drafter: &mut dyn Drafter,
    prompt: &[u32],
    temperature: f32,
    seed: u64,
) -> (Vec<u32>, u64) {
    let config = SamplerConfig { temperature, top_k: 64, top_p: 0.95, seed, ..SamplerConfig::default() };
    let sampler = Sampler::new(config).unwrap().usable(pair.tokenizer.vocab());
    let (mut history, mut stats, never) = (prompt.to_vec(), Stats::default(), AtomicBool::new(false));
    let limits = Limits { max_tokens: TOKENS, stop_ids: &[1, 106], interrupt: &never };
    generate(target, drafter, &sampler, &mut history, &limits, &mut stats, &mut |_| Flow::Continue).unwrap();
    (history.split_off(prompt.len()), stats.passes)
}

#[test]
fn one_seed_gives_one_text_whatever_drafts() {
    let pair = pair();
    let pools = [1, 2].map(|n| Arc::new(Pool::new(n).unwrap()));
    let mut plain = Timeline::new(engine(&pair.target, &pools[0]));
    let mut targets = [Timeline::new(engine(&pair.target, &pools[0])), Timeline::new(engine(&pair.target, &pools[1]))];
    let mut sets = [drafters(&pair, &pools[0]), drafters(&pair, &pools[1])];
    let mut passes = vec![0; sets[0].len()];
    let mut plain_passes = 0;
    for (i, prompt) in pair.prompts.iter().enumerate() {
        for temperature in [0.0, 0.7, 1.0] {
            for seed in 1..=3 {
                let (want, n) = run(&pair, &mut plain, &mut NoDraft, prompt, temperature, seed);
                plain_passes += n;
                for (threads, (set, target)) in sets.iter_mut().zip(&mut targets).enumerate() {
                    for (d, (name, drafter)) in set.iter_mut().enumerate() {
                        let (got, n) = run(&pair, target, drafter.as_mut(), prompt, temperature, seed);
                        if threads == 0 {
                            passes[d] += n;
                        }
                        let case = format!("{name}, prompt {i}, temperature {temperature}, seed {seed}, {} threads", threads + 1);
                        assert_eq!(got, want, "{case}");
                    }
                }
            }
        }
    }
    // The test must have tested something: drafts were accepted, and the target agrees with itself.
    for ((name, _), n) in sets[0].iter().zip(&passes) {
        assert!(*name == "ngram" || n * 10 < plain_passes * 9, "{name}: {n} passes, {plain_passes} without drafts");
    }
    let oracle = passes[passes.len() - 1];
    assert!(oracle * 3 < plain_passes, "the target as its own draft took {oracle} of {plain_passes} passes");
}
