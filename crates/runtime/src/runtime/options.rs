//! Options of a session as plain values, independent of the command line.

use crate::draft::{DraftOptions, Mixing, TreeSize};
use crate::runtime::devices::backends::Npu;
use crate::runtime::devices::lock::DeviceLock;
use gemma_base::compute::Choice;
use gemma_base::compute::cpu::Isa;
use gemma_base::error::Fault;
use std::str::FromStr;

/// The model, and where it runs.
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    /// A directory, a GGUF file or an id; the bundled demo model without a name.
    pub model: Option<String>,
    pub run: RunOptions,
}

/// Where and how a model runs.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    pub device: Device,
    pub gpu_layers: GpuLayers,
    /// Threads of the processor; all that this process may use where nobody says.
    pub threads: Option<usize>,
    /// Positions of a text.
    pub context: AutoOr,
    pub kv: Kv,
    pub lock: DeviceLock,
    pub npu: Npu,
    /// Instructions of the processor's kernels; the best ones where nobody says.
    pub isa: Option<Isa>,
    /// Each kernel's result is compared with its scalar twin's.
    pub check: bool,
}

/// Values of `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    #[default]
    Auto,
    Cpu,
    Vulkan(Choice),
}

impl std::str::FromStr for Device {
    type Err = Fault;

    fn from_str(device: &str) -> Result<Device, Fault> {
        match device.split_once(':') {
            None if device == "auto" => Ok(Device::Auto),
            None if device == "cpu" => Ok(Device::Cpu),
            None if device == "vulkan" => Ok(Device::Vulkan(Choice::Best)),
            Some(("vulkan", index)) if index.parse::<usize>().is_ok() => {
                Ok(Device::Vulkan(Choice::Index(index.parse().expect("just parsed"))))
            }
            _ => Err(Fault::usage(format!("unknown device `{device}`"))
                .help("one of auto, cpu, vulkan, vulkan:0, vulkan:1, ...")),
        }
    }
}

/// Where guesses come from, and how many.
#[derive(Clone, Debug, Default)]
pub struct DraftingOptions {
    pub source: DraftFrom,
    /// Tokens that are guessed ahead at most.
    pub tokens: AutoOr,
    pub tree: TreeSize,
    /// Where the draft model runs.
    pub device: Device,
    pub ahead: DraftAhead,
    /// How the sources are mixed.
    pub mixing: Mixing,
}

impl DraftingOptions {
    /// Returns the bounds on the length of drafts.
    pub fn limits(&self) -> DraftOptions {
        let tokens = match self.tokens {
            AutoOr::Auto => None,
            AutoOr::N(n) => Some(n),
        };
        DraftOptions { tree: self.tree, tokens }
    }
}

/// A source of guesses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DraftFrom {
    /// The bundled draft model that fits the target, mixed with what the text itself tells.
    #[default]
    Auto,
    /// The same, and no run without a bundled draft model.
    Bundled,
    /// The text itself.
    Ngram,
    /// Nothing is guessed.
    Off,
    /// A draft model by its path or id.
    Model(String),
}

impl From<&str> for DraftFrom {
    fn from(name: &str) -> DraftFrom {
        match name {
            "auto" => DraftFrom::Auto,
            "bundled" => DraftFrom::Bundled,
            "ngram" => DraftFrom::Ngram,
            "off" => DraftFrom::Off,
            path => DraftFrom::Model(path.to_owned()),
        }
    }
}

/// Whether drafting overlaps the target's passes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftAhead {
    #[default]
    Auto,
    On,
    Off,
}

/// A number, or the program's choice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AutoOr {
    #[default]
    Auto,
    N(usize),
}

/// More positions, or tokens, than any model has: sizes are products of them.
const MOST: usize = 1 << 30;

impl FromStr for AutoOr {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(AutoOr::Auto),
            _ => match s.parse() {
                Ok(n) if (1..=MOST).contains(&n) => Ok(AutoOr::N(n)),
                _ => Err(format!("expected auto or a number from 1 to {MOST}")),
            },
        }
    }
}

/// How many layers the GPU gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GpuLayers {
    /// As many as fit.
    #[default]
    Auto,
    All,
    N(usize),
}

impl FromStr for GpuLayers {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(GpuLayers::Auto),
            "all" => Ok(GpuLayers::All),
            _ => s.parse().map(GpuLayers::N).map_err(|_| "expected auto, all or a number".into()),
        }
    }
}

/// Precision of the stored keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Kv {
    /// f16 for quantised weights, f32 for others.
    #[default]
    Auto,
    F16,
    F32,
    Q8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_exactly() {
        let code = |device: &str| device.parse::<Device>().map_err(|e| e.kind.exit_code());
        assert_eq!(code("auto"), Ok(Device::Auto));
        assert_eq!(code("cpu"), Ok(Device::Cpu));
        assert_eq!(code("vulkan"), Ok(Device::Vulkan(Choice::Best)));
        assert_eq!(code("vulkan:1"), Ok(Device::Vulkan(Choice::Index(1))));
        for wrong in ["cuda", "cpu:1", "vulkan:", "vulkan:x", "vulkan:-1", ""] {
            assert_eq!(code(wrong), Err(2), "{wrong}");
        }
    }
}
