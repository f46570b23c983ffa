//! `--npu`: whether an NPU takes part, and its report.

use super::Listener;
use super::options::RunOptions;
use crate::compute::{AssistReport, Executor, KvFormat};
use crate::engine::Engine;
use crate::error::Fault;
use crate::models::Config;
use crate::npu::attention::{Dims, FlashPartial};
use crate::npu::gate::{self, Machine, WORTH, Work};
use crate::npu::host::{HostModelAccel, Library, ModelOptions};
use crate::npu::probe::{System, open_first};
use crate::npu::session::Session;
use crate::npu::{OffloadExecutor, manifest};
use crate::testing;
use anyhow::Result;
use std::path::PathBuf;

/// Values of `--npu`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Npu {
    /// A device, where it is predicted to pay.
    #[default]
    Auto,
    Off,
    /// A device, whatever is predicted.
    Force,
    /// The model of a device on the host, with the kernel's Rust twin or its C++ source as a
    /// library.
    Model(Option<PathBuf>),
}

impl std::str::FromStr for Npu {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once(':') {
            None if s == "auto" => Ok(Npu::Auto),
            None if s == "off" => Ok(Npu::Off),
            None if s == "force" => Ok(Npu::Force),
            None if s == "model" => Ok(Npu::Model(None)),
            Some(("model", file)) if !file.is_empty() => Ok(Npu::Model(Some(file.into()))),
            _ => Err("expected auto, off, force or model".into()),
        }
    }
}

impl Npu {
    /// Returns whether an NPU is used whatever is predicted. A plan then counts its memory.
    pub fn is_asked(&self) -> bool {
        matches!(self, Npu::Force | Npu::Model(_))
    }
}

/// Returns the error for an NPU where several texts share passes.
pub fn for_one_text() -> anyhow::Error {
    let fault =
        Fault::usage("the NPU works for one text at a time, and --parallel answers several");
    fault.help("leave out --npu or --parallel").into()
}

/// Returns the dimensions of a model's attention for the NPU.
pub fn dims(config: &Config) -> Dims {
    let Config { n_heads, n_kv_heads, head_dim, query_scale, .. } = *config;
    Dims { n_heads, n_kv_heads, head_dim, scale: query_scale }
}

/// Reports in one line why an NPU was given up.
pub fn say(engine: &dyn Engine, listener: &dyn Listener) {
    if let Some(why) = report(engine).and_then(|r| r.given_up) {
        listener.note(&format!(
            "the NPU was given up, and the other device computed all attention: {why}"
        ));
    }
}

/// Returns the report of an NPU beside an engine's device, if one takes part.
pub fn report(engine: &dyn Engine) -> Option<AssistReport> {
    engine.report().executor.and_then(|executor| executor.assist)
}

/// Returns the reads of a step, for the prediction.
fn work(config: &Config, kv: KvFormat, weights: u64, context: usize) -> Work {
    let global_layers = (0..config.n_layers).filter(|l| config.is_global(*l)).count();
    Work {
        weights: weights as f64,
        global_layers,
        local_layers: config.n_layers - global_layers,
        window: config.window,
        position: (2 * config.n_kv_heads * kv.head_bytes(config.head_dim)) as f64,
        context,
    }
}

/// Puts an NPU beside `executor` where `--npu` and the prediction say so. An obstacle is reported
/// in one line, and the executor goes on alone.
pub fn beside(
    mut executor: Box<dyn Executor>,
    options: &RunOptions,
    config: &Config,
    (kv, weights, context): (KvFormat, u64, usize),
    is_split: bool,
    listener: &dyn Listener,
) -> Result<Box<dyn Executor>> {
    let asked = options.npu.is_asked();
    if options.npu == Npu::Off {
        return Ok(executor);
    }
    if is_split {
        if asked {
            listener.note(
                "running without the NPU: it works beside one device, not where layers \
                are spread over two",
            );
        }
        return Ok(executor);
    }
    match bring_up(executor.as_mut(), options, config, work(config, kv, weights, context)) {
        Ok((npu, share, why)) => {
            listener.detail(1, &format!("npu: {why}"));
            Ok(if share == 0 {
                executor
            } else {
                Box::new(OffloadExecutor::new(executor, npu, dims(config), share))
            })
        }
        Err(why) if asked => {
            listener.note(&format!("running without the NPU: {why:#}"));
            Ok(executor)
        }
        Err(why) => {
            listener.detail(1, &format!("no npu: {why:#}"));
            Ok(executor)
        }
    }
}

/// Returns the operation on its device, the share of 256 that it should take, and why.
fn bring_up(
    executor: &mut dyn Executor,
    options: &RunOptions,
    config: &Config,
    work: Work,
) -> Result<(FlashPartial, usize, String)> {
    let dims = dims(config);
    let shape = dims.shape()?;
    let session = match &options.npu {
        Npu::Model(library) => {
            let library = library.as_deref().map(Library::open).transpose()?;
            let accel = HostModelAccel::new(ModelOptions {
                compiled: library,
                fault: testing::fault(testing::NPU_FAULT)
                    .map(|fault| fault.parse().map_err(anyhow::Error::msg))
                    .transpose()?,
                late: false,
            });
            Session::open(Box::new(accel), &HostModelAccel::xclbin(shape))?
        }
        _ => {
            let accel = open_first(&System::here())?;
            let array = manifest::load(&manifest::find(&manifest::directories(), shape)?, shape)?;
            Session::open(Box::new(accel), &array)?
        }
    };
    let mut npu = FlashPartial::new(session, dims)?;
    let measured = gate::self_test(&mut npu, dims)?;
    let near = format!("self-test {:.2} % from exact", 100.0 * measured.distance);
    if matches!(options.npu, Npu::Model(_)) {
        return Ok((npu, 256, format!("a model of it on the host, {near}")));
    }
    let Some(speed) = executor.read_bandwidth() else {
        anyhow::bail!(
            "the speed of {} cannot be measured, so nothing can be predicted",
            executor.report().device
        )
    };
    let npu_speed = measured.transfer.min(measured.kernel);
    let machine = Machine {
        executor: speed,
        npu: npu_speed,
        dispatch: measured.dispatch,
        ..Machine::PHOENIX
    };
    let choice = gate::choose(&machine, &work);
    let figures = format!(
        "{near}, {:.0} us a dispatch, {:.1} GB/s, {:.1} with all rows; predicted gain {:.1} %, \
            wanted {:.0} %",
        1e6 * measured.dispatch,
        measured.transfer / 1e9,
        measured.kernel / 1e9,
        100.0 * choice.gain,
        100.0 * WORTH
    );
    Ok(match options.npu {
        Npu::Force => (npu, 256, figures),
        _ if choice.gain >= WORTH => {
            // In coarse steps: a share decides how sums are rounded, and measured speeds differ a
            // little from run to run.
            let share = choice.share.next_multiple_of(32).min(256);
            (npu, share, format!("{figures}: takes {share} of 256 sealed pages"))
        }
        _ => (npu, 0, format!("{figures}: not used")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_named_exactly() {
        assert_eq!("model".parse(), Ok(Npu::Model(None)));
        assert_eq!("model:/a:b".parse(), Ok(Npu::Model(Some("/a:b".into()))));
        assert_eq!(
            ["auto", "off", "force"].map(|s| s.parse()),
            [Ok(Npu::Auto), Ok(Npu::Off), Ok(Npu::Force)]
        );
        assert!(["", "on", "model:", "force:1"].iter().all(|s| s.parse::<Npu>().is_err()));
    }
}
