//! A small made-up model, with which a device is tried.

use super::Listener;
use super::load::{Room, load, pool};
use super::lock::DeviceLock;
use super::npu::Npu;
use super::options::{AutoOr, GpuLayers, Kv, RunOptions};
use super::placement::Device;
use crate::engine::{Engine, EngineExt, Rows, Scores, TokenTree};
use crate::models::{Config, Role, Weights};
use crate::tensor::{Format, Token};
use crate::vulkan::{Choice, DeviceInfo};
use anyhow::Result;
use serde_json::json;

/// Positions that there is room for in the small model's context.
pub const SMALL_CONTEXT: usize = 256;

/// Returns a made-up model of two layers, one of which sees the whole context.
pub fn small_model() -> Result<Weights> {
    let config = json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64, "vocab_size": 512,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 512,
    });
    let linear: Format = "i4-g32".parse()?;
    let format =
        |role| if matches!(role, Role::Embed | Role::Head) { Format::I8_ROW } else { linear };
    Ok(Weights::synthetic(Config::from_json(&config)?, format, 1))
}

/// Runs passes of one row and of several.
pub fn run_passes(engine: &mut dyn Engine) -> Result<()> {
    let mut scores = Scores::default();
    for rows in [1u32, 9] {
        let tokens: Vec<Token> = (0..rows).map(|i| 7 * i + 3).collect();
        engine.forward(&TokenTree::chain(&tokens), Rows::All, &mut scores)?;
        engine.commit(&[(0, &(0..rows).collect::<Vec<u32>>())])?;
    }
    Ok(())
}

/// Loads the small model as `generate --check` would, and runs passes of it.
pub fn run(
    options: &RunOptions,
    device: Option<&DeviceInfo>,
    listener: &dyn Listener,
) -> Result<String> {
    let weights = small_model()?;
    let place = device.map_or(Device::Cpu, |d| Device::Vulkan(Choice::Index(d.index)));
    let options = RunOptions {
        device: place,
        gpu_layers: if device.is_some() { GpuLayers::All } else { GpuLayers::Auto },
        context: AutoOr::N(SMALL_CONTEXT),
        kv: Kv::F16,
        npu: Npu::Off,
        check: true,
        // A look at a device need not wait for who uses it.
        lock: DeviceLock::Off,
        ..options.clone()
    };
    let threads = pool(&options)?;
    let mut loaded = load(
        &weights,
        "a small made-up model",
        &options,
        Room::of(SMALL_CONTEXT),
        &threads,
        listener,
    )?;
    run_passes(loaded.engine.as_mut())?;
    Ok(format!(
        "a small model computes what the reference kernels compute ({})",
        loaded.engine.report().device
    ))
}
