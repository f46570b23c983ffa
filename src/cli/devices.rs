//! `gemma devices`: what this machine offers, and what would be chosen.

use super::args::UiOptions;
use super::output::print;
use crate::compute::cpu::bandwidth::read_bandwidth;
use crate::compute::cpu::isa::Isa;
use crate::compute::cpu::pool::Pool;
use crate::error::Fault;
use crate::vulkan::Choice;
use anyhow::Result;
use clap::Args;
use serde::Serialize;

#[derive(Debug, Args)]
pub struct Devices {
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// The processor and its memory.
#[derive(Clone, Debug, Serialize)]
pub struct Cpu {
    pub name: String,
    /// Threads that may run here (cgroup and affinity counted).
    pub threads: usize,
    /// Instruction sets that kernels exist for, slowest first; the last is chosen.
    pub instruction_sets: Vec<String>,
    pub memory_bytes: Option<u64>,
    pub memory_available_bytes: Option<u64>,
    /// Measured reading speed of all threads together, 1e9 bytes a second: the roof of decoding.
    pub read_gb_per_s: f64,
}

/// Bytes read to measure bandwidth: well beyond any last-level cache share that matters.
const PROBE_BYTES: usize = 256 << 20;

impl Cpu {
    pub fn probe() -> Result<Cpu> {
        let threads = default_threads();
        Ok(Cpu {
            name: proc_field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            threads,
            instruction_sets: Isa::all_supported().iter().map(Isa::to_string).collect(),
            memory_bytes: memory("MemTotal"),
            memory_available_bytes: memory("MemAvailable"),
            read_gb_per_s: read_bandwidth(&Pool::new(threads)?, PROBE_BYTES),
        })
    }
}

/// All threads that this process may use.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// A field of /proc/meminfo in bytes.
pub fn memory(field: &str) -> Option<u64> {
    let kib: u64 = proc_field("/proc/meminfo", field)?.trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

/// The first `name : value` line of a file under /proc.
fn proc_field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let found = text.lines().find_map(|line| line.split_once(':').filter(|(key, _)| key.trim() == name));
    found.map(|(_, value)| value.trim().to_owned())
}

/// Refuses devices that this build cannot use. Nothing else is ever used silently in place of what was asked for.
pub fn check_device(device: &str) -> Result<()> {
    gpu_choice(device).map(|_| ())
}

/// The GPU that `--device` names; `None` for the processor.
pub fn gpu_choice(device: &str) -> Result<Option<Choice>> {
    match device.split_once(':') {
        None if matches!(device, "auto" | "cpu") => Ok(None),
        None if device == "vulkan" => Ok(Some(Choice::Best)),
        Some(("vulkan", index)) if index.parse::<usize>().is_ok() => Ok(index.parse().ok().map(Choice::Index)),
        _ => Err(Fault::usage(format!("unknown device `{device}`"))
            .help("one of auto, cpu, vulkan, vulkan:0, vulkan:1, ...")
            .into()),
    }
}

pub fn run(options: &Devices) -> Result<u8> {
    let cpu = Cpu::probe()?;
    if options.json {
        let report = serde_json::json!({"cpu": cpu, "chosen": "cpu", "reason": REASON});
        print(&format!("{report:#}\n"))?;
        return Ok(0);
    }
    let gb = |bytes: Option<u64>| bytes.map_or("unknown".into(), super::ui::bytes);
    let mut text = format!("cpu  {}\n", cpu.name);
    text += &format!("     threads            {}\n", cpu.threads);
    let best = cpu.instruction_sets.last().map_or("", String::as_str);
    text += &format!("     instruction sets   {} (uses {best})\n", cpu.instruction_sets.join(", "));
    text += &format!("     memory             {}, {} available\n", gb(cpu.memory_bytes), gb(cpu.memory_available_bytes));
    text += &format!("     memory read speed  {} GB/s measured\n", super::ui::digits3(cpu.read_gb_per_s));
    text += &format!("\nauto chooses: cpu ({REASON})\n");
    print(&text)?;
    Ok(0)
}

const REASON: &str = "the only kind of device that this version has kernels for";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_never_replaced_silently() {
        let code = |device: &str| check_device(device).map_err(|e| crate::error::fault_of(&e).unwrap().kind.exit_code());
        assert_eq!(code("auto"), Ok(()));
        assert_eq!(code("cpu"), Ok(()));
        assert_eq!(code("vulkan"), Ok(()));
        assert_eq!(code("vulkan:1"), Ok(()));
        assert_eq!(code("vulkan:x"), Err(2));
        assert_eq!(code("cuda"), Err(2));
        assert_eq!(code("cpu:1"), Err(2));
    }
}
