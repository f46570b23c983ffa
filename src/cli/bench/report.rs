//! The figures of a run, as Markdown, JSON or CSV, alone or beside an older run.

use super::measure::Figure;
use crate::cli::devices::Cpu;
use crate::cli::ui::{bytes, digits3};
use crate::decode::Stats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything a run measured. Read back by `--compare`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub v: u32,
    pub version: String,
    pub machine: Machine,
    pub model: Model,
    pub results: Vec<Row>,
    #[serde(default)]
    pub kernels: Vec<Kernel>,
    /// The text test, where it ran.
    #[serde(default)]
    pub text: Option<Text>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    pub threads: usize,
    pub device: String,
    /// Measured, 1e9 bytes a second: what the processor or the GPU reads from its memory.
    pub read_gb_per_s: f64,
}

impl Machine {
    /// `device_speed` is the device's own reading speed in bytes a second, where it has memory of its own.
    pub fn new(cpu: Cpu, device: String, threads: usize, device_speed: Option<f64>) -> Self {
        Machine { cpu: cpu.name, threads, device, read_gb_per_s: device_speed.map_or(cpu.read_gb_per_s, |c| c / 1e9) }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Model {
    pub name: String,
    pub formats: String,
    /// Bytes as loaded.
    pub weights: u64,
    pub kv: u64,
    #[serde(default)]
    pub activations: u64,
    /// Positions that there is room for.
    #[serde(default)]
    pub context: Option<usize>,
    pub load_s: f64,
}

/// One measured thing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Row {
    /// Such as `pp512`, `tg128 @ d4096`, `verify 8 rows`.
    pub name: String,
    /// `tok/s` (more is better), or `ms` (less is better).
    pub unit: String,
    pub figure: Figure,
    /// What else the row says, such as `c(8) = 1.31`.
    #[serde(default)]
    pub note: String,
    /// Of the verify test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<PassSize>,
}

/// A pass that was timed: its rows, and tokens in the cache before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassSize {
    pub rows: usize,
    pub depth: usize,
}

/// Real prompts, plain and with drafts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Text {
    pub temperature: f32,
    /// Most tokens of an answer, and how often each prompt was answered each way.
    pub tokens: usize,
    pub runs: usize,
    /// What drafted.
    pub drafts: String,
    pub kinds: Vec<TextKind>,
    pub acceptance: Acceptance,
}

impl Text {
    pub fn prompts(&self) -> usize {
        self.kinds.iter().map(|k| k.prompts).sum()
    }
}

/// Prompts of one kind.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TextKind {
    pub kind: String,
    pub prompts: usize,
    /// Median tokens a second.
    pub plain: f64,
    pub drafted: f64,
    /// Drafted over plain speed of each pair of runs.
    pub ratio: Figure,
    /// The same by processor time of this process: what other programs do hardly changes it.
    #[serde(default)]
    pub by_processor: Figure,
    pub tokens_per_pass: f64,
}

/// What became of drafted tokens.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Acceptance {
    pub passes: u64,
    /// That they brought, the target's own among them.
    pub tokens: u64,
    /// Drafted and accepted nodes; by depth below the root, and by the source that spoke most for them.
    pub by_depth: Vec<[u64; 2]>,
    pub by_source: BTreeMap<String, [u64; 2]>,
}

impl Acceptance {
    pub fn of(stats: &Stats) -> Acceptance {
        Acceptance {
            passes: stats.passes,
            tokens: stats.committed(),
            by_depth: stats.by_depth.iter().map(|t| [t.drafted, t.accepted]).collect(),
            by_source: stats.by_source.iter().map(|(name, t)| ((*name).to_owned(), [t.drafted, t.accepted])).collect(),
        }
    }
}

/// Time of the kernels of one label while decoding.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Kernel {
    pub label: String,
    pub calls: u64,
    pub seconds: f64,
    pub bytes: u64,
}

impl Kernel {
    pub fn gb_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 / self.seconds / 1e9 } else { 0.0 }
    }
}

impl Report {
    pub fn markdown(&self, old: Option<&Report>) -> String {
        let m = &self.machine;
        let mut out = format!(
            "{} ({}; {} weights, {} kv), {} on {}, {} threads, memory {} GB/s, gemma {}\n\n",
            self.model.name,
            self.model.formats,
            bytes(self.model.weights),
            bytes(self.model.kv),
            m.device,
            m.cpu,
            m.threads,
            digits3(m.read_gb_per_s),
            self.version
        );
        let mut table = vec![["test", "median", "unit", "min", "max", "runs", ""].map(String::from).to_vec()];
        for row in &self.results {
            let f = &row.figure;
            let cells = [
                &row.name,
                &digits3(f.median),
                &row.unit,
                &digits3(f.min),
                &digits3(f.max),
                &f.runs.len().to_string(),
                &row.note,
            ];
            table.push(cells.map(String::clone).to_vec());
        }
        if let Some(old) = old {
            table[0].extend(["before", "now / before"].map(String::from));
            for (row, cells) in self.results.iter().zip(&mut table[1..]) {
                cells.extend(compared(row, old));
            }
        }
        out += &markdown(&table);
        if !self.kernels.is_empty() {
            let total: f64 = self.kernels.iter().map(|k| k.seconds).sum();
            let mut table =
                vec![["kernel (decode)", "calls", "ms", "% of time", "GB/s", "% of memory speed"].map(String::from).to_vec()];
            for k in &self.kernels {
                let percent = |x: f64| format!("{:.0}", 100.0 * x);
                let (speed, share) = match k.bytes {
                    0 => (String::new(), String::new()),
                    _ => (digits3(k.gb_per_s()), percent(k.gb_per_s() / m.read_gb_per_s)),
                };
                table.push(vec![
                    k.label.clone(),
                    k.calls.to_string(),
                    digits3(k.seconds * 1e3),
                    percent(k.seconds / total),
                    speed,
                    share,
                ]);
            }
            out.push('\n');
            out += &markdown(&table);
        }
        out
    }

    pub fn csv(&self) -> String {
        let mut out = String::from("test,unit,median,min,max,runs,note\n");
        for row in &self.results {
            let f = &row.figure;
            let runs = f.runs.len();
            out += &format!(
                "{},{},{},{},{},{runs},\"{}\"\n",
                row.name,
                row.unit,
                f.median,
                f.min,
                f.max,
                row.note.replace('"', "'")
            );
        }
        for k in &self.kernels {
            out += &format!("kernel {},GB/s,{},,,{},\"{} s\"\n", k.label, k.gb_per_s(), k.calls, k.seconds);
        }
        out
    }
}

/// The older median, and the ratio; `=` where the ranges of both runs overlap.
fn compared(row: &Row, old: &Report) -> [String; 2] {
    let Some(before) = old.results.iter().find(|o| o.name == row.name && o.unit == row.unit) else {
        return [String::new(), String::new()];
    };
    let (a, b) = (&row.figure, &before.figure);
    let ratio = if b.median > 0.0 { a.median / b.median } else { 0.0 };
    let same = a.min <= b.max && b.min <= a.max;
    [digits3(b.median), format!("{ratio:.2}{}", if same { " =" } else { "" })]
}

/// A table whose columns line up in plain text too; all but the first are right-aligned.
pub fn markdown(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0).max(3);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for (i, row) in rows.iter().enumerate() {
        for (c, w) in widths.iter().enumerate() {
            let cell = row.get(c).map_or("", String::as_str);
            out += &if c == 0 { format!("| {cell:w$} ") } else { format!("| {cell:>w$} ") };
        }
        out += "|\n";
        if i == 0 {
            for (c, w) in widths.iter().enumerate() {
                out += &if c == 0 { format!("|{} ", "-".repeat(w + 1)) } else { format!("|{}: ", "-".repeat(*w)) };
            }
            out += "|\n";
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(median: f64) -> Report {
        let row = Row {
            name: "pp512".into(),
            unit: "tok/s".into(),
            figure: Figure::of(vec![median - 1.0, median, median + 1.0]),
            ..Row::default()
        };
        let kernel = Kernel { label: "qkv".into(), calls: 2, seconds: 0.5, bytes: 1_000_000_000 };
        let machine = Machine { read_gb_per_s: 4.0, ..Machine::default() };
        Report { v: 1, machine, results: vec![row], kernels: vec![kernel], ..Report::default() }
    }

    #[test]
    fn a_comparison_says_what_changed_and_what_is_noise() {
        let text = report(20.0).markdown(Some(&report(10.0)));
        assert!(text.contains("2.00 |"), "{text}");
        assert!(report(10.5).markdown(Some(&report(10.0))).contains("1.05 = |"));
        assert!(text.contains("| 2.00 |                50 |"), "kernel speed and share of the roof: {text}");
    }

    #[test]
    fn json_survives_a_round_trip() {
        let json = serde_json::to_string(&report(3.0)).unwrap();
        let back: Report = serde_json::from_str(&json).unwrap();
        assert_eq!(back.results[0].figure, report(3.0).results[0].figure);
        assert!(report(3.0).csv().lines().all(|l| l.split(',').count() == 7));
    }
}
