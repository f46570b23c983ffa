//! The solver that reads text: [`Calibrator`] behind the pipeline's seam.

use super::calibrate::{Calibrator, Text};
use super::layout::{Entry, Layout, Target};
use super::solve::can_solve;
use super::solver::Solver;
use crate::models::{Role, Weights};
use crate::tensor::encode::TileEncoder;
use crate::tensor::quantize::quantize_by;
use crate::tensor::{Code, Format, Matrix};
use anyhow::Result;
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::sync::Arc;

/// Changes with every change of the method that changes a byte.
const METHOD: &str = "ldlq-2";

/// Feedback and correction on the inputs that a text gives.
pub struct Calibrated<'a> {
    source: &'a Weights,
    text: Text,
    name: String,
    calibrator: Option<Calibrator<'a>>,
    threads: rayon::ThreadPool,
    tiles: Arc<dyn TileEncoder>,
    losses: Vec<(Role, usize, f64)>,
}

impl<'a> Calibrated<'a> {
    /// `tiles` finds trellis codes.
    pub fn new(
        source: &'a Weights,
        text: Text,
        threads: usize,
        tiles: Arc<dyn TileEncoder>,
    ) -> Result<Calibrated<'a>> {
        let sha256 =
            crate::util::hex(Sha256::digest(bytemuck::cast_slice::<u32, u8>(&text.tokens)));
        let windows = text.tokens.len() / text.window;
        let name = format!(
            "{METHOD}, {windows} windows of {} tokens, sha256 {}",
            text.window,
            &sha256[..16]
        );
        let threads = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        Ok(Calibrated { source, text, name, calibrator: None, threads, tiles, losses: Vec::new() })
    }

    /// Must be called once, before the run: what each matrix becomes.
    pub fn begin(&mut self, layout: &Layout) -> Result<()> {
        let format = |e: &Entry| match e.target {
            Target::Format(format) if e.role.is_matrix() && can_solve(format, e.cols) => {
                Some(((e.role, e.layer), format))
            }
            _ => None,
        };
        let formats = layout.entries.iter().filter_map(format).collect();
        let (source, text, tiles) = (self.source, self.text.clone(), self.tiles.clone());
        self.calibrator =
            Some(self.threads.install(|| Calibrator::new(source, text, formats, tiles))?);
        Ok(())
    }

    /// Mean KL divergence from the source on some of the text, in nats, of the model that was
    /// written.
    pub fn divergence(&mut self, made: &Weights) -> Result<f64> {
        let calibrator = calibrator(&mut self.calibrator)?;
        self.threads.install(|| calibrator.divergence(made))
    }

    /// Squared output error over squared output of each matrix that this run solved.
    pub fn losses(&self) -> &[(Role, usize, f64)] {
        &self.losses
    }

    /// Returns what was out of the ordinary, and forgets it.
    pub fn notes(&mut self) -> Vec<String> {
        self.calibrator.as_mut().map(Calibrator::notes).unwrap_or_default()
    }
}

fn calibrator<'a, 'b>(
    calibrator: &'b mut Option<Calibrator<'a>>,
) -> Result<&'b mut Calibrator<'a>> {
    calibrator.as_mut().ok_or_else(|| anyhow::anyhow!("the calibrated solver was not begun"))
}

fn is_table(role: Role) -> bool {
    matches!(role, Role::Embed | Role::Head)
}

impl Solver for Calibrated<'_> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn wants_whole(&self, entry: &Entry) -> bool {
        entry.role.is_matrix() && !is_table(entry.role)
    }

    fn wants_resumed(&self, entry: &Entry) -> bool {
        entry.role.is_matrix()
    }

    fn memory(&self, layout: &Layout) -> u64 {
        let config = self.source.config();
        let streams = 2 * self.text.tokens.len() * config.dim;
        let widest = layout
            .entries
            .iter()
            .filter(|e| self.wants_whole(e))
            .map(|e| e.cols)
            .max()
            .unwrap_or(0);
        let block = super::solve::block_width(widest);
        // Moments, cross moments and a factor of each block.
        let moments = 3 * widest.div_ceil(block.max(1)) * block * block;
        let largest = layout
            .entries
            .iter()
            .filter(|e| self.wants_whole(e))
            .map(|e| e.rows * e.cols)
            .max()
            .unwrap_or(0);
        let batch = super::calibrate::BATCH * (6 * config.ffn_dim + 4 * config.dim);
        4 * (streams + moments + 3 * largest + batch) as u64
    }

    fn matrix(
        &mut self,
        entry: &Entry,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<Matrix<'static>> {
        let Calibrated { calibrator: own, threads, tiles, losses, .. } = self;
        let calibrator = calibrator(own)?;
        threads.install(|| {
            if !can_solve(format, entry.cols) || (is_table(entry.role) && format.code == Code::I8) {
                // Not coded by columns, or too fine for feedback to matter.
                let matrix = quantize_by(&**tiles, format, rows.len(), entry.cols, values)?;
                match entry.role {
                    Role::Embed => calibrator.table_done(rows, &matrix),
                    Role::Head => {}
                    _ => calibrator.done(entry.role, entry.layer, matrix.clone())?,
                }
                return Ok(matrix);
            }
            if !is_table(entry.role) {
                let solved = calibrator.matrix(entry.role, entry.layer)?;
                losses.push((entry.role, entry.layer, solved.loss));
                calibrator.done(entry.role, entry.layer, solved.matrix.clone())?;
                return Ok(solved.matrix);
            }
            let matrix = calibrator.table_rows(entry.role, format, values.to_vec())?.matrix;
            if entry.role == Role::Embed {
                calibrator.table_done(rows, &matrix);
            }
            Ok(matrix)
        })
    }

    fn resumed(&mut self, entry: &Entry, matrix: &Matrix<'_>) -> Result<()> {
        let Calibrated { calibrator: own, threads, .. } = self;
        let calibrator = calibrator(own)?;
        threads.install(|| match entry.role {
            Role::Embed => {
                calibrator.table_done(0..matrix.rows, matrix);
                Ok(())
            }
            Role::Head => Ok(()),
            _ => calibrator.done(entry.role, entry.layer, matrix.clone().into_owned()),
        })
    }
}
