//! The vision tower of Gemma 4 31B: RMSNorms before and after each half of a layer, rotation by
//! column and row, and linear layers with clipping.
//!
//! Source: transformers, `Gemma4VisionModel` and `Gemma4MultimodalEmbedder`.

use super::file::{Component, DAMAGED, Dense, TowerFile};
use super::pixels::{BUDGETS, Processor, cells, check_budget};
use super::program::{LinearLayer, Program};
use super::resize::Filter;
use super::tower::{Fit, Marks, Section, Tower, TowerShape};
use crate::checkpoint::Checkpoint;
use crate::models::reader;
use anyhow::Result;
use gemma_base::compute::dense::{DenseHeads, DenseOp, Limits, Register};
use gemma_base::error::Fault;

/// Marks of all Gemma 4 models. Their templates write the text around them.
pub const MARKS: Marks =
    Marks { begin: 255999, soft: 258880, end: 258882, is_begin_shown: false, around: "" };

/// Names of the four norms of a layer.
const NORMS: [&str; 4] = [
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
];

#[derive(Debug)]
struct Gemma4Layer {
    norms: [Vec<f32>; 4],
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    out: LinearLayer,
    gate: LinearLayer,
    up: LinearLayer,
    down: LinearLayer,
}

/// Gemma 4's tower of layers.
#[derive(Debug)]
pub struct Gemma4Tower {
    processor: Processor,
    marks: Marks,
    shape: TowerShape,
    heads: DenseHeads,
    theta: f64,
    /// Side of the square of patches that form a soft token.
    pool: usize,
    positions: usize,
    patch: LinearLayer, // [width, patch * patch * 3]
    layers: Vec<Gemma4Layer>,
    /// Bias and scale of pooled values.
    standard: Option<[Vec<f32>; 2]>,
    projector: Dense, // [embedding, width]
}

impl Gemma4Tower {
    /// Opens the tower of a checkpoint.
    ///
    /// # Errors
    /// A [`Fault`] for tensors that are missing or have other shapes.
    pub fn open(checkpoint: Checkpoint) -> Result<(TowerFile, Gemma4Tower)> {
        let file = TowerFile::new(
            checkpoint,
            ("patch_embedder.input_proj.weight", &["model.vision_tower.", "vision_tower."]),
            ("embedding_projection.weight", &["model.embed_vision.", "embed_vision."]),
        )?;
        let config = file.checkpoint().config();
        let section = Section(&config["vision_config"]);
        let default =
            TowerShape { width: 768, hidden: 3072, layers: 16, heads: 12, patch: 16, eps: 0.0 };
        let shape = section.shape("rms_norm_eps", default)?;
        let heads = DenseHeads {
            queries: shape.heads,
            keys: section.size("num_key_value_heads", 12, 1 << 10)?,
            dim: section.size("head_dim", 64, 1 << 10)?,
        };
        if !heads.queries.is_multiple_of(heads.keys) || !heads.dim.is_multiple_of(4) {
            let what = format!("{heads:?} of the tower do not fit together");
            return Err(Fault::model(what).help(DAMAGED).into());
        }
        let clips = section.is_set("use_clipped_linears");
        let layers = (0..shape.layers).map(|i| Self::layer(&file, &shape, heads, clips, i));
        let layers = layers.collect::<Result<_>>()?;
        let vector = |name: &str| file.floats(Component::Tower, name, &[shape.width]);
        let standard = match section.is_set("standardize") {
            true => Some([vector("std_bias")?, vector("std_scale")?]),
            false => None,
        };
        let pixels = shape.patch * shape.patch;
        let name = "patch_embedder.input_proj.weight";
        let matrix = file.patch_matrix(Component::Tower, name, shape.width, pixels)?;
        let name = "embedding_projection.weight";
        let width = file.shape(Component::Projector, name)?.first().copied().unwrap_or(0);
        let rope = &section.0["rope_parameters"];
        let tower = Gemma4Tower {
            processor: Processor::open(file.checkpoint(), Filter::Bicubic, false)?,
            marks: Marks::read(config, MARKS)?,
            theta: reader::positive("rope_theta", rope.get("rope_theta"), 100.0)?,
            pool: section.side("pooling_kernel_size", 3)?,
            positions: section.size("position_embedding_size", 10240, 1 << 20)?,
            patch: LinearLayer { matrix, bias: Vec::new(), limits: None },
            layers,
            standard,
            projector: file.matrix(Component::Projector, name, width, shape.width)?,
            heads,
            shape,
        };
        Ok((file, tower))
    }

    fn layer(
        file: &TowerFile,
        shape: &TowerShape,
        heads: DenseHeads,
        clips: bool,
        i: usize,
    ) -> Result<Gemma4Layer> {
        let name = |part: &str| format!("encoder.layers.{i}.{part}");
        let norm = |part: &str, width: usize| {
            file.floats(Component::Tower, &name(&format!("{part}.weight")), &[width])
        };
        let linear = |part: &str, rows, cols| -> Result<LinearLayer> {
            let matrix = name(&format!("{part}.linear.weight"));
            let matrix = file.matrix(Component::Tower, &matrix, rows, cols)?;
            let limit = |end: &str| -> Result<f32> {
                Ok(file.floats(Component::Tower, &name(&format!("{part}.{end}")), &[])?[0])
            };
            let range = |kind: &str| -> Result<Limits> {
                let least = limit(&format!("{kind}_min"))?;
                Ok(Limits { least, most: limit(&format!("{kind}_max"))? })
            };
            let limits = match clips {
                true => Some([range("input")?, range("output")?]),
                false => None,
            };
            Ok(LinearLayer { matrix, bias: Vec::new(), limits })
        };
        let (width, hidden) = (shape.width, shape.hidden);
        let (query, keys) = (heads.queries * heads.dim, heads.keys * heads.dim);
        let [first, second, third, fourth] = NORMS.map(|part| norm(part, width));
        Ok(Gemma4Layer {
            norms: [first?, second?, third?, fourth?],
            q_norm: norm("self_attn.q_norm", heads.dim)?,
            k_norm: norm("self_attn.k_norm", heads.dim)?,
            q: linear("self_attn.q_proj", query, width)?,
            k: linear("self_attn.k_proj", keys, width)?,
            v: linear("self_attn.v_proj", keys, width)?,
            out: linear("self_attn.o_proj", width, query)?,
            gate: linear("mlp.gate_proj", hidden, width)?,
            up: linear("mlp.up_proj", hidden, width)?,
            down: linear("mlp.down_proj", width, hidden)?,
        })
    }

    /// Returns the patches per row and per column of the picture.
    fn grid(&self, fit: Fit) -> (usize, usize) {
        (fit.columns * self.pool, fit.rows * self.pool)
    }

    /// Returns the position embeddings of a grid, f32 `[patches, width]`: the sum of those of the
    /// column and of the row.
    fn positions(&self, file: &TowerFile, fit: Fit) -> Result<Vec<f32>> {
        let (n, width) = (self.positions, self.shape.width);
        let (columns, rows) = self.grid(fit);
        let name = "patch_embedder.position_embedding_table";
        let table = file.floats(Component::Tower, name, &[2, n, width])?;
        let entry = |axis: usize, i: usize| &table[(axis * n + i) * width..][..width];
        let patch = |i: usize| {
            let (x, y) = (entry(0, i % columns), entry(1, i / columns));
            x.iter().zip(y).map(|(x, y)| x + y)
        };
        Ok((0..columns * rows).flat_map(patch).collect())
    }

    /// Returns sine and cosine of each pair in a half of a head, by position.
    fn angles(&self, positions: usize) -> Vec<f32> {
        let pairs = self.heads.dim / 4;
        let angle = |position: usize, pair: usize| {
            let exponent = pair as f64 / pairs as f64;
            // Rounded to f32 at the same step as in transformers.
            let frequency = (1.0 / libm::pow(self.theta, exponent)) as f32;
            let (sin, cos) = libm::sincos(f64::from(position as f32 * frequency));
            [sin as f32, cos as f32]
        };
        let at = |position| (0..pairs).flat_map(move |pair| angle(position, pair));
        (0..positions).flat_map(at).collect()
    }

    /// Appends the layers, which work on the register `x`.
    fn layers<'a>(&'a self, p: &mut Program<'a>, x: Register, (columns, rows): (usize, usize)) {
        let TowerShape { width, hidden, eps, .. } = self.shape;
        let DenseHeads { queries, keys, dim } = self.heads;
        let n = columns * rows;
        let angles = p.network.vector(&self.angles(columns.max(rows)));
        let h = p.register(n, width);
        let [q, attended] = [(); 2].map(|()| p.register(n, queries * dim));
        let [k, v] = [(); 2].map(|()| p.register(n, keys * dim));
        let [gate, up] = [(); 2].map(|()| p.register(n, hidden));
        for layer in &self.layers {
            p.rms_norm(&layer.norms[0], width, eps, x, h);
            p.linear(&layer.q, h, q, false);
            p.linear(&layer.k, h, k, false);
            p.linear(&layer.v, h, v, false);
            p.rms_norm(&layer.q_norm, dim, eps, q, q);
            p.rms_norm(&layer.k_norm, dim, eps, k, k);
            p.rms_norm(&[], dim, eps, v, v);
            for x in [q, k] {
                p.push(DenseOp::Rotate { x, half: dim / 2, columns, angles });
            }
            p.attention([q, k, v], attended, self.heads, 1.0);
            p.linear(&layer.out, attended, h, false);
            p.rms_norm(&layer.norms[1], width, eps, h, h);
            p.add(x, h);
            p.rms_norm(&layer.norms[2], width, eps, x, h);
            p.linear(&layer.gate, h, gate, true);
            p.linear(&layer.up, h, up, false);
            p.push(DenseOp::Multiply { x: gate, other: up });
            p.linear(&layer.down, gate, h, false);
            p.rms_norm(&layer.norms[3], width, eps, h, h);
            p.add(x, h);
        }
    }
}

impl Tower for Gemma4Tower {
    fn processor(&self) -> &Processor {
        &self.processor
    }

    fn marks(&self) -> Marks {
        self.marks
    }

    fn width(&self) -> usize {
        self.projector.rows
    }

    fn fit(&self, width: usize, height: usize, budget: Option<usize>) -> Result<Fit, Fault> {
        let budget = check_budget(budget.unwrap_or(self.processor.budget))?;
        let cell = self.shape.patch * self.pool;
        let (columns, rows) = cells(width, height, cell, budget)?;
        if columns.max(rows) * self.pool > self.positions {
            let what = format!("an image of {columns} x {rows} tokens is too long for the model");
            return Err(Fault::usage(what).help("cut the image, or give it fewer tokens"));
        }
        Ok(Fit { width: columns * cell, height: rows * cell, columns, rows, budget })
    }

    fn work(&self, fit: Fit) -> u64 {
        let (width, query) = (self.shape.width, self.heads.queries * self.heads.dim);
        let keys = self.heads.keys * self.heads.dim;
        let matrices = width * (2 * query + 2 * keys + 3 * self.shape.hidden);
        let patches = fit.tokens() * self.pool * self.pool;
        self.shape.work(patches as u64, matrices, query)
            + (fit.tokens() * width * self.projector.rows) as u64
    }

    fn scratch(&self) -> u64 {
        let patches = BUDGETS[4] * self.pool * self.pool;
        let table = 8 * (self.positions * self.shape.width) as u64;
        self.shape.scratch(patches, self.heads.queries * self.heads.dim) + table
    }

    fn program<'a>(&'a self, file: &'a TowerFile, rgb: &[u8], fit: Fit) -> Result<Program<'a>> {
        let TowerShape { width, eps, patch, .. } = self.shape;
        let (mut p, (columns, rows)) = (Program::new(file), self.grid(fit));
        let mut values = self.processor.patches(rgb, fit.width, patch, false);
        values.iter_mut().for_each(|v| *v = 2.0 * (*v - 0.5));
        let patches = p.input(values, self.patch.matrix.cols);
        let positions = p.input(self.positions(file, fit)?, width);
        let x = p.register(columns * rows, width);
        p.linear(&self.patch, patches, x, false);
        p.add(x, positions);
        self.layers(&mut p, x, (columns, rows));
        let pooled = p.register(fit.tokens(), width);
        p.push(DenseOp::Pool { x, out: pooled, side: self.pool, columns: fit.columns });
        p.push(DenseOp::Scale { x: pooled, factor: (width as f32).sqrt() });
        if let Some([bias, scale]) = &self.standard {
            let (bias, scale) = (p.network.vector(bias), p.network.vector(scale));
            p.push(DenseOp::Standardize { x: pooled, bias, scale });
        }
        p.rms_norm(&[], width, eps, pooled, pooled);
        p.network.output = p.register(fit.tokens(), self.projector.rows);
        p.product(&self.projector, false, pooled, p.network.output);
        Ok(p)
    }
}
