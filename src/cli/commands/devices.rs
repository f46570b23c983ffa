//! `gemma devices`: the processor, GPUs and NPUs of this machine, and the device that auto chooses.

use crate::cli::io::output::print;
use crate::cli::options::UiOptions;
use crate::cli::settings::Typed;
use crate::compute::{Choice, DeviceInfo};
use crate::runtime::devices::backends::{self, NpuProbe, NpuSystem};
use crate::runtime::devices::processor::Cpu;
use crate::util::units::{bytes, digits3};
use anyhow::Result;
use clap::Args;
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  gemma devices
  gemma devices --json | jq -r .chosen";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct DevicesArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// A Vulkan device, for `--json`.
#[derive(Clone, Debug, Serialize)]
struct GpuRow {
    /// N of `--device vulkan:N`.
    index: usize,
    name: String,
    driver: String,
    kind: &'static str,
    vulkan: String,
    memory_bytes: u64,
    memory_available_bytes: Option<u64>,
    subgroup: u32,
    /// Null until `gemma doctor` or a run has tried the driver.
    int8_matrices: Option<bool>,
    /// Missing features, if the device cannot be used.
    missing: Vec<&'static str>,
}

impl GpuRow {
    fn new(d: DeviceInfo) -> GpuRow {
        let kind = match (d.is_cpu, d.is_integrated) {
            (true, _) => "driver on the processor",
            (_, true) => "integrated",
            _ => "discrete",
        };
        GpuRow {
            int8_matrices: backends::multiplies_matrices(&d),
            index: d.index,
            name: d.name,
            driver: d.driver,
            kind,
            vulkan: format!("{}.{}", d.api.0, d.api.1),
            memory_bytes: d.memory,
            memory_available_bytes: d.available,
            subgroup: d.subgroup,
            missing: d.missing,
        }
    }

    fn text(&self) -> String {
        let free = self
            .memory_available_bytes
            .map_or(String::new(), |b| format!(", {} available", bytes(b)));
        let mut text = format!("vulkan:{}  {}\n", self.index, self.name);
        text += &format!(
            "     driver             {}, Vulkan {} ({})\n",
            self.driver, self.vulkan, self.kind
        );
        text += &format!("     memory             {}{free}\n", bytes(self.memory_bytes));
        text += &format!("     kernels            subgroups of {}\n", self.subgroup);
        if !self.missing.is_empty() {
            text += &format!("     cannot be used     lacks {}\n", self.missing.join(", "));
        }
        text
    }
}

/// An NPU, for `--json`.
#[derive(Clone, Debug, Serialize)]
struct NpuRow {
    path: String,
    usable: bool,
    findings: Vec<NpuFinding>,
}

#[derive(Clone, Debug, Serialize)]
struct NpuFinding {
    name: &'static str,
    found: String,
    /// Remedy; null if nothing is wrong.
    remedy: Option<String>,
}

impl NpuRow {
    fn new(probe: NpuProbe) -> NpuRow {
        let usable = probe.is_usable();
        let one =
            |f: backends::NpuFinding| NpuFinding { name: f.name, found: f.what, remedy: f.remedy };
        NpuRow {
            path: probe.path.display().to_string(),
            usable,
            findings: probe.findings.into_iter().map(one).collect(),
        }
    }

    fn text(&self) -> String {
        let mut text = format!(
            "npu  {} (AMD, first generation; the program has never run on one)\n",
            self.path
        );
        for f in &self.findings {
            let remedy = f.remedy.as_ref().map_or(String::new(), |r| format!(": {r}"));
            text += &format!("     {:<18} {}{remedy}\n", f.name, f.found);
        }
        text
    }
}

pub fn run(options: &DevicesArgs, _: &Typed) -> Result<u8> {
    let cpu = Cpu::probe()?;
    // A missing driver is a result here, not an error.
    let (found, driver) = match backends::probe() {
        Ok(found) => (found, None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    };
    let (chosen, reason) = match backends::choose(&found, Choice::Best) {
        Ok(best) => (
            format!("vulkan:{}", best.index),
            "a GPU; small models and layers that do not fit there run on the processor".to_owned(),
        ),
        Err(why) => ("cpu".to_owned(), why.to_string()),
    };
    let gpus: Vec<GpuRow> = found.into_iter().map(GpuRow::new).collect();
    let system = NpuSystem::here();
    let npus: Vec<NpuRow> = system.probe().into_iter().map(NpuRow::new).collect();
    let (no_npu, remedy) = system.nothing();
    if options.json {
        let report = serde_json::json!({
            "cpu": cpu, "vulkan": gpus, "npu": npus, "chosen": chosen, "reason": reason,
        });
        print(&format!("{report:#}\n"))?;
        return Ok(0);
    }
    let gb = |size: Option<u64>| size.map_or("unknown".into(), bytes);
    let mut text = format!("cpu  {}\n", cpu.name);
    text += &format!("     threads            {}\n", cpu.threads);
    let best = cpu.instruction_sets.last().map_or("", String::as_str);
    text += &format!("     instruction sets   {} (uses {best})\n", cpu.instruction_sets.join(", "));
    text += &format!(
        "     memory             {}, {} available\n",
        gb(cpu.memory_bytes),
        gb(cpu.memory_available_bytes)
    );
    let (speed, how) = (digits3(cpu.read_gb_per_s), &cpu.read_how);
    text += &format!("     memory read speed  {speed} GB/s, {how}\n");
    gpus.iter().for_each(|gpu| text += &gpu.text());
    if let Some(why) = driver {
        text += &format!("vulkan  none: {why}\n");
    }
    npus.iter().for_each(|npu| text += &npu.text());
    if npus.is_empty() {
        text +=
            &format!("npu  none: {no_npu}{}\n", remedy.map_or(String::new(), |r| format!(": {r}")));
    }
    text += &format!("\nauto chooses: {chosen} ({reason})\n");
    print(&text)?;
    Ok(0)
}
