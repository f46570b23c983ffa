//! `--npu`: whether an NPU takes part, and its report.

use super::Listener;
use super::backends::{self, Npu, NpuDims, NpuWork, OffloadExecutor};
use super::options::RunOptions;
use crate::compute::{AssistReport, Executor, KvFormat};
use crate::engine::Engine;
use crate::error::Fault;
use crate::models::Config;
use anyhow::Result;

/// Returns the error for an NPU where several texts share passes.
pub fn for_one_text() -> anyhow::Error {
    let fault =
        Fault::usage("the NPU works for one text at a time, and --parallel answers several");
    fault.help("leave out --npu or --parallel").into()
}

/// Returns the dimensions of a model's attention for the NPU.
pub fn dims(config: &Config) -> NpuDims {
    let Config { n_heads, n_kv_heads, head_dim, query_scale, .. } = *config;
    NpuDims { n_heads, n_kv_heads, head_dim, scale: query_scale }
}

/// Reports in one line why an NPU was given up.
pub fn say(engine: &dyn Engine, listener: &dyn Listener) {
    if let Some(why) = report(engine).and_then(|r| r.given_up) {
        listener.note(&format!(
            "the NPU was given up, and the other device computed all attention: {why}"
        ));
    }
}

/// Returns the report of an NPU beside an engine's device, if one takes part.
pub fn report(engine: &dyn Engine) -> Option<AssistReport> {
    engine.report().executor.and_then(|executor| executor.assist)
}

/// Returns the reads of a step, for the prediction.
fn work(config: &Config, kv: KvFormat, weights: u64, context: usize) -> NpuWork {
    let global_layers = (0..config.n_layers).filter(|l| config.is_global(*l)).count();
    NpuWork {
        weights: weights as f64,
        global_layers,
        local_layers: config.n_layers - global_layers,
        window: config.window,
        position: (2 * config.n_kv_heads * kv.head_bytes(config.head_dim)) as f64,
        context,
    }
}

/// Puts an NPU beside `executor` where `--npu` and the prediction say so. An obstacle is reported
/// in one line, and the executor goes on alone.
pub fn beside(
    mut executor: Box<dyn Executor>,
    options: &RunOptions,
    config: &Config,
    (kv, weights, context): (KvFormat, u64, usize),
    is_split: bool,
    listener: &dyn Listener,
) -> Result<Box<dyn Executor>> {
    let asked = options.npu.is_asked();
    if options.npu == Npu::Off {
        return Ok(executor);
    }
    if is_split {
        if asked {
            listener.note(
                "running without the NPU: it works beside one device, not where layers \
                are spread over two",
            );
        }
        return Ok(executor);
    }
    let work = work(config, kv, weights, context);
    match backends::bring_up_npu(executor.as_mut(), options.npu, dims(config), &work) {
        Ok((npu, share, why)) => {
            listener.detail(1, &format!("npu: {why}"));
            Ok(match share {
                0 => executor,
                _ => Box::new(OffloadExecutor::new(executor, npu, dims(config), share)),
            })
        }
        Err(why) if asked => {
            listener.note(&format!("running without the NPU: {why:#}"));
            Ok(executor)
        }
        Err(why) => {
            listener.detail(1, &format!("no npu: {why:#}"));
            Ok(executor)
        }
    }
}
