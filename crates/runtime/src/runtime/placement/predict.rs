//! Predicts the speed of a placement: bytes that a pass reads, divided by the speed of their
//! memory. The prediction is an upper bound.

use super::Placement;
use super::measure::Share;
use crate::runtime::Listener;
use crate::runtime::devices::backends;
use crate::runtime::devices::memory_speed::{Speed, memory_speed};
use anyhow::{Context, Result};
use gemma_base::compute::cpu::Pool;
use gemma_base::compute::cpu::bandwidth::PROBE_BYTES;
use gemma_base::compute::{DeviceInfo, ExecutorExt, Part, Plan, StepLayout};
use gemma_base::tensor::{Format, Matrix};
use gemma_base::util::units::digits3;
use serde::Serialize;
use std::borrow::Cow;

/// Assumed read speed of an unmeasured discrete GPU's memory, a mid-range value, in GB/s.
const ASSUMED: f64 = 300.0;

/// Assumed read speed of another machine's memory in GB/s: two channels of DDR5-5600, as in
/// laptops.
const ELSEWHERE: f64 = 60.0;

/// Speeds of the memories.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speeds {
    pub cpu: Speed,
    pub gpu: Option<Speed>,
}

/// Predicted speed of a pass over one row, limited by memory bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    pub ms_per_pass: f64,
    pub ms_per_pass_when_full: f64,
    /// Passes per second with a full context, and with an empty one. Plain decoding generates one
    /// token per pass.
    pub passes_per_s: [f64; 2],
    /// Bytes of weights read from the GPU's memory and from the processor's.
    #[serde(skip)]
    pub reads: [u64; 2],
}

impl Speeds {
    /// Measures the processor's memory. A GPU that shares it is assumed to be as fast.
    pub fn new(pool: &Pool, device: Option<&DeviceInfo>) -> Speeds {
        Speeds { cpu: memory_speed(pool), gpu: None }.beside(device)
    }

    /// Returns the assumed speeds of another machine.
    pub fn elsewhere() -> Speeds {
        Speeds { cpu: Speed::new(ELSEWHERE, "assumed"), gpu: None }
    }

    /// Adds the speed of this GPU, or of none. An unknown speed is assumed.
    pub fn beside(self, device: Option<&DeviceInfo>) -> Speeds {
        let Speeds { cpu, gpu } = self;
        let assumed =
            |d: &DeviceInfo| if d.is_integrated || d.is_cpu { cpu.gb_per_s } else { ASSUMED };
        let guessed = |d: &DeviceInfo| Speed::new(assumed(d), "assumed");
        Speeds { cpu, gpu: device.map(|d| gpu.unwrap_or_else(|| guessed(d))) }
    }

    /// Measures the GPU's speed, which temporarily uses some of its memory.
    pub fn measured(self, device: &DeviceInfo, listener: &dyn Listener) -> Result<Speeds> {
        let mut exec = backends::open(device, listener)?;
        let (rows, cols) = (8192, PROBE_BYTES / 4 / 8192);
        let codes = Cow::Owned(vec![0; PROBE_BYTES]);
        exec.load_matrix(
            "probe",
            Part::Head,
            &Matrix { format: Format::F32, rows, cols, codes, side: Cow::Borrowed(&[]) },
        )?;
        let layout = StepLayout { max_rows: 16, tables: 0 };
        let step = exec.alloc("step", layout.words() * 4)?;
        exec.record(Plan::default(), step, layout)?;
        let read = exec.read_bandwidth().context("the GPU's memory speed could not be measured")?;
        Ok(Speeds { gpu: Some(Speed::new(read / 1e9, "measured")), ..self })
    }

    /// Uses speeds given by the user: one for both memories, or the GPU's and the processor's.
    pub fn given(speeds: &[f64]) -> Speeds {
        let speed = |gb_per_s| Speed::new(gb_per_s, "given");
        let (first, last) = (speed(speeds[0]), speed(speeds[speeds.len() - 1]));
        Speeds { cpu: last, gpu: Some(first) }
    }

    /// Describes a prediction and its basis.
    pub fn describe(&self, p: &Prediction) -> String {
        format!(
            "at most {} tok/s without drafts ({} ms a pass, {} ms when the context is full) {}: {}",
            digits3(p.passes_per_s[1]),
            digits3(p.ms_per_pass),
            digits3(p.ms_per_pass_when_full),
            "at the full speed of memory",
            self.basis(p)
        )
    }

    /// Describes the speeds that a prediction is based on.
    pub fn basis(&self, p: &Prediction) -> String {
        let speed = |s: Speed| format!("{} GB/s ({})", digits3(s.gb_per_s), s.origin());
        // Leaves out a memory that is not read.
        let parts = [
            ("GPU", self.gpu.filter(|_| p.reads[0] > 0)),
            ("processor", Some(self.cpu).filter(|_| p.reads[1] > 0)),
        ];
        let parts: Vec<String> = parts
            .into_iter()
            .filter_map(|(name, s)| Some(format!("the {name}'s {}", speed(s?))))
            .collect();
        parts.join(", ")
    }

    pub fn predict(&self, placement: &Placement) -> Prediction {
        let seconds = |share: &Share, speed: Option<Speed>, full: bool| {
            let bytes = share.reads.weights + if full { share.reads.kv_when_full } else { 0 };
            speed.map_or(0.0, |s| bytes as f64 / s.gb_per_s / 1e9)
        };
        let layout = &placement.layout;
        let pass = |full| {
            seconds(&layout.gpu, self.gpu, full) + seconds(&layout.cpu, Some(self.cpu), full)
        };
        let [empty, full] = [pass(false), pass(true)];
        Prediction {
            ms_per_pass: empty * 1e3,
            ms_per_pass_when_full: full * 1e3,
            passes_per_s: [full.recip(), empty.recip()],
            reads: [layout.gpu.reads.weights, layout.cpu.reads.weights],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::measure::{MemoryLayout, Reads};
    use super::*;

    #[test]
    fn each_side_reads_at_its_own_speed() {
        let share = |weights, kv_when_full| Share {
            reads: Reads { weights, kv_when_full },
            ..Share::default()
        };
        let layout = MemoryLayout {
            gpu: share(6_000_000_000, 3_000_000_000),
            cpu: share(2_000_000_000, 0),
            ..MemoryLayout::default()
        };
        let speed = |gb_per_s| Speed::new(gb_per_s, "assumed");
        let speeds = Speeds { cpu: speed(20.0), gpu: Some(speed(300.0)) };
        let p = speeds.predict(&Placement { device: None, layout });
        assert!(
            (p.ms_per_pass - 120.0).abs() < 1e-9 && (p.ms_per_pass_when_full - 130.0).abs() < 1e-9,
            "{p:?}"
        );
        assert!(
            (p.passes_per_s[1] - 1.0 / 0.12).abs() < 1e-9
                && (p.passes_per_s[0] - 1.0 / 0.13).abs() < 1e-9,
            "{p:?}"
        );
        let text = speeds.describe(&p);
        assert!(
            text.contains("120 ms")
                && text.contains("300 GB/s (assumed)")
                && text.contains("20.0 GB/s"),
            "{text}"
        );
        let alone = Speeds { gpu: None, ..speeds }.describe(&Prediction { reads: [0, 1], ..p });
        assert!(!alone.contains("GPU"), "{alone}");
    }
}
