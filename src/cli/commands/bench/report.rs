//! The figures of a run as Markdown or JSON, alone or compared with an older run.

use super::measure::Figure;
use crate::cli::io::table::markdown;
use crate::cli::io::ui::wrapped;
use crate::decode::Stats;
use crate::util::units::{bytes, digits3};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// All figures of a run. `--compare` reads them from a file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BenchReport {
    pub v: u32,
    /// Version of the program, with its commit if the build knew it.
    pub version: String,
    /// Time of the run (UTC) and its command line.
    #[serde(default)]
    pub date: String,
    #[serde(default)]
    pub command: String,
    pub machine: BenchMachine,
    pub model: BenchModel,
    pub results: Vec<Measurement>,
    #[serde(default)]
    pub kernels: Vec<KernelTiming>,
    /// The text test, if it ran.
    #[serde(default)]
    pub text: Option<TextReport>,
    /// Reasons to distrust the figures, in sentences.
    #[serde(default)]
    pub doubts: Vec<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BenchMachine {
    pub cpu: String,
    pub threads: usize,
    pub device: String,
    /// Measured read speed of the memory of the processor or GPU, in 1e9 bytes a second.
    pub read_gb_per_s: f64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BenchModel {
    pub name: String,
    pub formats: String,
    /// Bytes of the loaded weights.
    pub weights: u64,
    /// Bytes of the weights that a pass over one row reads.
    #[serde(default)]
    pub read: u64,
    pub kv: u64,
    #[serde(default)]
    pub activations: u64,
    /// Context size in positions.
    #[serde(default)]
    pub context: Option<usize>,
    pub load_s: f64,
}

/// One measured quantity.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measurement {
    /// Name, such as `pp512`, `tg128 @ d4096`, `verify 8 rows`.
    pub name: String,
    /// `tok/s` (more is better), or `ms` (less is better).
    pub unit: String,
    pub figure: Figure,
    /// A remark, such as `c(8) = 1.31`.
    #[serde(default)]
    pub note: String,
    /// The pass of a verify test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<PassSize>,
}

/// A timed pass: its rows, and the number of tokens in the cache before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassSize {
    pub rows: usize,
    pub depth: usize,
}

/// Results of real prompts, with and without drafts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TextReport {
    pub temperature: f32,
    /// Token limit of an answer, and number of runs of each prompt with and without drafts.
    pub tokens: usize,
    pub runs: usize,
    /// The drafter, and the reason if it was disabled.
    pub drafts: String,
    pub kinds: Vec<TextKind>,
    /// All kinds of prompts together.
    #[serde(default)]
    pub all: Option<TextKind>,
    pub acceptance: DraftAcceptance,
}

impl TextReport {
    /// Returns the kinds of prompts, and then all of them together.
    pub fn rows(&self) -> impl Iterator<Item = &TextKind> {
        self.kinds.iter().chain(&self.all)
    }
}

/// Prompts of one kind.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TextKind {
    pub kind: String,
    pub prompts: usize,
    /// Median speed in tokens a second.
    pub plain: f64,
    pub drafted: f64,
    /// Speed with drafts divided by speed without, for each pair of runs of a prompt. The two runs
    /// of a pair follow each other. The median of these ratios is not the ratio of the medians
    /// above.
    pub ratio: Figure,
    pub tokens_per_pass: f64,
}

/// Numbers of drafted and accepted tokens.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DraftAcceptance {
    pub passes: u64,
    /// Tokens that the passes added, including the target's own.
    pub tokens: u64,
    /// Drafted and accepted nodes, by depth below the root and by the source with the largest
    /// share.
    pub by_depth: Vec<[u64; 2]>,
    pub by_source: BTreeMap<String, [u64; 2]>,
}

impl DraftAcceptance {
    pub fn of(stats: &Stats) -> DraftAcceptance {
        DraftAcceptance {
            passes: stats.passes,
            tokens: stats.committed(),
            by_depth: stats.by_depth.iter().map(|t| [t.drafted, t.accepted]).collect(),
            by_source: stats
                .by_source
                .iter()
                .map(|(name, t)| ((*name).to_owned(), [t.drafted, t.accepted]))
                .collect(),
        }
    }
}

/// Time of the kernels with one label, in passes of one size.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct KernelTiming {
    pub label: String,
    #[serde(default = "one")]
    pub rows: usize,
    /// Number of timed passes; 0 in files of older versions.
    #[serde(default)]
    pub passes: usize,
    pub calls: u64,
    pub seconds: f64,
    pub bytes: u64,
    /// Multiply-adds of int8 values in linear layers.
    #[serde(default)]
    pub macs: u64,
}

fn one() -> usize {
    1
}

impl KernelTiming {
    fn gb_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 / self.seconds / 1e9 } else { 0.0 }
    }
}

/// Formats a number of rows, such as `1 row`, `8 rows`.
pub fn count_rows(rows: usize) -> String {
    format!("{rows} row{}", if rows == 1 { "" } else { "s" })
}

/// Explanation below the table of texts.
const RATIO: &str = concat!(
    "Ratio: tokens per second with drafts divided by those without. ",
    "Each prompt runs both ways, one right after the other. ",
    "Shown are the median over all pairs and its quartiles.",
);

impl BenchReport {
    /// Returns tables of at most 100 columns, compared with an older run if there is one.
    pub fn markdown(&self, old: Option<&BenchReport>) -> String {
        let mut out = self.heading();
        if !self.results.is_empty() {
            out += &markdown(&match old {
                Some(old) => compared(&self.results, old),
                None => plain(&self.results),
            });
        }
        if let Some(text) = &self.text {
            out.push('\n');
            out += &markdown(&texts(text, old.and_then(|old| old.text.as_ref())));
            out += &format!("\n{}", wrapped(RATIO, COLUMNS) + "\n");
        }
        for kernels in self.kernels.chunk_by(|a, b| a.rows == b.rows) {
            out.push('\n');
            out += &markdown(&self.kernel_table(kernels));
        }
        for doubt in &self.doubts {
            out += &format!("\n{}\n", wrapped(&format!("Note: {doubt}"), COLUMNS));
        }
        out
    }

    /// Returns reasons to distrust the figures, in sentences: a load average before the run that is
    /// above the number of cores, or repetitions of a test that differ by more than 10 %.
    pub fn find_doubts(&self, load: Option<f64>, cores: usize) -> Vec<String> {
        let busy = load.filter(|load| *load > cores as f64).map(|load| {
            format!(
                "The load average was {load:.1} on {cores} cores before the run: \
                 other programs slow it down. Repeat the run when they have ended."
            )
        });
        let is_disturbed = |row: &&Measurement| row.figure.max > SPREAD * row.figure.min;
        let disturbed: Vec<&Measurement> = self.results.iter().filter(is_disturbed).collect();
        let spread = disturbed.split_first().map(|(first, more)| {
            let more = match more.len() {
                0 => String::new(),
                n => format!(" and of {n} other tests"),
            };
            format!(
                "Repetitions of {}{more} differ by more than 10 %: another program ran, \
                 or the processor changed its clock.",
                first.name
            )
        });
        busy.into_iter().chain(spread).collect()
    }

    /// Returns lines about the model, the machine and the run.
    fn heading(&self) -> String {
        let (m, model) = (&self.machine, &self.model);
        let (weights, kv) = (bytes(model.weights), bytes(model.kv));
        // The processor's own description already contains the threads.
        let threads = if m.device.contains(" thread") {
            String::new()
        } else {
            format!(", {} threads", m.threads)
        };
        let mut lines = vec![
            format!("{} ({}; {weights} weights, {kv} keys and values)", model.name, model.formats),
            format!(
                "on {}, {}{threads}, memory {} GB/s",
                m.device,
                m.cpu,
                digits3(m.read_gb_per_s)
            ),
            format!(
                "gemma {}{}",
                self.version,
                if self.date.is_empty() { String::new() } else { format!(", {}", self.date) }
            ),
        ];
        lines.extend((!self.command.is_empty()).then(|| self.command.clone()));
        lines.iter().map(|line| wrapped(line, COLUMNS) + "\n").collect::<String>() + "\n"
    }

    fn kernel_table(&self, kernels: &[KernelTiming]) -> Vec<Vec<String>> {
        let total: f64 = kernels.iter().map(|k| k.seconds).sum();
        let passes = match kernels[0].rows {
            1 => "kernel (decode)".to_owned(),
            rows => format!("kernel ({})", count_rows(rows)),
        };
        let head = [&passes, "calls", "ms", "% of time", "GB/s", "% of memory speed"];
        let mut table = vec![head.map(String::from).to_vec()];
        for k in kernels {
            let percent = |x: f64| format!("{:.0}", 100.0 * x);
            let (speed, share) = match k.bytes {
                0 => (String::new(), String::new()),
                _ => (digits3(k.gb_per_s()), percent(k.gb_per_s() / self.machine.read_gb_per_s)),
            };
            let row = [
                k.label.clone(),
                k.calls.to_string(),
                digits3(k.seconds * 1e3),
                percent(k.seconds / total),
                speed,
                share,
            ];
            table.push(row.to_vec());
        }
        table
    }
}

/// If repetitions of a test differ by more than this factor, they were disturbed.
const SPREAD: f64 = 1.10;

/// Columns of text around the tables, and the maximum for a table.
const COLUMNS: usize = 100;

fn plain(rows: &[Measurement]) -> Vec<Vec<String>> {
    let mut table =
        vec![["test", "median", "unit", "min", "max", "runs", ""].map(String::from).to_vec()];
    for row in rows {
        let f = &row.figure;
        let [median, min, max] = [f.median, f.min, f.max].map(digits3);
        table.push(
            [
                row.name.clone(),
                median,
                row.unit.clone(),
                min,
                max,
                f.runs.len().to_string(),
                row.note.clone(),
            ]
            .to_vec(),
        );
    }
    table
}

fn compared(rows: &[Measurement], old: &BenchReport) -> Vec<Vec<String>> {
    let mut table = vec![["test", "median", "unit", "before", "change"].map(String::from).to_vec()];
    for row in rows {
        let [before, change] = change(row, old);
        table.push(
            [row.name.clone(), digits3(row.figure.median), row.unit.clone(), before, change]
                .to_vec(),
        );
    }
    table
}

/// Returns a table of the text test by kinds of prompts.
fn texts(text: &TextReport, old: Option<&TextReport>) -> Vec<Vec<String>> {
    let head =
        ["prompts", "texts", "plain tok/s", "drafted tok/s", "tok/pass", "ratio", "half of them"];
    let mut table = vec![head.map(String::from).to_vec()];
    if old.is_some() {
        table[0].push("before".into());
    }
    for kind in text.rows() {
        let [low, high] = kind.ratio.quartiles();
        let [plain, drafted] = [kind.plain, kind.drafted].map(digits3);
        let (pass, ratio) =
            (format!("{:.2}", kind.tokens_per_pass), format!("{:.2}", kind.ratio.median));
        let range = format!("{low:.2} to {high:.2}");
        let mut row =
            [kind.kind.clone(), kind.prompts.to_string(), plain, drafted, pass, ratio, range]
                .to_vec();
        if let Some(old) = old {
            let before = old.rows().find(|before| before.kind == kind.kind);
            row.push(before.map_or(String::new(), |before| format!("{:.2}", before.ratio.median)));
        }
        table.push(row);
    }
    table
}

/// Returns the older median and the change since then.
///
/// The change is `same` if the ranges of both runs overlap.
fn change(row: &Measurement, old: &BenchReport) -> [String; 2] {
    let Some(before) = old.results.iter().find(|o| o.name == row.name && o.unit == row.unit) else {
        return [String::new(), String::new()];
    };
    let (a, b) = (&row.figure, &before.figure);
    let change = match (a.median, b.median) {
        _ if a.min <= b.max && b.min <= a.max => "same".to_owned(),
        (now, before) if now > 0.0 && before > 0.0 => {
            // Times are better when they are smaller.
            let faster =
                if row.unit == "ms" || row.unit == "s" { before / now } else { now / before };
            if faster >= 1.0 {
                format!("{faster:.2} x faster")
            } else {
                format!("{:.2} x slower", 1.0 / faster)
            }
        }
        _ => String::new(),
    };
    [digits3(b.median), change]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(median: f64) -> BenchReport {
        let row = Measurement {
            name: "pp512".into(),
            unit: "tok/s".into(),
            figure: Figure::of(vec![median - 1.0, median, median + 1.0]),
            ..Measurement::default()
        };
        let kernel = KernelTiming {
            label: "qkv".into(),
            rows: 1,
            calls: 2,
            seconds: 0.5,
            bytes: 1_000_000_000,
            ..KernelTiming::default()
        };
        let machine = BenchMachine { read_gb_per_s: 4.0, ..BenchMachine::default() };
        BenchReport {
            v: 1,
            machine,
            results: vec![row],
            kernels: vec![kernel],
            ..BenchReport::default()
        }
    }

    #[test]
    fn a_comparison_says_what_changed_and_what_is_noise() {
        let text = report(20.0).markdown(Some(&report(10.0)));
        assert!(text.contains("2.00 x faster |"), "{text}");
        assert!(report(10.0).markdown(Some(&report(25.0))).contains("2.50 x slower |"));
        assert!(report(10.5).markdown(Some(&report(10.0))).contains(" same |"));
        let mut times = [report(10.0), report(25.0)];
        times.iter_mut().for_each(|report| report.results[0].unit = "ms".into());
        assert!(
            times[0].markdown(Some(&times[1])).contains("2.50 x faster |"),
            "less time is faster"
        );
        assert!(
            text.contains("| 2.00 |                50 |"),
            "kernel speed and share of the roof: {text}"
        );
    }

    #[test]
    fn json_survives_a_round_trip() {
        let json = serde_json::to_string(&report(3.0)).unwrap();
        let back: BenchReport = serde_json::from_str(&json).unwrap();
        assert_eq!(back.results[0].figure, report(3.0).results[0].figure);
    }

    #[test]
    fn a_busy_machine_and_disturbed_runs_are_reported() {
        let report = report(10.0);
        assert_eq!(report.find_doubts(Some(2.0), 2).len(), 1, "9 to 11 is a wide range");
        let busy = report.find_doubts(Some(2.1), 2);
        assert!(busy[0].contains("load average was 2.1 on 2 cores"), "{busy:?}");
        assert!(busy[1].contains("Repetitions of pp512 differ"), "{busy:?}");
    }

    #[test]
    fn kernels_of_each_size_of_pass_have_a_table_of_their_own() {
        let mut report = report(1.0);
        let eight = KernelTiming { rows: 8, seconds: 0.25, ..report.kernels[0].clone() };
        report.kernels.push(eight);
        let text = report.markdown(None);
        let has = |heading: &str| text.contains(heading);
        assert!(has("| kernel (decode) |") && has("| kernel (8 rows) |"), "{text}");
        assert_eq!(text.matches("|       100 |").count(), 2, "shares within a size: {text}");
    }

    /// A report with the longest names and figures that a run can have.
    #[test]
    fn tables_fit_a_hundred_columns() {
        let mut report = report(12345.6);
        let row = |name: &str, unit: &str, note: &str| Measurement {
            name: name.into(),
            unit: unit.into(),
            figure: Figure::of(vec![12_345.6; 5]),
            note: note.into(),
            ..Measurement::default()
        };
        report.results.push(row("verify 32 rows @ d131072", "ms", "c(32) = 12.34"));
        report.results.push(row("tg128 @ d131072", "tok/s", "1234 GB/s, 100 % of memory"));
        let ratio = Figure::of(vec![10.5, 12.25]);
        let kind = TextKind {
            kind: "random words".into(),
            prompts: 100,
            plain: 1234.5,
            drafted: 12_345.6,
            ratio,
            ..TextKind::default()
        };
        report.text = Some(TextReport {
            kinds: vec![kind.clone()],
            all: Some(kind),
            ..TextReport::default()
        });
        report.model.formats = "words ".repeat(40);
        report.doubts = vec!["A sentence of many words. ".repeat(8)];
        for text in [report.markdown(None), report.markdown(Some(&report))] {
            assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
            assert!(text.contains("| random words ") && text.contains("10.50 to 12.25"), "{text}");
        }
    }
}
