//! Which drafter: what `--draft` says, as far as the target's tokenizer allows.

use super::costs::{CostFile, Passes, one_row};
use super::options::{DraftAhead, DraftingOptions, MemoryPlace};
use super::partner::Partner;
use crate::cli::args::{AutoOr, GpuLayers, RunOptions};
use crate::cli::npu::Npu;
use crate::cli::placement::{self, measure::Task};
use crate::cli::session::{Model, Size, kv_format, load};
use crate::cli::ui::Ui;
use crate::compute::cpu::Pool;
use crate::draft::{Ahead, CostCurve, DraftOptions, Drafter, Figures, Habits, Lm, Memory, NoDraft, Paced, Shared, Stack, Table};
use crate::error::Fault;
use crate::gemma::{Tokenizer, Weights};
use crate::util::hex;
use crate::vulkan::DeviceInfo;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Bytes of a draft model below which its matrices may be too small to be shared among threads, and the part of one thread's time that
/// all of them must stay below: they wait for each other at every layer, and that takes long where other programs run.
const LIGHT: u64 = 4 << 20;
const FEWER: f32 = 0.6;

/// Bytes of a draft model up to which more threads than these make it no faster, and many make it wait for each one that the system
/// holds up. Where the target's device leaves the processor alone it gets no more.
const SMALL: u64 = 16 << 20;
const FEW: usize = 4;

/// A drafter, and why it is less than was hoped for.
pub struct Drafting {
    pub drafter: Box<dyn Drafter>,
    pub disabled: Option<String>,
    /// Tells one draft model from another.
    pub identity: String,
}

/// Builds the drafter for a target whose passes take as long as `passes` says; `remembers` where `--draft-memory auto` is on.
#[allow(clippy::too_many_arguments)]
pub fn build(
    options: &DraftingOptions,
    model: &Model,
    tokenizer: &Tokenizer,
    run: &RunOptions,
    context: usize,
    passes: &Passes,
    pool: &Arc<Pool>,
    remembers: bool,
    ui: &Ui,
) -> Result<Drafting> {
    let (mut lm, mut draft_identity) = (None, WITHOUT_MODEL);
    let mut disabled = None;
    let (mut device, mut habits) = (None, Habits::default());
    let mut add_model = |name: &'static str, partner: Partner| -> Result<()> {
        draft_identity = partner.fingerprint()?;
        let context = partner.context(context);
        let run = RunOptions {
            device: place(options, &partner.weights, run, context)?,
            gpu_layers: GpuLayers::Auto,
            npu: Npu::Off,
            kv: partner.kv(run.kv),
            ..run.clone()
        };
        let bytes = Size::of(&partner.weights)?.bytes;
        let threads = threads(bytes, works_beside(passes.device.as_ref(), None), pool.threads());
        let pool = if threads < pool.threads() { &Arc::new(Pool::new(threads)?) } else { pool };
        let mut loaded = load(&partner.weights, "draft model", &run, context, pool, ui)?;
        habits.level = one_row(loaded.engine.as_mut())?;
        if loaded.device.is_none() && threads > 1 && bytes < LIGHT {
            let mut single = load(&partner.weights, "draft model", &run, context, &Arc::new(Pool::new(1)?), ui)?;
            let seconds = one_row(single.engine.as_mut())?;
            if seconds * FEWER < habits.level {
                (loaded, habits.level) = (single, seconds);
            }
        }
        device = loaded.device;
        lm = Some(Lm::new(name, partner.engine(loaded.engine)?));
        Ok(())
    };
    match options.draft.as_str() {
        "off" => {
            return Ok(Drafting { drafter: Box::new(NoDraft), disabled: Some("--draft off".into()), identity: String::new() });
        }
        "ngram" => {}
        choice @ ("auto" | "bundled") => match Partner::bundled(tokenizer, passes.plain())? {
            Ok(partner) => add_model("model", partner)?,
            Err(why) if choice == "bundled" => {
                let fault = Fault::model(format!("no bundled draft model can draft for {}: {why}", model.name));
                return Err(fault.help("use --draft ngram, or --draft MODEL with a small model of the same family").into());
            }
            Err(why) => {
                let reason = format!("there is no bundled draft model for this model: {why}");
                ui.note(format!("{reason}; guesses come from the text itself (n-grams)"));
                disabled = Some(reason);
            }
        },
        path => match Partner::at(path, tokenizer)? {
            Ok(partner) => add_model("model", partner)?,
            Err(why) => {
                let fault = Fault::model(format!("{path} cannot draft for {}: {why}", model.name));
                return Err(fault.help("a draft model needs the same tokens as the target").into());
            }
        },
    }
    let mut stack = Stack::new("mixed", lm, true, Some(Table::new()), options.mixing);
    remember(&mut stack, options, model, tokenizer, draft_identity, remembers, ui)?;
    let identity = spelled(draft_identity);
    let habits = passes.habits.get(&identity).cloned().unwrap_or(habits);
    let ahead = match options.draft_ahead {
        DraftAhead::On => Ahead::Always,
        DraftAhead::Off => Ahead::Never,
        DraftAhead::Auto if works_beside(passes.device.as_ref(), device.as_ref()) => Ahead::Auto,
        DraftAhead::Auto => Ahead::Never,
    };
    let options = limits(options);
    // Costs are replaced by those of every range of context that is known.
    let paced = Paced::new(Box::new(stack), CostCurve::guess(), options, true).with(passes.costs.clone(), &habits).ahead(ahead);
    Ok(Drafting { drafter: Box::new(paced), disabled, identity })
}

/// Drafters for texts that share a target's passes: what was there before, and no draft model.
pub fn of_text(
    options: &DraftingOptions,
    model: &Model,
    tokenizer: &Tokenizer,
    texts: usize,
    ui: &Ui,
) -> Result<Vec<Box<dyn Drafter>>> {
    let drafter = |_| -> Result<Box<dyn Drafter>> {
        if options.draft == "off" {
            return Ok(Box::new(NoDraft));
        }
        let mut stack = Stack::new("ngram", None, true, Some(Table::new()), options.mixing);
        remember(&mut stack, options, model, tokenizer, WITHOUT_MODEL, true, ui)?;
        Ok(Box::new(stack))
    };
    (0..texts).map(drafter).collect()
}

/// Stands for the draft model where there is none.
const WITHOUT_MODEL: [u8; 32] = [0; 32];

fn spelled(draft_identity: [u8; 32]) -> String {
    hex(&draft_identity[..8])
}

/// Goes on with what earlier runs have learnt, as far as `--draft-memory` allows.
fn remember(
    stack: &mut Stack,
    options: &DraftingOptions,
    model: &Model,
    tokenizer: &Tokenizer,
    draft_identity: [u8; 32],
    remembers: bool,
    ui: &Ui,
) -> Result<()> {
    if let Some(directory) = options.draft_memory.directory(remembers) {
        if options.draft_memory == MemoryPlace::Auto && !directory.exists() {
            ui.note(format!(
                "what drafting learns, with fragments of prompts and answers, is kept in {}; --draft-memory off keeps nothing",
                directory.display()
            ));
        }
        let target = [&model.checkpoint().fingerprint()?[..], &tokenizer.sha256()].concat();
        let memory = Memory::new(&directory, Sha256::digest(target).into(), draft_identity);
        if let Err(why) = stack.remember(memory) {
            ui.note(format!("draft memory: {why:#}"));
        }
    }
    Ok(())
}

/// What `--draft-tree` and `--draft-tokens` say.
pub fn limits(options: &DraftingOptions) -> DraftOptions {
    let tokens = match options.draft_tokens {
        AutoOr::Auto => None,
        AutoOr::N(n) => Some(n),
    };
    DraftOptions { tree: options.draft_tree, tokens }
}

/// Saves what one of the drafters of [`of_text`] learnt, and what passes cost.
pub fn keep_shared(drafter: &dyn Drafter, shared: &Shared, passes: Passes, file: &CostFile, ui: &Ui) {
    if let Err(why) = drafter.save() {
        ui.note(format!("the draft memory was not saved: {why:#}"));
    }
    let identity = spelled(WITHOUT_MODEL);
    let habits = passes.habits.get(&identity).cloned().unwrap_or_default();
    let figures = Figures { costs: Some(shared.costs().clone()), habits, ..Figures::default() };
    if let Err(why) = file.save(passes, &identity, &figures) {
        ui.detail(1, format!("the costs of passes were not saved: {why:#}"));
    }
}

/// Threads of `most` for a draft model of so many bytes, `beside` a target that does not need the processor.
fn threads(bytes: u64, beside: bool, most: usize) -> usize {
    if beside && bytes <= SMALL { most.min(FEW) } else { most }
}

/// Whether drafts and target keep out of each other's way: a driver on the processor computes where the drafts do.
fn works_beside(target: Option<&DeviceInfo>, draft: Option<&DeviceInfo>) -> bool {
    target.is_some_and(|t| !t.is_cpu && draft.is_none_or(|d| d.index != t.index))
}

/// The device that the draft model runs on, as `--device` would have it.
///
/// Under `auto` the processor, which is free while the target's device works, unless the model is large enough that the processor
/// reads it slowly and a discrete GPU has room for all of it beside the target.
fn place(options: &DraftingOptions, weights: &Weights, run: &RunOptions, context: usize) -> Result<String> {
    match options.draft_device.as_str() {
        "" | "auto" => {
            let task = Task { weights, context, kv: kv_format(weights, run.kv)?, sequences: 1, npu: false };
            let gpu = placement::roomy_gpu(&task)?;
            Ok(gpu.map_or("cpu".into(), |index| format!("vulkan:{index}")))
        }
        named => {
            named.parse::<placement::Device>().context("--draft-device")?;
            Ok(named.to_owned())
        }
    }
}

/// Why one model's guesses mean nothing to the other.
pub fn mismatch(target: &Tokenizer, draft: &Tokenizer) -> Option<String> {
    (!target.agrees_with(draft)).then(|| {
        let (a, b) = (target.vocab(), draft.vocab());
        if a == b { "its tokenizer differs".into() } else { format!("its tokenizer has {b} tokens, the target's {a}") }
    })
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
