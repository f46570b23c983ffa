//! Promise 4 on Vulkan: the text is the same with any drafter, and likelihoods are close to the
//! processor's.

use crate::{common, invariance};
use common::pooled::pooled;
use common::trees::tokens;
use common::vulkan::{config_of, device};
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::{Executor, KvFormat};
use gemma::decode::{Flow, Request, Scheduler, StopReason};
use gemma::draft::{NoDraft, Policy};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, PlannedEngine, Timeline};
use gemma::eval::evaluate;
use gemma::models::{Role, Weights};
use gemma::sampler::{Sampler, SamplerConfig, TokenRule};
use invariance::{Case, Strict, assisted_pairs, check, check_assisted};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn engine(exec: Box<dyn Executor>, linear: &str, embed: &str, kv: KvFormat) -> Box<dyn Engine> {
    let (linear, embed) = (linear.parse().unwrap(), embed.parse().unwrap());
    let weights = Weights::synthetic(
        config_of(2, 2, 70),
        move |role| if role == Role::Embed { embed } else { linear },
        11,
    );
    Box::new(PlannedEngine::new(&weights, exec, EngineOptions { context: 400, kv }).unwrap())
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap())
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn every_drafter_gives_the_plain_text() {
    let Some(open) = device() else { return };
    let (linear, embed, kv) = ("i4-g32", "i8-row", KvFormat::F16);
    let target = pooled(|| engine(Box::new(open()), linear, embed, kv));
    // Greedy, and at temperature 1 with the sampler's noise. The prompt ends just before the end of
    // a page.
    // Greedy under a rule, with penalties and biases that the device's lists of the best tokens
    // ignore, and with bans that they respect.
    let greedy = SamplerConfig { seed: 4, ..SamplerConfig::default() };
    let warm = SamplerConfig { temperature: 1.0, ..greedy.clone() };
    let adjusted = SamplerConfig {
        repeat_penalty: 1.2,
        repeat_last_n: 5,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(3, 2.0), (7, -100.0)],
        ..greedy.clone()
    };
    let bans = (0..40).map(|token| (2 * token, -100.0)).collect();
    let banning = SamplerConfig { logit_bias: bans, ..greedy.clone() };
    for (sampler, prompt, rule) in [
        (greedy.clone(), 6, None),
        (warm, 250, None),
        (adjusted, 6, None),
        (banning, 6, None),
        (greedy, 7, Some(Arc::new(Strict { vocab: 96 }))),
    ] {
        let mut rng = SmallRng::seed_from_u64(9);
        let rule = rule.map(|rule| rule as Arc<dyn TokenRule>);
        let case = Case {
            max_tokens: 10,
            rule: rule.clone(),
            ..Case::new(&tokens(&mut rng, prompt), sampler.clone())
        };
        // The draft model has the target's weights and runs on the processor, so it is mostly
        // right.
        let (text, figures) = check(&target, &|| engine(cpu(), linear, embed, kv), &case);
        assert_eq!((text.heard.len(), text.stop), (10, StopReason::Length));
        let accepted = |name: &str| figures.iter().find(|f| f.0 == name).unwrap().1.total.accepted;
        assert!(
            accepted("oracle") > 0
                && accepted("model") > 0
                && accepted("none") == 0
                && accepted("liar") == 0
        );
        for at in prompt..text.history.len() {
            let banned = |bias: &(u32, f32)| *bias == (text.history[at], -100.0);
            assert!(!sampler.logit_bias.iter().any(banned), "token {at}");
            let mask = rule.as_ref().map(|rule| rule.mask(&text.history[..at]).unwrap());
            assert!(mask.flatten().is_none_or(|mask| mask.allows(text.history[at])), "token {at}");
        }
    }
}

/// Lists of the best tokens decide the assistant's proposals, but never the text.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn the_assistant_gives_the_plain_text() {
    let Some(open) = device() else { return };
    for (weights, (temperature, prompt)) in assisted_pairs().iter().zip([(0.0, 9), (1.0, 252)]) {
        let sampler = SamplerConfig { temperature, seed: 6, ..SamplerConfig::default() };
        let prompt: Vec<u32> = (0..prompt).map(|i: u32| i * i % 239).collect();
        let case = Case { max_tokens: 10, ..Case::new(&prompt, sampler) };
        let target = |sequences| {
            let options = EngineOptions { context: 300, kv: KvFormat::F16 };
            let exec = Box::new(open());
            let engine = PlannedEngine::for_sequences(weights, exec, options, sequences);
            Box::new(engine.unwrap()) as _
        };
        check_assisted(&target, &case, 3);
    }
}

/// In one pass, some texts are picked from lists of the best tokens and others from all logits.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn texts_with_lists_and_texts_with_all_logits_share_passes() {
    let Some(open) = device() else { return };
    let greedy = SamplerConfig { seed: 4, ..SamplerConfig::default() };
    let warm = SamplerConfig { temperature: 1.0, top_k: 20, ..greedy.clone() };
    let adjusted = SamplerConfig { repeat_penalty: 1.5, ..greedy.clone() };
    let any = SamplerConfig { top_k: 0, ..warm.clone() };
    let texts =
        [(greedy.clone(), None), (adjusted, None), (warm, None), (greedy, Some(2)), (any, None)];
    let request = |i: usize| {
        let (config, top_log_probs) = texts[i].clone();
        let prompt = tokens(&mut SmallRng::seed_from_u64(i as u64), 5 + i);
        let request = Request::new(prompt, Sampler::new(config).unwrap(), 8);
        Request { top_log_probs, ..request }
    };
    let weights = Weights::synthetic(config_of(2, 2, 70), |_| "i4-g32".parse().unwrap(), 11);
    let run = |chosen: &[usize]| {
        let options = EngineOptions { context: 64, kv: KvFormat::F16 };
        let engine =
            PlannedEngine::for_sequences(&weights, Box::new(open()), options, chosen.len());
        let mut timeline = Timeline::new(Box::new(engine.unwrap()));
        let (mut none, mut policy, never) = (NoDraft, Policy::off(), AtomicBool::new(false));
        let mut texts = Scheduler::new(&mut timeline, &mut none, &mut policy, &[], &never);
        let places: Vec<usize> =
            chosen.iter().map(|i| texts.admit(request(*i)).ok().unwrap()).collect();
        let mut results = vec![None; chosen.len()];
        while texts.running() > 0 {
            for ended in texts.step(&mut |_, _| Flow::Continue).unwrap() {
                let at = places.iter().position(|place| *place == ended.sequence).unwrap();
                let scores: Vec<_> = ended
                    .log_probs
                    .iter()
                    .map(|s| (s.token, s.log_prob.map(f32::to_bits)))
                    .collect();
                results[at] = Some((ended.text.history, scores));
            }
        }
        results
    };
    let together = run(&[0, 1, 2, 3, 4]);
    for (i, text) in together.iter().enumerate() {
        assert_eq!(run(&[i])[0], *text, "text {i}");
    }
    assert_eq!(together[3].as_ref().unwrap().1.len(), 8);
}

/// A prompt gets the log-probabilities of `evaluate`, in passes of other sizes.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn scores_of_a_prompt_are_its_likelihoods() {
    let Some(open) = device() else { return };
    let ids = tokens(&mut SmallRng::seed_from_u64(10), 200);
    let target = || engine(Box::new(open()), "i4-g32", "i8-row", KvFormat::F16);
    let figures = evaluate(&mut *target(), &ids, 280, &mut |_| {}).unwrap();
    let (mut timeline, mut none, mut policy) = (Timeline::new(target()), NoDraft, Policy::off());
    let never = AtomicBool::new(false);
    let mut texts = Scheduler::new(&mut timeline, &mut none, &mut policy, &[], &never);
    let request = Request::new(ids.clone(), Sampler::new(SamplerConfig::default()).unwrap(), 0);
    texts.admit(Request { top_log_probs: Some(1), scored: Some(0), ..request }).unwrap();
    let scores = loop {
        if let Some(ended) = texts.step(&mut |_, _| Flow::Continue).unwrap().pop() {
            break ended.log_probs;
        }
    };
    assert_eq!((scores.len(), scores[0].log_prob), (ids.len(), None));
    for (i, entry) in scores[1..].iter().enumerate() {
        let log_prob = f64::from(entry.log_prob.unwrap());
        assert!((log_prob + figures.nll[i]).abs() < 1e-5, "{i}: {log_prob} {}", figures.nll[i]);
        assert_eq!(entry.best[0].0, figures.top1[i], "{i}");
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn likelihoods_are_the_processors() {
    let Some(open) = device() else { return };
    let mut rng = SmallRng::seed_from_u64(10);
    let ids = tokens(&mut rng, 300);
    for (linear, embed, kv) in [
        ("bf16", "bf16", KvFormat::F32),
        ("i4-row+h128", "i8-row", KvFormat::F16),
        ("i4-g32", "i8a-row", KvFormat::F16),
    ] {
        let [gpu, cpu] = [Box::new(open()) as Box<dyn Executor>, cpu()].map(|exec| {
            evaluate(&mut *engine(exec, linear, embed, kv), &ids, 280, &mut |_| {}).unwrap()
        });
        assert!(
            (gpu.mean_nll - cpu.mean_nll).abs() < 2e-3,
            "{linear}: {} and {}",
            gpu.mean_nll,
            cpu.mean_nll
        );
        // Differences have both signs, so the mean alone would hide much. Rounding changes single
        // tokens of these small models by a few hundredths.
        let worst = gpu.nll.iter().zip(&cpu.nll).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 0.1, "{linear}: a token's likelihoods are {worst} apart");
    }
}
