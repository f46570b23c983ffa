//! `--npu`: decides whether an NPU is used, and reports its work.

use crate::runtime::Listener;
use crate::runtime::devices::backends::Npu;
use anyhow::Result;
#[cfg(all(unix, feature = "npu"))]
pub use device::dims;
pub use device::{counted, refusal};
use gemma_base::compute::{AssistReport, Executor, KvFormat};
use gemma_base::error::Fault;
use gemma_model::engine::Engine;
use gemma_model::models::Config;

/// Returns the error for an NPU when several texts share passes.
pub fn for_one_text() -> anyhow::Error {
    let fault =
        Fault::usage("the NPU works for one text at a time, but --parallel answers several");
    fault.help("leave out --npu or --parallel").into()
}

/// Reports in one line why an NPU was disabled.
pub fn say(engine: &dyn Engine, listener: &dyn Listener) {
    if let Some(why) = report(engine).and_then(|r| r.given_up) {
        listener.note(&format!(
            "the NPU was given up, so the other device computed all attention: {why}"
        ));
    }
}

/// Returns the report of an NPU next to an engine's device, if one is used.
pub fn report(engine: &dyn Engine) -> Option<AssistReport> {
    engine.report().executor.and_then(|executor| executor.assist)
}

/// Wraps `executor` with an NPU if `--npu` and the prediction allow it. A problem is reported in
/// one line, and the executor runs without an NPU.
pub fn wrap(
    executor: Box<dyn Executor>,
    mode: Npu,
    config: &Config,
    sizes: (KvFormat, u64, usize),
    is_split: bool,
    listener: &dyn Listener,
) -> Result<Box<dyn Executor>> {
    let is_required = mode.is_asked();
    if mode == Npu::Off {
        return Ok(executor);
    }
    if is_split {
        if is_required {
            listener.note(
                "running without the NPU: it works next to a single device, \
                not with layers spread over two",
            );
        }
        return Ok(executor);
    }
    let (executor, outcome) = device::attach(executor, mode, config, sizes);
    match outcome {
        Ok(why) => listener.detail(1, &format!("npu: {why}")),
        Err(why) if is_required => listener.note(&format!("running without the NPU: {why:#}")),
        Err(why) => listener.detail(1, &format!("no npu: {why:#}")),
    }
    Ok(executor)
}

/// The NPU implementation.
#[cfg(all(unix, feature = "npu"))]
mod device {
    use crate::runtime::devices::backends::{
        FlashPartial, Npu, NpuDims, OffloadExecutor, StepMemory, bring_up_npu,
    };
    use anyhow::{Context, Result, ensure};
    use gemma_base::compute::{Executor, KvFormat};
    use gemma_model::models::{Config, LayerSpec};

    /// Returns the attention dimensions of a model's global layers. The NPU requires that they are
    /// equal.
    pub fn dims(config: &Config) -> Result<NpuDims> {
        let of_layer = |layer: &LayerSpec| NpuDims {
            n_heads: layer.n_heads,
            n_kv_heads: layer.n_kv_heads,
            head_dim: layer.head_dim,
            scale: layer.query_scale,
        };
        let mut global = config.layers.iter().filter(|layer| layer.is_global()).map(of_layer);
        let first = global.next().context("no layer sees all positions")?;
        ensure!(
            global.all(|dims| dims == first),
            "the layers that see all positions differ in shape"
        );
        Ok(first)
    }

    /// Returns the reads of a step, for the prediction.
    fn work(config: &Config, kv: KvFormat, weights: u64, context: usize) -> StepMemory {
        let global_layers = config.global_layers();
        let layer = &config.layers[global_layers.first().copied().unwrap_or(0)];
        StepMemory {
            weights: weights as f64,
            global_layers: global_layers.len(),
            local_layers: config.layers.len() - global_layers.len(),
            window: config.window().unwrap_or(0),
            position: (2 * layer.n_kv_heads * kv.head_bytes(layer.head_dim)) as f64,
            context,
        }
    }

    /// Wraps `executor` with an NPU if it works and is predicted to be faster. Also returns the
    /// reason for the decision, or for the failure.
    pub fn attach(
        mut executor: Box<dyn Executor>,
        mode: Npu,
        config: &Config,
        (kv, weights, context): (KvFormat, u64, usize),
    ) -> (Box<dyn Executor>, Result<String>) {
        let work = work(config, kv, weights, context);
        let bring_up = |dims| Ok((dims, bring_up_npu(executor.as_mut(), mode, dims, &work)?));
        match dims(config).and_then(bring_up) {
            Ok((_, (_, 0, why))) => (executor, Ok(why)),
            Ok((dims, (npu, share, why))) => {
                (Box::new(OffloadExecutor::new(executor, npu, dims, share)), Ok(why))
            }
            Err(why) => (executor, Err(why)),
        }
    }

    /// Wraps `executor` with an NPU that only counts memory, for plans. Returns it unchanged for
    /// models that the NPU does not support.
    pub fn counted(executor: Box<dyn Executor>, config: &Config) -> Box<dyn Executor> {
        match dims(config).and_then(|dims| Ok((dims, FlashPartial::dry(dims)?))) {
            Ok((dims, npu)) => Box::new(OffloadExecutor::new(executor, npu, dims, 256)),
            Err(_) => executor,
        }
    }

    /// Returns why the NPU does not support a model; `None` if it does.
    pub fn refusal(config: &Config) -> Option<String> {
        dims(config).and_then(|dims| dims.shape()).err().map(|why| why.to_string())
    }
}

/// A build without NPU support.
#[cfg(not(all(unix, feature = "npu")))]
mod device {
    use crate::runtime::devices::backends::Npu;
    use anyhow::{Result, anyhow};
    use gemma_base::compute::{Executor, KvFormat};
    use gemma_model::models::Config;

    const ABSENT: &str =
        "this program was built without NPU support (cargo feature npu, Linux only)";

    pub fn attach(
        executor: Box<dyn Executor>,
        _: Npu,
        _: &Config,
        _: (KvFormat, u64, usize),
    ) -> (Box<dyn Executor>, Result<String>) {
        (executor, Err(anyhow!(ABSENT)))
    }

    pub fn counted(executor: Box<dyn Executor>, _: &Config) -> Box<dyn Executor> {
        executor
    }

    pub fn refusal(_: &Config) -> Option<String> {
        Some(ABSENT.into())
    }
}
