//! The engine that runs plans on an executor: fills the step buffer, keeps the position, and says what may be taken back.

use super::{Engine, Memory, Rows, Scores, TokenTree};
use crate::compute::best;
use crate::compute::step::{NO_PARENT, StepView};
use crate::compute::{BufferId, Executor, KernelTime, KvFormat};
use crate::error::{Fault, Kind};
use crate::gemma::Weights;
use crate::gemma::forward::{self, Forward, ForwardOptions};
use crate::gemma::rope::Angles;
use crate::kv::PAGE;
use anyhow::{Context, Result, ensure};

/// What the caller decides.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Positions to make room for.
    pub context: usize,
    pub kv: KvFormat,
}

/// A model on an executor.
pub struct PlannedEngine {
    exec: Box<dyn Executor>,
    model: Forward,
    context: usize,
    position: usize,
    /// Positions ever written since the last reset: what the rings have turned by.
    written: usize,
    angles: [Angles; 2],
    words: Vec<u32>,
    lists: Vec<u32>,
    tables: [Vec<f32>; 2],
    /// The tree of the last pass, still in scratch.
    last: TokenTree,
    selected: usize,
    /// Best tokens of a row that will do, below which id.
    wanted: Option<(usize, usize)>,
    /// A pass that was started and whose scores nobody has taken.
    started: Option<Started>,
}

/// What a pass under way will give.
struct Started {
    /// Rows selected.
    selected: usize,
    /// Where lists of the best tokens come instead of logits.
    lists: Option<BufferId>,
}

impl PlannedEngine {
    /// Loads `weights` into `exec` with room for `options.context` positions.
    pub fn new(weights: &Weights, mut exec: Box<dyn Executor>, options: EngineOptions) -> Result<Self> {
        let max_rows = exec.max_rows();
        let options = ForwardOptions { context: options.context, kv: options.kv, max_rows };
        let model = forward::load(weights, exec.as_mut(), options)?;
        let c = &model.config;
        Ok(PlannedEngine {
            angles: [Angles::new(c.rope_local, c.head_dim), Angles::new(c.rope_global, c.head_dim)],
            words: vec![0; model.layout.words()],
            lists: Vec::new(),
            tables: Default::default(),
            context: options.context,
            position: 0,
            written: 0,
            last: TokenTree::default(),
            selected: 0,
            wanted: None,
            started: None,
            exec,
            model,
        })
    }

    /// Evaluates rows `first..` of the tree.
    fn pass(&mut self, tree: &TokenTree, first: usize, rows: Rows, out: &mut Scores) -> Result<()> {
        self.start(tree, first, rows)?;
        self.take(out)
    }

    /// Starts the evaluation of rows `first..` of the tree.
    fn start(&mut self, tree: &TokenTree, first: usize, rows: Rows) -> Result<()> {
        self.started = None;
        let n = tree.len();
        ensure!(n > first && n <= self.max_rows(), "a pass takes 1 to {} rows, got {n} (first {first})", self.max_rows());
        let depths = tree.depths();
        let deepest = depths.iter().max().map_or(0, |d| *d as usize);
        if self.position + deepest >= self.context {
            let what = format!("position {} does not fit a context of {}", self.position + deepest, self.context);
            return Err(Fault::new(Kind::Context, what).help("raise --ctx-size or shorten the prompt").into());
        }
        if let Some(bad) = tree.tokens[first..].iter().find(|t| **t as usize >= self.model.config.vocab) {
            return Err(Fault::model(format!("token {bad} is outside the vocabulary of {}", self.model.config.vocab)).into());
        }
        let positions: Vec<u32> = depths.iter().map(|d| self.position as u32 + d).collect();
        let parents: Vec<u32> = tree.parent.iter().map(|p| p.unwrap_or(NO_PARENT)).collect();
        let selected: Vec<u32> = match rows {
            Rows::None => Vec::new(),
            Rows::Last => vec![n as u32 - 1],
            Rows::All => (first as u32..n as u32).collect(),
        };
        let step = StepView {
            rows: n,
            first,
            base: self.position,
            tokens: &tree.tokens,
            positions: &positions,
            parents: &parents,
            selected: &selected,
            path: &[],
            n_best: self.wanted.map_or(0, |w| w.0 as u32),
            usable: self.wanted.map_or(0, |w| w.1.min(self.model.config.vocab) as u32),
        };
        self.model.layout.fill(&mut self.words, &step);
        self.exec.write(self.model.step, 0, bytemuck::cast_slice(&self.words))?;
        let head_dim = self.model.config.head_dim;
        for ((angles, table), buffer) in self.angles.iter().zip(&mut self.tables).zip(self.model.rope) {
            table.clear();
            positions[first..].iter().for_each(|p| angles.push(*p as usize, table));
            self.exec.write(buffer, first * head_dim * 4, bytemuck::cast_slice(table))?;
        }
        let lists = self.model.best.zip(self.model.pass_with_best).filter(|_| self.wanted.is_some());
        let (plan, result, row) = match lists {
            _ if selected.is_empty() => (self.model.pass_without_logits, None, 0),
            Some((lists, pass)) => (pass, Some(lists), best::WORDS * 4),
            None => (self.model.pass, Some(self.model.logits), self.model.config.vocab * 4),
        };
        self.exec.start(plan, result.map(|buffer| (buffer, selected.len() * row)))?;
        self.last.clone_from(tree);
        self.selected = selected.len();
        let lists = lists.map(|l| l.0).filter(|_| !selected.is_empty());
        self.started = Some(Started { selected: selected.len(), lists });
        Ok(())
    }

    /// Waits for the pass that was started and takes its scores.
    fn take(&mut self, out: &mut Scores) -> Result<()> {
        let Started { selected, lists } = self.started.take().context("no pass was begun")?;
        out.vocab = self.model.config.vocab;
        out.best.clear();
        if let Some(lists) = lists {
            self.lists.resize(selected * best::WORDS, 0);
            self.exec.finish(Some((lists, bytemuck::cast_slice_mut(&mut self.lists))))?;
            if let Some(best) = self.lists.chunks_exact(best::WORDS).map(best::parse).collect() {
                (out.best, out.logits) = (best, Vec::new());
                return Ok(());
            }
        }
        out.logits.resize(selected * out.vocab, 0.0);
        let logits: &mut [u8] = bytemuck::cast_slice_mut(&mut out.logits);
        match lists {
            // The lists were too short to decide.
            Some(_) => self.exec.read(self.model.logits, 0, logits),
            None => self.exec.finish((selected > 0).then_some((self.model.logits, logits))),
        }
    }
}

impl Engine for PlannedEngine {
    fn position(&self) -> usize {
        self.position
    }

    fn context(&self) -> usize {
        self.context
    }

    fn max_rows(&self) -> usize {
        self.exec.max_rows()
    }

    fn vocab(&self) -> usize {
        self.model.config.vocab
    }

    fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()> {
        self.pass(tree, 0, rows, out)
    }

    fn begin(&mut self, tree: &TokenTree, rows: Rows) -> Result<bool> {
        if !self.exec.runs_beside() {
            return Ok(false);
        }
        self.start(tree, 0, rows)?;
        Ok(true)
    }

    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        self.take(out)
    }

    fn is_busy(&self) -> bool {
        self.started.is_some() && self.exec.is_busy()
    }

    fn want(&mut self, best: Option<(usize, usize)>) {
        self.wanted = best.filter(|b| b.0 <= best::CHUNKS);
    }

    fn forward_more(&mut self, tree: &TokenTree, first_new: usize, rows: Rows, out: &mut Scores) -> Result<()> {
        let same = first_new == self.last.len()
            && tree.tokens.starts_with(&self.last.tokens)
            && tree.parent.starts_with(&self.last.parent);
        ensure!(same, "forward_more continues the tree of the last pass");
        self.pass(tree, first_new, rows, out)
    }

    fn commit(&mut self, path: &[u32]) -> Result<()> {
        let parent_of = |node: u32| self.last.parent.get(node as usize).copied();
        let linked = path.windows(2).all(|w| parent_of(w[1]) == Some(Some(w[0])));
        ensure!(
            path.first() == Some(&0) && parent_of(0) == Some(None) && linked,
            "a commit takes a path from the root of the last pass"
        );
        let step = StepView { base: self.position, path, ..StepView::default() };
        self.model.layout.fill(&mut self.words, &step);
        self.exec.write(self.model.step, 0, bytemuck::cast_slice(&self.words))?;
        self.exec.run(self.model.commit)?;
        self.position += path.len();
        self.written = self.written.max(self.position);
        self.last = TokenTree::default();
        Ok(())
    }

    fn truncate(&mut self, position: usize) -> Result<()> {
        ensure!(position <= self.position, "cannot truncate to {position}: only {} tokens are committed", self.position);
        let kept = self.model.kv.iter().all(|kv| kv.pages.can_return_to(position, self.written));
        ensure!(kept, "the sliding-window rings no longer hold what position {position} needs");
        self.position = position;
        self.last = TokenTree::default();
        if position == 0 {
            self.written = 0;
        }
        Ok(())
    }

    fn hidden(&mut self, out: &mut Vec<f32>) -> Result<()> {
        out.resize(self.selected * self.model.config.dim, 0.0);
        self.exec.read(self.model.hidden, 0, bytemuck::cast_slice_mut(out))
    }

    fn memory(&self) -> Memory {
        let (weights, buffers) = self.exec.memory();
        let kv = self.model.kv_bytes.iter().sum();
        Memory { weights, kv, activations: buffers - kv }
    }

    fn describe(&self) -> String {
        self.exec.describe()
    }

    fn read_bandwidth(&mut self) -> Option<f64> {
        self.exec.read_bandwidth()
    }

    fn upload_bandwidth(&mut self) -> Option<f64> {
        self.exec.upload_bandwidth()
    }

    fn assist(&self) -> Option<crate::compute::AssistReport> {
        self.exec.assist()
    }

    fn start_profile(&mut self) {
        self.exec.start_profile();
    }

    fn profile(&self) -> Vec<KernelTime> {
        self.exec.profile()
    }
}

impl PlannedEngine {
    /// Keys and values that later queries can still see, in position order: per layer, head and position one key and one
    /// value. For tests: two engines with the same history hold the same bytes.
    pub fn visible_cache(&mut self) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        for kv in self.model.kv.clone() {
            let (size, dim) = (kv.format.bytes(), kv.head_dim);
            for (head, position) in
                (0..kv.n_kv_heads).flat_map(|h| (kv.pages.first_visible(self.position)..self.position).map(move |p| (h, p)))
            {
                let physical = kv.pages.physical(position / PAGE);
                let page = physical * kv.n_kv_heads + head;
                let mut block = vec![0; size * kv.key_block];
                for d in (0..dim).step_by(kv.key_block) {
                    self.exec.read(kv.k, kv.key_at(physical, head, d, position % PAGE) * size, &mut block)?;
                    out.extend_from_slice(&block);
                }
                let mut value = vec![0; size * dim];
                self.exec.read(kv.v, (page * PAGE + position % PAGE) * dim * size, &mut value)?;
                out.extend_from_slice(&value);
                for (id, group) in [kv.k, kv.v].into_iter().flat_map(|id| (0..kv.scales()).map(move |g| (id, g))) {
                    let mut scale = [0; 2];
                    self.exec.read(id, kv.scale_at(physical, head, group, position % PAGE) * 2, &mut scale)?;
                    out.extend(scale);
                }
            }
        }
        Ok(out)
    }
}
