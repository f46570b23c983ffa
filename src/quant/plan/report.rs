//! `quant-report.json`: what was done, tensor by tensor. Its length is known before anything is
//! quantised.

use super::Plan;
use crate::quant::layout::{Entry, Layout};
use crate::quant::pretty;
use anyhow::Result;
use serde::{Deserialize, Serialize};

pub const FILE: &str = "quant-report.json";

/// What became of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    pub name: String,
    pub format: String,
    pub shape: Vec<usize>,
    pub bytes: u64,
    pub bits_per_weight: f64,
    /// sqrt(sum of squared errors / sum of squares), to six digits; 0 for what is copied.
    pub relative_error: f64,
    /// Of the bytes written: codes, then scales.
    pub sha256: String,
}

/// What a run did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub version: String,
    /// Of the SHA-256 of each of the source's tensors, as stored there, in the order of the forward
    /// pass: the same however the source is sharded.
    pub source_sha256: String,
    pub recipe: String,
    /// Of the recipe's text.
    pub recipe_sha256: String,
    /// Where the recipe aimed at a size.
    pub target_bytes: Option<u64>,
    /// How codes were found, with whatever that depends on.
    pub solver: String,
    /// In nats, by the planning rule; `None` where the rule says nothing.
    pub predicted_kld: Option<f64>,
    pub parameters: u64,
    /// Of all tensors, without headers and side files.
    pub bytes: u64,
    pub bits_per_weight: f64,
    pub tensors: Vec<TensorReport>,
}

impl TensorReport {
    pub fn new(entry: &Entry, relative_error: f64, sha256: String) -> Self {
        TensorReport {
            name: entry.name.clone(),
            format: entry.target.to_string(),
            shape: if entry.role.is_matrix() {
                vec![entry.rows, entry.cols]
            } else {
                vec![entry.cols]
            },
            bytes: entry.bytes(),
            bits_per_weight: 8.0 * entry.bytes() as f64 / (entry.rows * entry.cols) as f64,
            relative_error: digits(relative_error, 6),
            sha256,
        }
    }
}

impl Report {
    pub fn new(plan: &Plan, tensors: Vec<TensorReport>, source_sha256: String) -> Report {
        let layout: &Layout = &plan.layout;
        Report {
            version: env!("CARGO_PKG_VERSION").into(),
            source_sha256,
            recipe: plan.recipe.clone(),
            recipe_sha256: plan.recipe_sha256.clone(),
            target_bytes: plan.target,
            solver: plan.solver.clone(),
            predicted_kld: plan.predicted_kld,
            parameters: layout.parameters(),
            bytes: layout.bytes(),
            bits_per_weight: 8.0 * layout.bytes() as f64 / layout.parameters() as f64,
            tensors,
        }
    }

    /// Bytes of the file, whatever errors and hashes it will tell: numbers of most digits stand for
    /// them.
    pub fn file_bytes(plan: &Plan) -> Result<usize> {
        const LONGEST: f64 = 0.0000123457;
        let tensors = plan
            .layout
            .entries
            .iter()
            .map(|e| TensorReport::new(e, LONGEST, "0".repeat(64)))
            .collect();
        Ok(pretty(&Report::new(plan, tensors, "0".repeat(64)))?.len())
    }

    /// The file, filled up with blanks to the promised length.
    pub fn to_file(&self, plan: &Plan) -> Result<Vec<u8>> {
        let mut text = pretty(self)?;
        let missing = Report::file_bytes(plan)?.saturating_sub(text.len());
        text.pop();
        text.resize(text.len() + missing, b' ');
        text.push(b'\n');
        Ok(text)
    }
}

/// `x` to `n` significant digits; nothing below 1e-12.
pub fn digits(x: f64, n: usize) -> f64 {
    if x < 1e-12 { 0.0 } else { format!("{x:.*e}", n - 1).parse().unwrap_or(x) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file's length rests on this.
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
