//! Options of the model and its device.

use crate::compute::cpu::Isa;
use crate::runtime::devices::backends::Npu;
use crate::runtime::devices::lock::DeviceLock;
use crate::runtime::options::{AutoOr, GpuLayers, Kv};
use crate::runtime::{ModelOptions, RunOptions};
use anyhow::Result;
use clap::Args;

/// The model and its device.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and device")]
pub struct ModelArgs {
    /// Model: a directory, a GGUF file, or the id or size (27b) of a download
    ///
    /// The directory is a Hugging Face checkpoint or the output of gemma quantize. A size such as
    /// 27b or gemma4:31b names Google's 4-bit file, or the checkpoint if only that is there. An id
    /// such as google/gemma-3-27b-it names a model in the Hugging Face cache, OWNER/NAME:Q4_K_M one
    /// GGUF file of a repository there, and gemma3:4b a model of Ollama. gemma pull downloads a
    /// model. The default is the bundled demo model.
    #[arg(short, long, value_name = "PATH|ID")]
    pub model: Option<String>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// The device, and how a model runs on it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and device")]
pub struct RunArgs {
    /// Device: auto, cpu, vulkan or vulkan:N
    ///
    /// auto uses a GPU if the model is large enough to gain from it, for as many layers as fit (see
    /// --gpu-layers). If a device is named and cannot be used, the run fails. --draft-device
    /// chooses the device of the draft model.
    #[arg(short, long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,
    /// Layers on the GPU: auto, all, or a number
    ///
    /// auto is as many as fit; the others run on the processor. The output head goes to the GPU
    /// with the first layer. Another number of layers rounds at other places, so it may change the
    /// text. A number or all requires a GPU and enough memory.
    #[arg(long, value_name = "N|auto|all", default_value = "auto", hide_short_help = true)]
    pub gpu_layers: GpuLayers,
    /// CPU threads [default: all cores]
    #[arg(
        short, long, value_name = "N", hide_short_help = true,
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    pub threads: Option<u16>,
    /// Context size: tokens of prompt and answer together
    ///
    /// auto is the size that the prompt and --max-tokens need. For eval this is the length of a
    /// window, and auto is the length of the longest text.
    #[arg(short, long, value_name = "N|auto", default_value = "auto")]
    pub ctx_size: AutoOr,
    /// Format of the KV cache
    ///
    /// auto is f16 for quantised weights and f32 for others. q8 stores 8-bit integers with a scale
    /// for every 32 channels, in a little more than half the memory of f16.
    #[arg(long, value_parser = super::values::kv(), default_value = "auto", hide_short_help = true)]
    pub kv: Kv,
    /// Action while another process of yours uses the same GPU
    #[arg(
        long, value_parser = super::values::device_lock(), value_name = "WHAT",
        default_value = "wait", hide_short_help = true
    )]
    pub device_lock: DeviceLock,
    /// Use of an NPU in addition to the device: auto, off, force, or model
    ///
    /// The NPU computes attention over full pages of the global layers. With auto, a
    /// first-generation AMD NPU is used if measurements show a gain, which needs a long context.
    /// With force, it is always used. With model, the kernel runs on a software model of the NPU,
    /// slowly, for tests. This has never run on a real NPU.
    #[arg(long, value_name = "MODE", default_value = "auto", hide_short_help = true)]
    pub npu: Npu,
    /// Instruction set of the CPU kernels: scalar, avx2, avx-vnni, avx512, neon-dot or neon-i8mm
    #[arg(long, value_name = "ISA", hide = true)]
    pub isa: Option<Isa>,
    /// Compare each kernel's results with its scalar definition and stop at a difference (very
    /// slow)
    #[arg(long, hide_short_help = true)]
    pub check: bool,
}

impl ModelArgs {
    /// Returns the options of a session, or an error for an unknown device.
    pub fn settled(&self) -> Result<ModelOptions> {
        Ok(ModelOptions { model: self.model.clone(), run: self.run.settled()? })
    }
}

impl RunArgs {
    /// Returns the options of a run, or an error for an unknown device.
    pub fn settled(&self) -> Result<RunOptions> {
        Ok(RunOptions {
            device: self.device.parse()?,
            gpu_layers: self.gpu_layers,
            threads: self.threads.map(usize::from),
            context: self.ctx_size,
            kv: self.kv,
            lock: self.device_lock,
            npu: self.npu,
            isa: self.isa,
            check: self.check,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::Choice;
    use crate::runtime::options::Device;
    use clap::Parser;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        model: ModelArgs,
    }

    #[test]
    fn what_was_typed_is_what_a_session_is_asked_for() {
        let settled = |argv: &[&str]| Typed::parse_from(argv).model.settled();
        let ModelOptions { model, run } = settled(&["x"]).unwrap();
        assert!(model.is_none() && run.threads.is_none() && run.isa.is_none() && !run.check);
        assert_eq!(
            (run.device, run.gpu_layers, run.context),
            (Device::Auto, GpuLayers::Auto, AutoOr::Auto)
        );
        assert_eq!((run.kv, run.lock, run.npu), (Kv::Auto, DeviceLock::Wait, Npu::Auto));
        let device = "-d vulkan:1 --gpu-layers 3 -t 4 --device-lock fail --npu off --isa scalar";
        let argv = format!("x -m a/b {device} -c 99 --kv q8 --check");
        let ModelOptions { model, run } = settled(&argv.split(' ').collect::<Vec<_>>()).unwrap();
        assert_eq!(
            (model.as_deref(), run.threads, run.isa, run.check),
            (Some("a/b"), Some(4), Some(Isa::Scalar), true)
        );
        let device = Device::Vulkan(Choice::Index(1));
        assert_eq!(
            (run.device, run.gpu_layers, run.context),
            (device, GpuLayers::N(3), AutoOr::N(99))
        );
        assert_eq!((run.kv, run.lock, run.npu), (Kv::Q8, DeviceLock::Fail, Npu::Off));
        let refused = settled(&["x", "-d", "cuda"]).unwrap_err();
        assert_eq!(crate::error::fault_of(&refused).unwrap().kind.exit_code(), 2);
    }
}
