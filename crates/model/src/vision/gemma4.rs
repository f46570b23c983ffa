//! The tower of Gemma 4 31B: RMSNorms before and after each half of a layer, rotation by column and
//! row, and linear layers that clip.
//!
//! Source: transformers, `Gemma4VisionModel` and `Gemma4MultimodalEmbedder`.

use super::file::{Component, DAMAGED, Dense, TowerFile};
use super::ops::{Activations, Heads, Limits, attention};
use super::pixels::{BUDGETS, Processor, cells, check_budget};
use super::resize::Filter;
use super::tower::{Fit, LinearLayer, Marks, Section, Tower, TowerShape, pool};
use crate::checkpoint::Checkpoint;
use crate::models::reader;
use anyhow::Result;
use gemma_base::error::Fault;

/// Marks of all Gemma 4 models. Their templates bring what stands around them.
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
struct Layer {
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
    heads: Heads,
    theta: f64,
    /// Patches a side that make a soft token.
    pool: usize,
    positions: usize,
    patch: LinearLayer, // [width, patch * patch * 3]
    layers: Vec<Layer>,
    /// Bias and scale of pooled values.
    standard: Option<[Vec<f32>; 2]>,
    projector: Dense, // [embedding, width]
}

impl Gemma4Tower {
    /// Opens the tower of a checkpoint.
    ///
    /// # Errors
    /// A [`Fault`] for tensors that are missing or of other shapes.
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
        let heads = Heads {
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
        heads: Heads,
        clips: bool,
        i: usize,
    ) -> Result<Layer> {
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
        Ok(Layer {
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

    /// Patches of a row and of a column of the picture.
    fn grid(&self, fit: Fit) -> (usize, usize) {
        (fit.columns * self.pool, fit.rows * self.pool)
    }

    /// Returns the positions of a grid, f32 `[patches, width]`: those of the column and of the row
    /// added up.
    fn positions(&self, file: &TowerFile, fit: Fit) -> Result<Activations> {
        let (n, width) = (self.positions, self.shape.width);
        let (columns, rows) = self.grid(fit);
        let name = "patch_embedder.position_embedding_table";
        let table = file.floats(Component::Tower, name, &[2, n, width])?;
        let entry = |axis: usize, i: usize| &table[(axis * n + i) * width..][..width];
        let patch = |i: usize| {
            let (x, y) = (entry(0, i % columns), entry(1, i / columns));
            x.iter().zip(y).map(|(x, y)| x + y)
        };
        Ok(Activations::new((0..columns * rows).flat_map(patch).collect(), width))
    }

    /// Returns sine and cosine of each pair of a half of a head, by position.
    fn angles(&self, positions: usize) -> Vec<Vec<(f32, f32)>> {
        let pairs = self.heads.dim / 4;
        let angle = |position: usize, pair: usize| {
            let exponent = pair as f64 / pairs as f64;
            // Rounded to f32 where transformers does.
            let frequency = (1.0 / libm::pow(self.theta, exponent)) as f32;
            let (sin, cos) = libm::sincos(f64::from(position as f32 * frequency));
            (sin as f32, cos as f32)
        };
        let at = |position| (0..pairs).map(|pair| angle(position, pair)).collect();
        (0..positions).map(at).collect()
    }

    /// Rotates the first half of each head by the patch's column, and the second by its row.
    fn rotate(&self, x: &mut Activations, columns: usize, angles: &[Vec<(f32, f32)>]) {
        let half = self.heads.dim / 2;
        for (i, row) in x.data.chunks_exact_mut(x.width).enumerate() {
            for (part, values) in row.chunks_exact_mut(half).enumerate() {
                let position = if part % 2 == 0 { i % columns } else { i / columns };
                let (first, second) = values.split_at_mut(half / 2);
                let pairs = first.iter_mut().zip(second).zip(&angles[position]);
                for ((a, b), (sin, cos)) in pairs {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }

    /// Returns attention of the normed rows `h`, before its output matrix.
    fn attend(
        &self,
        file: &TowerFile,
        layer: &Layer,
        h: &Activations,
        columns: usize,
        angles: &[Vec<(f32, f32)>],
    ) -> Result<Activations> {
        let (dim, eps) = (self.heads.dim, self.shape.eps);
        let part = |linear: &LinearLayer, norm: &[f32]| -> Result<Activations> {
            Ok(linear.apply(file, h, false)?.rms_norm(dim, norm, eps))
        };
        let (mut q, mut k) = (part(&layer.q, &layer.q_norm)?, part(&layer.k, &layer.k_norm)?);
        let v = part(&layer.v, &[])?;
        self.rotate(&mut q, columns, angles);
        self.rotate(&mut k, columns, angles);
        attention(q, k, v, self.heads, 1.0)
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

    fn encode(&self, file: &TowerFile, rgb: &[u8], fit: Fit) -> Result<Vec<f32>> {
        let TowerShape { width, eps, patch, .. } = self.shape;
        let mut values = self.processor.patches(rgb, fit.width, patch, false);
        values.iter_mut().for_each(|v| *v = 2.0 * (*v - 0.5));
        let mut x =
            self.patch.apply(file, &Activations::new(values, self.patch.matrix.cols), false)?;
        x.add(&self.positions(file, fit)?);
        let (columns, rows) = self.grid(fit);
        let angles = self.angles(columns.max(rows));
        for layer in &self.layers {
            let norm = |x: Activations, i: usize| x.rms_norm(width, &layer.norms[i], eps);
            let h = norm(x.clone(), 0);
            let h = self.attend(file, layer, &h, columns, &angles)?;
            x.add(&norm(layer.out.apply(file, &h, false)?, 1));
            let h = norm(x.clone(), 2);
            let mut gate = layer.gate.apply(file, &h, true)?;
            let up = layer.up.apply(file, &h, false)?;
            gate.data.iter_mut().zip(&up.data).for_each(|(gate, up)| *gate *= up);
            x.add(&norm(layer.down.apply(file, &gate, false)?, 3));
        }
        let mut x = pool(&x, self.pool, fit.columns, fit.rows);
        let root = (width as f32).sqrt();
        x.data.iter_mut().for_each(|v| *v *= root);
        if let Some([bias, scale]) = &self.standard {
            for row in x.data.chunks_exact_mut(width) {
                let pairs = bias.iter().zip(scale);
                row.iter_mut().zip(pairs).for_each(|(v, (bias, scale))| *v = (*v - bias) * scale);
            }
        }
        let x = x.rms_norm(width, &[], eps);
        Ok(x.product(&file.load(&self.projector)?.t()?, None, |_| ())?.data)
    }
}
