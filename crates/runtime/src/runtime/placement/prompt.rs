//! Predicts the time to read a prompt, and the cost of draft rows, from their number of
//! multiplications. Their speed is measured with a small model of the same formats.

use super::Placement;
use super::measure::Task;
use crate::runtime::Listener;
use crate::runtime::devices::backends;
use anyhow::Result;
use gemma_base::compute::cpu::{CpuExecutor, CpuOptions, Isa, Pool};
use gemma_base::compute::{Executor, KvFormat};
use gemma_base::os::machine;
use gemma_base::tensor::{Format, Token};
use gemma_model::engine::planned::EngineOptions;
use gemma_model::engine::{Engine, EngineExt, PlannedEngine, Rows, Scores, TokenTree};
use gemma_model::models::{Config, Role, Weights};
use serde::Serialize;
use serde_json::json;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Length in tokens of the document for which reading times are predicted.
pub const DOCUMENT: usize = 4000;

/// Rows of a timed pass that reads a prompt.
const ROWS: usize = 128;
/// Row counts of timed passes that verify drafts, the first of them plain decoding.
pub const VERIFIED: [usize; 5] = [1, 2, 4, 8, 16];
/// Rounds of passes over these sizes in turn; the fastest of each size counts.
const ROUNDS: usize = 6;
/// Most bytes of weights in the small model. They should come from memory, like those of a real
/// model.
const MOST_BYTES: u64 = 64 << 20;
/// Tokens before the pass that measures attention.
const DEPTH: usize = 512;
/// Number of timed passes; the fastest counts.
const PASSES: usize = 5;

/// Predicted time to read a prompt of [`DOCUMENT`] tokens, or of the context's length if shorter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Reading {
    pub tokens: usize,
    pub seconds: f64,
    pub tokens_per_s: f64,
    /// Time of passes with [`VERIFIED`] rows, relative to one row.
    pub cost_of_rows: [f64; VERIFIED.len()],
}

/// Multiplications of a prompt in some layers: by weight format, and in attention.
#[derive(Clone, Debug, Default, PartialEq)]
struct PromptWork {
    linear: HashMap<Format, f64>,
    attention: f64,
}

impl PromptWork {
    /// Adds the multiplications of a row in the head.
    fn with_head(mut self, weights: &Weights) -> Result<PromptWork> {
        let role = if weights.has_own_head() { Role::Head } else { Role::Embed };
        let size = weights.tensor(role, 0).size();
        *self.linear.entry(weights.format(role, 0)?).or_default() += size as f64;
        Ok(self)
    }

    /// Counts the multiplications of a prompt of `tokens` tokens in the layers `layers`.
    fn of(weights: &Weights, layers: Range<usize>, tokens: usize) -> Result<PromptWork> {
        let config = weights.config();
        let mut work = PromptWork::default();
        for tensor in weights.matrices() {
            if tensor.role.is_layer() && layers.contains(&tensor.layer) {
                let format = weights.format(tensor.role, tensor.layer)?;
                // Each token only uses its chosen experts.
                let experts = config.experts.filter(|_| tensor.role.is_of_experts());
                let share = experts.map_or(1.0, |e| e.used as f64 / e.count as f64);
                let weights = tensor.size() as f64 * share;
                *work.linear.entry(format).or_default() += weights * tokens as f64;
            }
        }
        for layer in &config.layers[layers] {
            let window = layer.window.unwrap_or(tokens).min(tokens);
            // Each of the first `window` queries sees one key more than the one before; the others
            // see `window`.
            let seen = window * (window + 1) / 2 + (tokens - window) * window;
            work.attention += (2 * layer.query_width() * seen) as f64;
        }
        Ok(work)
    }
}

/// Multiplications per second of one device.
#[derive(Debug, Default)]
struct Rates {
    linear: HashMap<Format, f64>,
    attention: f64,
    /// Seconds per weight in passes of [`VERIFIED`] rows.
    rows: HashMap<Format, [f64; VERIFIED.len()]>,
}

impl Rates {
    /// Times small models on the executors that `place` creates.
    fn measure(
        formats: impl Iterator<Item = Format>,
        kv: KvFormat,
        place: &dyn Fn() -> Result<Box<dyn Executor>>,
    ) -> Result<Rates> {
        let mut rates = Rates::default();
        for format in formats {
            let mut small = Small::new([1024, 4096, 8], 1, format, kv, place()?)?;
            rates.linear.insert(format, ROWS as f64 * small.weights as f64 / small.seconds(ROWS)?);
            let of_layer = format.bytes(1, small.weights) as u64;
            let wanted = machine::last_level_cache().map_or(MOST_BYTES, |bytes| bytes / 2 * 3);
            let layers = wanted.min(MOST_BYTES).div_ceil(of_layer).max(1) as usize;
            let mut large = Small::new([1024, 4096, 8], layers, format, kv, place()?)?;
            rates.rows.insert(format, large.seconds_of_rows()?);
        }
        let mut small = Small::new([256, 256, 16], 1, Format::I8_ROW, kv, place()?)?;
        let shallow = small.seconds(ROWS)?;
        for _ in 0..DEPTH / ROWS {
            small.pass(ROWS)?;
            small.engine.commit(&[(0, &(0..ROWS as u32).collect::<Vec<_>>())])?;
        }
        let products = 2 * 16 * HEAD_DIM * ROWS * DEPTH;
        // The deep pass may measure faster than the shallow one if other programs ran. Attention is
        // then free.
        rates.attention = products as f64 / (small.seconds(ROWS)? - shallow).max(0.0);
        Ok(rates)
    }

    fn seconds(&self, work: &PromptWork) -> f64 {
        let linear: f64 = work.linear.iter().map(|(format, n)| n / self.linear[format]).sum();
        linear + work.attention / self.attention
    }

    /// Returns the seconds of passes with [`VERIFIED`] rows, for the work of one row.
    fn of_rows(&self, row: &PromptWork) -> [f64; VERIFIED.len()] {
        let of = |at| row.linear.iter().map(|(format, n)| n * self.rows[format][at]).sum();
        std::array::from_fn(of)
    }
}

/// Head dimension of the small models.
const HEAD_DIM: usize = 128;

/// A random model with few layers.
struct Small {
    engine: PlannedEngine,
    /// Number of weights in the layers' matrices.
    weights: usize,
    scores: Scores,
}

impl Small {
    /// Creates a model of `[dim, ffn_dim, n_heads]`, with half as many KV heads.
    fn new(
        [dim, ffn, heads]: [usize; 3],
        layers: usize,
        format: Format,
        kv: KvFormat,
        place: Box<dyn Executor>,
    ) -> Result<Small> {
        let config = json!({
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
            "hidden_size": dim, "intermediate_size": ffn, "num_hidden_layers": layers,
            "sliding_window_pattern": 1, "sliding_window": 1024, "num_attention_heads": heads,
            "num_key_value_heads": heads / 2, "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM, "vocab_size": 256, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "max_position_embeddings": 2048,
        });
        let table = |role| matches!(role, Role::Embed | Role::Head);
        let formats = |role| if table(role) { Format::I8_ROW } else { format };
        let weights = Weights::synthetic(Config::from_json(&config)?, formats, 1);
        let matrices = weights.matrices().filter(|tensor| tensor.role.is_layer());
        let of_layer = matrices.map(|tensor| tensor.size()).sum();
        let options = EngineOptions { context: DEPTH + ROWS, kv };
        Ok(Small {
            engine: PlannedEngine::new(&weights, place, options)?,
            weights: of_layer,
            scores: Scores::default(),
        })
    }

    /// Runs a pass of `rows` rows.
    fn pass(&mut self, rows: usize) -> Result<()> {
        let tokens: Vec<Token> = (0..rows as Token).collect();
        self.engine.forward(&TokenTree::chain(&tokens), Rows::Last, &mut self.scores)
    }

    /// Times passes of [`VERIFIED`] rows, in turns so that other programs affect all sizes equally.
    /// Returns seconds per weight.
    fn seconds_of_rows(&mut self) -> Result<[f64; VERIFIED.len()]> {
        let mut best = [f64::INFINITY; VERIFIED.len()];
        for round in 0..=ROUNDS {
            for (best, rows) in best.iter_mut().zip(VERIFIED) {
                let start = Instant::now();
                self.pass(rows)?;
                // The first passes find cold caches.
                if round > 0 {
                    *best = best.min(start.elapsed().as_secs_f64());
                }
            }
        }
        // A larger pass never takes less time. If it seems to, the smaller one lost a time slice.
        let mut least = f64::INFINITY;
        for seconds in best.iter_mut().rev() {
            least = least.min(*seconds);
            *seconds = least / self.weights as f64;
        }
        Ok(best)
    }

    /// Times one pass at the engine's current position, without committing it.
    fn seconds(&mut self, rows: usize) -> Result<f64> {
        // The first pass finds cold caches, and may compile a GPU's kernels.
        self.pass(rows)?;
        let mut best = f64::INFINITY;
        for _ in 0..PASSES {
            let start = Instant::now();
            self.pass(rows)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}

/// Predicts the time in which the placed model reads a document.
///
/// Returns `None` if a GPU has layers and `on_gpu` is missing, because timing a GPU takes seconds.
/// `on_gpu` receives a note about it.
pub fn reading(
    task: &Task<'_>,
    placement: &Placement,
    pool: &Arc<Pool>,
    isa: Option<Isa>,
    on_gpu: Option<&dyn Listener>,
) -> Result<Option<Reading>> {
    let (n_gpu, all) = (placement.layout.gpu.layers, task.layers());
    if n_gpu > 0 && on_gpu.is_none() {
        return Ok(None);
    }
    let tokens = DOCUMENT.min(task.weights.config().max_position);
    let host = || -> Result<Box<dyn Executor>> {
        Ok(Box::new(CpuExecutor::on(pool.clone(), CpuOptions { isa, ..CpuOptions::default() })))
    };
    let mut reading = Reading { tokens, ..Reading::default() };
    let mut add = |layers: Range<usize>, place: &dyn Fn() -> Result<Box<dyn Executor>>| {
        // The head is on the side of the first layer.
        let (is_first, weights) = (layers.start == 0, task.weights);
        let work = PromptWork::of(weights, layers.clone(), tokens)?;
        let row = PromptWork::of(weights, layers, 1)?;
        let row = if is_first { row.with_head(weights)? } else { row };
        let rates = Rates::measure(row.linear.keys().copied(), task.kv, place)?;
        reading.seconds += rates.seconds(&work);
        for (sum, more) in reading.cost_of_rows.iter_mut().zip(rates.of_rows(&row)) {
            *sum += more;
        }
        anyhow::Ok(())
    };
    if let (Some(device), Some(listener)) =
        (placement.device.as_ref().filter(|_| n_gpu > 0), on_gpu)
    {
        add(0..n_gpu, &|| backends::open(device, listener))?;
    }
    if n_gpu < all {
        add(n_gpu..all, &host)?;
    }
    reading.tokens_per_s = tokens as f64 / reading.seconds;
    let [one, ..] = reading.cost_of_rows;
    reading.cost_of_rows = reading.cost_of_rows.map(|seconds| seconds / one);
    Ok(Some(reading))
}

#[cfg(test)]
mod tests {
    use super::super::measure::Share;
    use super::*;
    use crate::runtime::model::shapes::{MadeUpFormats, Shape};

    fn weights(recipe: &str) -> Weights {
        Shape::M270.weights(&MadeUpFormats::of_recipe(recipe)).unwrap()
    }

    #[test]
    fn work_is_counted_by_format_and_window() {
        let weights = weights("q4_0");
        let c = weights.config();
        let (n, layer) = (c.layers.len(), c.layers[0]);
        let heads = layer.query_width() + layer.kv_width();
        let matrices = n * (2 * c.dim * heads + 3 * c.dim * c.ffn_dim);
        let work = PromptWork::of(&weights, 0..n, 1000).unwrap();
        assert_eq!(
            work.linear.into_iter().collect::<Vec<_>>(),
            [(Format::I4_G32, (1000 * matrices) as f64)]
        );
        // A window of 512: 512 queries see 1 to 512 keys, 488 see 512. In a global layer they see 1
        // to 1000.
        let globals = c.global_layers().len();
        let seen = globals * 500_500 + (n - globals) * (131_328 + 488 * 512);
        assert_eq!(work.attention, (2 * layer.query_width() * seen) as f64);
        // A row also passes through the head, which is the embedding table.
        let row = PromptWork::of(&weights, 0..n, 1).unwrap().with_head(&weights).unwrap();
        let (all, head) = (row.linear.values().sum::<f64>(), (c.vocab * c.dim) as f64);
        assert_eq!(all, matrices as f64 + head);
        // Layers on both sides add up.
        let [a, b] = [0..7, 7..n].map(|layers| PromptWork::of(&weights, layers, 1000).unwrap());
        assert_eq!(a.attention + b.attention, work.attention);
    }

    #[test]
    fn seconds_follow_from_work_and_rates() {
        let work = PromptWork {
            linear: [(Format::I4_G32, 6e9), (Format::BF16, 1e9)].into(),
            attention: 1e9,
        };
        let rates = Rates {
            linear: [(Format::I4_G32, 2e9), (Format::BF16, 5e8)].into(),
            attention: 1e9,
            rows: [(Format::I4_G32, [0.0, 0.0, 1e-9, 2e-9, 3e-9]), (Format::BF16, [1e-9; 5])]
                .into(),
        };
        assert_eq!(rates.seconds(&work), 6.0);
        assert_eq!(rates.of_rows(&work), [1.0, 1.0, 7.0, 13.0, 19.0]);
    }

    #[test]
    fn a_processor_is_timed_and_a_gpu_only_if_it_may_be() {
        let weights = weights("q4_0");
        let (kv, sequences) = (KvFormat::F16, 1);
        let task =
            Task { weights: &weights, context: 2048, kv, sequences, prefixes: 0, npu: false };
        let pool = Arc::new(Pool::new(2).unwrap());
        let here = Placement { device: None, layout: task.measure(None, 0).unwrap() };
        let found = reading(&task, &here, &pool, None, None).unwrap().unwrap();
        assert_eq!(found.tokens, DOCUMENT);
        assert!(
            found.seconds > 0.0
                && (found.tokens_per_s * found.seconds - DOCUMENT as f64).abs() < 1e-6
                && found.cost_of_rows.is_sorted()
                && found.cost_of_rows[0] == 1.0,
            "{found:?}"
        );
        let mut split = here.clone();
        split.layout.gpu = Share { layers: 4, ..Share::default() };
        assert_eq!(reading(&task, &split, &pool, None, None).unwrap(), None);
    }
}
