//! Memory use of the CPU executor, computed without loading anything.

use super::executor::{MAX_ROWS, key_block};
use super::linear::PackedMatrix;
use crate::compute::dry::Footprint;
use crate::compute::memory::ALIGN;
use crate::compute::{KvFormat, Plan, StepLayout};
use crate::tensor::Format;
use anyhow::Result;

/// Counts the memory of the processor's share.
pub struct CpuFootprint;

impl Footprint for CpuFootprint {
    fn weight(&mut self, _: &str, format: Format, rows: usize, cols: usize) -> Result<Vec<u64>> {
        format.check_cols(cols)?;
        Ok(vec![PackedMatrix::bytes_of(format, rows, cols) as u64])
    }

    fn buffer(&mut self, _: &str, bytes: usize) -> Result<u64> {
        Ok(bytes.max(1).next_multiple_of(ALIGN) as u64)
    }

    fn recorded(&mut self, _: &Plan, _: StepLayout) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }

    fn max_rows(&self) -> usize {
        MAX_ROWS
    }

    fn staging(&self) -> u64 {
        0
    }

    fn key_block(&self) -> fn(KvFormat) -> usize {
        key_block
    }

    fn lists_best(&self) -> bool {
        false
    }
}
