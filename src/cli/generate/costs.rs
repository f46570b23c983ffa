//! What passes cost on this machine: measured when a model first runs on a device, refined by every text, kept between runs.
//!
//! A file a model and device under `$XDG_CACHE_HOME/gemma`, JSON, written whole or not at all. What is damaged, of another version or of
//! something else is measured again. Nothing but speed depends on it.

use crate::cli::session::Loaded;
use crate::draft::{CostCurve, Costs, Figures, Habits};
use crate::engine::{Engine, Rows, Scores, TokenTree};
use crate::vulkan::DeviceInfo;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Version of the file's shape.
const VERSION: u32 = 1;
/// Larger files are none of ours.
const LARGEST: u64 = 1 << 20;
/// Draft models whose habits are kept.
const MOST_HABITS: usize = 32;
/// How long measuring may take before the first text; what is left then is estimated.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Sizes that are measured twice, the better one counting, as long as all of them are this quick together.
const QUICK: Duration = Duration::from_millis(100);
/// Rows of the passes measured beside one, in this order; the first tells most.
const SIZES: [usize; 5] = [ALWAYS, 2, 4, 16, 32];
const ALWAYS: usize = 8;

/// What is known of a target's passes.
#[derive(Clone, Debug)]
pub struct Passes {
    pub costs: Costs,
    /// What drafting came to on earlier texts, by draft model.
    pub habits: BTreeMap<String, Habits>,
    /// The GPU that runs the target, or a part of it.
    pub device: Option<DeviceInfo>,
}

impl Passes {
    /// For those who do not draft.
    pub fn unknown() -> Passes {
        Passes { costs: Costs::new(CostCurve::guess(), 0), habits: BTreeMap::new(), device: None }
    }

    /// Seconds of a pass over one row, at the shortest context that is known.
    pub fn plain(&self) -> f32 {
        self.costs.known().next().map_or(0.0, |(_, curve)| curve.cost(1))
    }

    /// Measured now.
    pub fn measured(loaded: &mut Loaded) -> Result<Passes> {
        let curve = cost_curve(loaded.engine.as_mut())?;
        let costs = Costs::new(curve, loaded.engine.position());
        Ok(Passes { costs, habits: BTreeMap::new(), device: loaded.device.clone() })
    }

    /// As an earlier run has left them, or measured now. The note says why a file that is there was not used.
    pub fn kept_or_measured(loaded: &mut Loaded, file: &CostFile) -> Result<(Passes, Option<String>)> {
        let (kept, note) = match file.load() {
            Ok(kept) => (kept, None),
            Err(why) => (None, Some(format!("{why:#}; measured again"))),
        };
        Ok(match kept {
            Some((costs, habits)) => (Passes { costs, habits, device: loaded.device.clone() }, note),
            None => (Self::measured(loaded)?, note),
        })
    }
}

/// Where the costs of one model on one device lie.
pub struct CostFile {
    /// `None` without a home.
    path: Option<PathBuf>,
    key: String,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    v: u32,
    key: String,
    /// Seconds by rows from 1 on, by range of context.
    costs: BTreeMap<usize, Vec<f32>>,
    habits: BTreeMap<String, KeptHabits>,
}

#[derive(Serialize, Deserialize)]
struct KeptHabits {
    survival: Vec<(f32, f32)>,
    level: f32,
}

/// `$XDG_CACHE_HOME/gemma`; `None` without a home.
pub fn directory() -> Option<PathBuf> {
    let home = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = home("XDG_CACHE_HOME").or_else(|| home("HOME").map(|h| h.join(".cache")));
    base.map(|b| b.join("gemma"))
}

impl CostFile {
    /// `model` identifies the weights; `device` is the engine's description, which names device, driver and threads.
    pub fn new(model: &[u8], device: &str, kv: &str) -> CostFile {
        Self::within(directory(), model, device, kv)
    }

    fn within(directory: Option<PathBuf>, model: &[u8], device: &str, kv: &str) -> CostFile {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let key = format!("{} {} kv {kv} on {device}", env!("CARGO_PKG_VERSION"), hex(model));
        let name = hex(&Sha256::digest(&key)[..8]);
        CostFile { path: directory.map(|d| d.join(format!("costs-{name}.json"))), key }
    }

    /// What the file holds; `None` where there is none.
    fn load(&self) -> Result<Option<(Costs, BTreeMap<String, Habits>)>> {
        let Some(path) = self.path.as_ref().filter(|p| p.exists()) else { return Ok(None) };
        let read = || -> Result<(Costs, BTreeMap<String, Habits>)> {
            ensure!(std::fs::metadata(path)?.len() <= LARGEST, "it is too large");
            let kept: Kept = serde_json::from_slice(&std::fs::read(path)?).context("it is damaged")?;
            ensure!(kept.v == VERSION && kept.key == self.key, "it belongs to something else");
            let curve = |seconds| CostCurve::restored(seconds).context("it is damaged: a cost is none");
            let known = kept.costs.into_iter().map(|(range, seconds)| Ok((range, curve(seconds)?)));
            let costs = Costs::restored(known.collect::<Result<Vec<_>>>()?);
            let habits = kept.habits.into_iter().map(|(draft, h)| (draft, Habits { survival: h.survival, level: h.level }));
            Ok((costs.context("it holds no costs")?, habits.collect()))
        };
        read().map(Some).with_context(|| format!("{} is not used", path.display()))
    }

    /// Keeps what a text has taught; `draft` identifies the draft model.
    pub fn save(&self, mut passes: Passes, draft: &str, figures: &Figures) -> Result<()> {
        let (Some(path), Some(costs)) = (&self.path, &figures.costs) else { return Ok(()) };
        passes.habits.insert(draft.to_owned(), figures.habits.clone());
        while passes.habits.len() > MOST_HABITS {
            let other = passes.habits.keys().find(|k| *k != draft).cloned();
            other.map(|k| passes.habits.remove(&k));
        }
        let habits = passes.habits.into_iter().map(|(k, h)| (k, KeptHabits { survival: h.survival, level: h.level }));
        let kept = Kept {
            v: VERSION,
            key: self.key.clone(),
            costs: costs.known().map(|(range, curve)| (range, curve.seconds().to_vec())).collect(),
            habits: habits.collect(),
        };
        let directory = path.parent().context("a file lies in a directory")?;
        std::fs::create_dir_all(directory)?;
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        file.write_all(&serde_json::to_vec(&kept)?)?;
        file.persist(path)?;
        Ok(())
    }
}

/// Seconds that a pass over one row takes, for a start: the first round of drafts has to know what it spends.
pub fn one_row(engine: &mut dyn Engine) -> Result<f32> {
    let mut scores = Scores::default();
    let mut best = f32::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        engine.forward(&TokenTree::root(0), Rows::All, &mut scores)?;
        best = best.min(start.elapsed().as_secs_f32());
    }
    Ok(best)
}

/// How long the engine's passes take by their rows. One row and [`ALWAYS`] are measured on any device, the other sizes as far as
/// [`PATIENCE`] goes; the rest is on a line with its neighbours.
fn cost_curve(engine: &mut dyn Engine) -> Result<CostCurve> {
    let mut scores = Scores::default();
    let room = engine.context().saturating_sub(engine.position()).min(engine.max_rows());
    let mut pass = |rows: usize| -> Result<f32> {
        let start = Instant::now();
        engine.forward(&TokenTree::chain(&vec![0; rows]), Rows::All, &mut scores)?;
        Ok(start.elapsed().as_secs_f32().max(1e-6))
    };
    pass(1)?; // touches every page once
    let mut points = BTreeMap::from([(1, pass(1)?.min(pass(1)?))]);
    let start = Instant::now();
    for rows in SIZES {
        let affordable = start.elapsed() + Duration::from_secs_f32(3.0 * estimate(&points, rows)) < PATIENCE;
        // A short answer to a short prompt has room for fewer rows than that.
        if rows <= room && (rows == ALWAYS || affordable) {
            pass(rows)?; // whatever a size needs once
            let once = pass(rows)?;
            points.insert(rows, if start.elapsed() < QUICK { once.min(pass(rows)?) } else { once });
        }
    }
    without_spikes(&mut points);
    let mut curve: Vec<(usize, f32)> = vec![(1, points[&1])];
    for rows in [2, 4, 8, 16, 32] {
        let least = curve[curve.len() - 1].1;
        curve.push((rows, points.get(&rows).copied().unwrap_or_else(|| estimate(&points, rows)).max(least)));
    }
    Ok(CostCurve::new(&curve))
}

/// Fewer rows never take longer: what was measured above a larger pass had its time slice stolen, and would make all larger ones look
/// dear, so that none is ever tried.
fn without_spikes(points: &mut BTreeMap<usize, f32>) {
    let mut least = f32::INFINITY;
    for seconds in points.values_mut().rev() {
        least = least.min(*seconds);
        *seconds = least;
    }
}

/// What a pass may take by those measured: on the line through its neighbours or the nearest two.
fn estimate(points: &BTreeMap<usize, f32>, rows: usize) -> f32 {
    let known: Vec<(usize, f32)> = points.iter().map(|(rows, seconds)| (*rows, *seconds)).collect();
    let [.., (_, only)] = known[..] else { return 0.0 };
    let above = known.iter().position(|(n, _)| *n > rows).unwrap_or(known.len()).clamp(1, known.len().max(2) - 1);
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

    fn figures() -> Figures {
        let habits = Habits { survival: vec![(0.7, 12.0), (0.5, 12.0)], level: 0.001 };
        Figures { costs: Some(passes().costs), habits, ..Figures::default() }
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

    #[test]
    fn costs_come_back_for_the_same_model_and_device() {
        let directory = tempfile::tempdir().unwrap();
        let at = |model: &[u8], device: &str| CostFile::within(Some(directory.path().join("new")), model, device, "f16");
        let file = at(b"model", "cpu, 2 threads");
        assert!(file.load().unwrap().is_none());
        file.save(passes(), "draft", &figures()).unwrap();
        let (costs, habits) = file.load().unwrap().unwrap();
        assert_eq!((costs.known().map(|(range, _)| range).collect::<Vec<_>>(), habits.len()), (vec![2], 1));
        let mut costs = costs;
        assert_eq!((costs.at(3000).cost(8), &habits["draft"]), (0.02, &figures().habits));
        for other in [at(b"other", "cpu, 2 threads"), at(b"model", "cpu, 4 threads")] {
            assert!(other.load().unwrap().is_none());
        }
        assert!(CostFile::within(None, b"model", "", "").save(passes(), "", &figures()).is_ok(), "no home is no failure");
        for i in 0..50 {
            let (costs, habits) = file.load().unwrap().unwrap();
            file.save(Passes { costs, habits, device: None }, &format!("draft {i}"), &figures()).unwrap();
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
