//! The target's assistant drafts, and the text is the same as without drafts.

use crate::invariance::{Case, Strict, assisted_pairs, check_assisted};
use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::engine::PlannedEngine;
use gemma::engine::planned::EngineOptions;
use gemma::sampler::SamplerConfig;
use std::sync::Arc;

#[test]
fn the_assistant_gives_the_plain_text() {
    let [dense, mixture] = &assisted_pairs();
    // Prompts of 254 tokens end just before the end of a page. The one of 330 is longer than the
    // window.
    for (weights, temperature, prompt, kv, is_ruled) in [
        (dense, 0.0, 5, KvFormat::F16, false),
        (dense, 1.0, 254, KvFormat::F32, false),
        (dense, 0.0, 330, KvFormat::Q8, false),
        (dense, 1.0, 40, KvFormat::F16, true),
        (mixture, 0.0, 38, KvFormat::F16, false),
        (mixture, 1.0, 254, KvFormat::F32, false),
    ] {
        let config = SamplerConfig { temperature, seed: 3, ..SamplerConfig::default() };
        let prompt: Vec<u32> = (0..prompt).map(|i: u32| i * i % 241).collect();
        let rule = is_ruled.then(|| Arc::new(Strict { vocab: 256 }) as _);
        let case = Case { max_tokens: 24, rule, ..Case::new(&prompt, config) };
        let target = |sequences| {
            let exec = CpuExecutor::new(CpuOptions { threads: 2, ..CpuOptions::default() });
            let options = EngineOptions { context: 400, kv };
            let exec = Box::new(exec.unwrap());
            let engine = PlannedEngine::for_sequences(weights, exec, options, sequences);
            Box::new(engine.unwrap()) as _
        };
        check_assisted(&target, &case, usize::MAX);
    }
}
