//! The front end of Gemma 4 12B, which has no tower. Each soft token is one square of pixels,
//! normalised and multiplied by two matrices.
//!
//! Source: transformers, `Gemma4UnifiedVisionEmbedder`. Its LayerNorms have PyTorch's epsilon.

use super::file::{BiasedNorm, Component, Dense, TowerFile};
use super::gemma4::MARKS;
use super::pixels::{Processor, cells, check_budget};
use super::program::{LinearLayer, Program};
use super::resize::{CHANNELS, Filter};
use super::tower::{Fit, Marks, Section, Tower};
use crate::checkpoint::Checkpoint;
use anyhow::Result;
use gemma_base::error::Fault;

const LAYER_NORM_EPS: f32 = 1e-5;

/// A front end without layers.
#[derive(Debug)]
pub struct Merged {
    processor: Processor,
    marks: Marks,
    /// Side of a soft token in pixels.
    side: usize,
    positions: usize,
    eps: f32,
    /// Norms of the pixels, of their product with the first matrix, and of the sum with positions.
    norms: [BiasedNorm; 3],
    embed: LinearLayer, // [hidden, side * side * 3]
    projector: Dense,   // [width, hidden]
}

impl Merged {
    /// Opens the front end of a checkpoint.
    ///
    /// # Errors
    /// A [`Fault`] for tensors that are missing or have other shapes.
    pub fn open(checkpoint: Checkpoint) -> Result<(TowerFile, Merged)> {
        let file = TowerFile::new(
            checkpoint,
            ("patch_dense.weight", &["model.vision_embedder.", "vision_embedder."]),
            ("embedding_projection.weight", &["model.embed_vision.", "embed_vision."]),
        )?;
        let config = file.checkpoint().config();
        let section = Section(&config["vision_config"]);
        let side = section.side("patch_size", 16)? * section.side("pooling_kernel_size", 3)?;
        let hidden = section.size("mm_embed_dim", 3840, 1 << 16)?;
        let positions = section.size("mm_posemb_size", 1120, 1 << 16)?;
        let eps = section.eps("rms_norm_eps")?;
        let values = side * side * CHANNELS;
        let norms = [
            file.norm("patch_ln1", values)?.map(|part| file.by_pixel(part)),
            file.norm("patch_ln2", hidden)?,
            file.norm("pos_norm", hidden)?,
        ];
        let matrix =
            file.patch_matrix(Component::Tower, "patch_dense.weight", hidden, side * side)?;
        let bias = file.floats(Component::Tower, "patch_dense.bias", &[hidden])?;
        let name = "embedding_projection.weight";
        let width = file.shape(Component::Projector, name)?.first().copied().unwrap_or(0);
        let projector = file.matrix(Component::Projector, name, width, hidden)?;
        let processor = Processor::open(file.checkpoint(), Filter::Bicubic, false)?;
        let marks = Marks::read(config, MARKS)?;
        let embed = LinearLayer { matrix, bias, limits: None };
        Ok((file, Merged { processor, marks, side, positions, eps, norms, embed, projector }))
    }

    /// Returns the position embeddings of a grid, f32 `[tokens, hidden]`: the sum of those of the
    /// column and of the row.
    fn positions(&self, file: &TowerFile, fit: Fit) -> Result<Vec<f32>> {
        let hidden = self.embed.matrix.rows;
        // [positions, axis, hidden]; in mmproj files [axis, positions, hidden].
        let (shape, axis, place) = match file.is_mmproj {
            true => ([2, self.positions, hidden], self.positions, 1),
            false => ([self.positions, 2, hidden], 1, 2),
        };
        let table = file.floats(Component::Tower, "pos_embedding", &shape)?;
        let entry = |i: usize, a: usize| &table[(i * place + a * axis) * hidden..][..hidden];
        let token = |i: usize| {
            let (column, row) = (entry(i % fit.columns, 0), entry(i / fit.columns, 1));
            column.iter().zip(row).map(|(x, y)| x + y)
        };
        Ok((0..fit.tokens()).flat_map(token).collect())
    }
}

impl Tower for Merged {
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
        let (columns, rows) = cells(width, height, self.side, budget)?;
        if columns.max(rows) > self.positions {
            let what = format!("an image of {columns} x {rows} tokens is too long for the model");
            return Err(Fault::usage(what).help("cut the image, or give it fewer tokens"));
        }
        let (width, height) = (columns * self.side, rows * self.side);
        Ok(Fit { width, height, columns, rows, budget })
    }

    fn work(&self, fit: Fit) -> u64 {
        let (first, second) = (&self.embed.matrix, &self.projector);
        (fit.tokens() * (first.rows * first.cols + second.rows * second.cols)) as u64
    }

    fn scratch(&self) -> u64 {
        let (first, most) = (&self.embed.matrix, super::pixels::BUDGETS[4]);
        let rows = 2 * first.cols + 3 * first.rows + self.projector.rows;
        4 * (most * rows + first.rows * (first.cols + 2 * self.positions)) as u64
    }

    fn program<'a>(&'a self, file: &'a TowerFile, rgb: &[u8], fit: Fit) -> Result<Program<'a>> {
        let (mut p, tokens) = (Program::new(file), fit.tokens());
        let values = self.processor.patches(rgb, fit.width, self.side, false);
        let pixels = p.input(values, self.embed.matrix.cols);
        let hidden = self.embed.matrix.rows;
        let positions = p.input(self.positions(file, fit)?, hidden);
        let x = p.register(tokens, hidden);
        let [first, second, third] = &self.norms;
        p.layer_norm(first, LAYER_NORM_EPS, pixels, pixels);
        p.linear(&self.embed, pixels, x, false);
        p.layer_norm(second, LAYER_NORM_EPS, x, x);
        p.add(x, positions);
        p.layer_norm(third, LAYER_NORM_EPS, x, x);
        p.rms_norm(&[], hidden, self.eps, x, x);
        p.network.output = p.register(tokens, self.projector.rows);
        p.product(&self.projector, false, x, p.network.output);
        Ok(p)
    }
}
