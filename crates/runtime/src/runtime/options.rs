//! Options of a session as plain values, independent of the command line.

use crate::draft::{DraftOptions, Mixing, TreeSize};
use crate::runtime::devices::backends::Npu;
use crate::runtime::devices::lock::DeviceLock;
use gemma_base::compute::Choice;
use gemma_base::compute::cpu::Isa;
use gemma_base::error::Fault;
use std::str::FromStr;

/// The model and its device.
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    /// A directory, a GGUF file or an id; `None` for the bundled demo model.
    pub model: Option<String>,
    pub run: RunOptions,
}

/// Options that determine where and how a model runs.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    pub device: Device,
    pub gpu_layers: GpuLayers,
    /// Processor threads; `None` for all available ones.
    pub threads: Option<usize>,
    /// Positions per text.
    pub context: AutoOr,
    pub kv: Kv,
    pub lock: DeviceLock,
    pub npu: Npu,
    /// Instruction set of the processor's kernels; `None` for the best one.
    pub isa: Option<Isa>,
    /// Whether each kernel's result is compared with that of its scalar twin.
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

/// Source and limits of drafts.
#[derive(Clone, Debug, Default)]
pub struct DraftingOptions {
    pub source: DraftFrom,
    /// Longest draft in tokens.
    pub tokens: AutoOr,
    pub tree: TreeSize,
    /// Device of the draft model.
    pub device: Device,
    pub ahead: DraftAhead,
    /// How the sources are mixed.
    pub mixing: Mixing,
}

impl DraftingOptions {
    /// Returns the limits on the size of drafts.
    pub fn limits(&self) -> DraftOptions {
        let tokens = match self.tokens {
            AutoOr::Auto => None,
            AutoOr::N(n) => Some(n),
        };
        DraftOptions { tree: self.tree, tokens }
    }
}

/// A source of drafts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DraftFrom {
    /// The bundled draft model that fits the target, mixed with n-grams of the text.
    #[default]
    Auto,
    /// Like `Auto`, but an error if there is no fitting bundled draft model.
    Bundled,
    /// N-grams of the text.
    Ngram,
    /// No drafts.
    Off,
    /// A draft model, by path or id.
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

/// Upper bound of positions and tokens, so that products of sizes do not overflow.
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

/// Number of layers on the GPU.
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

/// Precision of the KV cache.
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
