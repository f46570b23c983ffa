//! A Vulkan device for tests. Without a device, tests print a message and pass, unless
//! GEMMA_REQUIRE_GPU is set.
//!
//! A driver on the processor takes minutes, and counts as a device only if GEMMA_REQUIRE_GPU or
//! GEMMA_VULKAN_CPU is set.

#![allow(dead_code)]

use gemma::models::Config;
use gemma::vulkan::validation::{VALIDATE, is_installed};
use gemma::vulkan::{ALLOW_CPU_DRIVER, Choice, VulkanExecutor};
use std::sync::Once;

/// Returns a function that opens the device, if there is one.
///
/// The validation layers are enabled if they are installed. Their errors fail the test when the
/// device is closed. Child processes inherit these settings.
pub fn device() -> Option<impl Fn() -> VulkanExecutor> {
    static ENVIRONMENT: Once = Once::new();
    // SAFETY: this happens once, before any other thread of the tests opens the device and reads
    // the environment.
    ENVIRONMENT.call_once(|| unsafe {
        if std::env::var_os("GEMMA_REQUIRE_GPU").is_some_and(|v| v == "1") {
            std::env::set_var(ALLOW_CPU_DRIVER, "1");
        }
        // As in `shell.rs`. Child processes with their own cache directory share these kernels too.
        std::env::set_var("MESA_SHADER_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/mesa"));
        if is_installed() && std::env::var_os(VALIDATE).is_none() {
            std::env::set_var(VALIDATE, "1");
        }
    });
    match VulkanExecutor::open(Choice::Best) {
        // While the first device is open, others find it open and its kernels compiled.
        Ok(first) => Some(move || {
            let _ = &first;
            VulkanExecutor::open(Choice::Best).unwrap()
        }),
        Err(e) if std::env::var_os("GEMMA_REQUIRE_GPU").is_some_and(|v| v == "1") => {
            panic!("no Vulkan device: {e:#}")
        }
        Err(e) => {
            eprintln!("SKIPPED, no Vulkan device: {e:#}");
            None
        }
    }
}

/// A configuration of four layers. The third is global.
pub fn config(window: usize) -> Config {
    config_of(4, 3, window)
}

/// A configuration in which every n-th layer is global.
pub fn config_of(n_layers: usize, pattern: usize, window: usize) -> Config {
    config_with(n_layers, pattern, window, 128, 256)
}

/// A configuration of one layer.
///
/// Its rows have more groups than kernels of linear layers have parts, and the groups do not divide
/// evenly.
pub fn wide_config() -> Config {
    config_with(1, 1, 70, 1280, 2304)
}

/// A local and a global layer. A pass over many rows has enough work to be cut.
pub fn large_config() -> Config {
    config_with(2, 2, 70, 1280, 2304)
}

fn config_with(
    n_layers: usize,
    pattern: usize,
    window: usize,
    dim: usize,
    ffn_dim: usize,
) -> Config {
    let json = serde_json::json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": dim, "intermediate_size": ffn_dim, "num_hidden_layers": n_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96,
        "query_pre_attn_scalar": 21, "sliding_window": window, "sliding_window_pattern": pattern,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0,
            "rope_type": "linear"},
        "max_position_embeddings": 4096,
    });
    Config::from_json(&json).unwrap()
}
