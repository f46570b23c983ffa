//! Selects the drafter: the requested one, if the target's tokenizer allows it.

pub mod calibration;
pub mod costs;

use crate::draft::{
    Ahead, AssistantModel, CandidateSource, DraftFigures, DraftModel, Drafter, Habits, NoDraft,
    Policy, TreeBuilder,
};
use crate::runtime::devices::backends::Npu;
use crate::runtime::drafting::costs::{Passes, one_row};
use crate::runtime::load::{Room, kv_format, load};
use crate::runtime::model::Size;
use crate::runtime::model::partner::Partner;
use crate::runtime::options::Device;
use crate::runtime::options::{DraftAhead, DraftFrom, DraftingOptions, GpuLayers, RunOptions};
use crate::runtime::placement;
use crate::runtime::placement::measure::Task;
use crate::runtime::{Listener, Model};
use anyhow::Result;
use gemma_base::compute::cpu::Pool;
use gemma_base::compute::{Choice, DeviceInfo};
use gemma_base::error::Fault;
use gemma_base::util::hex;
use gemma_model::checkpoint::Checkpoint;
use gemma_model::models::{Tokenizer, Weights};
use std::sync::Arc;

/// Bytes below which a draft model's matrices may be too small for several threads. Threads wait
/// for each other at every layer, which takes long while other programs run.
const LIGHT: u64 = 4 << 20;
/// For a light model, all threads are used only if they take less than this share of a single
/// thread's time.
const FEWER: f32 = 0.6;

/// Bytes up to which a draft model uses at most [`FEW`] threads if the target is on another device.
/// More threads do not speed it up, and each delayed thread delays the others.
const SMALL: u64 = 16 << 20;
const FEW: usize = 4;

/// A drafter, and the reason if it is less than requested.
pub struct Drafting {
    pub drafter: Box<dyn Drafter>,
    /// Decides how much of its proposals a pass verifies.
    pub policy: Policy,
    pub disabled: Option<String>,
    /// Identifies the draft model.
    pub identity: String,
}

impl Drafting {
    /// Creates plain decoding.
    pub fn off() -> Drafting {
        Drafting {
            drafter: Box::new(NoDraft),
            policy: Policy::off(),
            disabled: None,
            identity: String::new(),
        }
    }

    /// Returns the combined counts of drafter and policy.
    pub fn figures(&self) -> DraftFigures {
        let mut figures = DraftFigures::default();
        self.drafter.figures(&mut figures);
        self.policy.figures(&mut figures);
        figures
    }

    /// Returns why nothing is being drafted, if so.
    pub fn disabled(&self) -> Option<String> {
        let notes: Vec<String> =
            self.policy.note().into_iter().chain(self.drafter.note()).collect();
        self.disabled.clone().or_else(|| (!notes.is_empty()).then(|| notes.join("; ")))
    }
}

/// The target to draft for.
pub struct DraftTarget<'a> {
    pub tokenizer: &'a Tokenizer,
    pub model: &'a Model,
    pub run: &'a RunOptions,
    /// Context and sequences of the target.
    pub room: Room,
    /// Times of its passes.
    pub passes: &'a Passes,
    /// Threads shared with a draft model on the processor.
    pub pool: &'a Arc<Pool>,
}

/// A loaded draft model.
struct LoadedDraft {
    lm: DraftModel,
    identity: [u8; 32],
    device: Option<DeviceInfo>,
    /// Seconds of a pass over one row.
    level: f32,
}

/// Builds the drafter for a target.
pub fn build(
    options: &DraftingOptions,
    target: &DraftTarget<'_>,
    listener: &dyn Listener,
) -> Result<Drafting> {
    let DraftTarget { tokenizer, model, passes, .. } = *target;
    let name = &model.name;
    if let Some(assistant) = model.weights.assistant() {
        return assisted(assistant, options, target);
    }
    let mut disabled = None;
    let partner = match &options.source {
        DraftFrom::Off => {
            let disabled = Some("--draft off".into());
            return Ok(Drafting { disabled, ..Drafting::off() });
        }
        DraftFrom::Ngram => None,
        choice @ (DraftFrom::Auto | DraftFrom::Bundled) => {
            match Partner::bundled(tokenizer, passes.plain())? {
                Ok(partner) => Some(partner),
                Err(why) if *choice == DraftFrom::Bundled => {
                    let fault =
                        Fault::model(format!("no bundled draft model can draft for {name}: {why}"));
                    return Err(fault
                        .help(
                            "use --draft ngram, \
                            or --draft MODEL with a small model of the same family",
                        )
                        .into());
                }
                Err(why) => {
                    let reason = format!("there is no bundled draft model for this model: {why}");
                    listener.note(&format!("{reason}; drafts come from n-grams of the text"));
                    disabled = Some(reason);
                    None
                }
            }
        }
        DraftFrom::Model(path) => match Partner::at(path, tokenizer)? {
            Ok(partner) => Some(partner),
            Err(why) => {
                let fault = Fault::model(format!("{path} cannot draft for {name}: {why}"));
                return Err(fault.help("a draft model needs the same tokens as the target").into());
            }
        },
    };
    let model =
        partner.map(|partner| draft_model(partner, options, target, listener)).transpose()?;
    let (identity, device, habits, lm) = match model {
        Some(m) => {
            (m.identity, m.device, Habits { level: m.level, ..Habits::default() }, Some(m.lm))
        }
        None => (WITHOUT_MODEL, None, Habits::default(), None),
    };
    let builder = TreeBuilder::of_all(lm, options.mixing);
    let identity = spelled(identity);
    let habits = passes.habits.get(&identity).cloned().unwrap_or(habits);
    let ahead = match options.ahead {
        DraftAhead::On => Ahead::Always,
        DraftAhead::Off => Ahead::Never,
        DraftAhead::Auto if works_beside(passes.device.as_ref(), device.as_ref()) => Ahead::Auto,
        DraftAhead::Auto => Ahead::Never,
    };
    let policy = Policy::new(passes.costs.clone(), options.limits(), true);
    let policy = policy.with(&habits).working_ahead(ahead);
    Ok(Drafting { drafter: Box::new(builder), policy, disabled, identity })
}

/// Builds the drafter of a target that is loaded with its assistant. Both run on one device, so
/// there is no drafting ahead.
fn assisted(
    assistant: &Weights,
    options: &DraftingOptions,
    target: &DraftTarget<'_>,
) -> Result<Drafting> {
    let DraftTarget { model, passes, .. } = *target;
    let sources: Vec<CandidateSource> = CandidateSource::mixed().collect();
    let lm = AssistantModel::new(assistant.config().vocab);
    let builder = TreeBuilder::assisted(lm, &sources, options.mixing);
    let identity = assistant.checkpoint().map_or(Ok([0; 32]), Checkpoint::fingerprint)?;
    let identity = spelled(identity);
    // The time of a step is estimated from its bytes relative to those of a target pass.
    let share = Size::of(assistant)?.bytes as f32 / Size::of(&model.weights)?.bytes as f32;
    let level = share * passes.plain();
    let habits = passes.habits.get(&identity).cloned();
    let habits = habits.unwrap_or(Habits { level, ..Habits::default() });
    let policy = Policy::new(passes.costs.clone(), options.limits(), true);
    let policy = policy.with(&habits).working_ahead(Ahead::Never);
    Ok(Drafting { drafter: Box::new(builder), policy, disabled: None, identity })
}

/// Loads a draft model on its device, with the number of threads that is fastest.
fn draft_model(
    partner: Partner,
    options: &DraftingOptions,
    target: &DraftTarget<'_>,
    listener: &dyn Listener,
) -> Result<LoadedDraft> {
    let (identity, run) = (partner.fingerprint()?, target.run);
    let context = partner.context(target.room.context);
    let room = Room { context, sequences: target.room.sequences, prefixes: 0 };
    let run = RunOptions {
        device: place(options, &partner.weights, run, room)?,
        gpu_layers: GpuLayers::Auto,
        npu: Npu::Off,
        kv: partner.kv(run.kv),
        ..run.clone()
    };
    let bytes = Size::of(&partner.weights)?.bytes;
    let most = target.pool.threads();
    let threads = threads(bytes, works_beside(target.passes.device.as_ref(), None), most);
    let pool = if threads < most { &Arc::new(Pool::new(threads)?) } else { target.pool };
    let load = |pool: &Arc<Pool>| load(&partner.weights, "draft model", &run, room, pool, listener);
    let mut loaded = load(pool)?;
    let mut level = one_row(loaded.engine.as_mut())?;
    if loaded.device.is_none() && threads > 1 && bytes < LIGHT {
        let mut single = load(&Arc::new(Pool::new(1)?))?;
        let seconds = one_row(single.engine.as_mut())?;
        if seconds * FEWER < level {
            (loaded, level) = (single, seconds);
        }
    }
    let lm = DraftModel::new(partner.engine(loaded.engine)?);
    Ok(LoadedDraft { lm, identity, device: loaded.device, level })
}

/// Placeholder identity if there is no draft model.
const WITHOUT_MODEL: [u8; 32] = [0; 32];

fn spelled(draft_identity: [u8; 32]) -> String {
    hex(&draft_identity[..8])
}

/// Returns the number of threads, at most `most`, for a draft model of `bytes` bytes.
///
/// `is_elsewhere` means that the target does not need the processor.
fn threads(bytes: u64, is_elsewhere: bool, most: usize) -> usize {
    if is_elsewhere && bytes <= SMALL { most.min(FEW) } else { most }
}

/// Returns whether drafts and target use different hardware. A driver on the processor competes
/// with drafts there.
fn works_beside(target: Option<&DeviceInfo>, draft: Option<&DeviceInfo>) -> bool {
    target.is_some_and(|t| !t.is_cpu && draft.is_none_or(|d| d.index != t.index))
}

/// Returns the device for the draft model.
///
/// Under `auto` this is the processor, which is free while the target's device runs. A discrete GPU
/// is used instead if the model is large enough to be slow on the processor, and the GPU has room
/// for all of it in addition to the target.
fn place(
    options: &DraftingOptions,
    weights: &Weights,
    run: &RunOptions,
    room: Room,
) -> Result<Device> {
    if options.device != Device::Auto {
        return Ok(options.device);
    }
    let Room { context, sequences, prefixes } = room;
    let kv = kv_format(weights, run.kv)?;
    let task = Task { weights, context, kv, sequences, prefixes, npu: false };
    let gpu = placement::roomy_gpu(&task)?;
    Ok(gpu.map_or(Device::Cpu, |index| Device::Vulkan(Choice::Index(index))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_drafts_beside_a_gpu_take_few_threads() {
        assert_eq!(threads(9 << 20, true, 16), FEW);
        assert_eq!(threads(9 << 20, true, 2), 2);
        assert_eq!(threads(9 << 20, false, 16), 16);
        assert_eq!(threads(33 << 20, true, 16), 16);
    }
}
