//! The machine to plan for: this one, or another one with known memory size only.

use super::measure::Task;
use super::{Placement, candidates_among, check_memory};
use crate::runtime::devices::backends;
use crate::runtime::options::{Device, GpuLayers, RunOptions};
use crate::runtime::{Listener, Silence};
use anyhow::Result;
use gemma_base::compute::DeviceInfo;
use gemma_base::error::{Fault, Kind, fault_of};
use std::cell::LazyCell;

/// Devices of the backends, or the reason why there are none.
type ProbedDevices = Result<Vec<DeviceInfo>, Fault>;

/// A machine, and the options that select the used part of it.
pub struct Host<'a> {
    run: &'a RunOptions,
    /// Free memory in bytes; `None` if the system does not report it.
    pub available: Option<u64>,
    /// Total memory in bytes, if this is another machine.
    pub elsewhere: Option<u64>,
    /// Listed on first use, since small models need no driver.
    found: LazyCell<ProbedDevices, Box<dyn FnOnce() -> ProbedDevices + 'a>>,
}

impl<'a> Host<'a> {
    /// Returns this machine.
    pub fn here(run: &'a RunOptions) -> Host<'a> {
        Host {
            found: LazyCell::new(Box::new(move || found(&backends::probe()))),
            ..Host::bare(run, gemma_base::os::machine::available_memory())
        }
    }

    /// Returns this machine with devices that the caller has already listed.
    pub fn known(
        run: &'a RunOptions,
        devices: &Result<Vec<DeviceInfo>>,
        available: Option<u64>,
    ) -> Host<'a> {
        let devices = found(devices);
        Host { found: LazyCell::new(Box::new(move || devices)), ..Host::bare(run, available) }
    }

    /// Returns another machine with `memory` bytes.
    pub fn other(run: &'a RunOptions, memory: u64) -> Result<Host<'a>> {
        let wants_gpu = matches!(run.device, Device::Vulkan(_))
            || !matches!(run.gpu_layers, GpuLayers::Auto | GpuLayers::N(0));
        if wants_gpu {
            let fault = Fault::usage("--memory plans for another machine with an unknown GPU");
            return Err(fault
                .help(
                    "leave out --device and --gpu-layers: \
                    the plan is for the processor and its memory",
                )
                .into());
        }
        Ok(Host { elsewhere: Some(memory), ..Host::bare(run, Some(memory - in_use(memory))) })
    }

    /// Returns a machine without a GPU.
    fn bare(run: &'a RunOptions, available: Option<u64>) -> Host<'a> {
        Host { run, available, elsewhere: None, found: LazyCell::new(Box::new(|| Ok(Vec::new()))) }
    }

    /// Returns where a run would load the model.
    pub fn place(&self, task: &Task<'_>, listener: &dyn Listener) -> Result<Placement> {
        let devices = || self.found.clone().map_err(Into::into);
        Ok(candidates_among(task, self.run, devices, listener)?.swap_remove(0))
    }

    /// Fails for a placement that needs more memory than available.
    pub fn check(&self, placement: &Placement) -> Result<()> {
        check_memory(placement, self.available)
    }

    /// Returns where a run would load the model, if it fits.
    pub fn fitting(&self, task: &Task<'_>) -> Option<Placement> {
        self.place(task, &Silence).ok().filter(|p| self.check(p).is_ok())
    }
}

fn found(devices: &Result<Vec<DeviceInfo>>) -> ProbedDevices {
    match devices {
        Ok(list) => Ok(list.clone()),
        Err(e) => {
            Err(fault_of(e).cloned().unwrap_or_else(|| Fault::new(Kind::Device, e.to_string())))
        }
    }
}

/// Returns the memory assumed to be in use on another machine: a quarter, at most 8 GB.
pub fn in_use(memory: u64) -> u64 {
    (memory / 4).min(8_000_000_000)
}
