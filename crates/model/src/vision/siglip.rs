//! The vision tower of Gemma 3, a SigLIP, and its projector.
//!
//! Source: transformers, `SiglipVisionModel` and `Gemma3MultiModalProjector`.

use super::file::{BiasedNorm, Component, DAMAGED, Dense, TowerFile};
use super::pixels::Processor;
use super::program::{LinearLayer, Program};
use super::resize::Filter;
use super::tower::{Fit, Marks, Section, Tower, TowerShape};
use crate::checkpoint::Checkpoint;
use anyhow::Result;
use gemma_base::compute::dense::{DenseHeads, DenseOp};
use gemma_base::error::Fault;

const MARKS: Marks =
    Marks { begin: 255999, soft: 262144, end: 256000, is_begin_shown: true, around: "\n\n" };

/// Longest side of a picture in pixels.
const MOST_PIXELS: usize = 4096;

#[derive(Debug)]
struct SigLipLayer {
    norms: [BiasedNorm; 2],
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    out: LinearLayer,
    up: LinearLayer,
    down: LinearLayer,
}

/// A SigLIP with the projector of Gemma 3.
#[derive(Debug)]
pub struct SigLip {
    processor: Processor,
    marks: Marks,
    shape: TowerShape,
    /// Patches per row of the picture.
    side: usize,
    /// Side of the square of patches that form a soft token.
    pool: usize,
    patch: LinearLayer, // [width, 3 * patch * patch], by channel
    layers: Vec<SigLipLayer>,
    last_norm: BiasedNorm,
    /// Factors of the norm before the projection, including the 1 of Gemma 3's norms.
    soft_norm: Vec<f32>,
    projector: Dense, // [width, embedding], stored transposed
}

impl SigLip {
    /// Opens the tower of a checkpoint.
    ///
    /// # Errors
    /// A [`Fault`] for tensors that are missing or have other shapes.
    pub fn open(checkpoint: Checkpoint) -> Result<(TowerFile, SigLip)> {
        let towers = [
            "model.vision_tower.vision_model.",
            "vision_tower.vision_model.",
            "model.vision_tower.",
            "vision_tower.",
        ];
        let projectors = ["model.multi_modal_projector.", "multi_modal_projector."];
        let file = TowerFile::new(
            checkpoint,
            ("embeddings.patch_embedding.weight", &towers),
            ("mm_input_projection_weight", &projectors),
        )?;
        let config = file.checkpoint().config();
        let section = Section(&config["vision_config"]);
        let default =
            TowerShape { width: 768, hidden: 3072, layers: 12, heads: 12, patch: 16, eps: 0.0 };
        let shape = section.shape("layer_norm_eps", default)?;
        let image = section.size("image_size", 224, MOST_PIXELS)?;
        let tokens = Section(config).size("mm_tokens_per_image", 256, 1 << 16)?;
        let (side, tokens_a_side) = (image / shape.patch, tokens.isqrt());
        let is_even = image.is_multiple_of(shape.patch)
            && tokens_a_side * tokens_a_side == tokens
            && side.is_multiple_of(tokens_a_side)
            && shape.width.is_multiple_of(shape.heads);
        if !is_even || side == 0 {
            let what = format!(
                "{image} pixels, patches of {}, {tokens} tokens and {} heads of {} do not fit",
                shape.patch, shape.heads, shape.width
            );
            return Err(Fault::model(what).help(DAMAGED).into());
        }
        let layers = (0..shape.layers).map(|i| Self::layer(&file, &shape, i));
        let layers = layers.collect::<Result<_>>()?;
        let patch_values = shape.patch_values();
        let patch = "embeddings.patch_embedding";
        let name = "mm_input_projection_weight";
        let width = file.shape(Component::Projector, name)?.last().copied().unwrap_or(0);
        let soft_norm =
            file.floats(Component::Projector, "mm_soft_emb_norm.weight", &[shape.width])?;
        let processor = match config.get("processor") {
            Some(json) => Processor::read(json, Filter::Bilinear, true)?,
            None => Processor::open(file.checkpoint(), Filter::Bilinear, true)?,
        };
        let tower = SigLip {
            processor,
            marks: Marks::read(config, MARKS)?,
            side,
            pool: side / tokens_a_side,
            patch: LinearLayer::with_bias(&file, patch, shape.width, patch_values)?,
            layers,
            last_norm: file.norm("post_layernorm", shape.width)?,
            soft_norm: soft_norm.into_iter().map(|v| v + 1.0).collect(),
            projector: file.matrix(Component::Projector, name, shape.width, width)?,
            shape,
        };
        Ok((file, tower))
    }

    fn layer(file: &TowerFile, shape: &TowerShape, i: usize) -> Result<SigLipLayer> {
        let (width, hidden) = (shape.width, shape.hidden);
        let name = |part: &str| format!("encoder.layers.{i}.{part}");
        let linear = |part: &str, rows, cols| LinearLayer::with_bias(file, &name(part), rows, cols);
        Ok(SigLipLayer {
            norms: [
                file.norm(&name("layer_norm1"), width)?,
                file.norm(&name("layer_norm2"), width)?,
            ],
            q: linear("self_attn.q_proj", width, width)?,
            k: linear("self_attn.k_proj", width, width)?,
            v: linear("self_attn.v_proj", width, width)?,
            out: linear("self_attn.out_proj", width, width)?,
            up: linear("mlp.fc1", hidden, width)?,
            down: linear("mlp.fc2", width, hidden)?,
        })
    }

    fn patches(&self) -> usize {
        self.side * self.side
    }
}

impl Tower for SigLip {
    fn processor(&self) -> &Processor {
        &self.processor
    }

    fn marks(&self) -> Marks {
        self.marks
    }

    fn width(&self) -> usize {
        self.projector.cols
    }

    fn fit(&self, _: usize, _: usize, budget: Option<usize>) -> Result<Fit, Fault> {
        let (pixels, columns) = (self.side * self.shape.patch, self.side / self.pool);
        let tokens = columns * columns;
        if let Some(budget) = budget.filter(|budget| *budget != tokens) {
            let what = format!("an image of Gemma 3 has {tokens} tokens, not up to {budget}");
            return Err(Fault::usage(what).help("leave the number of image tokens out"));
        }
        Ok(Fit { width: pixels, height: pixels, columns, rows: columns, budget: tokens })
    }

    fn work(&self, fit: Fit) -> u64 {
        let (width, hidden) = (self.shape.width, self.shape.hidden);
        let matrices = 4 * width * width + 2 * width * hidden;
        self.shape.work(self.patches() as u64, matrices, width)
            + (fit.tokens() * width * self.projector.cols) as u64
    }

    fn scratch(&self) -> u64 {
        self.shape.scratch(self.patches(), self.shape.width)
            + 4 * (self.patches() * self.shape.width.max(self.shape.patch_values())) as u64
    }

    fn program<'a>(&'a self, file: &'a TowerFile, rgb: &[u8], fit: Fit) -> Result<Program<'a>> {
        let TowerShape { width, heads, eps, patch, hidden, .. } = self.shape;
        let (mut p, rows) = (Program::new(file), self.patches());
        let patches = self.processor.patches(rgb, fit.width, patch, true);
        let patches = p.input(patches, self.patch.matrix.cols);
        let name = "embeddings.position_embedding.weight";
        let positions = p.input(file.floats(Component::Tower, name, &[rows, width])?, width);
        let [x, h, q, k, v] = std::array::from_fn(|_| p.register(rows, width));
        let inner = p.register(rows, hidden);
        p.linear(&self.patch, patches, x, false);
        p.add(x, positions);
        let dim = width / heads;
        let (heads, scale) = (DenseHeads { queries: heads, keys: heads, dim }, (dim as f32).sqrt());
        for layer in &self.layers {
            p.layer_norm(&layer.norms[0], eps, x, h);
            p.linear(&layer.q, h, q, false);
            p.linear(&layer.k, h, k, false);
            p.linear(&layer.v, h, v, false);
            p.attention([q, k, v], h, heads, 1.0 / scale);
            p.linear(&layer.out, h, q, false);
            p.add(x, q);
            p.layer_norm(&layer.norms[1], eps, x, h);
            p.linear(&layer.up, h, inner, true);
            p.linear(&layer.down, inner, q, false);
            p.add(x, q);
        }
        p.layer_norm(&self.last_norm, eps, x, h);
        let pooled = p.register(fit.tokens(), width);
        p.push(DenseOp::Pool { x: h, out: pooled, side: self.pool, columns: fit.columns });
        p.rms_norm(&self.soft_norm, width, eps, pooled, pooled);
        p.network.output = p.register(fit.tokens(), self.projector.cols);
        p.product(&self.projector, true, pooled, p.network.output);
        Ok(p)
    }
}
