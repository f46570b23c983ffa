//! Memory for models: the bytes that each needs, as counted by `gemma plan`, and the bytes that the
//! machine has.

use super::{LOOK, ModelLoad, ServedModels, ServerState};
use crate::compute::{Choice, DeviceInfo};
use crate::error::{Fault, Kind};
use crate::os::machine::available_memory;
use crate::runtime::devices::backends::probe;
use crate::runtime::load::kv_format;
use crate::runtime::model::partner::SLOW_PASS;
use crate::runtime::options::{Device, GpuLayers, RunOptions};
use crate::runtime::placement::measure::Task;
use crate::runtime::placement::process::ProcessMemory;
use crate::runtime::placement::{Placement, candidates_among};
use crate::runtime::{Listener, Room, Session};
use crate::util::units::bytes;
use anyhow::{Context, Result};
use std::sync::{OnceLock, PoisonError};

/// Bytes that a loaded model needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlannedMemory {
    /// Bytes of the processor's memory.
    pub host: u64,
    /// Index of the GPU that has layers, and bytes of its memory.
    pub device: Option<(usize, u64)>,
}

/// The memory that a model lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLack {
    pub host: bool,
    pub device: bool,
}

impl MemoryLack {
    pub fn is_nothing(self) -> bool {
        !self.host && !self.device
    }

    /// Returns whether unloading `other` frees the kind of memory that is missing for `needed`.
    pub fn is_eased_by(self, needed: &PlannedMemory, other: &PlannedMemory) -> bool {
        let on_device = |memory: &PlannedMemory| memory.device.map(|(index, _)| index);
        self.host && other.host > 0 || self.device && on_device(other) == on_device(needed)
    }
}

/// Memory for models.
pub struct ModelBudget {
    /// Bytes of the processor's memory; `None` if the system does not report it.
    host: Option<u64>,
    /// The GPUs, with their free memory before any model was loaded.
    devices: OnceLock<Vec<DeviceInfo>>,
}

impl ModelBudget {
    /// Makes the budget from the given bytes, or else from the memory that is free now.
    pub fn new(given: Option<u64>) -> ModelBudget {
        ModelBudget { host: given.or_else(available_memory), devices: OnceLock::new() }
    }

    /// Returns the placement of a model that has the machine for itself, and the bytes that it
    /// needs. It does not depend on other loaded models, so neither does the text.
    pub fn place(
        &self,
        session: &Session,
        room: Room,
        listener: &dyn Listener,
    ) -> Result<(Placement, PlannedMemory)> {
        let weights = &session.model.weights;
        let Room { context, sequences, prefixes } = room;
        let kv = kv_format(weights, session.run.kv)?;
        let task = Task { weights, context, kv, sequences, prefixes, npu: false };
        let found = || Ok(self.devices.get_or_init(|| probe().unwrap_or_default()).clone());
        let mut places = candidates_among(&task, &session.run, found, listener)?.into_iter();
        let placement = places.next().context("there is always a place")?;
        let (gpu, cpu) = (placement.layout.gpu.need.total(), placement.layout.cpu.need.total());
        let shared = placement.device.as_ref().filter(|d| d.is_integrated || d.is_cpu);
        let program = ProcessMemory::of(&task, SLOW_PASS)?.total();
        let host = [cpu, program, if shared.is_some() { gpu } else { 0 }];
        let host = host.into_iter().fold(0, u64::saturating_add);
        let device = placement.device.as_ref().map(|device| (device.index, gpu));
        Ok((placement, PlannedMemory { host, device }))
    }

    /// Returns the memory that a model lacks while `others` are loaded.
    ///
    /// `available` is the host memory that is free now.
    pub fn lack(
        &self,
        needed: &PlannedMemory,
        others: &[PlannedMemory],
        available: Option<u64>,
    ) -> MemoryLack {
        let taken: u64 = others.iter().map(|other| other.host).fold(0, u64::saturating_add);
        let left = self.host.map(|host| host.saturating_sub(taken));
        let host = left.into_iter().chain(available).any(|free| needed.host > free);
        let device = needed.device.is_some_and(|(index, bytes)| {
            let others = others.iter().filter_map(|other| other.device);
            let taken: u64 = others.filter(|(on, _)| *on == index).map(|(_, bytes)| bytes).sum();
            let known = self.devices.get().into_iter().flatten();
            let device = known.into_iter().find(|device| device.index == index);
            device.is_some_and(|device| bytes > device.free().saturating_sub(taken))
        });
        MemoryLack { host, device }
    }

    /// Makes the error of a model that never fits.
    pub fn refusal(&self, name: &str, needed: &PlannedMemory) -> Fault {
        let has = self.host.map_or_else(String::new, |host| {
            format!(", and the server's models have {}", bytes(host))
        });
        let gpu = needed.device.map_or_else(String::new, |(_, gpu)| {
            format!(" of memory and {} of the GPU's", bytes(gpu))
        });
        let what = format!("{name} needs {}{gpu}{has}", bytes(needed.host));
        Fault::new(Kind::Memory, what).help("lower --ctx-size or --parallel")
    }
}

impl ServedModels {
    /// Waits until a model's planned bytes are free, and takes them.
    ///
    /// Other models are unloaded for it: first the idle one that was used longest ago, and busy
    /// ones last.
    pub(super) fn take_room(
        &self,
        slot: usize,
        load: &ModelLoad,
        needed: PlannedMemory,
    ) -> Result<(), anyhow::Error> {
        let name = self.slots[slot].name();
        if !self.budget.lack(&needed, &[], None).is_nothing() {
            return Err(self.budget.refusal(name, &needed).into());
        }
        let (mut state, mut is_told) = (self.lock(), false);
        loop {
            if state.ends.is_some() || load.users() == 0 {
                anyhow::bail!("no request waits for {name} any more");
            }
            let available = available_memory();
            let others = |state: &ServerState| -> Vec<(usize, PlannedMemory)> {
                let slots = state.slots.iter().enumerate().filter(|(other, _)| *other != slot);
                slots.filter_map(|(at, s)| Some((at, s.active.as_ref()?.planned))).collect()
            };
            let mut others = others(&state);
            let plans = |list: &[(usize, PlannedMemory)]| -> Vec<PlannedMemory> {
                list.iter().map(|(_, planned)| *planned).collect()
            };
            if self.budget.lack(&needed, &plans(&others), available).is_nothing() {
                let active = state.slots[slot].active.as_mut().expect("it is being loaded");
                active.planned = needed;
                return Ok(());
            }
            if others.iter().all(|(_, planned)| *planned == PlannedMemory::default()) {
                return Err(self.budget.refusal(name, &needed).into());
            }
            let mut freed = 0;
            loop {
                let now = available.map(|available| available.saturating_add(freed));
                let lack = self.budget.lack(&needed, &plans(&others), now);
                let next = next_to_leave(&state, &others, lack, &needed);
                let Some(at) = next.filter(|_| !lack.is_nothing()) else { break };
                let (other, planned) = others.remove(at);
                freed += planned.host;
                let active = state.slots[other].active.as_mut().expect("it is loaded");
                if !active.is_leaving {
                    let other = self.slots[other].name();
                    self.events.say(&format!("{other} is unloaded to make room for {name}"));
                    active.leave();
                }
                if active.load.users() > 0 && !is_told {
                    is_told = true;
                    let other = self.slots[other].name();
                    self.events.say(&format!("{name} waits until {other} has answered"));
                }
            }
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Returns the index in `others` of the model to unload next: one that is already leaving, an idle
/// one, or a busy one, and among equals the one that was used longest ago.
fn next_to_leave(
    state: &ServerState,
    others: &[(usize, PlannedMemory)],
    lack: MemoryLack,
    needed: &PlannedMemory,
) -> Option<usize> {
    let rank = |(at, (slot, planned)): (usize, &(usize, PlannedMemory))| {
        let active = state.slots[*slot].active.as_ref()?;
        let can_leave = active.loaded.is_some() || active.is_leaving;
        let helps = can_leave && lack.is_eased_by(needed, planned);
        let is_busy = active.load.users() > 0;
        helps.then_some(((!active.is_leaving, is_busy, active.idle_since), at))
    };
    others.iter().enumerate().filter_map(rank).min().map(|(_, at)| at)
}

/// Fixes the placement of a model in its run options.
pub fn pin(run: &mut RunOptions, placement: &Placement) {
    match &placement.device {
        None => (run.device, run.gpu_layers) = (Device::Cpu, GpuLayers::Auto),
        Some(device) => {
            run.device = Device::Vulkan(Choice::Index(device.index));
            run.gpu_layers = GpuLayers::N(placement.layout.gpu.layers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_loaded_models_are_taken_from_the_budget() {
        let budget = ModelBudget { host: Some(100), devices: OnceLock::new() };
        let model = |host| PlannedMemory { host, device: None };
        let lacks = |needed, others: &[PlannedMemory], available| {
            budget.lack(&model(needed), others, available).host
        };
        assert!(!lacks(100, &[], None) && lacks(101, &[], None));
        assert!(!lacks(40, &[model(30), model(30)], None));
        assert!(lacks(41, &[model(30), model(30)], None));
        // The system may have less memory free than the budget.
        assert!(lacks(40, &[], Some(39)) && !lacks(40, &[], Some(40)));
        assert!(lacks(1, &[model(u64::MAX), model(1)], None));
        let lack = budget.lack(&model(50), &[model(60)], None);
        assert!(lack.is_eased_by(&model(50), &model(1)) && !lack.is_nothing());
        assert!(!lack.is_eased_by(&model(50), &model(0)));
    }
}
