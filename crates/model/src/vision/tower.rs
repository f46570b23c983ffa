//! The interface of a tower: how a picture is resized for it, and how pixels become soft tokens.

use super::file::TowerFile;
use super::pixels::Processor;
use super::program::Program;
use super::resize::CHANNELS;
use crate::models::reader;
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use serde_json::Value;

/// Most layers of a tower.
const MOST_LAYERS: usize = 256;
/// Largest side of a patch or of a pooling square.
const MOST_SIDE: usize = 256;

/// The resized size of a picture, and its soft tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Width and height in pixels.
    pub width: usize,
    pub height: usize,
    /// Soft tokens per row and per column, in row-major order.
    pub columns: usize,
    pub rows: usize,
    /// The requested limit of tokens.
    pub budget: usize,
}

impl Fit {
    /// Returns the number of soft tokens.
    pub fn tokens(&self) -> usize {
        self.columns * self.rows
    }
}

/// Tokens around the soft tokens of an image in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    pub begin: Token,
    /// Placeholder of a soft token.
    pub soft: Token,
    pub end: Token,
    /// Whether chat templates write `begin` for an image instead of `soft`.
    pub is_begin_shown: bool,
    /// Text before `begin` and after `end`, in addition to that of a chat template.
    pub around: &'static str,
}

impl Marks {
    /// Reads the ids from a `config.json` with the key names of transformers 4 or 5. Missing ids
    /// have the values of `default`.
    pub fn read(config: &Value, default: Marks) -> Result<Marks, Fault> {
        let id = |name: &str, default: Token| {
            let keys = [format!("{name}_token_id"), format!("{name}_token_index")];
            let key = keys.iter().find(|key| config.get(key).is_some_and(|v| !v.is_null()));
            let Some(key) = key else { return Ok(default) };
            let value = config[key].as_u64().and_then(|id| Token::try_from(id).ok());
            value.ok_or_else(|| Fault::model(format!("`{key}` is {}", config[key])))
        };
        Ok(Marks {
            begin: id("boi", default.begin)?,
            soft: id("image", default.soft)?,
            end: id("eoi", default.end)?,
            ..default
        })
    }
}

/// A vision tower, without the tensors that stay in its file.
pub trait Tower: Send + Sync + std::fmt::Debug {
    fn processor(&self) -> &Processor;
    fn marks(&self) -> Marks;
    /// Returns the channels of a soft token, equal to those of an embedding.
    fn width(&self) -> usize;
    /// Returns the resized size for a picture of this size in pixels.
    ///
    /// # Errors
    /// A [`Fault`] for a budget that the family does not support.
    fn fit(&self, width: usize, height: usize, budget: Option<usize>) -> Result<Fit, Fault>;
    /// Returns the multiply-adds of an image.
    fn work(&self, fit: Fit) -> u64;
    /// Returns the most bytes that encoding an image needs, including one matrix in f32.
    fn scratch(&self) -> u64;
    /// Returns the network that computes the soft tokens of an image, f32 `[tokens, width]`. Its
    /// matrices have the same numbers for all images.
    fn program<'a>(&'a self, file: &'a TowerFile, rgb: &[u8], fit: Fit) -> Result<Program<'a>>;
}

/// The shape of a tower with layers, by its keys.
#[derive(Clone, Debug)]
pub struct TowerShape {
    pub width: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub patch: usize, // side in pixels
    pub eps: f32,
}

/// Reads sizes of the section `vision_config`.
pub struct Section<'a>(pub &'a Value);

impl Section<'_> {
    pub fn size(&self, key: &str, default: usize, most: usize) -> Result<usize, Fault> {
        reader::size(key, self.0.get(key).filter(|v| !v.is_null()), default, most)
    }

    pub fn eps(&self, key: &str) -> Result<f32, Fault> {
        let value = self.0.get(key).filter(|v| !v.is_null());
        reader::positive(key, value, 1e-6).map(|eps| eps as f32)
    }

    /// Returns the side of a square from a key, in pixels or patches.
    pub fn side(&self, key: &str, default: usize) -> Result<usize, Fault> {
        self.size(key, default, MOST_SIDE)
    }

    pub fn is_set(&self, key: &str) -> bool {
        self.0.get(key).and_then(Value::as_bool).unwrap_or(false)
    }

    /// Reads a shape; missing keys have the values of `default`.
    pub fn shape(&self, eps: &str, default: TowerShape) -> Result<TowerShape, Fault> {
        Ok(TowerShape {
            width: self.size("hidden_size", default.width, 1 << 16)?,
            hidden: self.size("intermediate_size", default.hidden, 1 << 18)?,
            layers: self.size("num_hidden_layers", default.layers, MOST_LAYERS)?,
            heads: self.size("num_attention_heads", default.heads, 1 << 10)?,
            patch: self.side("patch_size", default.patch)?,
            eps: self.eps(eps)?,
        })
    }
}

impl TowerShape {
    /// Returns the number of values of a patch.
    pub fn patch_values(&self) -> usize {
        self.patch * self.patch * CHANNELS
    }

    /// Returns the multiply-adds for `patches` patches, with `matrices` weights per layer and
    /// attention of `query` channels.
    pub fn work(&self, patches: u64, matrices: usize, query: usize) -> u64 {
        let layer = patches * matrices as u64 + 2 * patches * patches * query as u64;
        self.layers as u64 * layer + patches * (self.patch_values() * self.width) as u64
    }

    /// Returns the bytes of `patches` rows while a layer is computed, plus its largest matrix.
    pub fn scratch(&self, patches: usize, query: usize) -> u64 {
        // The stream, its norm, and either the rows of attention or the hidden values.
        let rows = 3 * self.width + (4 * query).max(2 * self.hidden);
        let matrix = self.width.max(query) * self.hidden.max(query);
        4 * (patches * rows + matrix) as u64
    }
}
