//! Reference engine: Gemma 3 with candle tensors, in f32.
//!
//! The engine shares no arithmetic with the kernels, the plan or the page cache: keys and values
//! are plain tensors, a tree is a mask, weights are dequantised, activations are never rounded.
//! Tests compare the planned engine and the golden vectors with it. Rows depend on the other rows
//! of their pass up to rounding, because candle's matrix product blocks by row count.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{D, Device, Tensor};
use gemma::compute::Reports;
use gemma::engine::{
    Assistant, Cached, Engine, EngineInfo, EngineMemory, EngineReport, Input, Output, PageCopy,
    Prefix, Rows, Scores, TokenTree,
};
use gemma::models::{Config, ExpertSpec, Image, LayerSpec, Role, RopeSpec, Weights};
use gemma::tensor::Token;
use std::sync::Arc;

/// Limit of rows per pass. The results do not depend on it.
const MAX_ROWS: usize = 256;

struct Layer {
    q: Tensor,              // [n_heads * head_dim, dim]
    k: Tensor,              // [n_kv_heads * head_dim, dim]
    v: Tensor,              // [n_kv_heads * head_dim, dim]
    o: Tensor,              // [dim, n_heads * head_dim]
    gate: Tensor,           // [ffn_dim, dim]
    up: Tensor,             // [ffn_dim, dim]
    down: Tensor,           // [dim, ffn_dim]
    q_norm: Tensor,         // [head_dim]
    k_norm: Tensor,         // [head_dim]
    input_norm: Tensor,     // [dim]
    post_attn_norm: Tensor, // [dim]
    pre_ffn_norm: Tensor,   // [dim]
    post_ffn_norm: Tensor,  // [dim]
    mixture: Option<Mixture>,
    scale: f64,
    spec: LayerSpec,
}

/// The experts of one layer.
struct Mixture {
    spec: ExpertSpec,
    router: Tensor,           // [count, dim]
    router_scale: Tensor,     // [dim]
    factors: Vec<f32>,        // [count]
    pre_norm: Tensor,         // [dim]
    gate_up: Vec<Tensor>,     // [2 * width, dim] each
    down: Vec<Tensor>,        // [dim, width] each
    post_shared_norm: Tensor, // [dim]
    post_expert_norm: Tensor, // [dim]
}

impl Mixture {
    fn new(
        weights: &Weights,
        i: usize,
        matrix: &mut dyn FnMut(Role, usize) -> Result<Tensor>,
    ) -> Result<Option<Mixture>> {
        let Some(spec) = weights.config().experts else { return Ok(None) };
        let vector =
            |role| -> Result<Tensor> { Ok(Tensor::new(weights.vector(role, i)?, &Device::Cpu)?) };
        Ok(Some(Mixture {
            spec,
            router: matrix(Role::Router, i)?,
            router_scale: vector(Role::RouterScale)?,
            factors: weights.vector(Role::ExpertFactors, i)?,
            pre_norm: vector(Role::PreExpertNorm)?,
            gate_up: matrix(Role::ExpertGateUp, i)?.chunk(spec.count, 0)?,
            down: matrix(Role::ExpertDown, i)?.chunk(spec.count, 0)?,
            post_shared_norm: vector(Role::PostSharedNorm)?,
            post_expert_norm: vector(Role::PostExpertNorm)?,
        }))
    }

    /// Returns the sum of the shared MLP's output and the experts of each row of the stream `x`.
    fn forward(&self, x: &Tensor, shared: &Tensor, eps: f64) -> Result<Tensor> {
        let dim = x.dim(1)?;
        let routed = (rms_norm(x, &self.router_scale, eps)? * (dim as f64).powf(-0.5))?;
        let scores: Vec<Vec<f32>> = linear(&routed, &self.router)?.to_vec2()?;
        let y = rms_norm(x, &self.pre_norm, eps)?;
        let mut rows = Vec::with_capacity(scores.len());
        for (r, scores) in scores.iter().enumerate() {
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            let chosen = &order[..self.spec.used];
            let total: f32 = chosen.iter().map(|e| (scores[*e] - scores[order[0]]).exp()).sum();
            let (row, mut sum) = (y.narrow(0, r, 1)?, Tensor::zeros_like(&y.narrow(0, r, 1)?)?);
            for &e in chosen {
                let weight = (scores[e] - scores[order[0]]).exp() / total * self.factors[e];
                let both = linear(&row, &self.gate_up[e])?.chunk(2, 1)?;
                let part = linear(&(both[0].gelu()? * &both[1])?, &self.down[e])?;
                sum = (sum + (part * weight as f64)?)?;
            }
            rows.push(sum);
        }
        let experts = rms_norm(&Tensor::cat(&rows, 0)?, &self.post_expert_norm, eps)?;
        Ok((rms_norm(shared, &self.post_shared_norm, eps)? + experts)?)
    }
}

/// Rotated keys and values of some positions, `[positions, n_kv_heads, head_dim]` each.
#[derive(Clone)]
struct KeysValues {
    k: Tensor,
    v: Tensor,
}

impl KeysValues {
    fn then(&self, other: &KeysValues) -> Result<KeysValues> {
        Ok(KeysValues {
            k: Tensor::cat(&[&self.k, &other.k], 0)?,
            v: Tensor::cat(&[&self.v, &other.v], 0)?,
        })
    }
}

/// A model and one timeline, computed the slow way.
pub struct ReferenceEngine {
    config: Config,
    embed: Tensor, // [vocab, dim]
    head: Tensor,  // [vocab, dim]
    final_norm: Tensor,
    layers: Vec<Layer>,
    cache: Vec<KeysValues>,   // [n_layers], committed positions
    scratch: Vec<KeysValues>, // [n_layers], nodes of the last tree
    last: TokenTree,
    /// Result of a started pass.
    scores: Option<Scores>,
    /// All committed tokens.
    tokens: Vec<Token>,
    info: EngineInfo,
    context: usize,
    parameters: usize,
    norms_values: bool,
}

impl ReferenceEngine {
    /// Dequantises all weights to f32.
    pub fn new(weights: &Weights, context: usize) -> Result<Self> {
        let config = weights.config().clone();
        let mut parameters = 0;
        let mut matrix = |role, layer| -> Result<Tensor> {
            let m = weights.matrix(role, layer)?;
            parameters += m.rows * m.cols;
            Ok(Tensor::from_vec(m.dequantize(), (m.rows, m.cols), &Device::Cpu)?)
        };
        let norm = |role, layer| -> Result<Tensor> {
            Ok(Tensor::new(weights.vector(role, layer)?, &Device::Cpu)?)
        };
        // Gemma 4 normalises values, and scales the stream after each layer.
        let is_4 = config.architecture.name() == "Gemma 4";
        let scale = |i: usize| -> Result<f64> {
            Ok(if is_4 { weights.vector(Role::LayerScale, i)?[0] as f64 } else { 1.0 })
        };
        let layer =
            |i: usize, matrix: &mut dyn FnMut(Role, usize) -> Result<Tensor>| -> Result<Layer> {
                Ok(Layer {
                    q: matrix(Role::Q, i)?,
                    k: matrix(Role::K, i)?,
                    v: matrix(if config.layers[i].values_are_keys { Role::K } else { Role::V }, i)?,
                    o: matrix(Role::O, i)?,
                    gate: matrix(Role::Gate, i)?,
                    up: matrix(Role::Up, i)?,
                    down: matrix(Role::Down, i)?,
                    q_norm: norm(Role::QNorm, i)?,
                    k_norm: norm(Role::KNorm, i)?,
                    input_norm: norm(Role::InputNorm, i)?,
                    post_attn_norm: norm(Role::PostAttnNorm, i)?,
                    pre_ffn_norm: norm(Role::PreFfnNorm, i)?,
                    post_ffn_norm: norm(Role::PostFfnNorm, i)?,
                    mixture: Mixture::new(weights, i, matrix)?,
                    scale: scale(i)?,
                    spec: config.layers[i],
                })
            };
        let layers =
            (0..config.layers.len()).map(|i| layer(i, &mut matrix)).collect::<Result<Vec<_>>>()?;
        let embed = matrix(Role::Embed, 0)?;
        let head = if weights.has_own_head() { matrix(Role::Head, 0)? } else { embed.clone() };
        let none = |spec: &LayerSpec| -> Result<KeysValues> {
            let shape = (0, spec.n_kv_heads, spec.head_dim);
            let none = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu)?;
            Ok(KeysValues { k: none.clone(), v: none })
        };
        let cache = config.layers.iter().map(none).collect::<Result<Vec<_>>>()?;
        Ok(ReferenceEngine {
            final_norm: norm(Role::FinalNorm, 0)?,
            scratch: cache.clone(),
            last: TokenTree::default(),
            scores: None,
            tokens: Vec::new(),
            info: EngineInfo {
                sequences: 1,
                max_rows: MAX_ROWS,
                image_rows: MAX_ROWS,
                images: weights.images().cloned(),
                vocab: config.vocab,
                reach: None,
                columns: None,
                most_rows: 1,
                paged: Vec::new(),
            },
            config,
            embed,
            head,
            layers,
            cache,
            context,
            parameters,
            norms_values: is_4,
        })
    }

    /// Evaluates the whole tree and scores the nodes `first..`.
    fn pass(&mut self, tree: &TokenTree, first: usize, rows: Rows, out: &mut Scores) -> Result<()> {
        let n = tree.len();
        ensure!(
            first < n && n <= MAX_ROWS,
            "a pass takes 1 to {MAX_ROWS} rows, got {n} (first {first})"
        );
        let positions: Vec<usize> =
            tree.depths().iter().map(|d| self.tokens.len() + *d as usize).collect();
        let deepest = positions.iter().max().copied().unwrap_or(0);
        ensure!(deepest < self.context, "the context has {} positions", self.context);
        let vocab = self.config.vocab;
        let is_known = |t: &Token| (*t as usize) < vocab || self.image(*t).is_some();
        ensure!(tree.tokens.iter().all(is_known), "the vocabulary has {vocab}");
        let eps = self.config.eps as f64;
        let mut x = self.embedded(&tree.tokens)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let (attention, new) = self.attention(
                layer,
                &self.cache[i],
                &rms_norm(&x, &layer.input_norm, eps)?,
                tree,
                &positions,
            )?;
            self.scratch[i] = new;
            x = (x + rms_norm(&attention, &layer.post_attn_norm, eps)?)?;
            let h = rms_norm(&x, &layer.pre_ffn_norm, eps)?;
            // candle's `gelu` is the tanh approximation, like Gemma's.
            let mut ffn =
                linear(&(linear(&h, &layer.gate)?.gelu()? * linear(&h, &layer.up)?)?, &layer.down)?;
            if let Some(mixture) = &layer.mixture {
                ffn = mixture.forward(&x, &ffn, eps)?;
            }
            x = ((x + rms_norm(&ffn, &layer.post_ffn_norm, eps)?)? * layer.scale)?;
        }
        let (start, len) = match rows {
            Rows::None => (n, 0),
            Rows::Last => (n - 1, 1),
            Rows::All => (first, n - first),
        };
        out.vocab = self.config.vocab;
        out.logits.clear();
        out.hidden.clear();
        if len > 0 {
            let h = rms_norm(&x.narrow(0, start, len)?.contiguous()?, &self.final_norm, eps)?;
            let mut logits = linear(&h, &self.head)?;
            if let Some(cap) = self.config.logit_cap {
                logits = ((logits / cap as f64)?.tanh()? * cap as f64)?;
            }
            out.logits = logits.flatten_all()?.to_vec1()?;
            out.hidden = h.flatten_all()?.to_vec1()?;
        }
        self.last.clone_from(tree);
        Ok(())
    }

    /// Returns the image of a place, and the index of its soft token.
    fn image(&self, item: Token) -> Option<(Arc<Image>, usize)> {
        self.info.images.as_ref()?.at(item)
    }

    /// Returns scaled embeddings of tokens, and soft tokens of images unscaled: `[rows, dim]`.
    fn embedded(&self, items: &[Token]) -> Result<Tensor> {
        let mut rows = Vec::with_capacity(items.len());
        for &item in items {
            rows.push(match self.image(item) {
                Some((image, n)) => {
                    Tensor::new(&image.soft_from(n)[..self.config.dim], &Device::Cpu)?
                }
                None => (self.embed.get(item as usize)? * self.config.embed_scale as f64)?,
            });
        }
        Ok(Tensor::stack(&rows, 0)?)
    }

    /// Maps `x [rows, dim]` to the block's output `[rows, dim]` and the rows' own keys and values.
    fn attention(
        &self,
        layer: &Layer,
        cache: &KeysValues,
        x: &Tensor,
        tree: &TokenTree,
        positions: &[usize],
    ) -> Result<(Tensor, KeysValues)> {
        let LayerSpec { n_heads, n_kv_heads, head_dim, rope, query_scale, .. } = layer.spec;
        let (n, eps) = (positions.len(), self.config.eps as f64);
        let q =
            rms_norm(&linear(x, &layer.q)?.reshape((n, n_heads, head_dim))?, &layer.q_norm, eps)?;
        let k = rms_norm(
            &linear(x, &layer.k)?.reshape((n, n_kv_heads, head_dim))?,
            &layer.k_norm,
            eps,
        )?;
        let mut v = linear(x, &layer.v)?.reshape((n, n_kv_heads, head_dim))?;
        if self.norms_values {
            v = rms_norm(&v, &Tensor::ones(head_dim, candle_core::DType::F32, &Device::Cpu)?, eps)?;
        }
        let angles = angles(rope, head_dim, positions)?;
        let new = KeysValues { k: rotate(&k, &angles)?, v };
        let all = cache.then(&new)?;
        // Queries of the heads that share a key head are adjacent: [n_kv_heads, shared * rows,
        // head_dim].
        let shared = n_heads / n_kv_heads;
        let q = rotate(&q, &angles)?.transpose(0, 1)?.contiguous()?.reshape((
            n_kv_heads,
            shared * n,
            head_dim,
        ))?;
        let k = all.k.transpose(0, 1)?.contiguous()?; // [n_kv_heads, seen, head_dim]
        let v = all.v.transpose(0, 1)?.contiguous()?;
        let seen = self.tokens.len() + n;
        let scores =
            (q.matmul(&k.t()?.contiguous()?)? * query_scale as f64)?.reshape((n_heads, n, seen))?;
        let scores = scores.broadcast_add(&self.mask(tree, positions, &layer.spec)?)?;
        let weights = softmax(&scores)?.reshape((n_kv_heads, shared * n, seen))?;
        let mixed =
            weights.matmul(&v)?.reshape((n_heads, n, head_dim))?.transpose(0, 1)?.contiguous()?;
        Ok((linear(&mixed.reshape((n, n_heads * head_dim))?, &layer.o)?, new))
    }

    /// Returns 0 where a row sees a position, and minus infinity elsewhere: `[rows, committed +
    /// rows]`.
    ///
    /// A row sees the positions before it. In a layer with image masks it also sees all rows of its
    /// image. The window limits both.
    fn mask(&self, tree: &TokenTree, positions: &[usize], spec: &LayerSpec) -> Result<Tensor> {
        let (n, seen) = (tree.len(), self.tokens.len() + tree.len());
        let mut mask = vec![f32::NEG_INFINITY; n * seen];
        let near = |from: usize, to: usize| spec.window.is_none_or(|w| from < to + w);
        let image = |row: usize| Some(self.image(tree.tokens[row])?.0.places().start);
        for (row, mask) in mask.chunks_exact_mut(seen).enumerate() {
            (0..self.tokens.len()).filter(|p| near(positions[row], *p)).for_each(|p| mask[p] = 0.0);
            let mut node = Some(row as u32);
            while let Some(at) = node.map(|n| n as usize) {
                if near(positions[row], positions[at]) {
                    mask[self.tokens.len() + at] = 0.0;
                }
                node = tree.parent[at];
            }
            let same = |other: &usize| image(row).is_some() && image(row) == image(*other);
            for other in (0..n).filter(|_| spec.whole_images).filter(same) {
                if near(positions[row], positions[other]) {
                    mask[self.tokens.len() + other] = 0.0;
                }
            }
        }
        Ok(Tensor::from_vec(mask, (n, seen), &Device::Cpu)?)
    }
}

fn indices(values: &[u32]) -> Result<Tensor> {
    Ok(Tensor::new(values, &Device::Cpu)?)
}

/// Returns `x [rows, cols]` times the transpose of `weight [outputs, cols]`.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    Ok(x.matmul(&weight.t()?)?)
}

/// Normalises the last dimension.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    Ok(x.broadcast_mul(&scale)?.broadcast_mul(weight)?)
}

fn softmax(x: &Tensor) -> Result<Tensor> {
    let e = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(e.broadcast_div(&e.sum_keepdim(D::Minus1)?)?)
}

/// Returns cosines and sines of each position, `[positions, 1, head_dim / 2]`.
///
/// Angles are rounded to f32, as in transformers.
fn angles(rope: RopeSpec, head_dim: usize, positions: &[usize]) -> Result<[Tensor; 2]> {
    let half = head_dim / 2;
    let angle = |position: usize, i: usize| {
        let frequency = 1.0 / rope.theta.powf((2 * i) as f32 / head_dim as f32) / rope.factor;
        if i < (rope.share * half as f32) as usize { position as f32 * frequency } else { 0.0 }
    };
    let all: Vec<f32> =
        positions.iter().flat_map(|p| (0..half).map(move |i| angle(*p, i))).collect();
    let all = Tensor::from_vec(all, (positions.len(), 1, half), &Device::Cpu)?;
    Ok([all.cos()?, all.sin()?])
}

/// Rotates `x [positions, heads, head_dim]`.
///
/// Component i of the first half is paired with component i of the second half.
fn rotate(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let half = x.dim(2)? / 2;
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
    Ok(Tensor::cat(&[&first, &second], 2)?)
}

impl Engine for ReferenceEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn cached(&self, _: usize) -> Cached<'_> {
        Cached { tokens: &self.tokens, room: self.context - self.tokens.len(), free_pages: 0 }
    }

    /// Evaluates old nodes again: this engine saves no work.
    fn begin(&mut self, inputs: &[Input<'_>], output: Output) -> Result<bool> {
        let &[Input { sequence: 0, tree, first, rows, .. }] = inputs else {
            bail!("there is one sequence")
        };
        let same = first == 0
            || first == self.last.len()
                && tree.tokens.starts_with(&self.last.tokens)
                && tree.parent.starts_with(&self.last.parent);
        ensure!(same, "a pass continues the tree of the last one");
        self.scores = None;
        let mut scores = Scores::default();
        self.pass(tree, first, rows, &mut scores)?;
        if output != Output::Hidden {
            scores.hidden.clear();
        }
        self.scores = Some(scores);
        Ok(false)
    }

    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        *out = self.scores.take().context("no pass was begun")?;
        Ok(())
    }

    fn is_busy(&self) -> bool {
        false
    }

    fn lend(&self, _: usize) -> Option<&[f32]> {
        None
    }

    fn commit(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        let &[(0, path)] = paths else { bail!("there is one sequence") };
        let parent_of = |node: u32| self.last.parent.get(node as usize).copied();
        let linked = path.windows(2).all(|w| parent_of(w[1]) == Some(Some(w[0])));
        ensure!(
            path.first() == Some(&0) && parent_of(0) == Some(None) && linked,
            "a commit takes a path from the root of the last pass"
        );
        let path_rows = indices(path)?;
        for (cache, new) in self.cache.iter_mut().zip(&self.scratch) {
            let taken = KeysValues {
                k: new.k.index_select(&path_rows, 0)?,
                v: new.v.index_select(&path_rows, 0)?,
            };
            *cache = cache.then(&taken)?;
        }
        self.tokens.extend(path.iter().map(|node| self.last.tokens[*node as usize]));
        self.last = TokenTree::default();
        Ok(())
    }

    /// Always succeeds, because no keys are ever dropped.
    fn truncate(&mut self, _: usize, position: usize) -> Result<()> {
        ensure!(
            position <= self.tokens.len(),
            "cannot truncate to {position}: only {} tokens are committed",
            self.tokens.len()
        );
        for cache in &mut self.cache {
            *cache = KeysValues {
                k: cache.k.narrow(0, 0, position)?,
                v: cache.v.narrow(0, 0, position)?,
            };
        }
        self.tokens.truncate(position);
        self.last = TokenTree::default();
        Ok(())
    }

    /// Returns `None`: this engine has no pages to keep.
    fn retain(&mut self, _: usize, _: usize) -> Option<Prefix> {
        None
    }

    fn resume(&mut self, _: usize, _: &Prefix, _: usize) -> Result<()> {
        bail!("the oracle keeps no prefixes")
    }

    fn copy_page(&mut self, _: &mut Prefix, _: usize, _: usize, _: PageCopy<'_>) -> Result<bool> {
        Ok(false)
    }

    fn report(&self) -> EngineReport {
        let width: usize = self.config.layers.iter().map(LayerSpec::kv_width).sum();
        let kv = 8 * self.tokens.len() * width;
        EngineReport {
            device: "reference: candle, f32".into(),
            memory: EngineMemory {
                weights: 4 * self.parameters as u64,
                kv: kv as u64,
                activations: 0,
            },
            executor: None,
        }
    }

    fn assistant(&mut self) -> Option<&mut dyn Assistant> {
        None
    }

    fn device(&mut self) -> Option<&mut dyn Reports> {
        None
    }
}
