//! `gemma bench --report`: the figures of a run as one page of HTML, plots drawn as SVG in it. It
//! loads nothing from anywhere, and shows nothing that was not measured.

mod chart;

use super::measure::Figure;
use super::replay;
use super::report::{Acceptance, Kernel, RATIO, Report, Text, change, of_rows};
use crate::util::units::{bytes, digits3, thousands};
use chart::{Bar, Group, Plot, Point, Series, bars, bars_of, escape, lines};

const STYLE: &str = include_str!("page.css");
/// Depths and kernels shown, at most: what comes after is small.
const MOST: usize = 12;

/// The page of a run of the bench, beside an older run where there is one.
pub fn of(report: &Report, old: Option<&Report>) -> String {
    let m = &report.machine;
    let when = |report: &Report| match report.date.as_str() {
        "" => format!("gemma {}", report.version),
        date => format!("gemma {}, {date} UTC", report.version),
    };
    let mut facts = vec![
        ("model", format!("{} ({})", report.model.name, report.model.formats)),
        ("device", m.device.clone()),
        (
            "processor",
            format!("{}, {} thread{}", m.cpu, m.threads, if m.threads == 1 { "" } else { "s" }),
        ),
        ("memory reads", format!("{} GB/s, measured", digits3(m.read_gb_per_s))),
        ("program", when(report)),
    ];
    facts.extend((!report.command.is_empty()).then(|| ("command", report.command.clone())));
    facts.extend(old.map(|old| {
        ("before", format!("{} on {}, {}", old.model.name, old.machine.device, when(old)))
    }));
    let mut page = Page::new(&format!("gemma bench: {}", report.model.name), &facts);
    for doubt in &report.doubts {
        page.0 += &format!("<p class=\"doubt\">{}</p>\n", escape(doubt));
    }
    page.speeds(report, old);
    page.costs(report, old);
    if let Some(text) = &report.text {
        page.text(text, old.and_then(|old| old.text.as_ref()), &m.device);
        let of = format!("{}, temperature {}", text.drafts, text.temperature);
        page.acceptance(
            "",
            &text.acceptance,
            &format!("While {of}; all {} prompts together.", text.prompts()),
        );
    }
    page.memory(report);
    for (rows, kernels) in report.kernels_by_rows() {
        page.kernels(rows, &kernels, report.machine.read_gb_per_s);
    }
    page.finish()
}

/// The page of a replay.
pub fn of_replay(report: &replay::Report) -> String {
    let facts = [
        ("drafts", format!("{} from {}", report.tree, report.sources.join(", "))),
        ("draft model", report.draft.clone().unwrap_or_else(|| "none".into())),
        ("tokenizer", format!("SHA-256 {}", report.tokenizer_sha256)),
        ("program", format!("gemma {}", report.version)),
    ];
    let mut page = Page::new("gemma bench: replay of transcripts", &facts);
    let group = |c: &replay::Category| Group {
        label: format!(
            "{} ({} texts, {} tokens)",
            c.name,
            thousands(c.records as u64),
            thousands(c.tokens)
        ),
        bars: vec![Bar {
            value: c.tau,
            text: format!("{:.2} ({:.2} to {:.2})", c.tau, c.low, c.high),
            series: 1,
        }],
    };
    page.figure(
        "Tokens per pass",
        &bars(
            &report.categories.iter().map(group).collect::<Vec<_>>(),
            "tokens per pass by \
            category",
        ),
        "Tokens that a pass of the target would bring, its own among them; plain decoding has 1. \
         In brackets 95 % intervals, by resampling texts. No target ran: the texts stand for what \
         it would say.",
        &["text", "texts", "tokens", "passes", "tokens per pass"],
        report.categories.iter().map(|c| {
            vec![
                c.name.clone(),
                c.records.to_string(),
                c.tokens.to_string(),
                c.passes.to_string(),
                format!("{:.3}", c.tau),
            ]
        }),
    );
    for c in &report.categories {
        let one = Acceptance {
            passes: c.passes,
            tokens: c.tokens,
            by_depth: c.by_depth.clone(),
            by_source: c.by_source.clone(),
        };
        page.acceptance(
            &format!(", {}", c.name),
            &one,
            &format!("Replay of {} texts, {}.", c.records, report.tree),
        );
    }
    page.finish()
}

/// Passes that were timed, by depth of the cache: from one row, which the others are compared with,
/// to the most.
fn passes(report: &Report) -> Vec<(usize, Vec<(usize, &Figure)>)> {
    let mut depths: Vec<usize> =
        report.results.iter().filter_map(|r| r.pass.map(|p| p.depth)).collect();
    depths.sort_unstable();
    depths.dedup();
    let of = |depth: usize| {
        let rows = report
            .results
            .iter()
            .filter_map(|r| Some((r.pass.filter(|p| p.depth == depth)?.rows, &r.figure)));
        let mut rows: Vec<_> = rows.collect();
        rows.sort_by_key(|(rows, _)| *rows);
        (depth, rows)
    };
    // Without a pass of one row there is nothing to compare with.
    depths
        .into_iter()
        .map(of)
        .filter(|(_, rows)| rows[0].0 == 1 && rows[0].1.median > 0.0)
        .collect()
}

struct Page(String);

impl Page {
    fn new(title: &str, facts: &[(&str, String)]) -> Page {
        let title = escape(title);
        let facts: String = facts
            .iter()
            .map(|(name, what)| format!("<dt>{name}</dt><dd>{}</dd>", escape(what)))
            .collect();
        // Nothing may be fetched, whatever names of models say.
        let policy = "default-src 'none'; style-src 'unsafe-inline'";
        Page(format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta \
             http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n<meta name=\"viewport\" \
             content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" \
             content=\"light \
             dark\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
             <h1>{title}</h1>\n<dl>{facts}</dl>\n"
        ))
    }

    fn finish(self) -> String {
        self.0 + "</main>\n</body>\n</html>\n"
    }

    /// A plot with its caption, and its figures as a table below.
    fn figure(
        &mut self,
        title: &str,
        plot: &Plot,
        caption: &str,
        head: &[&str],
        rows: impl Iterator<Item = Vec<String>>,
    ) {
        self.0 += &format!(
            "<section>\n<h2>{}</h2>\n<figure>\n{}<figcaption>{}</figcaption>\n</figure>\n",
            escape(title),
            plot.html,
            escape(caption)
        );
        self.0 += "<details><summary>The figures as a table</summary>\n";
        self.table(head, rows);
        self.0 += "</details>\n</section>\n";
    }

    fn table(&mut self, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
        let cells = |tag: &str, cells: &mut dyn Iterator<Item = String>| -> String {
            cells.map(|c| format!("<{tag}>{}</{tag}>", escape(&c))).collect()
        };
        self.0 += &format!(
            "<div class=\"wide\"><table>\n<thead><tr>{}</tr></thead>\n<tbody>\n",
            cells("th", &mut head.iter().map(|h| h.to_string()))
        );
        for row in rows {
            self.0 += &format!("<tr>{}</tr>\n", cells("td", &mut row.into_iter()));
        }
        self.0 += "</tbody></table></div>\n";
    }

    fn speeds(&mut self, report: &Report, old: Option<&Report>) {
        let rows: Vec<_> = report.results.iter().filter(|r| r.unit == "tok/s").collect();
        if rows.is_empty() {
            return;
        }
        self.0 += "<section>\n<h2>Prefill and decode</h2>\n";
        let head = ["test", "median, tok/s", "least", "most", "runs"];
        let more: &[&str] =
            if old.is_some() { &["before", "change", "of which"] } else { &["of which"] };
        self.table(
            &[&head, more].concat(),
            rows.iter().map(|r| {
                let f = &r.figure;
                let [median, min, max] = [f.median, f.min, f.max].map(digits3);
                let cells = vec![r.name.clone(), median, min, max, f.runs.len().to_string()];
                let before = old.map_or(Vec::new(), |old| change(r, old).to_vec());
                [cells, before, vec![r.note.clone()]].concat()
            }),
        );
        self.0 += "<p class=\"caption\">pp: tokens of a prompt; tg: tokens one by one, sampling \
                   included; d: tokens in the cache before. One run more comes first and does not \
                   count.</p>\n</section>\n";
    }

    /// c(M) by depth of the cache, and that of an older run.
    fn costs(&mut self, report: &Report, old: Option<&Report>) {
        let (mut series, mut table) = (Vec::new(), Vec::new());
        for (report, when) in [(Some(report), ""), (old, ", before")] {
            let Some(report) = report else { continue };
            for (depth, points) in passes(report) {
                let one = points[0].1.median;
                let point = |(rows, f): &(usize, &Figure)| Point {
                    x: *rows,
                    y: f.median / one,
                    low: f.min / one,
                    high: f.max / one,
                };
                let name = format!("{} tokens in the cache{when}", thousands(depth as u64));
                table.extend(points.iter().map(|(rows, f)| {
                    let cells = [f.median, f.min, f.max].map(digits3);
                    [
                        vec![format!("{depth}{when}"), rows.to_string()],
                        cells.to_vec(),
                        vec![format!("{:.3}", f.median / one)],
                    ]
                    .concat()
                }));
                series.push(Series { name, points: points.iter().map(point).collect() });
            }
        }
        if series.iter().all(|s| s.points.len() < 2) {
            return;
        }
        let runs =
            report.results.iter().find(|r| r.pass.is_some()).map_or(0, |r| r.figure.runs.len());
        self.figure(
            "Cost of a pass by its rows, c(M)",
            &lines(
                &series,
                "M, tokens checked in one \
                pass",
                "c(M) = time of a pass of M rows / of \
                one row",
            ),
            &format!(
                "Median of {runs} runs, whiskers from least to most; every row's logits sampled. \
                 Dashed: c = 1, where checking drafts would be free. Measured on {}.",
                report.machine.device
            ),
            &["tokens in the cache", "M", "median, ms", "least", "most", "c(M)"],
            table.into_iter(),
        );
    }

    fn text(&mut self, text: &Text, old: Option<&Text>, device: &str) {
        let group = |k: &super::report::TextKind| Group {
            label: format!("{}: ratio {:.2}", k.kind, k.ratio.median),
            bars: vec![
                Bar { value: k.plain, text: format!("{} tok/s", digits3(k.plain)), series: 0 },
                Bar { value: k.drafted, text: format!("{} tok/s", digits3(k.drafted)), series: 1 },
            ],
        };
        let plot = bars(
            &text.kinds.iter().map(group).collect::<Vec<_>>(),
            "tokens a second by kind of prompt",
        );
        let head = [
            "kind",
            "prompts",
            "plain, tok/s",
            "with drafts, tok/s",
            "ratio",
            "half of the pairs",
            "tokens per pass",
        ];
        let before: &[&str] = if old.is_some() { &["ratio before"] } else { &[] };
        self.figure(
            "Tokens a second by kind of prompt",
            &plot.legend(&["plain", "with drafts"]),
            &format!(
                "Medians of decoding at temperature {}, at most {} tokens an answer, {} runs of \
                 each prompt. {RATIO} Both ways gave the same text. Drafts: {}. Measured on \
                 {device}.",
                text.temperature, text.tokens, text.runs, text.drafts
            ),
            &[&head, before].concat(),
            text.rows().map(|k| {
                let [low, high] = k.ratio.quartiles();
                let ratio = [
                    format!("{:.2}", k.ratio.median),
                    format!(
                        "{low:.2} to \
                    {high:.2}"
                    ),
                    format!("{:.2}", k.tokens_per_pass),
                ];
                let figures = [vec![digits3(k.plain), digits3(k.drafted)], ratio.to_vec()].concat();
                let was = |old: &Text| {
                    old.rows()
                        .find(|o| o.kind == k.kind)
                        .map_or(String::new(), |o| format!("{:.2}", o.ratio.median))
                };
                [
                    vec![k.kind.clone(), k.prompts.to_string()],
                    figures,
                    old.map(was).into_iter().collect(),
                ]
                .concat()
            }),
        );
    }

    /// `of` tells one text from another in the title.
    fn acceptance(&mut self, of: &str, a: &Acceptance, caption: &str) {
        if a.passes == 0 || a.by_depth.iter().all(|t| t[0] == 0) {
            return;
        }
        let per_pass = |n: u64| n as f64 / a.passes as f64;
        let percent = |t: &[u64; 2]| 100.0 * t[1] as f64 / t[0].max(1) as f64;
        let bar = |label: String, t: &[u64; 2]| Group {
            label,
            bars: vec![Bar {
                value: per_pass(t[1]),
                text: format!("{:.2} ({:.0} % of drafted)", per_pass(t[1]), percent(t)),
                series: 1,
            }],
        };
        let row = |name: String, t: &[u64; 2]| {
            vec![name, t[0].to_string(), t[1].to_string(), format!("{:.4}", per_pass(t[1]))]
        };
        let (passes, tau) = (thousands(a.passes), a.tokens as f64 / a.passes as f64);
        let depths: Vec<_> =
            a.by_depth.iter().enumerate().filter(|(_, t)| t[0] > 0).take(MOST).collect();
        self.figure(
            &format!("Acceptance by depth{of}"),
            &bars_of(
                &depths
                    .iter()
                    .map(|(d, t)| {
                        bar(
                            format!(
                                "token {} of a \
                draft",
                                d + 1
                            ),
                            t,
                        )
                    })
                    .collect::<Vec<_>>(),
                1.0,
                "accepted by depth",
            ),
            &format!(
                "Tokens accepted per pass at each depth of the draft, that is the share of \
                      passes that got there; in brackets, of the nodes drafted there. {passes} \
                      passes brought {tau:.2} tokens each, the target's own among them. {caption}"
            ),
            &["depth", "drafted", "accepted", "accepted per pass"],
            depths.iter().map(|(d, t)| row((d + 1).to_string(), t)),
        );
        self.figure(
            &format!("Acceptance by source{of}"),
            &bars_of(
                &a.by_source.iter().map(|(name, t)| bar(name.clone(), t)).collect::<Vec<_>>(),
                1.0,
                "accepted \
                by source",
            ),
            &format!(
                "Tokens accepted per pass by the source that spoke most for them; in \
                brackets, of its nodes. {caption}"
            ),
            &["source", "drafted", "accepted", "accepted per pass"],
            a.by_source.iter().map(|(name, t)| row(name.clone(), t)),
        );
    }

    fn memory(&mut self, report: &Report) {
        let m = &report.model;
        let arenas =
            [("weights", m.weights), ("keys and values", m.kv), ("activations", m.activations)];
        // An older run did not say what activations took.
        let arenas: Vec<_> = arenas.into_iter().filter(|(_, n)| *n > 0).collect();
        if arenas.is_empty() {
            return;
        }
        let group = |(name, n): &(&str, u64)| Group {
            label: (*name).to_owned(),
            bars: vec![Bar { value: *n as f64, text: bytes(*n), series: 1 }],
        };
        let context = m
            .context
            .map_or(String::new(), |c| format!(" with room for {} tokens", thousands(c as u64)));
        self.figure(
            "Memory by arena",
            &bars(&arenas.iter().map(group).collect::<Vec<_>>(), "bytes by arena"),
            &format!(
                "What the engine allocated for {}{context}, drafts not counted, on {}.",
                m.name, report.machine.device
            ),
            &["arena", "bytes"],
            arenas.iter().map(|(name, n)| vec![(*name).to_owned(), thousands(*n)]),
        );
    }

    /// Of passes over so many rows.
    fn kernels(&mut self, rows: usize, kernels: &[&Kernel], read_gb_per_s: f64) {
        let total: f64 = kernels.iter().map(|k| k.seconds).sum();
        if total <= 0.0 {
            return;
        }
        let speed = |k: &Kernel| match k.bytes {
            0 => String::new(),
            _ => format!(
                ", {} GB/s = {:.0} % of memory",
                digits3(k.gb_per_s()),
                100.0 * k.gb_per_s() / read_gb_per_s
            ),
        };
        let group = |k: &&Kernel| {
            let share = 100.0 * k.seconds / total;
            Group {
                label: k.label.clone(),
                bars: vec![Bar {
                    value: share,
                    text: format!("{share:.1} %{}", speed(k)),
                    series: 1,
                }],
            }
        };
        let passes = if rows == 1 {
            "while decoding".into()
        } else {
            format!("in passes of {}", of_rows(rows))
        };
        self.figure(
            &format!("Time by kernel {passes}"),
            &bars(
                &kernels.iter().take(MOST).map(group).collect::<Vec<_>>(),
                "share of time by \
                kernel",
            ),
            &format!(
                "Share of the kernels' time; weights and cache read per second, against the {} \
                    GB/s that memory gives.",
                digits3(read_gb_per_s)
            ),
            &["kernel", "calls", "ms", "bytes"],
            kernels.iter().map(|k| {
                vec![
                    k.label.clone(),
                    k.calls.to_string(),
                    digits3(k.seconds * 1e3),
                    thousands(k.bytes),
                ]
            }),
        );
    }
}
