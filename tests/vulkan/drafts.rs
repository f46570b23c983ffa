//! Promise 4 on Vulkan: the text is the same whatever drafter, and so nearly are likelihoods and
//! the processor's.

use crate::{common, invariance};
use anyhow::Result;
use common::trees::tokens;
use common::vulkan::{config_of, device};
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::compute::{Executor, KvFormat, Reports};
use gemma::decode::Stop;
use gemma::engine::planned::EngineOptions;
use gemma::engine::{
    Cached, Engine, EngineReport, Info, Input, Output, PlannedEngine, Prefix, Scores,
};
use gemma::eval::evaluate;
use gemma::models::{Role, Weights};
use gemma::sampler::{Rule, SamplerConfig};
use invariance::{Case, Strict, check};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::{Arc, Mutex};

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

/// Engines that are not in use: opening a device takes longer than a text.
type Pool = Arc<Mutex<Vec<Box<dyn Engine>>>>;

/// An engine that goes back to the pool, empty, when it is done with.
struct Lent {
    engine: Option<Box<dyn Engine>>,
    pool: Pool,
}

impl Lent {
    fn get(&self) -> &dyn Engine {
        &**self.engine.as_ref().unwrap()
    }
    fn get_mut(&mut self) -> &mut dyn Engine {
        &mut **self.engine.as_mut().unwrap()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut engine = self.engine.take().unwrap();
        engine.truncate(0, 0).unwrap();
        self.pool.lock().unwrap().push(engine);
    }
}

impl Engine for Lent {
    fn info(&self) -> &Info {
        self.get().info()
    }
    fn cached(&self, sequence: usize) -> Cached<'_> {
        self.get().cached(sequence)
    }
    fn begin(&mut self, inputs: &[Input<'_>], output: Output) -> Result<bool> {
        self.get_mut().begin(inputs, output)
    }
    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        self.get_mut().finish(out)
    }
    fn is_busy(&self) -> bool {
        self.get().is_busy()
    }
    fn lend(&self, i: usize) -> Option<&[f32]> {
        self.get().lend(i)
    }
    fn commit(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        self.get_mut().commit(paths)
    }
    fn truncate(&mut self, sequence: usize, position: usize) -> Result<()> {
        self.get_mut().truncate(sequence, position)
    }
    fn retain(&mut self, sequence: usize, tokens: usize) -> Option<Prefix> {
        self.get_mut().retain(sequence, tokens)
    }
    fn resume(&mut self, sequence: usize, prefix: &Prefix, tokens: usize) -> Result<()> {
        self.get_mut().resume(sequence, prefix, tokens)
    }
    fn report(&self) -> EngineReport {
        self.get().report()
    }
    fn device(&mut self) -> Option<&mut dyn Reports> {
        self.get_mut().device()
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn every_drafter_gives_the_plain_text() {
    let Some(open) = device() else { return };
    let (linear, embed, kv) = ("i4-g32", "i8-row", KvFormat::F16);
    let pool = Pool::default();
    // Greedy, and at temperature 1 with the sampler's noise; the prompt ends short of a page.
    // Greedy under a rule, which the device's lists of the best tokens know nothing of.
    for (temperature, prompt, rule) in
        [(0.0, 6, None), (1.0, 250, None), (0.0, 7, Some(Arc::new(Strict { vocab: 96 })))]
    {
        let mut rng = SmallRng::seed_from_u64(9);
        let sampler = SamplerConfig { temperature, seed: 4, ..SamplerConfig::default() };
        let rule = rule.map(|rule| rule as Arc<dyn Rule>);
        let case = Case {
            max_tokens: 10,
            rule: rule.clone(),
            ..Case::new(&tokens(&mut rng, prompt), sampler)
        };
        // The draft model has the target's weights, on the processor: mostly right, for other
        // reasons.
        let target = || {
            let waiting = pool.lock().unwrap().pop();
            let engine = waiting.unwrap_or_else(|| engine(Box::new(open()), linear, embed, kv));
            Box::new(Lent { engine: Some(engine), pool: pool.clone() }) as Box<dyn Engine>
        };
        let (text, figures) = check(&target, &|| engine(cpu(), linear, embed, kv), &case);
        assert_eq!((text.heard.len(), text.stop), (10, Stop::Length));
        let accepted = |name: &str| figures.iter().find(|f| f.0 == name).unwrap().1.total.accepted;
        assert!(
            accepted("oracle") > 0
                && accepted("model") > 0
                && accepted("none") == 0
                && accepted("liar") == 0
        );
        for at in prompt..text.history.len() {
            let mask = rule.as_ref().map(|rule| rule.mask(&text.history[..at]).unwrap());
            assert!(mask.is_none_or(|mask| mask.allows(text.history[at])), "token {at}");
        }
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
        // Differences of both signs: the mean alone would hide much. Rounding moves single tokens
        // of these small models by a few hundredths.
        let worst = gpu.nll.iter().zip(&cpu.nll).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 0.1, "{linear}: a token's likelihoods are {worst} apart");
    }
}
