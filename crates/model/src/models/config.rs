//! Shape and constants of a language model, independent of its file format.

use super::architecture::{self, Architecture, Step, TensorSpec};
use super::role::Role;
use anyhow::Result;
use gemma_base::tensor::Token;
use serde_json::Value;

/// Rotary position embedding of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the rotation periods.
    pub theta: f32,
    /// Divisor of positions; 1 where unscaled.
    pub factor: f32,
    /// Share of a head's channels that are rotated, the fastest first; 1 for all.
    pub share: f32,
}

impl RopeSpec {
    /// Returns the number of rotated channel pairs of a head.
    pub fn turning(&self, head_dim: usize) -> usize {
        // The small offset guards the truncation of `head_dim * share / 2` against rounding.
        (self.share * (head_dim / 2) as f32 + 1e-3) as usize
    }
}

/// Shape of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSpec {
    pub n_heads: usize,
    /// Divides `n_heads`.
    pub n_kv_heads: usize,
    /// A multiple of 16.
    pub head_dim: usize,
    /// Positions that a query sees, including its own; `None` for all.
    pub window: Option<usize>,
    pub rope: RopeSpec,
    /// Factor of the query-key products.
    pub query_scale: f32,
    /// Whether values are the keys before norm and rotation, computed by the same matrix.
    pub values_are_keys: bool,
    /// Whether a row of an image sees its whole image, as far as the window reaches back. Otherwise
    /// it sees no later row.
    pub whole_images: bool,
}

impl LayerSpec {
    /// Returns whether queries see all positions.
    pub fn is_global(&self) -> bool {
        self.window.is_none()
    }

    /// Returns the channels of all query heads of a position.
    pub fn query_width(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Returns the channels of all key heads (or all value heads) of a position.
    pub fn kv_width(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
}

/// Experts of a mixture layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSpec {
    pub count: usize,
    /// Experts used per row.
    pub used: usize,
    /// Hidden width of an expert, a multiple of 32.
    pub width: usize,
    /// Whether gate and up matrix of an expert are stored as one.
    pub fused: bool,
}

/// Shape and constants of a language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub architecture: &'static dyn Architecture,
    pub layers: Vec<LayerSpec>,
    pub dim: usize,
    pub ffn_dim: usize,
    /// Experts in addition to the MLP of each layer, in a mixture model.
    pub experts: Option<ExpertSpec>,
    /// Rows of the embedding, including unused ids
    pub vocab: usize,
    /// The epsilon of every RMSNorm
    pub eps: f32,
    /// Factor of embeddings.
    pub embed_scale: f32,
    /// Soft cap of logits: `cap tanh(logit / cap)`; `None` for no cap.
    pub logit_cap: Option<f32>,
    /// Positions that the model was trained for.
    pub max_position: usize,
    /// Width of the target's hidden states, in an assistant model that reads them and the target's
    /// cache.
    pub backbone: Option<usize>,
    /// Tokens that end a text.
    pub eos: Vec<Token>,
    pub bos: Token,
    /// Whether the output head shares the embedding table.
    pub tied: bool,
    /// Whether the file specifies `vocab`. Otherwise it is the number of embedding rows.
    pub vocab_is_explicit: bool,
}

impl Config {
    /// Reads a whole `config.json`. Architectures reject keys that their forward pass does not
    /// implement.
    pub fn from_json(json: &Value) -> Result<Config> {
        architecture::of_json(json).and_then(|a| a.config(json)).map_err(|fault| {
            let what = format!("config.json: {}", fault.what);
            let help = fault
                .help
                .unwrap_or_else(|| "compare the file with the one on the model's page".into());
            gemma_base::error::Fault::model(what).help(help).into()
        })
    }

    /// Returns the layers that see all positions.
    pub fn global_layers(&self) -> Vec<usize> {
        (0..self.layers.len()).filter(|i| self.layers[*i].is_global()).collect()
    }

    /// Returns the largest window of the layers; `None` if all layers see all positions.
    pub fn window(&self) -> Option<usize> {
        self.layers.iter().filter_map(|layer| layer.window).max()
    }

    /// Returns the largest value of `f` over the layers.
    pub fn most(&self, f: impl Fn(&LayerSpec) -> usize) -> usize {
        self.layers.iter().map(f).max().unwrap_or(0)
    }

    /// Returns the steps of a layer.
    pub fn steps(&self, layer: usize) -> Vec<Step> {
        self.architecture.layer(self, &self.layers[layer])
    }

    /// Returns every tensor of the model in the order of the forward pass.
    pub fn tensors(&self, has_own_head: bool) -> Vec<TensorSpec> {
        let outside = |role, rows, cols| TensorSpec { role, layer: 0, rows, cols, stack: 1 };
        let mut out = vec![outside(Role::Embed, self.vocab, self.dim)];
        if let Some(backbone) = self.backbone {
            out.push(outside(Role::PreProjection, self.dim, 2 * backbone));
        }
        for (layer, spec) in self.layers.iter().enumerate() {
            architecture::tensors(self, spec, layer, &mut out);
        }
        out.push(outside(Role::FinalNorm, 1, self.dim));
        if let Some(backbone) = self.backbone {
            out.push(outside(Role::PostProjection, backbone, self.dim));
        }
        if has_own_head {
            out.push(outside(Role::Head, self.vocab, self.dim));
        }
        out
    }
}
