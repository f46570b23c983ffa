//! The engine that runs plans on an executor: fills the step buffer, keeps the position, and says
//! what may be taken back.

use super::rows::Trees;
use super::{Engine, Memory, Rows, Scores, TokenTree};
use crate::compute::best;
use crate::compute::step::StepView;
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
    sequences: Vec<Sequence>,
    /// The sequence that is selected.
    current: usize,
    angles: [Angles; 2],
    words: Vec<u32>,
    lists: Vec<u32>,
    tables: [Vec<f32>; 2],
    /// The trees of the last pass, still in scratch.
    last: Trees,
    selected: usize,
    /// Best tokens of a row that will do, below which id.
    wanted: Option<(usize, usize)>,
    /// Logits may stay with the executor.
    leaves: bool,
    /// A pass that was started and whose scores nobody has taken.
    started: Option<Started>,
}

/// How far a sequence has come.
#[derive(Clone, Copy, Debug, Default)]
struct Sequence {
    position: usize,
    /// Positions ever written since the last reset: what the rings have turned by.
    written: usize,
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
    pub fn new(weights: &Weights, exec: Box<dyn Executor>, options: EngineOptions) -> Result<Self> {
        Self::for_sequences(weights, exec, options, 1)
    }

    /// The same for several sequences, each with so much room.
    pub fn for_sequences(
        weights: &Weights,
        mut exec: Box<dyn Executor>,
        options: EngineOptions,
        sequences: usize,
    ) -> Result<Self> {
        let max_rows = exec.max_rows();
        ensure!(
            (1..=max_rows).contains(&sequences),
            "{sequences} sequences do not go into passes of {max_rows} rows"
        );
        let options =
            ForwardOptions { context: options.context, kv: options.kv, max_rows, sequences };
        let model = forward::load(weights, exec.as_mut(), options)?;
        let c = &model.config;
        Ok(PlannedEngine {
            angles: [Angles::new(c.rope_local, c.head_dim), Angles::new(c.rope_global, c.head_dim)],
            words: vec![0; model.layout.words()],
            lists: Vec::new(),
            tables: Default::default(),
            context: options.context,
            sequences: vec![Sequence::default(); sequences],
            current: 0,
            last: Trees::default(),
            selected: 0,
            wanted: None,
            leaves: false,
            started: None,
            exec,
            model,
        })
    }

    /// The trees as rows of a pass.
    fn rows_of(&self, trees: &[(usize, &TokenTree)]) -> Trees {
        Trees::new(trees, |sequence| self.sequences[sequence].position)
    }

    /// Evaluates rows `first..` of the trees.
    fn pass(&mut self, trees: Trees, first: usize, rows: Rows, out: &mut Scores) -> Result<()> {
        self.start(trees, first, rows)?;
        self.take(out)
    }

    /// Starts the evaluation of rows `first..` of the trees.
    fn start(&mut self, trees: Trees, first: usize, rows: Rows) -> Result<()> {
        self.started = None;
        let n = trees.tokens.len();
        ensure!(
            n > first && n <= self.max_rows(),
            "a pass takes 1 to {} rows, got {n} (first {first})",
            self.max_rows()
        );
        let last = trees.positions.iter().max().map_or(0, |p| *p as usize);
        if last >= self.context {
            let what = format!("position {last} does not fit a context of {}", self.context);
            return Err(Fault::new(Kind::Context, what)
                .help("raise --ctx-size or shorten the prompt")
                .into());
        }
        if let Some(bad) =
            trees.tokens[first..].iter().find(|t| **t as usize >= self.model.config.vocab)
        {
            return Err(Fault::model(format!(
                "token {bad} is outside the vocabulary of {}",
                self.model.config.vocab
            ))
            .into());
        }
        let selected: Vec<u32> = match rows {
            Rows::None => Vec::new(),
            Rows::Last => vec![n as u32 - 1],
            Rows::All => (first as u32..n as u32).collect(),
        };
        let step = StepView {
            rows: n,
            first,
            selected: &selected,
            n_best: self.wanted.map_or(0, |w| w.0 as u32),
            usable: self.wanted.map_or(0, |w| w.1.min(self.model.config.vocab) as u32),
            ..trees.step()
        };
        self.model.layout.fill(&mut self.words, &step);
        self.exec.write(self.model.step, 0, bytemuck::cast_slice(&self.words))?;
        let head_dim = self.model.config.head_dim;
        for ((angles, table), buffer) in
            self.angles.iter().zip(&mut self.tables).zip(self.model.rope)
        {
            table.clear();
            trees.positions[first..].iter().for_each(|p| angles.push(*p as usize, table));
            self.exec.write(buffer, first * head_dim * 4, bytemuck::cast_slice(table))?;
        }
        let lists =
            self.model.best.zip(self.model.pass_with_best).filter(|_| self.wanted.is_some());
        let (plan, result, row) = match lists {
            _ if selected.is_empty() => (self.model.pass_without_logits, None, 0),
            Some((lists, pass)) => (pass, Some(lists), best::WORDS * 4),
            None => (self.model.pass, Some(self.model.logits), self.model.config.vocab * 4),
        };
        self.exec.start(plan, result.map(|buffer| (buffer, selected.len() * row)))?;
        self.last = trees;
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
        if self.leaves && lists.is_none() && self.lend(0).is_some() {
            out.logits.clear();
            return self.exec.finish(None);
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
        self.sequences[self.current].position
    }

    fn context(&self) -> usize {
        self.context
    }

    fn max_rows(&self) -> usize {
        self.exec.max_rows()
    }

    fn reach(&self) -> Option<usize> {
        let config = &self.model.config;
        (0..config.n_layers).all(|layer| !config.is_global(layer)).then_some(config.window)
    }

    fn vocab(&self) -> usize {
        self.model.config.vocab
    }

    fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()> {
        self.pass(self.rows_of(&[(self.current, tree)]), 0, rows, out)
    }

    fn begin(&mut self, tree: &TokenTree, rows: Rows) -> Result<bool> {
        if !self.exec.runs_beside() {
            return Ok(false);
        }
        self.start(self.rows_of(&[(self.current, tree)]), 0, rows)?;
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

    fn leave_logits(&mut self) {
        self.leaves = true;
    }

    fn lend(&self, i: usize) -> Option<&[f32]> {
        let vocab = self.model.config.vocab;
        let logits =
            self.exec.lend(self.model.logits, self.selected * vocab * 4).filter(|_| self.leaves)?;
        bytemuck::cast_slice(logits).chunks_exact(vocab).nth(i)
    }

    fn forward_more(
        &mut self,
        tree: &TokenTree,
        first_new: usize,
        rows: Rows,
        out: &mut Scores,
    ) -> Result<()> {
        let trees = self.rows_of(&[(self.current, tree)]);
        let same = first_new == self.last.tokens.len() && trees.continues(&self.last);
        ensure!(same, "forward_more continues the tree of the last pass");
        self.pass(trees, first_new, rows, out)
    }

    fn commit(&mut self, path: &[u32]) -> Result<()> {
        self.commit_each(&[(self.current, path)])
    }

    fn sequences(&self) -> usize {
        self.sequences.len()
    }

    fn select(&mut self, sequence: usize) {
        assert!(sequence < self.sequences.len(), "there are {} sequences", self.sequences.len());
        self.current = sequence;
    }

    fn forward_each(&mut self, trees: &[(usize, &TokenTree)], out: &mut Scores) -> Result<()> {
        let known = trees.iter().enumerate().all(|(i, (s, tree))| {
            *s < self.sequences.len()
                && !tree.is_empty()
                && trees[..i].iter().all(|(other, _)| other != s)
        });
        ensure!(known, "a pass takes a tree of at least one row of each of several sequences");
        self.pass(self.rows_of(trees), 0, Rows::All, out)
    }

    fn commit_each(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        let mut all = Vec::new();
        for (sequence, path) in paths {
            let rows = self.last.rows(*sequence, path);
            all.extend(rows.context("a commit takes a path from the root of the last pass")?);
        }
        // No row is live: there is nothing to compute.
        let rows = self.last.tokens.len();
        let step = StepView { rows, first: rows, path: &all, ..self.last.step() };
        self.model.layout.fill(&mut self.words, &step);
        self.exec.write(self.model.step, 0, bytemuck::cast_slice(&self.words))?;
        self.exec.run(self.model.commit)?;
        for (sequence, path) in paths {
            let sequence = &mut self.sequences[*sequence];
            sequence.position += path.len();
            sequence.written = sequence.written.max(sequence.position);
        }
        self.last = Trees::default();
        Ok(())
    }

    fn truncate(&mut self, position: usize) -> Result<()> {
        let Sequence { position: now, written } = self.sequences[self.current];
        ensure!(position <= now, "cannot truncate to {position}: only {now} tokens are committed");
        let kept = self.model.kv.iter().all(|kv| kv.pages.can_return_to(position, written));
        ensure!(kept, "the sliding-window rings no longer hold what position {position} needs");
        self.sequences[self.current] =
            Sequence { position, written: if position == 0 { 0 } else { written } };
        self.last = Trees::default();
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

    fn loading(&self) -> Option<crate::compute::Loading> {
        self.exec.loading()
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
    /// Keys and values that later queries can still see, in position order: per layer, head and
    /// position one key and one value. For tests: two engines with the same history hold the same
    /// bytes.
    pub fn visible_cache(&mut self) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let now = self.position();
        for kv in self.model.kv.clone() {
            let (size, dim) = (kv.format.bytes(), kv.head_dim);
            for (head, position) in (0..kv.n_kv_heads)
                .flat_map(|h| (kv.pages.first_visible(now)..now).map(move |p| (h, p)))
            {
                let physical = kv.page(self.current, position / PAGE);
                let page = physical * kv.n_kv_heads + head;
                let mut block = vec![0; size * kv.key_block];
                for d in (0..dim).step_by(kv.key_block) {
                    self.exec.read(
                        kv.k,
                        kv.key_at(physical, head, d, position % PAGE) * size,
                        &mut block,
                    )?;
                    out.extend_from_slice(&block);
                }
                let mut value = vec![0; size * dim];
                self.exec.read(kv.v, (page * PAGE + position % PAGE) * dim * size, &mut value)?;
                out.extend_from_slice(&value);
                for (id, group) in
                    [kv.k, kv.v].into_iter().flat_map(|id| (0..kv.scales()).map(move |g| (id, g)))
                {
                    let mut scale = [0; 2];
                    self.exec.read(
                        id,
                        kv.scale_at(physical, head, group, position % PAGE) * 2,
                        &mut scale,
                    )?;
                    out.extend(scale);
                }
            }
        }
        Ok(out)
    }
}
