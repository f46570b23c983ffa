//! Which model is meant, and where it runs.

use crate::compute::cpu::Isa;
use crate::runtime::devices::backends::Npu;
use crate::runtime::devices::lock::DeviceLock;
use crate::runtime::options::{AutoOr, GpuLayers, Kv};
use crate::runtime::{ModelOptions, RunOptions};
use anyhow::Result;
use clap::Args;

/// Which model, and where it runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and device")]
pub struct ModelArgs {
    /// Directory, GGUF file or id of a downloaded model
    ///
    /// A directory is one of Hugging Face's or one that gemma quantize made; an id such as
    /// google/gemma-3-27b-it names a model in the Hugging Face cache. Nothing is ever downloaded.
    /// Without this option the bundled demo model is used.
    #[arg(short, long, value_name = "PATH|ID")]
    pub model: Option<String>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// Where and how a model runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and device")]
pub struct RunArgs {
    /// auto, cpu, vulkan or vulkan:N (see gemma devices)
    ///
    /// auto takes a GPU for models that are worth it, for as many layers as fit (see --gpu-layers).
    /// A named device is taken or refused, never replaced. The draft model runs where
    /// --draft-device says.
    #[arg(short, long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,
    /// Layers that run on the GPU: auto, all, or a number
    ///
    /// auto puts as many there as fit; the others run on the processor. The output head goes to the
    /// GPU with the first layer. For one number of layers the text does not depend on the drafts;
    /// another number rounds in other places, as another device does. A number or all asks for a
    /// GPU, and is refused where the layers do not fit.
    #[arg(long, value_name = "N|auto|all", default_value = "auto")]
    pub gpu_layers: GpuLayers,
    /// CPU threads [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Context: tokens of prompt and answer together
    ///
    /// auto makes room for what the prompt and --max-tokens need; for eval it is the length of a
    /// window, and auto that of the longest text.
    #[arg(short, long, value_name = "N|auto", default_value = "auto")]
    pub ctx_size: AutoOr,
    /// Precision of the stored keys and values
    ///
    /// auto is f16 for quantised weights and f32 for others. q8 stores 8-bit integers with a scale
    /// for every 32 channels: little more than half the memory of f16, for contexts that would not
    /// fit otherwise.
    #[arg(long, value_enum, default_value_t = Kv::Auto)]
    pub kv: Kv,
    /// What to do where another process of yours uses the same GPU
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = DeviceLock::Wait)]
    pub device_lock: DeviceLock,
    /// NPU beside the device: auto, off, force, or model
    ///
    /// The NPU takes full pages of the layers that see the whole context. auto uses an AMD NPU of
    /// the first generation where that is measured to pay (long contexts only), force uses it in
    /// any case. model runs the same kernel on a software model of the NPU, slowly, for tests. This
    /// has never run on a real NPU.
    #[arg(long, value_name = "MODE", default_value = "auto", hide_short_help = true)]
    pub npu: Npu,
    /// Instructions of the CPU kernels: scalar, avx2 or avx512-vnni; a processor without the
    /// others, as far as speed goes
    #[arg(long, value_name = "ISA", hide = true)]
    pub isa: Option<Isa>,
    /// Compare every kernel's result with its scalar twin's, and stop at the first difference (very
    /// slow)
    #[arg(long, hide_short_help = true)]
    pub check: bool,
}

impl ModelArgs {
    /// The options of a session. A device that nobody knows is refused.
    pub fn settled(&self) -> Result<ModelOptions> {
        Ok(ModelOptions { model: self.model.clone(), run: self.run.settled()? })
    }
}

impl RunArgs {
    /// The same without a model.
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
        let argv = "x -m a/b -d vulkan:1 --gpu-layers 3 -t 4 -c 99 --kv q8 --device-lock fail \
            --npu off --isa scalar --check";
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
