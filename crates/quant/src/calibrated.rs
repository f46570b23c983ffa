//! Solver that calibrates on a text. It adapts [`Calibrator`] to [`Solver`].

use super::calibrate::{CalibrationText, Calibrator};
use super::layout::{ArtifactLayout, TargetFormat, TensorPlan};
use super::ldlq::can_solve;
use super::solver::Solver;
use anyhow::Result;
use gemma_base::tensor::encode::CodingDevice;
use gemma_base::tensor::quantize::quantize_by;
use gemma_base::tensor::{Code, Format, Matrix};
use gemma_model::models::{Role, Weights};
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::sync::Arc;

/// Version of the method. It must change whenever a byte of the result changes.
const METHOD: &str = "ldlq-4";

/// Solver with error feedback (LDLQ) that corrects for quantised inputs. Inputs come from a
/// calibration text.
pub struct Calibrated<'a> {
    source: &'a Weights,
    text: CalibrationText,
    name: String,
    calibrator: Option<Calibrator<'a>>,
    threads: rayon::ThreadPool,
    device: Arc<dyn CodingDevice>,
    losses: Vec<(Role, usize, f64)>,
}

impl<'a> Calibrated<'a> {
    /// Returns a solver that calibrates on `text`. `device` computes the products and searches for
    /// codes.
    pub fn new(
        source: &'a Weights,
        text: CalibrationText,
        threads: usize,
        device: Arc<dyn CodingDevice>,
    ) -> Result<Calibrated<'a>> {
        let sha256 =
            gemma_base::util::hex(Sha256::digest(bytemuck::cast_slice::<u32, u8>(&text.tokens)));
        let windows = text.tokens.len() / text.window;
        let name = format!(
            "{METHOD}, {windows} windows of {} tokens, sha256 {}",
            text.window,
            &sha256[..16]
        );
        let threads = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        Ok(Calibrated { source, text, name, calibrator: None, threads, device, losses: Vec::new() })
    }

    /// Sets the format of each matrix. The caller must call it once before the run.
    pub fn begin(&mut self, layout: &ArtifactLayout) -> Result<()> {
        let format = |e: &TensorPlan| match e.target {
            TargetFormat::Format(format) if e.role.is_matrix() && solves(e, format) => {
                Some(((e.role, e.layer), format))
            }
            _ => None,
        };
        let formats = layout.entries.iter().filter_map(format).collect();
        let (source, text, device) = (self.source, self.text.clone(), self.device.clone());
        self.calibrator =
            Some(self.threads.install(|| Calibrator::new(source, text, formats, device))?);
        Ok(())
    }

    /// Returns the mean KL divergence of the written model from the source in nats, on a part of
    /// the text. An error returned by `heard` ends the measurement.
    pub fn divergence(
        &mut self,
        made: &Weights,
        heard: &mut (dyn FnMut() -> Result<()> + Send),
    ) -> Result<f64> {
        let calibrator = calibrator(&mut self.calibrator)?;
        self.threads.install(|| calibrator.divergence(made, heard))
    }

    /// Returns the squared output error over the squared output of each matrix that this run
    /// solved.
    pub fn losses(&self) -> &[(Role, usize, f64)] {
        &self.losses
    }

    /// Returns the notes about unusual events, such as raised damping, and clears them.
    pub fn notes(&mut self) -> Vec<String> {
        self.calibrator.as_mut().map(Calibrator::notes).unwrap_or_default()
    }
}

fn calibrator<'a, 'b>(
    calibrator: &'b mut Option<Calibrator<'a>>,
) -> Result<&'b mut Calibrator<'a>> {
    calibrator.as_mut().ok_or_else(|| anyhow::anyhow!("the calibrated solver was not begun"))
}

/// Returns whether a matrix is quantised with the text. Routers are not: they stay floats in all
/// recipes.
fn solves(entry: &TensorPlan, format: Format) -> bool {
    can_solve(format, entry.cols) && entry.role != Role::Router
}

fn is_table(role: Role) -> bool {
    matches!(role, Role::Embed | Role::Head)
}

impl Solver for Calibrated<'_> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn wants_whole(&self, entry: &TensorPlan) -> bool {
        entry.role.is_matrix() && !is_table(entry.role)
    }

    fn wants_resumed(&self, entry: &TensorPlan) -> bool {
        entry.role.is_matrix()
    }

    fn at_once(&self, threads: usize) -> usize {
        self.device.at_once(threads)
    }

    fn memory(&self, layout: &ArtifactLayout) -> u64 {
        let config = self.source.config();
        // The tokens that choose an expert are gathered, for its inputs in the source and in the
        // copy.
        let gathered = if config.experts.is_some() { 2 } else { 0 };
        let streams = (2 + gathered) * self.text.tokens.len() * config.dim;
        let widest = layout
            .entries
            .iter()
            .filter(|e| self.wants_whole(e))
            .map(|e| e.cols)
            .max()
            .unwrap_or(0);
        let block = super::ldlq::block_width(widest);
        // Moments, damped moments, cross moments and a factor, for each block of columns. With
        // experts, the prior adds moments and cross moments.
        let moments = (4 + gathered) * widest.div_ceil(block.max(1)) * block * block;
        // The tensor's values, as a whole. Two matrices with the same inputs are solved at the same
        // time, but only one expert at a time.
        let matrices = layout
            .entries
            .iter()
            .filter(|e| self.wants_whole(e))
            .map(|e| e.rows * e.cols + 7 * e.rows * e.cols / e.stack)
            .max()
            .unwrap_or(0);
        let batch = super::calibrate::BATCH * (6 * config.ffn_dim + 4 * config.dim);
        4 * (streams + moments + matrices + batch) as u64
    }

    fn matrix(
        &mut self,
        entry: &TensorPlan,
        format: Format,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<Matrix<'static>> {
        let Calibrated { calibrator: own, threads, device, losses, .. } = self;
        let calibrator = calibrator(own)?;
        threads.install(|| {
            if !solves(entry, format) || (is_table(entry.role) && format.code == Code::I8) {
                // The format is not coded by columns, or is so fine that feedback has no effect.
                let matrix = quantize_by(&**device, format, rows.len(), entry.cols, values)?;
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

    fn state(&mut self, layer: usize) -> Result<Vec<&[f32]>> {
        let Calibrated { calibrator: own, threads, .. } = self;
        let calibrator = calibrator(own)?;
        threads.install(|| calibrator.streams(layer)).map(Vec::from)
    }

    fn restore(&mut self, layer: usize, state: Vec<f32>) -> Result<()> {
        calibrator(&mut self.calibrator)?.go_on(layer, state)
    }

    fn resumed(&mut self, entry: &TensorPlan, matrix: &Matrix<'_>) -> Result<()> {
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
