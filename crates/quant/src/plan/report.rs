//! `quant-report.json`: format and error of each tensor. The length of the file is known before the
//! conversion.

use super::QuantPlan;
use crate::layout::{ArtifactLayout, TensorPlan};
use crate::pretty;
use anyhow::Result;
use serde::{Deserialize, Serialize};

pub const FILE: &str = "quant-report.json";

/// Format and error of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    pub name: String,
    pub format: String,
    pub shape: Vec<usize>,
    pub bytes: u64,
    pub bits_per_weight: f64,
    /// sqrt(sum of squared errors / sum of squares), to six digits; 0 for a copy.
    pub relative_error: f64,
    /// SHA-256 of the written bytes: codes, then scales.
    pub sha256: String,
}

/// Result of a conversion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantReport {
    pub version: String,
    /// SHA-256 over the SHA-256 of the source's tensors as stored, in the order of the forward
    /// pass. It does not depend on how the source is divided into shards.
    pub source_sha256: String,
    pub recipe: String,
    /// SHA-256 of the recipe's text.
    pub recipe_sha256: String,
    /// The target size of the recipe, if it has one.
    pub target_bytes: Option<u64>,
    /// See [`Solver::name`](crate::Solver::name).
    pub solver: String,
    pub parameters: u64,
    /// Bytes of all tensors, without headers and side files.
    pub bytes: u64,
    pub bits_per_weight: f64,
    pub tensors: Vec<TensorReport>,
}

impl TensorReport {
    pub fn new(entry: &TensorPlan, relative_error: f64, sha256: String) -> Self {
        TensorReport {
            name: entry.name.clone(),
            format: entry.target.to_string(),
            shape: entry.spec().shape(),
            bytes: entry.bytes(),
            bits_per_weight: 8.0 * entry.bytes() as f64 / (entry.rows * entry.cols) as f64,
            relative_error: digits(relative_error, 6),
            sha256,
        }
    }
}

impl QuantReport {
    pub fn new(plan: &QuantPlan, tensors: Vec<TensorReport>, source_sha256: String) -> QuantReport {
        let layout: &ArtifactLayout = &plan.layout;
        QuantReport {
            version: env!("CARGO_PKG_VERSION").into(),
            source_sha256,
            recipe: plan.recipe.clone(),
            recipe_sha256: plan.recipe_sha256.clone(),
            target_bytes: plan.target,
            solver: plan.solver.clone(),
            parameters: layout.parameters(),
            bytes: layout.bytes(),
            bits_per_weight: 8.0 * layout.bytes() as f64 / layout.parameters() as f64,
            tensors,
        }
    }

    /// Returns the bytes of the file. Errors and hashes are assumed to have the longest possible
    /// text.
    pub fn file_bytes(plan: &QuantPlan) -> Result<usize> {
        const LONGEST: f64 = 0.0000123457;
        let tensors = plan
            .layout
            .entries
            .iter()
            .map(|e| TensorReport::new(e, LONGEST, "0".repeat(64)))
            .collect();
        Ok(pretty(&QuantReport::new(plan, tensors, "0".repeat(64)))?.len())
    }

    /// Returns the file, padded with blanks to the length of [`Self::file_bytes`].
    pub fn to_file(&self, plan: &QuantPlan) -> Result<Vec<u8>> {
        let mut text = pretty(self)?;
        let missing = QuantReport::file_bytes(plan)?.saturating_sub(text.len());
        text.pop();
        text.resize(text.len() + missing, b' ');
        text.push(b'\n');
        Ok(text)
    }
}

/// Rounds `x` to `n` significant digits, and below 1e-12 to 0.
pub fn digits(x: f64, n: usize) -> f64 {
    if x < 1e-12 { 0.0 } else { format!("{x:.*e}", n - 1).parse().unwrap_or(x) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The predicted length of the file depends on this.
    #[test]
    fn no_error_has_more_digits_than_the_longest() {
        let length = |x: f64| serde_json::to_string(&digits(x, 6)).unwrap().len();
        let longest = length(0.000012345678);
        for exponent in -20..3 {
            for mantissa in [1.0, 1.2345678, 9.999999, 7.77777777] {
                let x = mantissa * 10f64.powi(exponent);
                assert!(length(x) <= longest, "{x}: {} > {longest}", digits(x, 6));
            }
        }
        assert_eq!(digits(0.0123456789, 6), 0.0123457);
        assert_eq!(digits(0.0, 6), 0.0);
    }
}
