//! Gemma 3's forward pass, written once as a dispatch list.
//!
//! Per layer: norm, qkv, rope, attention, o, norm, gate and up, down. The norm after one block and
//! the norm before the next are one dispatch, since both work row by row on the residual stream,
//! which stays in f32 (Gemma 3's peaks near 7e5).

use super::{Config, Role, Weights};
use crate::compute::reference::MAX_HEAD_DIM;
use crate::compute::{
    Act, ActFormat, Attention, Best, BufferId, Commit, Embed, Executor, GateUp, KvFormat, KvLayer,
    Linear, LinearJob, LoadJob, Norm, Op, PageRange, Part, Plan, PlanId, Prepare, Rope, RowSet,
    StepLayout, WeightId, best,
};
use crate::error::Fault;
use crate::kv::{PAGE, Pages};
use crate::tensor::{Format, Matrix};
use crate::util::threads;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, sync_channel};

/// A model loaded into an executor, ready to run.
pub struct Forward {
    pub config: Config,
    pub layout: StepLayout,
    /// u32, see [`StepLayout`]
    pub step: BufferId,
    /// Angles of the sliding-window layers, then of the global ones: f32 `[max_rows, 2, head_dim /
    /// 2]` each
    pub rope: [BufferId; 2],
    /// f32 `[max_rows, dim]`: final-norm hidden states of the selected rows
    pub hidden: BufferId,
    /// f32 `[max_rows, vocab]`: logits of the selected rows
    pub logits: BufferId,
    pub kv: Vec<KvLayer>,
    /// The page tables of the step: layers that keep equally many pages share one of them
    pub tables: Vec<PageTable>,
    /// Bytes of each layer's cache and scratch rows.
    pub kv_bytes: Vec<u64>,
    /// Scores the step's rows.
    pub pass: PlanId,
    /// The same, and lists of the largest logits where the executor is for it.
    pub pass_with_best: Option<PlanId>,
    /// u32 `[max_rows, best::WORDS]`
    pub best: Option<BufferId>,
    /// Scores nothing: writes scratch keys and values only.
    pub pass_without_logits: PlanId,
    pub commit: PlanId,
}

/// What the caller decides.
#[derive(Clone, Copy, Debug)]
pub struct ForwardOptions {
    /// Positions to make room for.
    pub context: usize,
    pub kv: KvFormat,
    /// The most rows of one pass; rounded up to whole vectors.
    pub max_rows: usize,
    /// Sequences, each with room for `context` positions.
    pub sequences: usize,
    /// Pages beside theirs.
    pub spare: SparePages,
}

/// Pages beside those that all sequences hold when they are full: for prefixes that outlive their
/// sequences. Without any, prefixes hold what sequences leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SparePages {
    /// Of the layers that keep all positions
    pub global: usize,
    /// Of the sliding-window layers
    pub local: usize,
}

impl SparePages {
    /// As many as so many bytes hold, in the proportion in which prefixes take them: of each text of
    /// half the context, one behind its prompt and one behind its answer, windows apart.
    pub fn within(bytes: u64, config: &Config, kv: KvFormat, context: usize) -> SparePages {
        let globals = (0..config.n_layers).filter(|layer| config.is_global(*layer)).count();
        let of_a_layer = 2 * PAGE * config.n_kv_heads * kv.head_bytes(config.head_dim);
        let global = (context / 2).div_ceil(PAGE).max(1);
        let local = global.min(2 * config.window.div_ceil(PAGE));
        let of_a_text = (globals * global + (config.n_layers - globals) * local) * of_a_layer;
        let texts = bytes as f64 / of_a_text as f64;
        let pages = |each: usize| (texts * each as f64) as usize;
        SparePages { global: pages(global), local: pages(local) }
    }
}

/// Which pages each sequence has in some of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTable {
    pub pages: Pages,
    /// Pages that there are
    pub all_pages: usize,
    /// Where it begins among the step's tables: `[sequences, pages.count]`
    pub at: usize,
}

/// The tables that a model needs: of its global layers and of its sliding-window layers, where it
/// has such.
fn tables(config: &Config, options: ForwardOptions, max_rows: usize) -> Vec<PageTable> {
    let mut tables: Vec<PageTable> = Vec::new();
    for (is_global, spare) in [(true, options.spare.global), (false, options.spare.local)] {
        if (0..config.n_layers).any(|layer| config.is_global(layer) == is_global) {
            let window = (!is_global).then_some(config.window);
            let pages = Pages::for_layer(options.context, max_rows, window);
            let at = tables.last().map_or(0, |t| t.at + options.sequences * t.pages.count);
            let all_pages = options.sequences * pages.count + spare;
            tables.push(PageTable { pages, all_pages, at });
        }
    }
    tables
}

/// Loads the weights and records the plans.
pub fn load(
    weights: &Weights,
    exec: &mut dyn Executor,
    options: ForwardOptions,
) -> Result<Forward> {
    if exec.caps().is_dry {
        return build(weights, exec, options, Matrices::Shapes);
    }
    let unpacks =
        |exec: &dyn Executor, role, layer| exec.storage(part(weights, role, layer)).unpacks;
    let matrices = weights.roles().into_iter().filter(|(role, _)| role.is_matrix());
    let converted: Vec<_> =
        matrices.filter(|(role, layer)| !unpacks(exec, *role, *layer)).collect();
    // Matrices are read, and converted where a file has them in another form, while the ones before
    // them are taken by the executor.
    std::thread::scope(|scope| {
        let (send, ahead) = sync_channel(AHEAD);
        let convert = move || {
            for (role, layer) in converted {
                if send.send((role, layer, weights.matrix(role, layer))).is_err() {
                    return; // Who waited for matrices has given up.
                }
            }
        };
        let matrices = match threads::start(scope, convert) {
            Ok(_) => Matrices::Ahead(ahead),
            Err(_) => Matrices::Here,
        };
        build(weights, exec, options, matrices)
    })
}

fn build<'a>(
    weights: &'a Weights,
    exec: &'a mut dyn Executor,
    options: ForwardOptions,
    matrices: Matrices<'a>,
) -> Result<Forward> {
    let config = weights.config().clone();
    let max_rows = options.max_rows.next_multiple_of(16);
    let tables = tables(&config, options, max_rows);
    let entries = tables.iter().map(|t| options.sequences * t.pages.count).sum();
    let layout = StepLayout { max_rows, tables: entries };
    let mut b =
        Builder { weights, exec, matrices, loaded: HashMap::new(), layout, acts: HashMap::new() };
    if !matches!(b.matrices, Matrices::Shapes) {
        b.load_stored()?;
    }
    let step = b.exec.alloc("step", layout.words() * 4)?;
    let rope = [b.rows("rope local", config.head_dim)?, b.rows("rope global", config.head_dim)?];
    let (kv, kv_bytes) = b.kv(&config, &tables, options.kv)?;
    let hidden = b.rows("hidden", config.dim)?;
    let logits = b.rows("logits", config.vocab)?;
    let (body, tail) = b.pass(&config, &kv, rope, hidden, logits)?;
    let mut whole = body.clone();
    whole.dispatches.extend(tail.dispatches);
    let mut best = None;
    let mut with_best = whole.clone();
    if b.exec.caps().lists_best {
        let maxima = b.rows("chunk maxima", best::CHUNKS)?;
        let lists = b.rows("best logits", best::WORDS)?;
        let op = Best { logits, vocab: config.vocab, maxima, lists };
        with_best.push("best", None, Op::Best(op));
        best = Some(lists);
    }
    let mut commit = Plan::default();
    commit.push("commit", None, Op::Commit(Commit { layers: kv.clone() }));
    Ok(Forward {
        pass_with_best: best.map(|_| b.exec.record(with_best, step, layout)).transpose()?,
        best,
        pass: b.exec.record(whole, step, layout)?,
        pass_without_logits: b.exec.record(body, step, layout)?,
        commit: b.exec.record(commit, step, layout)?,
        config,
        layout,
        step,
        rope,
        hidden,
        logits,
        kv,
        tables,
        kv_bytes,
    })
}

/// Matrices made ahead, beside the one that is being loaded.
const AHEAD: usize = 1;

/// What a matrix is called in errors.
fn label(role: Role, layer: usize) -> String {
    format!("{role:?} {layer}")
}

fn part(weights: &Weights, role: Role, layer: usize) -> Part {
    match role {
        Role::Embed if weights.has_own_head() => Part::Embedding,
        Role::Embed | Role::Head => Part::Head,
        _ => Part::Layer(layer as u16),
    }
}

/// Where matrices come from that the executor does not unpack itself.
enum Matrices<'a> {
    /// A dry run wants their shapes only.
    Shapes,
    /// A thread reads them before they are asked for.
    Ahead(Receiver<(Role, usize, Result<Matrix<'a>>)>),
    /// Read when they are asked for.
    Here,
}

struct Builder<'a> {
    weights: &'a Weights,
    exec: &'a mut dyn Executor,
    /// Matrices that the executor has unpacked itself, with their format.
    loaded: HashMap<(Role, usize), (WeightId, Format)>,
    matrices: Matrices<'a>,
    layout: StepLayout,
    /// One set of buffers per kind of linear input: dispatches use them one after the other.
    acts: HashMap<(ActFormat, usize), Act>,
}

impl Builder<'_> {
    /// An f32 buffer of `[max_rows, cols]`.
    fn rows(&mut self, label: &str, cols: usize) -> Result<BufferId> {
        self.exec.alloc(label, self.layout.max_rows * cols * 4)
    }

    /// Has the executor load what it unpacks itself.
    fn load_stored(&mut self) -> Result<()> {
        let roles = self.weights.roles().into_iter().filter(|(role, _)| role.is_matrix());
        let (mut jobs, mut places) = (Vec::new(), Vec::new());
        for (role, layer) in roles {
            let part = part(self.weights, role, layer);
            if self.exec.storage(part).unpacks {
                let matrix = self.weights.stored(role, layer)?;
                places.push(((role, layer), matrix.format));
                jobs.push(LoadJob { label: label(role, layer), part, matrix });
            }
        }
        if jobs.is_empty() {
            return Ok(());
        }
        let ids = self.exec.load_stored(jobs)?;
        self.loaded = places
            .into_iter()
            .zip(ids)
            .map(|((place, format), id)| (place, (id, format)))
            .collect();
        Ok(())
    }

    /// Loads a matrix; the format decides what its input must look like.
    fn matrix(&mut self, role: Role, layer: usize) -> Result<(WeightId, ActFormat, usize)> {
        if let Some((id, format)) = self.loaded.get(&(role, layer)) {
            let [_, cols] = role.shape(self.weights.config());
            return Ok((*id, ActFormat::for_weights(*format), cols));
        }
        let matrix = match &self.matrices {
            Matrices::Shapes => self.weights.shape(role, layer)?,
            Matrices::Here => self.weights.matrix(role, layer)?,
            Matrices::Ahead(ahead) => {
                let (next_role, next_layer, matrix) =
                    ahead.recv().context("all matrices were taken")?;
                assert_eq!(
                    (next_role, next_layer),
                    (role, layer),
                    "matrices are asked for in the order of Weights::roles"
                );
                matrix?
            }
        };
        let label = label(role, layer);
        let id = self
            .exec
            .load(&label, part(self.weights, role, layer), &matrix)
            .with_context(|| format!("loading {label}"))?;
        let (format, cols) = (ActFormat::for_weights(matrix.format), matrix.cols);
        self.weights.recycle(matrix);
        if !matches!(self.matrices, Matrices::Shapes) {
            self.weights.count(role, layer)?;
        }
        Ok((id, format, cols))
    }

    fn vector(&mut self, role: Role, layer: usize) -> Result<BufferId> {
        let id = self.exec.alloc("norm", role.shape(self.weights.config())[1] * 4)?;
        if !self.exec.caps().is_dry {
            self.exec.write(id, 0, bytemuck::cast_slice(&self.weights.vector(role, layer)?))?;
        }
        Ok(id)
    }

    /// Prepared activations of this kind; `None` as buffers means "read the f32 input as it is".
    fn act(&mut self, format: ActFormat, cols: usize, input: BufferId) -> Result<Act> {
        if !format.int8 && !format.hadamard {
            return Ok(Act { format, cols, values: input, scales: input, sums: input });
        }
        if let Some(act) = self.acts.get(&(format, cols)) {
            return Ok(*act);
        }
        let (width, groups) = (if format.int8 { 1 } else { 4 }, format.groups(cols).max(1));
        let rows = self.layout.max_rows;
        let act = Act {
            format,
            cols,
            values: self.exec.alloc("activations", rows * cols * width)?,
            scales: self.exec.alloc("activation scales", rows * groups * 4)?,
            sums: self.exec.alloc("activation sums", rows * groups * 4)?,
        };
        self.acts.insert((format, cols), act);
        Ok(act)
    }

    /// The preparations that `input` needs for these formats, each once; returns the activations in
    /// the formats' order.
    fn prepare<const N: usize>(
        &mut self,
        plan: &mut Plan,
        label: &'static str,
        layer: Option<u16>,
        input: BufferId,
        cols: usize,
        formats: [ActFormat; N],
        rows: RowSet,
    ) -> Result<[Act; N]> {
        let mut acts = Vec::with_capacity(N);
        for format in formats {
            let act = self.act(format, cols, input)?;
            if act.values != input && !acts.contains(&act) {
                plan.push(label, layer, Op::Prepare(Prepare { input, act, rows }));
            }
            acts.push(act);
        }
        Ok(std::array::from_fn(|i| acts[i]))
    }

    fn kv(
        &mut self,
        config: &Config,
        tables: &[PageTable],
        format: KvFormat,
    ) -> Result<(Vec<KvLayer>, Vec<u64>)> {
        let (heads, dim, bytes) =
            (config.n_kv_heads, config.head_dim, format.head_bytes(config.head_dim));
        if format == KvFormat::Q8 && !(dim.is_multiple_of(16) && dim <= MAX_HEAD_DIM) {
            let what = format!(
                "int8 keys and values take heads of up to {MAX_HEAD_DIM} channels, a multiple of \
                    16, not {dim}"
            );
            return Err(Fault::model(what).help("use --kv f16").into());
        }
        let mut sizes = Vec::with_capacity(config.n_layers);
        let mut layers = Vec::with_capacity(config.n_layers);
        for layer in 0..config.n_layers {
            let is_own = |t: &&PageTable| t.pages.window.is_none() == config.is_global(layer);
            let table = tables.iter().find(is_own).expect("there is one of each kind of layers");
            let cache = table.all_pages * PAGE * heads * bytes;
            let scratch = self.layout.max_rows * heads * bytes;
            sizes.push(2 * (cache + scratch) as u64);
            layers.push(KvLayer {
                format,
                n_kv_heads: heads,
                head_dim: dim,
                pages: table.pages,
                all_pages: table.all_pages,
                table: table.at,
                key_block: (self.exec.storage(Part::Layer(layer as u16)).key_block)(format),
                k: self.exec.alloc("keys", cache)?,
                v: self.exec.alloc("values", cache)?,
                scratch_k: self.exec.alloc("scratch keys", scratch)?,
                scratch_v: self.exec.alloc("scratch values", scratch)?,
            });
        }
        Ok((layers, sizes))
    }

    /// The layers, and the head that follows when logits are wanted.
    fn pass(
        &mut self,
        c: &Config,
        kv: &[KvLayer],
        rope: [BufferId; 2],
        hidden: BufferId,
        logits: BufferId,
    ) -> Result<(Plan, Plan)> {
        let (q_cols, kv_cols) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        let x = self.rows("residual", c.dim)?;
        let z = self.rows("normed", c.dim)?;
        let y = self.rows("block output", c.dim)?;
        let q = self.rows("queries", q_cols)?;
        let k = self.rows("new keys", kv_cols)?;
        let v = self.rows("new values", kv_cols)?;
        let attended = self.rows("attended", q_cols)?;
        let ffn = self.rows("ffn", c.ffn_dim)?;
        let (table, table_act, _) = self.matrix(Role::Embed, 0)?;
        let norm =
            |add, w, out, rows| Op::Norm(Norm { x, add, w, eps: c.eps, dim: c.dim, out, rows });
        let all = RowSet::All;

        let mut plan = Plan::default();
        plan.push("embed", None, Op::Embed(Embed { table, scale: c.embed_scale, out: x }));
        let mut before = None; // what the previous block adds to the residual, and its norm
        for (i, &kv) in kv.iter().enumerate() {
            let layer = Some(i as u16);
            let w = self.vector(Role::InputNorm, i)?;
            plan.push("norm", layer, norm(before, w, z, all));
            let (wq, fq, _) = self.matrix(Role::Q, i)?;
            let (wk, fk, _) = self.matrix(Role::K, i)?;
            let (wv, fv, _) = self.matrix(Role::V, i)?;
            let [aq, ak, av] =
                self.prepare(&mut plan, "quantise", layer, z, c.dim, [fq, fk, fv], all)?;
            let jobs = vec![
                LinearJob { weight: wq, act: aq, out: q },
                LinearJob { weight: wk, act: ak, out: k },
                LinearJob { weight: wv, act: av, out: v },
            ];
            plan.push("qkv", layer, Op::Linear(Linear { jobs, rows: all }));
            let op = Rope {
                q,
                k,
                v,
                q_norm: self.vector(Role::QNorm, i)?,
                k_norm: self.vector(Role::KNorm, i)?,
                eps: c.eps,
                n_heads: c.n_heads,
                rope_table: rope[c.is_global(i) as usize],
                kv,
            };
            plan.push("rope", layer, Op::Rope(op));
            let (n_heads, scale, range) = (c.n_heads, c.query_scale, PageRange::All);
            let op = Attention { q, out: attended, n_heads, scale, kv, range };
            plan.push("attention", layer, Op::Attention(op));
            let (wo, fo, _) = self.matrix(Role::O, i)?;
            let [act] = self.prepare(&mut plan, "quantise", layer, attended, q_cols, [fo], all)?;
            let jobs = vec![LinearJob { weight: wo, act, out: y }];
            plan.push("o", layer, Op::Linear(Linear { jobs, rows: all }));
            let add = Some((y, self.vector(Role::PostAttnNorm, i)?));
            let w = self.vector(Role::PreFfnNorm, i)?;
            plan.push("norm", layer, norm(add, w, z, all));
            let (gate, fg, _) = self.matrix(Role::Gate, i)?;
            let (up, fu, _) = self.matrix(Role::Up, i)?;
            let [act_gate, act_up] =
                self.prepare(&mut plan, "quantise", layer, z, c.dim, [fg, fu], all)?;
            let op = GateUp { act_gate, gate, act_up, up, out: ffn };
            plan.push("gate_up", layer, Op::GateUp(op));
            let (down, fd, _) = self.matrix(Role::Down, i)?;
            let [act] = self.prepare(&mut plan, "quantise", layer, ffn, c.ffn_dim, [fd], all)?;
            let jobs = vec![LinearJob { weight: down, act, out: y }];
            plan.push("down", layer, Op::Linear(Linear { jobs, rows: all }));
            before = Some((y, self.vector(Role::PostFfnNorm, i)?));
        }

        let mut tail = Plan::default();
        let w = self.vector(Role::FinalNorm, 0)?;
        tail.push("norm", None, norm(before, w, hidden, RowSet::Selected));
        let (head, head_act) = match self.weights.has_own_head() {
            true => self.matrix(Role::Head, 0).map(|(id, act, _)| (id, act))?,
            false => (table, table_act),
        };
        let [act] =
            self.prepare(&mut tail, "quantise", None, hidden, c.dim, [head_act], RowSet::Selected)?;
        let jobs = vec![LinearJob { weight: head, act, out: logits }];
        tail.push("head", None, Op::Linear(Linear { jobs, rows: RowSet::Selected }));
        Ok((plan, tail))
    }
}
