//! Which drafter: what `--draft` says, as far as the target's tokenizer allows.

use super::options::DraftingOptions;
use crate::checkpoint::Checkpoint;
use crate::cli::args::{AutoOr, GpuLayers, RunOptions};
use crate::cli::model::{Source, find};
use crate::cli::npu::Npu;
use crate::cli::session::{Model, load, tokenizer_of};
use crate::cli::ui::Ui;
use crate::compute::cpu::Pool;
use crate::draft::{CostCurve, DraftOptions, Drafter, Lm, Memory, NoDraft, Paced, Stack, Table};
use crate::engine::{Engine, Rows, Scores, TokenTree};
use crate::error::Fault;
use crate::gemma::{Tokenizer, Weights};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::time::Instant;

/// A drafter, and why it is less than was hoped for.
pub struct Drafting {
    pub drafter: Box<dyn Drafter>,
    pub disabled: Option<String>,
}

/// Builds the drafter for a target whose passes take as long as `curve` says; `remembers` where `--draft-memory auto` is on.
#[allow(clippy::too_many_arguments)]
pub fn build(
    options: &DraftingOptions,
    model: &Model,
    tokenizer: &Tokenizer,
    run: &RunOptions,
    context: usize,
    curve: CostCurve,
    pool: &Arc<Pool>,
    remembers: bool,
    ui: &Ui,
) -> Result<Drafting> {
    let (mut lm, mut draft_identity) = (None, [0; 32]);
    let mut disabled = None;
    // The drafter works on the processor while the target's device is busy.
    let run = RunOptions { device: "cpu".into(), gpu_layers: GpuLayers::Auto, npu: Npu::Off, ..run.clone() };
    let mut add_model = |name: &'static str, checkpoint: Checkpoint| -> Result<()> {
        draft_identity = checkpoint.fingerprint()?;
        let weights = Weights::open(checkpoint)?;
        let context = context.min(weights.config().max_position);
        lm = Some(Lm::new(name, load(&weights, "draft model", &run, context, pool, ui)?.engine));
        Ok(())
    };
    match options.draft.as_str() {
        "off" => return Ok(Drafting { drafter: Box::new(NoDraft), disabled: Some("--draft off".into()) }),
        "ngram" => {}
        choice @ ("auto" | "bundled") => {
            let draft = crate::gemma::bundled::draft()?;
            match mismatch(tokenizer, &tokenizer_of(&draft)?) {
                None => add_model("model", draft)?,
                Some(why) if choice == "bundled" => {
                    let fault = Fault::model(format!("the bundled draft model cannot draft for {}: {why}", model.name));
                    return Err(fault.help("use --draft ngram, or --draft PATH with a small model of the same family").into());
                }
                Some(why) => {
                    let reason = format!("the bundled draft model is not used: {why}");
                    ui.note(format!("{reason}; drafting by n-grams alone"));
                    disabled = Some(reason);
                }
            }
        }
        path => {
            let checkpoint = draft_checkpoint(path)?.expect("a path names a model");
            if let Some(why) = mismatch(tokenizer, &tokenizer_of(&checkpoint)?) {
                let fault = Fault::model(format!("{path} cannot draft for {}: {why}", model.name));
                return Err(fault.help("a draft model needs the same tokens as the target").into());
            }
            add_model("model", checkpoint)?;
        }
    }
    let mut stack = Stack::new("mixed", lm, true, Some(Table::new()), options.mixing);
    if let Some(directory) = options.draft_memory.directory(remembers) {
        let target = [&model.checkpoint().fingerprint()?[..], &tokenizer.sha256()].concat();
        let memory = Memory::new(&directory, Sha256::digest(target).into(), draft_identity);
        if let Err(why) = stack.remember(memory) {
            ui.note(format!("draft memory: {why:#}"));
        }
    }
    let tokens = match options.draft_tokens {
        AutoOr::Auto => None,
        AutoOr::N(n) => Some(n),
    };
    let options = DraftOptions { tree: options.draft_tree, tokens };
    Ok(Drafting { drafter: Box::new(Paced::new(Box::new(stack), curve, options, true)), disabled })
}

/// The model that `--draft` names, if it does.
pub fn draft_checkpoint(draft: &str) -> Result<Option<Checkpoint>> {
    match draft {
        "off" | "ngram" => Ok(None),
        "auto" | "bundled" => Ok(Some(crate::gemma::bundled::draft()?)),
        path => {
            let shown = || format!("cannot draft with {path}");
            let Source::Directory(directory) = find(Some(path)).with_context(shown)? else { unreachable!("a name was given") };
            Checkpoint::open(&directory).and_then(crate::gemma::gguf::present).with_context(shown).map(Some)
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

/// Passes that take longer are not measured one by one: the first token would wait for it.
const PATIENCE: f32 = 0.03;

/// How long the engine's passes take by their rows; measured where that is quick, else scaled from one pass.
pub fn cost_curve(engine: &mut dyn Engine) -> Result<CostCurve> {
    let mut scores = Scores::default();
    let room = engine.context().saturating_sub(engine.position()).min(engine.max_rows());
    let mut pass = |rows: usize| -> Result<f32> {
        let start = Instant::now();
        engine.forward(&TokenTree::chain(&vec![0; rows]), Rows::All, &mut scores)?;
        Ok(start.elapsed().as_secs_f32())
    };
    pass(1)?; // touches every page once
    let one = pass(1)?.min(pass(1)?).max(1e-6);
    let guess = CostCurve::guess();
    let mut points = vec![(1, one)];
    for rows in [2usize, 4, 8, 16, 32] {
        // A short answer to a short prompt has room for fewer rows than that.
        let seconds = if one < PATIENCE && rows <= room { pass(rows)? } else { one * guess.cost(rows) / guess.cost(1) };
        points.push((rows, seconds.max(points[points.len() - 1].1)));
    }
    Ok(CostCurve::new(&points))
}
