//! The engine that runs plans on an executor. It fills the step buffer, owns the committed tokens
//! and their pages, and knows how far a sequence can be rolled back.

use super::assistant::{Assistant, AssistantNode, AssistantRows};
use super::rows::Scratch;
use super::sight::PassImages;
use super::{
    Cached, Engine, EngineInfo, EngineMemory, EngineReport, Input, Output, PageCopy, Prefix,
    Scores, pages,
};
use crate::models::Angles;
use crate::models::Weights;
use crate::models::forward::{self, Forward, ForwardOptions, PageTable, RopeTable, SparePages};
use crate::models::images::Sight;
use anyhow::{Context, Result, ensure};
use gemma_base::compute::best;
use gemma_base::compute::step::StepView;
use gemma_base::compute::{BufferId, Executor, ExecutorExt, Held, KvFormat, PlanId, Reports};
use gemma_base::error::{Fault, Kind};
use gemma_base::kv::{PAGE, PageList, PagePool};
use gemma_base::tensor::Token;

/// Options of the caller.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Positions per sequence.
    pub context: usize,
    pub kv: KvFormat,
}

/// A model on an executor.
pub struct PlannedEngine {
    pub(super) exec: Box<dyn Executor>,
    pub(super) model: Forward,
    /// Rows of the model's assistant.
    pub(super) assist: AssistantRows,
    pub(super) info: EngineInfo,
    context: usize,
    pub(super) sequences: Vec<CommittedSequence>,
    /// One pool per page table of the model
    pub(super) pools: Vec<PagePool>,
    /// One per rotation table of the model
    angles: Vec<Angles>,
    pub(super) words: Vec<u32>,
    lists: Vec<u32>,
    /// Rotation angles of the rows of a pass, f32 `[rows, 2, head_dim / 2]`
    pub(super) row_angles: Vec<f32>,
    pub(super) scratch: Scratch,
    /// Number of rows that the last pass scored.
    selected: usize,
    output: Output,
    /// Rows of the path to commit.
    path: Vec<u32>,
    /// A pass that was started and not finished.
    started: Option<PendingScores>,
    pub(super) sight: Sight,
}

/// Committed part of a sequence.
#[derive(Debug, Default)]
pub(super) struct CommittedSequence {
    /// All committed tokens.
    pub(super) tokens: Vec<Token>,
    /// Its pages, one list per page table of the model
    pages: Vec<PageList>,
}

/// Results of a pass in progress.
struct PendingScores {
    /// For each scored row, whether all its logits are needed
    whole: Vec<bool>,
    /// Buffer of the lists of best tokens, if they are read instead of logits
    lists: Option<BufferId>,
}

impl PlannedEngine {
    /// Loads `weights` into `exec` with room for `options.context` positions.
    pub fn new(weights: &Weights, exec: Box<dyn Executor>, options: EngineOptions) -> Result<Self> {
        Self::for_sequences(weights, exec, options, 1)
    }

    /// Loads `weights` for several sequences of `options.context` positions each.
    pub fn for_sequences(
        weights: &Weights,
        exec: Box<dyn Executor>,
        options: EngineOptions,
        sequences: usize,
    ) -> Result<Self> {
        Self::with_spare(weights, exec, options, sequences, SparePages::default())
    }

    /// Loads `weights` with spare pages for prefixes in addition to those of the sequences.
    pub fn with_spare(
        weights: &Weights,
        mut exec: Box<dyn Executor>,
        options: EngineOptions,
        sequences: usize,
        spare: SparePages,
    ) -> Result<Self> {
        let max_rows = exec.caps().max_rows;
        let images = weights.images().cloned();
        ensure!(
            (1..=max_rows).contains(&sequences),
            "{sequences} sequences do not fit in passes of {max_rows} rows"
        );
        let EngineOptions { context, kv } = options;
        let options = ForwardOptions { context, kv, max_rows, sequences, spare };
        let model = forward::load(weights, exec.as_mut(), options)?;
        let c = &model.config;
        let reach = if c.global_layers().is_empty() { c.window() } else { None };
        let (vocab, columns, paged) = (c.vocab, None, pages::paged(&model));
        let image_rows = images.as_ref().map_or(0, |images| images.most_rows()).max(max_rows);
        let sight = weights.sight().clone();
        let most_rows = 1;
        let info = EngineInfo {
            sequences,
            max_rows,
            image_rows,
            images,
            vocab,
            reach,
            columns,
            most_rows,
            paged,
        };
        Ok(PlannedEngine {
            info,
            sight,
            angles: model.ropes.iter().map(RopeTable::angles).collect(),
            words: vec![0; model.layout.tables_at()],
            lists: Vec::new(),
            row_angles: Vec::new(),
            context: options.context,
            sequences: (0..sequences)
                .map(|_| CommittedSequence {
                    pages: vec![PageList::default(); model.tables.len()],
                    ..CommittedSequence::default()
                })
                .collect(),
            pools: model.tables.iter().map(|table| PagePool::new(table.all_pages)).collect(),
            output: Output::Logits,
            scratch: Scratch::default(),
            selected: 0,
            path: Vec::new(),
            started: None,
            assist: model
                .assistant
                .as_ref()
                .map_or_else(AssistantRows::default, |own| AssistantRows::new(own, sequences)),
            exec,
            model,
        })
    }

    /// Returns the word of the step buffer that holds the page of a sequence's index `nth`.
    fn entry(&self, table: &PageTable, sequence: usize, nth: usize) -> usize {
        let at = table.at + sequence * table.pages.count + table.pages.entry(nth);
        self.model.layout.tables_at() + at
    }

    fn write_entries(&mut self, entries: &[(usize, u32)]) -> Result<()> {
        entries.iter().try_for_each(|(word, page)| {
            self.exec.write(self.model.step, word * 4, bytemuck::bytes_of(page))
        })
    }

    /// Allocates pages for the tokens that these sequences will commit.
    fn make_room(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        let mut entries = Vec::new();
        let mut is_enough = true;
        for (sequence, path) in paths {
            let mut own = std::mem::take(&mut self.sequences[*sequence]);
            let end = own.tokens.len() + path.len();
            for ((list, table), pool) in
                own.pages.iter_mut().zip(&self.model.tables).zip(&self.pools)
            {
                is_enough &= list.grow(table.pages, pool, end, &mut |nth, page| {
                    entries.push((self.entry(table, *sequence, nth), page))
                });
            }
            self.sequences[*sequence] = own;
        }
        self.write_entries(&entries)?;
        if !is_enough {
            return Err(Fault::new(Kind::Memory, "all pages of the cache are held")
                .help("drop prefixes before sequences grow")
                .into());
        }
        Ok(())
    }

    /// Starts the evaluation of the rows of scratch from `first`.
    fn start(&mut self, first: usize, output: Output) -> Result<bool> {
        let (n, scratch, most) = (self.scratch.tokens.len(), &self.scratch, self.info.image_rows);
        ensure!(n > first && n <= most, "a pass takes 1 to {most} rows, got {n} (first {first})");
        let last = scratch.positions[first..].iter().max().map_or(0, |p| *p as usize);
        if last >= self.context {
            let what = format!("position {last} does not fit a context of {}", self.context);
            return Err(Fault::new(Kind::Context, what)
                .help("raise --ctx-size or shorten the prompt")
                .into());
        }
        let (scored, most) = (scratch.selected.len(), self.model.scored_rows);
        ensure!(scored <= most, "a pass scores up to {most} rows, not {scored}");
        let vocab = self.model.config.vocab;
        let is_text = scratch.tokens[first..].iter().all(|token| (*token as usize) < vocab);
        let seen = if is_text { PassImages::default() } else { self.see(first)? };
        for (row, soft) in &seen.soft {
            let at = row * self.model.config.dim * 4;
            self.exec.write(self.model.embedded, at, bytemuck::cast_slice(soft.values()))?;
        }
        let wanted = match output {
            Output::Best { n, usable } => Some((n, usable)).filter(|b| b.0 <= best::CHUNKS),
            Output::Logits | Output::Hidden | Output::Lent => None,
        };
        let step = StepView {
            first,
            selected: &scratch.selected,
            n_best: wanted.map_or(0, |w| w.0 as u32),
            usable: wanted.map_or(0, |w| w.1.min(self.model.config.vocab) as u32),
            tokens: seen.words.as_deref().unwrap_or(&scratch.tokens),
            ..scratch.step()
        };
        self.model.layout.fill(&mut self.words, &step);
        self.exec.write(self.model.step, 0, bytemuck::cast_slice(&self.words))?;
        for (angles, table) in self.angles.iter().zip(&self.model.ropes) {
            angles.fill(&scratch.positions[first..], &mut self.row_angles);
            let offset = first * table.head_dim * 4;
            self.exec.write(table.buffer, offset, bytemuck::cast_slice(&self.row_angles))?;
        }
        let selected = scratch.selected.len();
        self.assist.forget(None);
        let lists = self.model.best.zip(self.model.pass_with_best).filter(|_| wanted.is_some());
        let (plan, result, row) = match lists {
            _ if selected == 0 => (self.model.pass_without_logits, None, 0),
            Some((best, pass)) => (pass, Some(best.lists), best::WORDS * 4),
            None => (self.model.pass, Some(self.model.logits), self.model.config.vocab * 4),
        };
        let works = self.exec.start(plan, result.map(|buffer| (buffer, selected * row)))?;
        self.output = output;
        self.selected = selected;
        let lists = lists.map(|(best, _)| best.lists).filter(|_| selected > 0);
        self.started = Some(PendingScores { whole: self.scratch.whole.clone(), lists });
        Ok(works)
    }

    /// Tells the assistant the scored rows of the newest committed tokens.
    fn note_states(&mut self, paths: &[(usize, &[u32])]) {
        if self.model.assistant.is_none() {
            return;
        }
        let mut rows = self.path.iter();
        for (sequence, path) in paths {
            let last = rows.by_ref().take(path.len()).last();
            let scored = self.scratch.selected.iter();
            self.assist.note(*sequence, last.and_then(|row| scored.clone().position(|r| r == row)));
        }
    }

    /// Runs a plan that scores `selected` rows and reads their scores: lists, if there is a buffer
    /// of lists.
    pub(super) fn run_scored(
        &mut self,
        plan: PlanId,
        selected: usize,
        lists: Option<BufferId>,
        out: &mut Scores,
    ) -> Result<()> {
        let (buffer, row) = match lists {
            Some(lists) => (lists, best::WORDS * 4),
            None => (self.model.logits, self.model.config.vocab * 4),
        };
        self.exec.start(plan, Some((buffer, selected * row)))?;
        self.output = Output::Logits;
        self.started = Some(PendingScores { whole: vec![false; selected], lists });
        self.take(out)
    }

    /// Waits for the started pass and reads its scores.
    fn take(&mut self, out: &mut Scores) -> Result<()> {
        let PendingScores { whole, lists } = self.started.take().context("no pass was begun")?;
        let (selected, vocab) = (whole.len(), self.model.config.vocab);
        out.vocab = vocab;
        out.best.clear();
        out.hidden.clear();
        if let Some(lists) = lists {
            self.lists.resize(selected * best::WORDS, 0);
            self.exec.finish(Some((lists, bytemuck::cast_slice_mut(&mut self.lists))))?;
            let lists = self.lists.chunks_exact(best::WORDS).zip(whole);
            let list = |(words, whole)| if whole { None } else { best::parse(words) };
            out.best.extend(lists.map(list));
            out.logits.resize(out.best.iter().filter(|list| list.is_none()).count() * vocab, 0.0);
            let (mut row, mut read) = (0, 0);
            for run in out.best.chunk_by(|a, b| a.is_none() == b.is_none()) {
                if run[0].is_none() {
                    let logits = &mut out.logits[read * vocab..][..run.len() * vocab];
                    let logits = bytemuck::cast_slice_mut(logits);
                    self.exec.read(self.model.logits, row * vocab * 4, logits)?;
                    read += run.len();
                }
                row += run.len();
            }
            return Ok(());
        }
        if self.lend(0).is_some() {
            out.logits.clear();
            return self.exec.finish(None);
        }
        out.logits.resize(selected * vocab, 0.0);
        let logits: &mut [u8] = bytemuck::cast_slice_mut(&mut out.logits);
        self.exec.finish((selected > 0).then_some((self.model.logits, logits)))?;
        if self.output == Output::Hidden {
            out.hidden.resize(selected * self.model.config.dim, 0.0);
            let hidden = bytemuck::cast_slice_mut(&mut out.hidden);
            self.exec.read(self.model.hidden, 0, hidden)?;
        }
        Ok(())
    }
}

impl Engine for PlannedEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn cached(&self, sequence: usize) -> Cached<'_> {
        let tokens = &self.sequences[sequence].tokens[..];
        let free_pages = self.pools.iter().map(PagePool::free).min().unwrap_or(0);
        Cached { tokens, room: self.context - tokens.len(), free_pages }
    }

    fn begin(&mut self, inputs: &[Input<'_>], output: Output) -> Result<bool> {
        self.started = None;
        let known = inputs.iter().all(|input| input.sequence < self.sequences.len());
        ensure!(known, "there are {} sequences", self.sequences.len());
        inputs.iter().try_for_each(|input| self.goes_on(input))?;
        let first = self.scratch.take(inputs, |sequence| self.sequences[sequence].tokens.len())?;
        let started = self.start(first, output);
        if started.is_err() {
            self.scratch.clear();
        }
        started
    }

    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        let taken = self.take(out);
        if taken.is_err() {
            self.scratch.clear();
        }
        taken
    }

    fn is_busy(&self) -> bool {
        self.started.is_some() && self.exec.is_busy()
    }

    fn lend(&self, i: usize) -> Option<&[f32]> {
        let vocab = self.model.config.vocab;
        if self.output != Output::Lent {
            return None;
        }
        let logits = self.exec.lend(self.model.logits, self.selected * vocab * 4)?;
        bytemuck::cast_slice(logits).chunks_exact(vocab).nth(i)
    }

    fn commit(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        if paths.is_empty() {
            return Ok(());
        }
        self.path.clear();
        for (sequence, path) in paths {
            let rows = self.scratch.path(*sequence, path);
            self.path.extend(
                rows.context("a committed path must start at the root of a tree in scratch")?,
            );
        }
        self.make_room(paths)?;
        // The commit plan has no live rows: it computes nothing.
        let rows = self.scratch.tokens.len();
        let step = StepView { first: rows, path: &self.path, ..self.scratch.step() };
        self.model.layout.fill(&mut self.words, &step);
        self.exec.write(self.model.step, 0, bytemuck::cast_slice(&self.words))?;
        self.exec.run(self.model.commit)?;
        self.note_states(paths);
        let mut rows = self.path.iter().map(|row| self.scratch.tokens[*row as usize]);
        for (sequence, path) in paths {
            let own = &mut self.sequences[*sequence];
            own.tokens.extend(rows.by_ref().take(path.len()));
        }
        paths.iter().for_each(|(sequence, _)| self.scratch.forget(*sequence));
        Ok(())
    }

    fn truncate(&mut self, sequence: usize, position: usize) -> Result<()> {
        let own = &mut self.sequences[sequence];
        let now = own.tokens.len();
        ensure!(position <= now, "cannot truncate to {position}: only {now} tokens are committed");
        let mut lists = own.pages.iter().zip(&self.model.tables);
        ensure!(
            lists.all(|(list, table)| list.can_return_to(table.pages, position)),
            "the sequence's pages no longer hold what position {position} needs, \
                or a prefix shares a page that ends after it"
        );
        self.assist.forget(Some(sequence));
        own.tokens.truncate(position);
        own.pages.iter_mut().for_each(|list| list.truncate(position));
        self.scratch.forget(sequence);
        Ok(())
    }

    fn retain(&mut self, sequence: usize, tokens: usize) -> Option<Prefix> {
        let own = &self.sequences[sequence];
        let begins = |(list, table): (&PageList, &PageTable)| list.beginning(table.pages, tokens);
        Some(Prefix {
            tokens: own.tokens.get(..tokens)?.into(),
            pages: own.pages.iter().zip(&self.model.tables).map(begins).collect::<Option<_>>()?,
        })
    }

    fn resume(&mut self, sequence: usize, prefix: &Prefix, tokens: usize) -> Result<()> {
        ensure!(tokens <= prefix.tokens.len(), "the prefix has {} tokens", prefix.tokens.len());
        let fits = tokens <= self.context && prefix.pages.len() == self.pools.len();
        let own = prefix.pages.iter().zip(&self.pools).all(|(list, pool)| list.is_of(pool));
        ensure!(fits && own, "the prefix was not made here");
        let begins = |(list, table): (&PageList, &PageTable)| list.beginning(table.pages, tokens);
        let lists: Option<Vec<PageList>> =
            prefix.pages.iter().zip(&self.model.tables).map(begins).collect();
        let lists = lists.context("the prefix lacks pages that are needed to continue there")?;
        self.scratch.forget(sequence);
        self.assist.forget(Some(sequence));
        let entries: Vec<(usize, u32)> = lists
            .iter()
            .zip(&self.model.tables)
            .flat_map(|(list, table)| {
                list.iter().map(|(nth, page)| (self.entry(table, sequence, nth), page))
            })
            .collect();
        self.sequences[sequence] =
            CommittedSequence { tokens: prefix.tokens[..tokens].to_vec(), pages: lists };
        self.write_entries(&entries)
    }

    fn copy_page(
        &mut self,
        prefix: &mut Prefix,
        layers: usize,
        nth: usize,
        copy: PageCopy<'_>,
    ) -> Result<bool> {
        self.copy_one_page(prefix, layers, nth, copy)
    }

    fn report(&self) -> EngineReport {
        let report = self.exec.report();
        let kv = self.model.kv_bytes.iter().sum();
        let Held { weights, buffers } = report.held;
        EngineReport {
            device: report.device.clone(),
            memory: EngineMemory { weights, kv, activations: buffers - kv },
            executor: Some(report),
        }
    }

    fn device(&mut self) -> Option<&mut dyn Reports> {
        Some(&mut *self.exec)
    }

    fn assistant(&mut self) -> Option<&mut dyn Assistant> {
        self.model.assistant.is_some().then_some(self)
    }
}

impl PlannedEngine {
    /// Returns the keys and values of a sequence that later queries can still see.
    ///
    /// One key and one value per layer, head and position. Tests compare them: engines with equal
    /// histories hold equal bytes.
    pub fn visible_cache(&mut self, sequence: usize) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let now = self.sequences[sequence].tokens.len();
        for kv in self.model.kv.clone() {
            let (size, dim) = (kv.format.bytes(), kv.head_dim);
            for (head, position) in (0..kv.n_kv_heads)
                .flat_map(|h| (kv.pages.first_visible(now)..now).map(move |p| (h, p)))
            {
                let is_own = |table: &PageTable| table.at == kv.table;
                let list = self.model.tables.iter().position(is_own).context("a table")?;
                let held = self.sequences[sequence].pages[list].page(position / PAGE);
                let physical = held.context("a visible page is held")? as usize;
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

impl Assistant for PlannedEngine {
    fn max_nodes(&self) -> usize {
        self.info.max_rows - self.info.sequences
    }

    fn begin(&mut self, sequences: &[usize]) -> Result<Vec<bool>> {
        let committed: Vec<usize> = self.sequences.iter().map(|own| own.tokens.len()).collect();
        let model = self.model.assistant.as_ref().context("there is no assistant")?;
        let assist = &mut self.assist;
        assist.clear(committed.iter().copied());
        let width = 4 * self.model.config.dim;
        let mut state = vec![0; width];
        let mut begun = Vec::with_capacity(sequences.len());
        for &sequence in sequences {
            let scored = assist.scored[sequence].filter(|_| committed[sequence] > 0);
            if let Some(row) = scored {
                self.exec.read(self.model.hidden, row * width, &mut state)?;
                self.exec.write(model.states, sequence * width, &state)?;
            }
            begun.push(scored.is_some());
        }
        Ok(begun)
    }

    fn evaluate(
        &mut self,
        nodes: &[AssistantNode],
        output: Output,
        out: &mut Scores,
    ) -> Result<()> {
        let model = self.model.assistant.as_ref().context("there is no assistant")?;
        let assist = &mut self.assist;
        let (first, texts) = (assist.tokens.len(), self.sequences.len());
        let vocab = self.model.config.vocab;
        for &AssistantNode { sequence, parent, token } in nodes {
            let row = parent.map_or(sequence, |node| texts + node as usize);
            let is_below = sequence < texts && row < first;
            ensure!(is_below, "the parent of a node must be a node of an earlier pass");
            ensure!((token as usize) < vocab, "token {token} is outside the vocabulary");
            let position = assist.positions[sequence].checked_sub(1);
            let position = position.context("nothing is committed")?;
            assist.push(token, position, row as u32, sequence as u32);
        }
        let rows = assist.tokens.len();
        ensure!(first < rows && rows <= self.info.max_rows, "too many nodes");
        let selected: Vec<u32> = (first as u32..rows as u32).collect();
        let wanted = match output {
            Output::Best { n, usable } => Some((n, usable.min(vocab))),
            _ => None,
        };
        let wanted = wanted.filter(|wanted| wanted.0 <= best::CHUNKS);
        let step = StepView {
            rows,
            first,
            tokens: &assist.tokens,
            positions: &assist.positions,
            parents: &assist.parents,
            selected: &selected,
            roots: &assist.roots,
            sequences: &assist.sequences,
            n_best: wanted.map_or(0, |w| w.0 as u32),
            usable: wanted.map_or(0, |w| w.1 as u32),
            ..StepView::default()
        };
        self.model.layout.fill(&mut self.words, &step);
        self.exec.write(self.model.step, 0, bytemuck::cast_slice(&self.words))?;
        let roots = assist.roots[first..].iter();
        let positions: Vec<u32> = roots.map(|root| assist.positions[*root as usize]).collect();
        for (angles, table) in assist.angles.iter().zip(&model.ropes) {
            angles.fill(&positions, &mut self.row_angles);
            let offset = first * table.head_dim * 4;
            self.exec.write(table.buffer, offset, bytemuck::cast_slice(&self.row_angles))?;
        }
        let lists = self.model.best.zip(model.pass_with_best).filter(|_| wanted.is_some());
        let plan = lists.map_or(model.pass, |(_, plan)| plan);
        let lists = lists.map(|(best, _)| best.lists);
        self.run_scored(plan, selected.len(), lists, out)
    }
}
