//! Costs of passes on this machine. They are measured when a model first runs on a device, refined
//! by every text, and stored between runs.
//!
//! Each model and device has a JSON file under `$XDG_CACHE_HOME/gemma`, written atomically. A file
//! that is damaged, unrelated or of another version is ignored, and the costs are measured again.
//! The costs only affect speed.

use crate::draft::{CostCurve, Costs, DraftFigures, Habits};
use crate::runtime::load::Loaded;
use anyhow::{Context, Result, ensure};
use gemma_base::compute::DeviceInfo;
use gemma_base::util::files::{keep_newest, read_regular, write_whole};
use gemma_base::util::{hex, xdg};
use gemma_model::engine::{Engine, EngineExt, Input, Output, Rows, Scores, TokenTree};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Version of the file format.
const VERSION: u32 = 1;
/// Most bytes of a valid file.
const LARGEST: u64 = 1 << 20;
/// Most files to keep, newest first: one per model, device and number of threads.
const MOST_FILES: usize = 64;
/// Most draft models with stored habits.
const MOST_HABITS: usize = 32;
/// Seconds allowed for warm-up passes before the first text, including kernel compilation, and for
/// timed passes. Sizes beyond these limits are estimated.
const WARMING: f32 = 8.0;
const PATIENCE: f32 = 1.5;
/// Most timed runs per size.
const RUNS: usize = 5;
/// If a pass over one row takes less than this, stored costs are measured again. This is quick, and
/// the stored costs may come from a busy moment.
const QUICK: f32 = 0.01;
/// Approximate number of best tokens that a round requests per row.
const LISTED: usize = 64;
/// Row counts of the measured passes, in this order: the first two are the most informative.
const SIZES: [usize; 6] = [1, ALWAYS, 2, 4, 16, 32];
const ALWAYS: usize = 8;

/// Known costs of a target's passes.
#[derive(Clone, Debug)]
pub struct Passes {
    pub costs: Costs,
    /// Measurements of drafting in earlier texts, by draft model.
    pub habits: BTreeMap<String, Habits>,
    /// The GPU that runs the target or part of it.
    pub device: Option<DeviceInfo>,
}

impl Passes {
    /// Returns unknown costs, for runs without drafts.
    pub fn unknown() -> Passes {
        Passes { costs: Costs::default(), habits: BTreeMap::new(), device: None }
    }

    /// Returns the seconds of a pass over one row, at the shortest known context.
    pub fn plain(&self) -> f32 {
        self.costs.known().next().map_or(0.0, |(_, curve)| curve.cost(1))
    }

    /// Measures the costs now.
    pub fn measured(loaded: &mut Loaded) -> Result<Passes> {
        let curve = cost_curve(loaded.engine.as_mut())?;
        let costs = Costs::new(curve, loaded.engine.position(0));
        Ok(Passes { costs, habits: BTreeMap::new(), device: loaded.device.clone() })
    }

    /// Loads the costs of an earlier run, or measures them. The note explains why a file was not
    /// used.
    pub fn kept_or_measured(
        loaded: &mut Loaded,
        file: &CostFile,
    ) -> Result<(Passes, Option<String>)> {
        let (kept, note) = match file.load() {
            Ok(kept) => (kept, None),
            Err(why) => (None, Some(format!("{why:#}; measured again"))),
        };
        let Some((costs, habits)) = kept else { return Ok((Self::measured(loaded)?, note)) };
        let mut passes = Passes { costs, habits, device: loaded.device.clone() };
        if passes.plain() < QUICK {
            let curve = cost_curve(loaded.engine.as_mut())?;
            *passes.costs.at(loaded.engine.position(0)) = curve;
        }
        Ok((passes, note))
    }
}

/// The file of costs of one model on one device.
pub struct CostFile {
    /// `None` without a home directory.
    path: Option<PathBuf>,
    key: String,
}

#[derive(Serialize, Deserialize)]
struct KeptCosts {
    v: u32,
    key: String,
    /// Seconds by number of rows from 1 upwards, by context range.
    costs: BTreeMap<usize, Vec<f32>>,
    habits: BTreeMap<String, KeptHabits>,
}

#[derive(Serialize, Deserialize)]
struct KeptHabits {
    survival: Vec<(f32, f32)>,
    level: f32,
}

impl CostFile {
    /// Returns the file. `model` identifies the weights. `device` is the engine's description:
    /// device, driver and threads.
    pub fn new(model: &[u8], device: &str, kv: &str) -> CostFile {
        Self::within(xdg::cache(), model, device, kv)
    }

    /// Returns the file in another directory.
    pub fn within(directory: Option<PathBuf>, model: &[u8], device: &str, kv: &str) -> CostFile {
        let key = format!("{} {} kv {kv} on {device}", env!("CARGO_PKG_VERSION"), hex(model));
        let name = hex(&Sha256::digest(&key)[..8]);
        CostFile { path: directory.map(|d| d.join(format!("costs-{name}.json"))), key }
    }

    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the key that the file must contain.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Reads the file; `None` if there is none.
    pub fn load(&self) -> Result<Option<(Costs, BTreeMap<String, Habits>)>> {
        let Some(path) = self.path.as_ref().filter(|p| p.exists()) else { return Ok(None) };
        let read = || -> Result<(Costs, BTreeMap<String, Habits>)> {
            let kept: KeptCosts =
                serde_json::from_slice(&read_regular(path, LARGEST)?).context("it is damaged")?;
            ensure!(
                kept.v == VERSION && kept.key == self.key,
                "it belongs to another model or device"
            );
            let curve = |seconds| {
                CostCurve::restored(seconds)
                    .context("it is damaged: one of its costs is not a time")
            };
            let known = kept.costs.into_iter().map(|(range, seconds)| Ok((range, curve(seconds)?)));
            let costs = Costs::restored(known.collect::<Result<Vec<_>>>()?);
            let habits = kept
                .habits
                .into_iter()
                .map(|(draft, h)| (draft, Habits { survival: h.survival, level: h.level }));
            Ok((costs.context("it holds no costs")?, habits.collect()))
        };
        read().map(Some).with_context(|| format!("{} is not used", path.display()))
    }

    /// Saves the costs after a text; `draft` identifies the draft model.
    pub fn save(&self, mut passes: Passes, draft: &str, figures: &DraftFigures) -> Result<()> {
        let (Some(path), Some(costs)) = (&self.path, &figures.costs) else { return Ok(()) };
        passes.habits.insert(draft.to_owned(), figures.habits.clone());
        while passes.habits.len() > MOST_HABITS {
            let other = passes.habits.keys().find(|k| *k != draft).cloned();
            other.map(|k| passes.habits.remove(&k));
        }
        let habits = passes
            .habits
            .into_iter()
            .map(|(k, h)| (k, KeptHabits { survival: h.survival, level: h.level }));
        let kept = KeptCosts {
            v: VERSION,
            key: self.key.clone(),
            costs: costs.known().map(|(range, curve)| (range, curve.seconds().to_vec())).collect(),
            habits: habits.collect(),
        };
        write_whole(path, &serde_json::to_vec(&kept)?)?;
        if let Some(directory) = path.parent() {
            keep_newest(directory, MOST_FILES, |name| {
                name.starts_with("costs-") && name.ends_with(".json")
            });
        }
        Ok(())
    }
}

/// Measures the approximate seconds of a pass over one row: the first round of drafts needs a cost
/// estimate.
pub fn one_row(engine: &mut dyn Engine) -> Result<f32> {
    let mut scores = Scores::default();
    let mut best = f32::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        engine.forward(&TokenTree::root(0), Rows::All, &mut scores)?;
        best = best.min(start.elapsed().as_secs_f32());
    }
    Ok(best)
}

/// Measures the seconds of the engine's passes by number of rows, like in rounds: with lists of the
/// best tokens if the engine supports them.
fn cost_curve(engine: &mut dyn Engine) -> Result<CostCurve> {
    let mut scores = Scores::default();
    let room = engine.context(0).saturating_sub(engine.position(0)).min(engine.info().max_rows);
    let output = Output::Best { n: LISTED, usable: engine.info().vocab };
    measure(room, &mut |rows| {
        let tree = TokenTree::chain(&vec![0; rows]);
        let start = Instant::now();
        engine.run(&[Input::new(0, &tree, Rows::All)], output, &mut scores)?;
        Ok(start.elapsed().as_secs_f32())
    })
}

/// Builds the curve with `pass`, which runs a pass over a number of rows and returns its seconds.
///
/// Sizes 1 and [`ALWAYS`] are measured on every device, the others within the limits of [`WARMING`]
/// and [`PATIENCE`]. Unmeasured sizes are interpolated.
///
/// The first pass of a size is not counted, since it may compile kernels and touch memory. Then all
/// sizes take turns, so that other load affects them equally. The best run of each size counts.
fn measure(room: usize, pass: &mut dyn FnMut(usize) -> Result<f32>) -> Result<CostCurve> {
    let (mut points, mut warming, mut spent) = (BTreeMap::new(), 0.0, 0.0);
    for rows in SIZES {
        let affordable = || warming < WARMING && spent + estimate(&points, rows) < PATIENCE;
        // A short answer to a short prompt may have room for fewer rows.
        if rows <= room && (rows == 1 || rows == ALWAYS || affordable()) {
            warming += pass(rows)?;
            let seconds = pass(rows)?.max(1e-6);
            (warming, spent) = (warming - seconds, spent + seconds);
            points.insert(rows, seconds);
        }
    }
    for _ in 1..RUNS {
        for (rows, best) in &mut points {
            if spent < PATIENCE {
                let seconds = pass(*rows)?.max(1e-6);
                (*best, spent) = (best.min(seconds), spent + seconds);
            }
        }
    }
    without_spikes(&mut points);
    let mut curve: Vec<(usize, f32)> = vec![(1, points[&1])];
    for rows in [2, 4, 8, 16, 32] {
        let least = curve[curve.len() - 1].1;
        curve.push((
            rows,
            points.get(&rows).copied().unwrap_or_else(|| estimate(&points, rows)).max(least),
        ));
    }
    Ok(CostCurve::new(&curve))
}

/// Lowers costs to at most those of larger passes. A higher cost is due to a lost time slice, and
/// would make all larger passes seem expensive, so that they are never tried.
fn without_spikes(points: &mut BTreeMap<usize, f32>) {
    let mut least = f32::INFINITY;
    for seconds in points.values_mut().rev() {
        least = least.min(*seconds);
        *seconds = least;
    }
}

/// Estimates a pass from the measured ones: on the line through its neighbours or the nearest two.
fn estimate(points: &BTreeMap<usize, f32>, rows: usize) -> f32 {
    let known: Vec<(usize, f32)> = points.iter().map(|(rows, seconds)| (*rows, *seconds)).collect();
    let [.., (_, only)] = known[..] else { return 0.0 };
    let above = known
        .iter()
        .position(|(n, _)| *n > rows)
        .unwrap_or(known.len())
        .clamp(1, known.len().max(2) - 1);
    let (Some(low), Some(high)) = (known.get(above - 1), known.get(above)) else { return only };
    let slope = (high.1 - low.1) / (high.0 - low.0) as f32;
    (low.1 + slope * (rows as f32 - low.0 as f32)).max(known[0].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes() -> Passes {
        let costs = Costs::new(CostCurve::new(&[(1, 0.01), (8, 0.02)]), 3000);
        Passes { costs, habits: BTreeMap::new(), device: None }
    }

    fn figures() -> DraftFigures {
        let habits = Habits { survival: vec![(0.7, 12.0), (0.5, 12.0)], level: 0.001 };
        DraftFigures { costs: Some(passes().costs), habits, ..DraftFigures::default() }
    }

    #[test]
    fn what_was_not_measured_is_on_a_line_with_what_was() {
        let points = |list: &[(usize, f32)]| list.iter().copied().collect::<BTreeMap<_, _>>();
        let one = points(&[(1, 1.0)]);
        assert_eq!([1, 8].map(|rows| estimate(&one, rows)), [1.0, 1.0]);
        let two = points(&[(1, 1.0), (8, 8.0)]);
        assert_eq!([1, 4, 8, 16, 32].map(|rows| estimate(&two, rows)), [1.0, 4.0, 8.0, 16.0, 32.0]);
        let knee = points(&[(1, 1.0), (4, 1.0), (8, 3.0)]);
        assert_eq!([2, 6, 16].map(|rows| estimate(&knee, rows)), [1.0, 2.0, 7.0]);
        assert_eq!(estimate(&points(&[(1, 1.0), (8, 0.5)]), 32), 1.0, "never less than one row");
        let mut stolen = points(&[(1, 1.0), (2, 9.0), (4, 1.2), (8, 1.5)]);
        without_spikes(&mut stolen);
        assert_eq!(stolen, points(&[(1, 1.0), (2, 1.2), (4, 1.2), (8, 1.5)]));
    }

    /// Returns a simulated machine with these pass times plus `once` for the first pass of a size.
    /// `busy(pass, seconds so far)` is the slowdown factor.
    fn measured(
        curve: &[(usize, f32)],
        once: f32,
        mut busy: impl FnMut(usize, f32) -> f32,
    ) -> (CostCurve, BTreeMap<usize, usize>, f32) {
        let truth = CostCurve::new(curve);
        let (mut times, mut clock, mut count) = (BTreeMap::new(), 0.0, 0);
        let mut pass = |rows: usize| {
            let met = times.entry(rows).or_insert(0);
            *met += 1;
            count += 1;
            let seconds =
                truth.cost(rows) * busy(count, clock) + if *met == 1 { once } else { 0.0 };
            clock += seconds;
            Ok(seconds)
        };
        (measure(32, &mut pass).unwrap(), times, clock)
    }

    fn assert_near(found: &CostCurve, truth: &[(usize, f32)], scale: f32) {
        for (rows, cost) in truth {
            let found = found.cost(*rows);
            assert!(
                (found / (scale * cost) - 1.0).abs() < 0.05,
                "{rows} rows: {found}, not {}",
                scale * cost
            );
        }
    }

    const FLAT: [(usize, f32); 6] =
        [(1, 0.008), (2, 0.008), (4, 0.009), (8, 0.013), (16, 0.02), (32, 0.04)];

    #[test]
    fn what_a_size_needs_once_is_no_part_of_its_cost() {
        let (curve, _, _) = measured(&FLAT, 0.5, |_, _| 1.0);
        assert_near(&curve, &FLAT, 1.0);
        // Slow kernel compilation is limited by patience; the timed values are correct anyway.
        let (curve, times, _) = measured(&FLAT, 30.0, |_, _| 1.0);
        assert_eq!(times.keys().copied().collect::<Vec<_>>(), [1, 8]);
        assert_near(&curve, &[(1, 0.008), (8, 0.013)], 1.0);
        assert!(curve.cost(2) < 0.01, "between both: {}", curve.cost(2));
    }

    #[test]
    fn stolen_time_and_slow_beginnings_do_not_bend_the_curve() {
        // Every fifth pass takes ten times as long.
        let (curve, _, _) = measured(&FLAT, 0.1, |pass, _| if pass % 5 == 0 { 10.0 } else { 1.0 });
        assert_near(&curve, &FLAT, 1.0);
        // For two thirds of a second everything takes three times as long. That is longer than the
        // first timing of all sizes.
        let (curve, _, _) = measured(&FLAT, 0.0, |_, clock| if clock < 0.66 { 3.0 } else { 1.0 });
        assert_near(&curve, &FLAT, 1.0);
        // A device that went to sleep while kernels were compiled, and wakes slowly.
        let mut awake = 0.0;
        let (curve, _, _) = measured(&FLAT, 3.0, |pass, clock| {
            awake = if clock > awake + 2.0 || pass == 1 { clock } else { awake };
            if clock < awake + 0.02 { 3.0 } else { 1.0 }
        });
        assert_near(&curve, &[FLAT[0], FLAT[3]], 1.0);
        // A machine that is always slow has the same curve, scaled.
        let (curve, _, _) = measured(&FLAT, 0.0, |_, _| 3.0);
        assert_near(&curve, &FLAT, 3.0);
    }

    #[test]
    fn measuring_takes_no_longer_than_it_may() {
        let slow: Vec<_> = FLAT.iter().map(|(rows, cost)| (*rows, 50.0 * cost)).collect();
        for (points, once) in
            [(&FLAT.to_vec(), 0.0), (&FLAT.to_vec(), 3.0), (&slow, 0.0), (&slow, 3.0)]
        {
            let (curve, times, seconds) = measured(points, once, |_, _| 1.0);
            let warm: f32 =
                times.keys().map(|rows| once + CostCurve::new(points).cost(*rows)).sum();
            // The two sizes that are always measured, and one pass that ends late.
            let most = PATIENCE + CostCurve::new(points).cost(32);
            assert!(seconds - warm <= most, "{seconds} - {warm}");
            assert!(warm <= WARMING + 2.0 * once + 2.0 + 2.0 * PATIENCE, "{warm}");
            assert_near(&curve, &[points[0], points[3]], 1.0);
        }
    }

    #[test]
    fn costs_come_back_for_the_same_model_and_device() {
        let directory = tempfile::tempdir().unwrap();
        let at = |model: &[u8], device: &str| {
            CostFile::within(Some(directory.path().join("new")), model, device, "f16")
        };
        let file = at(b"model", "cpu, 2 threads");
        assert!(file.load().unwrap().is_none());
        file.save(passes(), "draft", &figures()).unwrap();
        let (costs, habits) = file.load().unwrap().unwrap();
        assert_eq!(
            (costs.known().map(|(range, _)| range).collect::<Vec<_>>(), habits.len()),
            (vec![2], 1)
        );
        let mut costs = costs;
        assert_eq!((costs.at(3000).cost(8), &habits["draft"]), (0.02, &figures().habits));
        for other in [at(b"other", "cpu, 2 threads"), at(b"model", "cpu, 4 threads")] {
            assert!(other.load().unwrap().is_none());
        }
        assert!(
            CostFile::within(None, b"model", "", "").save(passes(), "", &figures()).is_ok(),
            "no home is no failure"
        );
        for i in 0..50 {
            let (costs, habits) = file.load().unwrap().unwrap();
            file.save(Passes { costs, habits, device: None }, &format!("draft {i}"), &figures())
                .unwrap();
        }
        let habits = file.load().unwrap().unwrap().1;
        assert!(habits.len() == MOST_HABITS && habits.contains_key("draft 49"));
    }

    #[test]
    fn damaged_and_foreign_files_are_not_used_and_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let file = CostFile::within(Some(directory.path().into()), b"model", "cpu", "f16");
        file.save(passes(), "draft", &figures()).unwrap();
        let path = file.path.clone().unwrap();
        let whole = std::fs::read(&path).unwrap();
        let text = String::from_utf8(whole.clone()).unwrap();
        let bad = [
            whole[..whole.len() / 2].to_vec(),
            vec![],
            b"{}".to_vec(),
            vec![0xff; 100],
            text.replace("\"v\":1", "\"v\":2").into_bytes(),
            text.replace(" on cpu", " on gpu").into_bytes(),
            text.replace("[0.01,", "[-0.01,").into_bytes(),
            text.replace("[0.01,", "[1e30,").into_bytes(),
            vec![b' '; LARGEST as usize + 1],
        ];
        for (i, bytes) in bad.iter().enumerate() {
            assert_ne!(bytes, &whole, "{i}");
            std::fs::write(&path, bytes).unwrap();
            assert!(file.load().unwrap_err().to_string().contains("not used"), "{i}");
        }
        file.save(passes(), "draft", &figures()).unwrap();
        assert!(file.load().unwrap().is_some());
    }
}
