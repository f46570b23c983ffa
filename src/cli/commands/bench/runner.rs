//! Tests of a loaded engine: prefill, decode, passes over several rows, kernels, loading.

use super::measure::{self, Figure};
use super::report::{BenchMachine, BenchReport, KernelTiming, Measurement, PassSize, count_rows};
use super::{BenchArgs, Test};
use crate::cli::io::ui::Ui;
use crate::compute::KernelTime;
use crate::engine::{Engine, EngineExt, Scores};
use crate::error::Fault;
use crate::models::Weights;
use crate::sampler::Sampler;
use crate::tensor::Token;
use crate::util::units::{bytes, digits3};
use anyhow::{Context, Result, ensure};
use std::time::Instant;

/// Numbers of nodes of the timed draft steps.
const STEPS: [usize; 3] = [1, 4, 8];
/// Draft tokens of the timed round.
pub const CHAIN: usize = 4;
/// Positions that one repetition of the drafting test uses.
pub const ROUND_POSITIONS: usize = 2;

/// Runs tests on one engine.
pub struct Runner<'a> {
    engine: &'a mut dyn Engine,
    options: &'a BenchArgs,
    ui: &'a Ui,
    scores: Scores,
    sampler: Sampler,
}

impl<'a> Runner<'a> {
    pub fn new(engine: &'a mut dyn Engine, options: &'a BenchArgs, ui: &'a Ui) -> Result<Self> {
        let (scores, sampler) = (Scores::default(), Sampler::new(super::sampling())?);
        Ok(Runner { engine, options, ui, scores, sampler })
    }

    /// Runs the engine tests that the options name.
    pub fn measure_all(&mut self, report: &mut BenchReport) -> Result<()> {
        if self.options.poison {
            self.poison()?;
        }
        let wants = |test: Test| self.options.only.contains(&test);
        let [prefill, decode, verify, drafts, kernels] =
            [Test::Prefill, Test::Decode, Test::Verify, Test::Drafts, Test::Kernels].map(wants);
        if prefill {
            report.results.push(self.prefill()?);
        }
        for depth in &self.options.depth {
            if decode {
                let row = self.decode(*depth, &report.machine, report.model.read)?;
                report.results.push(row);
            }
            if verify {
                let rows = self.verify(*depth)?;
                report.results.extend(rows);
            }
            if drafts {
                let rows = self.drafts(*depth)?;
                report.results.extend(rows);
            }
        }
        if kernels {
            for rows in &self.options.kernel_rows {
                let kernels = self.kernels(*rows)?;
                report.kernels.extend(kernels);
            }
        }
        Ok(())
    }

    /// Repeats a timing, after a first run that is not counted.
    fn repeat(
        &mut self,
        label: &str,
        mut once: impl FnMut(&mut Self) -> Result<f64>,
    ) -> Result<Figure> {
        let bar = self.ui.bar(label, self.options.repetitions as u64 + 1);
        let mut runs = Vec::new();
        for run in 0..=self.options.repetitions {
            let seconds = once(self)?;
            if run > 0 {
                runs.push(seconds);
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(Figure::of(runs))
    }

    /// Fills the cache with `depth` tokens.
    fn fill(&mut self, depth: usize) -> Result<()> {
        if self.engine.truncate(0, depth).is_err() || self.engine.position(0) != depth {
            self.engine.truncate(0, 0)?;
            let tokens = measure::tokens(self.engine.info().vocab, depth);
            measure::prefill(self.engine, &tokens, &mut self.scores)?;
        }
        Ok(())
    }

    /// Runs passes with and without poisoned buffers. Fails if their scores differ.
    fn poison(&mut self) -> Result<()> {
        self.fill(self.options.depth[0])?;
        let most = self.engine.info().max_rows;
        let mut sizes: Vec<usize> = self
            .options
            .rows
            .iter()
            .chain([&self.options.pp])
            .map(|rows| *rows.min(&most))
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        for rows in &sizes {
            let [plain, poisoned] = measure::poisoned(self.engine, &self.sampler, *rows)?;
            ensure!(
                plain == poisoned,
                "a kernel does not compute all elements: \
                 a pass over {} gives other scores where its buffers hold NaN before",
                count_rows(*rows)
            );
        }
        let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
        self.ui.note(format!(
            "poison: passes over {} rows give the same bits, \
             although all that they compute was NaN before",
            sizes.join(", ")
        ));
        Ok(())
    }

    fn prefill(&mut self) -> Result<Measurement> {
        let n = self.options.pp;
        let tokens = measure::tokens(self.engine.info().vocab, n);
        let seconds = self.repeat(&format!("pp{n}"), |b| {
            b.engine.truncate(0, 0)?;
            measure::prefill(b.engine, &tokens, &mut b.scores)
        })?;
        Ok(Measurement {
            name: format!("pp{n}"),
            unit: "tok/s".into(),
            figure: seconds.map(|s| n as f64 / s),
            ..Measurement::default()
        })
    }

    fn decode(
        &mut self,
        depth: usize,
        machine: &BenchMachine,
        weights: u64,
    ) -> Result<Measurement> {
        let n = self.options.tg;
        let seconds = self.repeat(&format!("tg{n}"), |b| {
            b.fill(depth)?;
            measure::decode(b.engine, &b.sampler, n, &mut b.scores)
        })?;
        let gb_per_s = weights as f64 * n as f64 / seconds.median / 1e9;
        let share = 100.0 * gb_per_s / machine.read_gb_per_s;
        // Weights in the processor's cache are read faster than memory allows.
        let note = match share > 105.0 {
            true => format!("{} GB/s, from the cache", digits3(gb_per_s)),
            false => format!("{} GB/s, {share:.0} % of memory", digits3(gb_per_s)),
        };
        let figure = seconds.map(|s| n as f64 / s);
        Ok(Measurement {
            name: format!("tg{n}{}", at(depth)),
            unit: "tok/s".into(),
            figure,
            note,
            pass: None,
        })
    }

    /// Times passes of each size once per repetition.
    ///
    /// A drift of the machine's speed then affects all sizes equally.
    fn verify(&mut self, depth: usize) -> Result<Vec<Measurement>> {
        self.fill(depth)?;
        let sizes: Vec<usize> = self
            .options
            .rows
            .iter()
            .copied()
            .filter(|m| *m <= self.engine.info().max_rows)
            .collect();
        // The first pass of a new size may run in pieces, and the second may be recorded. Neither
        // is counted.
        for rows in &sizes {
            measure::verify(self.engine, &self.sampler, *rows, &mut self.scores)?;
        }
        let mut runs = vec![Vec::new(); sizes.len()];
        self.repeat("verify", |b| {
            for (runs, rows) in runs.iter_mut().zip(&sizes) {
                runs.push(measure::verify(b.engine, &b.sampler, *rows, &mut b.scores)?);
            }
            Ok(0.0)
        })?;
        let figures: Vec<Figure> = runs.into_iter().map(|r| Figure::of(r[1..].to_vec())).collect();
        let one = sizes.iter().position(|m| *m == 1).map(|i| figures[i].median);
        let row = |(rows, figure): (&usize, Figure)| Measurement {
            name: format!("verify {}{}", count_rows(*rows), at(depth)),
            unit: "ms".into(),
            note: one
                .map_or(String::new(), |one| format!("c({rows}) = {:.2}", figure.median / one)),
            figure: figure.map(|s| s * 1e3),
            pass: Some(PassSize { rows: *rows, depth }),
        };
        Ok(sizes.iter().zip(figures).map(row).collect())
    }

    /// Times draft steps of the assistant over several numbers of nodes, a plain round, and a round
    /// with a chain of drafts. They alternate.
    fn drafts(&mut self, depth: usize) -> Result<Vec<Measurement>> {
        self.fill(depth.max(1))?;
        if self.engine.assistant().is_none() {
            let what = "the test of drafts needs a model of Gemma 4 with its assistant";
            return Err(Fault::usage(what)
                .help("name the assistant with --draft, or use --synthetic gemma4-31b")
                .into());
        }
        let mut runs = vec![Vec::new(); 2 + STEPS.len()];
        let mut token = 0;
        let mut time_all = |b: &mut Self| -> Result<f64> {
            let Runner { engine, sampler, scores, .. } = b;
            runs[0].push(measure::round(*engine, sampler, 0, &mut token, scores)?);
            runs[1].push(measure::round(*engine, sampler, CHAIN, &mut token, scores)?);
            for (runs, nodes) in runs[2..].iter_mut().zip(STEPS) {
                runs.push(measure::draft_step(*engine, nodes, token, scores)?);
            }
            Ok(0.0)
        };
        // The second pass of a new size may be recorded, so two runs are not counted.
        time_all(self)?;
        self.repeat("drafts", time_all)?;
        self.say_draft_kernels(token)?;
        let figures: Vec<Figure> = runs.into_iter().map(|r| Figure::of(r[2..].to_vec())).collect();
        let plain = figures[0].median;
        let row = |name: String, figure: &Figure, note: String| Measurement {
            name: format!("{name}{}", at(depth)),
            unit: "ms".into(),
            note,
            figure: figure.clone().map(|s| s * 1e3),
            pass: None,
        };
        let step = |(nodes, figure): (&usize, &Figure)| {
            let share = 100.0 * figure.median / plain;
            let nodes = if *nodes == 1 { "1 node".into() } else { format!("{nodes} nodes") };
            row(format!("draft step, {nodes}"), figure, format!("{share:.1} % of a plain round"))
        };
        let mut rows = vec![row("plain round".into(), &figures[0], String::new())];
        rows.extend(STEPS.iter().zip(&figures[2..]).map(step));
        let ratio = format!("{:.2} plain rounds", figures[1].median / plain);
        rows.push(row(format!("round, {CHAIN} drafts in a row"), &figures[1], ratio));
        Ok(rows)
    }

    /// Prints the kernels of a draft step over one node.
    fn say_draft_kernels(&mut self, mut token: Token) -> Result<()> {
        measure::round(self.engine, &self.sampler, 0, &mut token, &mut self.scores)?;
        self.engine.device().into_iter().for_each(|e| e.start_profile());
        for _ in 0..self.options.repetitions {
            measure::draft_step(self.engine, 1, token, &mut self.scores)?;
        }
        let times = self.engine.report().executor.map_or_else(Vec::new, |e| e.kernels);
        // A root and its child.
        let steps = 2.0 * self.options.repetitions as f64;
        let shown = |k: &KernelTime| format!("{} {:.1} us", k.label, 1e6 * k.seconds / steps);
        let all: f64 = times.iter().map(|k| k.seconds).sum();
        let kernels: Vec<String> = times.iter().map(shown).collect();
        let kernels = kernels.join(", ");
        self.ui
            .detail(1, format!("a draft step's kernels: {:.1} us: {kernels}", 1e6 * all / steps));
        Ok(())
    }

    /// Times the kernels in passes over `rows` rows, in as many passes as the decode test has
    /// tokens.
    fn kernels(&mut self, rows: usize) -> Result<Vec<KernelTiming>> {
        let most = self.engine.info().max_rows;
        if rows > most {
            return Err(Fault::usage(format!(
                "--kernel-rows {rows}: a pass has at most {most} rows here"
            ))
            .into());
        }
        let passes = self.options.tg;
        self.fill(self.options.depth[0])?;
        self.engine.device().into_iter().for_each(|e| e.start_profile());
        if rows == 1 {
            measure::decode(self.engine, &self.sampler, passes, &mut self.scores)?;
        } else {
            for _ in 0..passes {
                measure::verify(self.engine, &self.sampler, rows, &mut self.scores)?;
            }
        }
        let kernel = |k: KernelTime| {
            let KernelTime { label, calls, seconds, bytes, macs } = k;
            KernelTiming { label: label.into(), rows, passes, calls, seconds, bytes, macs }
        };
        let times = self.engine.report().executor.map_or_else(Vec::new, |e| e.kernels);
        let mut kernels: Vec<KernelTiming> = times.into_iter().map(kernel).collect();
        kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let read = kernels.iter().map(|k| k.bytes).sum();
        self.ui.detail(
            1,
            format!("{} read in {passes} passes over {}", bytes(read), count_rows(rows)),
        );
        Ok(kernels)
    }
}

fn at(depth: usize) -> String {
    if depth == 0 { String::new() } else { format!(" @ d{depth}") }
}

/// Returns the time of a load, with its lower bound in the note.
///
/// The bound is the longer of two times: reading the files into memory with all threads, from the
/// system's current cache, and sending the weights to the device.
pub fn load_row(weights: &Weights, engine: &mut dyn Engine, seconds: f64) -> Result<Measurement> {
    let checkpoint = weights.checkpoint().context("a made-up model is not loaded from anywhere")?;
    let start = Instant::now();
    let size = checkpoint.read_through()?;
    let reading = start.elapsed().as_secs_f64();
    let on_device = engine.report().memory.weights as f64;
    let upload = engine.device().and_then(|e| e.upload_bandwidth());
    let sending = upload.map_or(0.0, |speed| on_device / speed);
    let note = format!(
        "{} times the bound: reading {} of files {} ms, sending to the device {} ms",
        digits3(seconds / reading.max(sending)),
        bytes(size),
        digits3(1e3 * reading),
        digits3(1e3 * sending)
    );
    let figure = Figure::of(vec![1e3 * seconds]);
    Ok(Measurement { name: "load".into(), unit: "ms".into(), figure, note, pass: None })
}
