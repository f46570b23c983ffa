//! The forward pass of a model as a dispatch list on an executor.
//!
//! Start at [`load`]. `builder` loads tensors, `pass` lowers the steps of each layer. [`assistant`]
//! adds a draft model that reads the model's caches.

pub mod assistant;
mod builder;
mod mixture;
mod pass;

use super::{Angles, Config, Role, RopeSpec, Weights};
use anyhow::Result;
use assistant::AssistantForward;
use builder::Builder;
use gemma_base::compute::reference::MAX_HEAD_DIM;
use gemma_base::compute::{
    Best, BufferId, Commit, Executor, KvFormat, KvLayer, Op, Part, Plan, PlanId, StepLayout,
    WeightId, best,
};
use gemma_base::error::Fault;
use gemma_base::kv::{PAGE, Pages};

/// A model loaded into an executor, ready to run.
pub struct Forward {
    pub config: Config,
    pub layout: StepLayout,
    /// u32, see [`StepLayout`]
    pub step: BufferId,
    pub ropes: Vec<RopeTable>,
    /// f32 `[max_rows, dim]`: embeddings of a pass. The caller writes the rows of images.
    pub embedded: BufferId,
    /// f32 `[max_rows, dim]`: final-norm hidden states of the selected rows
    pub hidden: BufferId,
    /// f32 `[scored_rows, vocab]`: logits of the selected rows
    pub logits: BufferId,
    /// The most rows of a pass that have logits.
    pub scored_rows: usize,
    pub kv: Vec<KvLayer>,
    /// Page tables of the step; layers with equally many pages share one
    pub tables: Vec<PageTable>,
    /// Bytes of each layer's cache and scratch rows.
    pub kv_bytes: Vec<u64>,
    /// Scores the step's rows.
    pub pass: PlanId,
    /// Like `pass`, with lists of the largest logits, if the executor uses them.
    pub pass_with_best: Option<PlanId>,
    /// Buffers of the lists of the largest logits, if the executor uses them.
    pub best: Option<Best>,
    /// The embedding table
    pub table: WeightId,
    /// Computes no logits: only writes keys and values to scratch.
    pub pass_without_logits: PlanId,
    pub commit: PlanId,
    pub assistant: Option<AssistantForward>,
}

/// Options of the caller.
#[derive(Clone, Copy, Debug)]
pub struct ForwardOptions {
    /// Positions per sequence.
    pub context: usize,
    pub kv: KvFormat,
    /// The most rows of a pass of tokens, and the most rows with logits; rounded up to whole
    /// vectors.
    pub max_rows: usize,
    /// Sequences, each with room for `context` positions.
    pub sequences: usize,
    /// Pages in addition to those of the sequences.
    pub spare: SparePages,
}

/// Pages in addition to those of all full sequences, for prefixes that outlive their sequences.
///
/// Without spare pages, prefixes use the pages that sequences leave free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SparePages {
    /// Per layer that keeps all positions
    pub global: usize,
    /// Per sliding-window layer
    pub local: usize,
}

impl SparePages {
    /// Returns the spare pages that fit in `bytes`, in the proportion that prefixes need.
    ///
    /// Assumes texts of half the context, with one prefix after the prompt and one after the
    /// answer, plus their windows.
    pub fn within(bytes: u64, config: &Config, kv: KvFormat, context: usize) -> SparePages {
        let global = (context / 2).div_ceil(PAGE).max(1);
        let local = global.min(2 * config.window().unwrap_or(0).div_ceil(PAGE));
        let text_bytes: usize = config
            .layers
            .iter()
            .map(|layer| {
                let page = 2 * PAGE * layer.n_kv_heads * kv.head_bytes(layer.head_dim);
                page * if layer.is_global() { global } else { local }
            })
            .sum();
        let texts = bytes as f64 / text_bytes as f64;
        let pages = |each: usize| (texts * each as f64) as usize;
        SparePages { global: pages(global), local: pages(local) }
    }
}

/// Rotation angles of the rows of a pass, for layers with the same rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeTable {
    pub rope: RopeSpec,
    pub head_dim: usize,
    /// f32 `[max_rows, 2, head_dim / 2]`
    pub buffer: BufferId,
}

impl RopeTable {
    /// Returns the angles that the table needs.
    pub fn angles(&self) -> Angles {
        Angles::new(self.rope, self.head_dim)
    }
}

/// A table of the pages of each sequence in layers with the same window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTable {
    pub pages: Pages,
    /// Pages in total
    pub all_pages: usize,
    /// Offset in the step's tables: `[sequences, pages.count]`
    pub at: usize,
}

/// Returns the page tables of a model: one for its global layers, and one per window.
fn tables(config: &Config, options: ForwardOptions, max_rows: usize) -> Vec<PageTable> {
    let mut windows: Vec<Option<usize>> = config.layers.iter().map(|layer| layer.window).collect();
    windows.sort_unstable(); // Global layers first.
    windows.dedup();
    let mut tables: Vec<PageTable> = Vec::new();
    for window in windows {
        let spare = if window.is_none() { options.spare.global } else { options.spare.local };
        let pages = Pages::for_layer(options.context, max_rows, window);
        let at = tables.last().map_or(0, |t| t.at + options.sequences * t.pages.count);
        let all_pages = options.sequences * pages.count + spare;
        tables.push(PageTable { pages, all_pages, at });
    }
    tables
}

/// Loads the weights and records the plans.
pub fn load(
    weights: &Weights,
    exec: &mut dyn Executor,
    options: ForwardOptions,
) -> Result<Forward> {
    let config = weights.config().clone();
    if config.backbone.is_some() {
        let what = "the model is an assistant: it drafts from the cache of another model";
        return Err(Fault::model(what)
            .help("give the other model with --model, and this one with --draft")
            .into());
    }
    let scored_rows = options.max_rows.next_multiple_of(16);
    // All rows of an image are in one pass.
    let image_rows = weights.images().map_or(0, |images| images.most_rows());
    let max_rows = scored_rows.max(image_rows.next_multiple_of(16));
    let tables = tables(&config, options, max_rows);
    let entries = tables.iter().map(|t| options.sequences * t.pages.count).sum();
    let layout = StepLayout { max_rows, tables: entries };
    let mut b = Builder::new(weights, exec, layout, None)?;
    let step = b.exec.alloc("step", layout.words() * 4)?;
    let ropes = ropes(&mut b, &config)?;
    let (kv, kv_bytes) = caches(&mut b, &config, &tables, options.kv)?;
    let hidden = b.rows("hidden", config.dim)?;
    let logits = b.exec.alloc("logits", scored_rows * config.vocab * 4)?;
    let pass::PassPlans { body, tail, embedded } =
        pass::pass(&mut b, &config, &kv, &ropes, hidden, logits)?;
    let mut whole = body.clone();
    whole.dispatches.extend(tail.dispatches);
    let mut best = None;
    let mut with_best = whole.clone();
    if b.exec.caps().lists_best {
        let maxima = b.rows("chunk maxima", best::CHUNKS)?;
        let lists = b.rows("best logits", best::WORDS)?;
        let op = Best { logits, vocab: config.vocab, maxima, lists };
        with_best.push("best", None, Op::Best(op));
        best = Some(op);
    }
    let mut commit = Plan::default();
    commit.push("commit", None, Op::Commit(Commit { layers: kv.clone() }));
    let mut model = Forward {
        pass_with_best: best.map(|_| b.exec.record(with_best, step, layout)).transpose()?,
        best,
        table: b.matrix(Role::Embed, 0).0,
        pass: b.exec.record(whole, step, layout)?,
        pass_without_logits: b.exec.record(body, step, layout)?,
        commit: b.exec.record(commit, step, layout)?,
        config,
        layout,
        step,
        ropes,
        embedded,
        hidden,
        logits,
        scored_rows,
        kv,
        tables,
        kv_bytes,
        assistant: None,
    };
    if let Some(weights) = weights.assistant() {
        model.assistant = Some(assistant::load(weights, &model, b.exec)?);
    }
    Ok(model)
}

/// Allocates a table of angles for each kind of rotation.
fn ropes(b: &mut Builder<'_>, config: &Config) -> Result<Vec<RopeTable>> {
    let mut ropes: Vec<RopeTable> = Vec::new();
    for layer in &config.layers {
        let (rope, head_dim) = (layer.rope, layer.head_dim);
        if !ropes.iter().any(|t| (t.rope, t.head_dim) == (rope, head_dim)) {
            ropes.push(RopeTable { rope, head_dim, buffer: b.rows("rope angles", head_dim)? });
        }
    }
    Ok(ropes)
}

/// Allocates the KV caches, and returns the bytes of each layer's.
fn caches(
    b: &mut Builder<'_>,
    config: &Config,
    tables: &[PageTable],
    format: KvFormat,
) -> Result<(Vec<KvLayer>, Vec<u64>)> {
    let mut sizes = Vec::with_capacity(config.layers.len());
    let mut layers = Vec::with_capacity(config.layers.len());
    for (i, spec) in config.layers.iter().enumerate() {
        let (heads, dim) = (spec.n_kv_heads, spec.head_dim);
        if format == KvFormat::Q8 && !(dim.is_multiple_of(16) && dim <= MAX_HEAD_DIM) {
            let what = format!(
                "int8 keys and values support heads of up to {MAX_HEAD_DIM} channels, \
                    a multiple of 16, not {dim}"
            );
            return Err(Fault::model(what).help("use --kv f16").into());
        }
        let bytes = heads * format.head_bytes(dim);
        let table = tables.iter().find(|t| t.pages.window == spec.window);
        let table = table.expect("there is one for each window");
        let (cache, scratch) = (table.all_pages * PAGE * bytes, b.layout.max_rows * bytes);
        sizes.push(2 * (cache + scratch) as u64);
        layers.push(KvLayer {
            format,
            n_kv_heads: heads,
            head_dim: dim,
            pages: table.pages,
            all_pages: table.all_pages,
            table: table.at,
            key_block: b.exec.key_block(Part::Layer(i as u16))(format),
            k: b.exec.alloc("keys", cache)?,
            v: b.exec.alloc("values", cache)?,
            scratch_k: b.exec.alloc("scratch keys", scratch)?,
            scratch_v: b.exec.alloc("scratch values", scratch)?,
        });
    }
    Ok((layers, sizes))
}
