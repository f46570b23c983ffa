//! The page that `gemma bench --report` writes: the tables of the run, and plots of the same
//! figures. It is one HTML file that loads nothing.

use super::measure::Figure;
use super::report::{Kernel, Report, of_rows};
use crate::cli::io::ui::clean;
use crate::util::units::{bytes, digits3, thousands};
use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const STYLE: &str = "\
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 960px; margin: 0 auto; padding: 16px; }
pre { overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; background: #fff; }
@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg); } }
";
const WIDTH: u32 = 960;
/// Depths and kernels in one plot, at most: later ones are small.
const MOST: usize = 12;
/// Columns of a bar's plot: where the labels end and the bars begin, and the longest bar.
const LABEL: i32 = 240;
const LONGEST: f64 = 400.0;
const ROW: i32 = 24;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Writes the page of a run, beside an older run if there is one.
pub fn page(report: &Report, old: Option<&Report>) -> Result<String> {
    let title = escape(&format!("gemma bench: {}", report.model.name));
    let mut body = format!("<h1>{title}</h1>\n<pre>{}</pre>\n", escape(&report.markdown(old)));
    if let Some(old) = old {
        let before = format!("Before: {}, {}, {}", old.model.name, old.date, old.machine.device);
        body += &format!("<p>{}</p>\n", escape(&before));
    }
    for plot in plots(report, old)? {
        let (title, caption) = (escape(&plot.title), escape(&plot.caption));
        let label = format!("<svg role=\"img\" aria-label=\"{title}\" ");
        let svg = plot.svg.replacen("<svg ", &label, 1);
        body += &format!(
            "<figure>\n<h2>{title}</h2>\n{svg}<figcaption>{caption}</figcaption>\n</figure>\n"
        );
    }
    // The policy holds even where a model's name is hostile.
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta \
         http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    ))
}

struct PlotOnPage {
    title: String,
    svg: String,
    caption: String,
}

struct Bar {
    label: String,
    value: f64,
    text: String,
    colour: RGBColor,
}

impl Bar {
    fn new(label: impl Into<String>, value: f64, text: String) -> Bar {
        Bar { label: label.into(), value, text, colour: RGBColor(38, 110, 180) }
    }
}

/// Cost of a pass of each number of rows, relative to one row, with its range.
struct Costs {
    name: String,
    points: Vec<(f64, [f64; 3])>, // rows, least, median, most
}

fn plots(report: &Report, old: Option<&Report>) -> Result<Vec<PlotOnPage>> {
    let mut all = Vec::new();
    let mut add = |title: &str, svg: String, caption: &str| {
        all.push(PlotOnPage { title: title.to_owned(), svg, caption: caption.to_owned() });
    };
    let mut costs = costs(report, "");
    costs.extend(old.into_iter().flat_map(|old| self::costs(old, ", before")));
    if costs.iter().any(|series| series.points.len() > 1) {
        add(
            "Cost of a pass by its rows, c(M)",
            lines(&costs)?,
            "Time of a pass over M rows divided by the time of one row: medians, with bars from \
             the least run to the most. At c = 1 checking drafts is free.",
        );
    }
    if let Some(text) = &report.text {
        let speed = |value: f64| format!("{} tok/s", digits3(value));
        let pair = |kind: &super::report::TextKind| {
            let plain = Bar::new(format!("{}, plain", kind.kind), kind.plain, speed(kind.plain));
            let text = format!("{}, ratio {:.2}", speed(kind.drafted), kind.ratio.median);
            [
                Bar { colour: RGBColor(150, 150, 150), ..plain },
                Bar::new(format!("{}, with drafts", kind.kind), kind.drafted, text),
            ]
        };
        let pairs: Vec<Bar> = text.rows().flat_map(pair).collect();
        let caption = format!("Medians at temperature {}; {}.", text.temperature, text.drafts);
        add("Tokens a second by kind of prompt", bars(&pairs, 0.0)?, &caption);
        let accepted = &text.acceptance;
        let bar = |label: String, [drafted, accepted_here]: &[u64; 2]| {
            let per_pass = *accepted_here as f64 / accepted.passes.max(1) as f64;
            let share = 100.0 * *accepted_here as f64 / (*drafted).max(1) as f64;
            Bar::new(label, per_pass, format!("{per_pass:.2} ({share:.0} % of drafted)"))
        };
        let depths = accepted.by_depth.iter().enumerate().filter(|(_, t)| t[0] > 0).take(MOST);
        let depths: Vec<Bar> = depths.map(|(d, t)| bar(format!("token {}", d + 1), t)).collect();
        let sources: Vec<Bar> =
            accepted.by_source.iter().map(|(name, t)| bar(name.clone(), t)).collect();
        let caption = format!(
            "Tokens accepted per pass. {} passes brought {} tokens, the target's own among them.",
            thousands(accepted.passes),
            thousands(accepted.tokens)
        );
        if !depths.is_empty() {
            add("Acceptance by depth", bars(&depths, 1.0)?, &caption);
            add("Acceptance by source", bars(&sources, 1.0)?, &caption);
        }
    }
    let model = &report.model;
    let arenas =
        [("weights", model.weights), ("KV cache", model.kv), ("activations", model.activations)];
    let arenas = arenas.into_iter().filter(|(_, size)| *size > 0);
    let arenas: Vec<Bar> =
        arenas.map(|(name, size)| Bar::new(name, size as f64, bytes(size))).collect();
    if !arenas.is_empty() {
        let context = model.context.unwrap_or_default() as u64;
        let caption = format!("Allocated for {} tokens, drafts not counted.", thousands(context));
        add("Memory by arena", bars(&arenas, 0.0)?, &caption);
    }
    for (rows, kernels) in report.kernels_by_rows() {
        let title = match rows {
            1 => "Time by kernel while decoding".to_owned(),
            _ => format!("Time by kernel in passes of {}", of_rows(rows)),
        };
        add(&title, bars(&kernel_bars(&kernels), 0.0)?, "Share of the time of all kernels.");
    }
    Ok(all)
}

fn kernel_bars(kernels: &[&Kernel]) -> Vec<Bar> {
    let total: f64 = kernels.iter().map(|k| k.seconds).sum();
    let bar = |k: &&Kernel| {
        let share = 100.0 * k.seconds / total.max(f64::MIN_POSITIVE);
        Bar::new(k.label.clone(), share, format!("{share:.1} %"))
    };
    kernels.iter().take(MOST).map(bar).collect()
}

/// Returns the costs by depth of the cache. A depth without a pass of one row is left out.
fn costs(report: &Report, when: &str) -> Vec<Costs> {
    let passes: Vec<(usize, usize, &Figure)> = report
        .results
        .iter()
        .filter_map(|row| row.pass.map(|pass| (pass.depth, pass.rows, &row.figure)))
        .collect();
    let one_row = passes.iter().filter(|(_, rows, figure)| *rows == 1 && figure.median > 0.0);
    let series = |(depth, _, one): &(usize, usize, &Figure)| {
        let of_depth = passes.iter().filter(|(other, ..)| other == depth);
        let point = |(_, rows, f): &(usize, usize, &Figure)| {
            (*rows as f64, [f.min, f.median, f.max].map(|seconds| seconds / one.median))
        };
        let mut points: Vec<_> = of_depth.map(point).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Costs { name: format!("{} tokens in the cache{when}", thousands(*depth as u64)), points }
    };
    one_row.map(series).collect()
}

fn draw(height: i32, plot: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (WIDTH, height as u32)).into_drawing_area();
    plot(&area)?;
    drop(area); // Finishes the text.
    Ok(svg)
}

/// Draws horizontal bars from 0; the longest stands for the largest value, or for `whole` if that
/// is more.
fn bars(bars: &[Bar], whole: f64) -> Result<String> {
    let most = bars.iter().map(|bar| bar.value).fold(whole.max(f64::MIN_POSITIVE), f64::max);
    draw(ROW * bars.len() as i32, |area| {
        let font = ("sans-serif", 14).into_font();
        let left = font.clone().into_text_style(area).pos(Pos::new(HPos::Left, VPos::Center));
        let right = font.into_text_style(area).pos(Pos::new(HPos::Right, VPos::Center));
        for (row, bar) in (0..).zip(bars) {
            let (top, middle) = (row * ROW + 4, row * ROW + ROW / 2);
            let end = LABEL + (LONGEST * bar.value / most) as i32;
            area.draw(&Rectangle::new([(LABEL, top), (end, top + ROW - 8)], bar.colour.filled()))?;
            area.draw(&Text::new(clean(&bar.label), (LABEL - 10, middle), right.clone()))?;
            area.draw(&Text::new(bar.text.clone(), (end + 8, middle), left.clone()))?;
        }
        Ok(())
    })
}

/// Draws lines over a logarithmic axis of rows.
fn lines(series: &[Costs]) -> Result<String> {
    let points = || series.iter().flat_map(|s| &s.points);
    let most_rows = points().map(|(rows, _)| *rows).fold(2.0, f64::max);
    let most_cost = points().map(|(_, cost)| cost[2]).fold(1.0, f64::max);
    draw(360, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .set_label_area_size(LabelAreaPosition::Left, 50)
            .set_label_area_size(LabelAreaPosition::Bottom, 40)
            .build_cartesian_2d((1.0..most_rows * 1.05).log_scale().base(2.0), 0.0..most_cost)?;
        chart
            .configure_mesh()
            .x_desc("M, rows of a pass")
            .y_desc("c(M)")
            .x_label_formatter(&|rows| format!("{rows:.0}"))
            .label_style(("sans-serif", 14))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (i, series) in series.iter().enumerate() {
            let colour = Palette99::pick(i).to_rgba();
            let medians = series.points.iter().map(|(rows, cost)| (*rows, cost[1]));
            chart
                .draw_series(LineSeries::new(medians, colour.stroke_width(2)))?
                .label(series.name.as_str())
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 4), (x + 14, y + 4)], colour.filled())
                });
            chart.draw_series(series.points.iter().map(|(rows, [low, median, high])| {
                ErrorBar::new_vertical(*rows, *low, *median, *high, colour.filled(), 8)
            }))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .label_font(("sans-serif", 14))
            .background_style(WHITE)
            .draw()?;
        Ok(())
    })
}

/// Returns text as HTML shows it, without control characters.
fn escape(text: &str) -> String {
    clean(text).replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}
