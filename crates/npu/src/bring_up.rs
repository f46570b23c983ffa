//! Start of an NPU for `--npu`: opens the device, tests it, and decides by the predicted gain.

use super::attention::{Dims, FlashPartial};
use super::gate::{self, Machine, StepMemory, WORTH};
use super::host::{HostModelAccel, HostModelOptions};
use super::layout::KernelShape;
use super::manifest;
use super::mode::Npu;
use super::probe::{NpuSystem, directories, open_first};
use super::session::NpuSession;
use anyhow::Result;
use gemma_base::compute::Executor;
use gemma_base::testing;

/// Returns the operation on its device, its share of the sealed pages in 256ths, and the reason for
/// the decision. `executor` is the device that computes the rest.
pub fn bring_up(
    executor: &mut dyn Executor,
    mode: Npu,
    dims: Dims,
    work: &StepMemory,
) -> Result<(FlashPartial, usize, String)> {
    let mut npu = FlashPartial::new(open(mode, dims.shape()?)?, dims)?;
    let measured = gate::self_test(&mut npu, dims)?;
    let near = format!("self-test {:.2} % from exact", 100.0 * measured.distance);
    if mode == Npu::Model {
        return Ok((npu, 256, format!("a model of it on the host, {near}")));
    }
    let Some(speed) = executor.read_bandwidth() else {
        anyhow::bail!(
            "the speed of {} cannot be measured, so no gain can be predicted",
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
    let choice = gate::choose(&machine, work);
    let figures = format!(
        "{near}, {:.0} us per dispatch, {:.1} GB/s, {:.1} with all rows; \
            predicted gain {:.1} %, wanted {:.0} %",
        1e6 * measured.dispatch,
        measured.transfer / 1e9,
        measured.kernel / 1e9,
        100.0 * choice.gain,
        100.0 * WORTH
    );
    Ok(match mode {
        Npu::Force => (npu, 256, figures),
        _ if choice.gain >= WORTH => {
            // Shares have coarse steps, because a different share changes the rounding of sums and
            // measured speeds vary a little between runs.
            let share = choice.share.next_multiple_of(32).min(256);
            (npu, share, format!("{figures}: used for {share} of 256 sealed pages"))
        }
        _ => (npu, 0, format!("{figures}: not used")),
    })
}

/// Opens the first device, or the model of a device on the host.
fn open(mode: Npu, shape: KernelShape) -> Result<NpuSession> {
    if mode == Npu::Model {
        let fault = testing::fault(testing::NPU_FAULT)
            .map(|fault| fault.parse().map_err(anyhow::Error::msg))
            .transpose()?;
        let accel = HostModelAccel::new(HostModelOptions { fault, ..HostModelOptions::default() });
        return NpuSession::open(Box::new(accel), &HostModelAccel::xclbin(shape));
    }
    let accel = open_first(&NpuSystem::here())?;
    let array = manifest::load(&manifest::find(&directories(), shape)?, shape)?;
    NpuSession::open(Box::new(accel), &array)
}
