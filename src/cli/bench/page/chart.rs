//! Plots as SVG. Places are shares of the width, letters are not: so a plot fills whatever width it
//! gets and stays readable.

use crate::util::units::digits3;

/// A plot with what explains it.
pub struct Plot {
    pub html: String,
}

/// Bars under one label.
pub struct Group {
    pub label: String,
    pub bars: Vec<Bar>,
}

pub struct Bar {
    pub value: f64,
    /// What stands at its end: value and unit.
    pub text: String,
    /// Which of the colours.
    pub series: usize,
}

pub struct Series {
    pub name: String,
    pub points: Vec<Point>,
}

/// A value with its range.
pub struct Point {
    /// At least 1: the axis is logarithmic.
    pub x: usize,
    pub y: f64,
    pub low: f64,
    pub high: f64,
}

/// Text that HTML shows as it is.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c if c.is_control() && c != '\n' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Colours that the style sheet has.
const COLOURS: usize = 4;
/// Heights in pixels: of a label, of a bar, between groups.
const LABEL: usize = 20;
const BAR: usize = 16;
const GAP: usize = 12;

/// Horizontal bars from 0, the label above each group, the value beside its label or at the end of
/// its bar.
pub fn bars(groups: &[Group], about: &str) -> Plot {
    bars_of(groups, 0.0, about)
}

/// The same where a bar of `whole` takes the whole width, unless one is longer: for shares.
pub fn bars_of(groups: &[Group], whole: f64, about: &str) -> Plot {
    let most = groups.iter().flat_map(|g| &g.bars).map(|b| b.value).fold(whole, f64::max);
    let share =
        |value: f64| if most > 0.0 { (100.0 * value / most).clamp(0.0, 100.0) } else { 0.0 };
    let (mut y, mut body) = (0, String::new());
    for group in groups {
        let alone = group.bars.len() == 1;
        body += &format!("<text x=\"0\" y=\"{}\">{}</text>\n", y + LABEL - 6, escape(&group.label));
        if alone {
            let (y, text) = (y + LABEL - 6, escape(&group.bars[0].text));
            body += &format!("<text class=\"value\" x=\"100%\" y=\"{y}\">{text}</text>\n");
        }
        y += LABEL;
        for bar in &group.bars {
            let (class, height) = (bar.series % COLOURS, BAR - 2);
            // Room for the value at the bar's end, where it is not above.
            let room = if alone { 1.0 } else { 0.7 };
            body += &format!(
                "<rect class=\"track\" x=\"0\" y=\"{y}\" width=\"{}%\" height=\"{height}\" \
                    rx=\"2\"/>\n",
                100.0 * room
            );
            body += &format!(
                "<rect class=\"s{class}\" x=\"0\" y=\"{y}\" width=\"{:.2}%\" height=\"{height}\" \
                    rx=\"2\"/>\n",
                room * share(bar.value)
            );
            if !alone {
                let (end, y, text) = (room * share(bar.value), y + BAR - 5, escape(&bar.text));
                body += &format!("<text x=\"{end:.2}%\" y=\"{y}\" dx=\"6\">{text}</text>\n");
            }
            y += BAR;
        }
        y += GAP;
    }
    let said = |g: &Group| {
        let values: Vec<&str> = g.bars.iter().map(|b| b.text.as_str()).collect();
        format!("{}: {}", g.label, values.join(" and "))
    };
    let results: Vec<String> = groups.iter().map(said).collect();
    let about = escape(&format!("Bars, {about}. {}", results.join("; ")));
    let html = format!(
        "<svg role=\"img\" aria-label=\"{about}\" width=\"100%\" height=\"{y}\">\n{body}</svg>\n"
    );
    Plot { html }
}

/// Lines over a logarithmic axis, from 0 upwards, with ranges as whiskers and a dashed line at 1.
pub fn lines(series: &[Series], x_label: &str, y_label: &str) -> Plot {
    let points = || series.iter().flat_map(|s| &s.points);
    let (step, top) = ticks(points().map(|p| p.high).fold(1.0, f64::max));
    let (first, last) =
        (points().map(|p| p.x).min().unwrap_or(1), points().map(|p| p.x).max().unwrap_or(1));
    let log = |x: usize| (x.max(1) as f64).log2();
    let width = (log(last) - log(first)).max(1e-9);
    let at_x = |x: usize| 100.0 * (log(x) - log(first)) / width;
    let at_y = |y: f64| 100.0 * (1.0 - y / top);
    let mut body = String::new();
    for i in 0..=(top / step).round() as usize {
        let (value, y) = (i as f64 * step, at_y(i as f64 * step));
        body +=
            &format!("<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{y:.2}%\" y2=\"{y:.2}%\"/>\n");
        let value = if step < 1.0 { format!("{value:.1}") } else { format!("{value:.0}") };
        body += &format!("<text class=\"tick\" x=\"-8\" y=\"{y:.2}%\" dy=\"4\">{value}</text>\n");
    }
    let one = at_y(1.0);
    body +=
        &format!("<line class=\"one\" x1=\"0\" x2=\"100%\" y1=\"{one:.2}%\" y2=\"{one:.2}%\"/>\n");
    let mut sizes: Vec<usize> = points().map(|p| p.x).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for x in sizes {
        body += &format!(
            "<text class=\"below\" x=\"{:.2}%\" y=\"100%\" dy=\"20\">{x}</text>\n",
            at_x(x)
        );
    }
    for (i, series) in series.iter().enumerate() {
        let class = (i + 1) % COLOURS;
        for pair in series.points.windows(2) {
            let [(x1, y1), (x2, y2)] = [&pair[0], &pair[1]].map(|p| (at_x(p.x), at_y(p.y)));
            body += &format!(
                "<line class=\"l{class}\" x1=\"{x1:.2}%\" y1=\"{y1:.2}%\" x2=\"{x2:.2}%\" \
                    y2=\"{y2:.2}%\"/>\n"
            );
        }
        for p in &series.points {
            let (x, y) = (at_x(p.x), at_y(p.y));
            body += &format!(
                "<line class=\"whisker l{class}\" x1=\"{x:.2}%\" y1=\"{:.2}%\" x2=\"{x:.2}%\" \
                    y2=\"{:.2}%\"/>\n",
                at_y(p.low),
                at_y(p.high)
            );
            // A nested drawing: its own units are pixels, wherever it stands.
            body += &format!(
                "<svg x=\"{x:.2}%\" y=\"{y:.2}%\" overflow=\"visible\">{}<title>M = {}: \
                    {}</title></svg>\n",
                mark(class),
                p.x,
                digits3(p.y)
            );
        }
    }
    let last =
        |s: &Series| s.points.last().map(|p| format!("{}: {} at {}", s.name, digits3(p.y), p.x));
    let results: Vec<String> = series.iter().filter_map(last).collect();
    let about = format!("Lines, {y_label} by {x_label}. {}", results.join("; "));
    let html = format!(
        "<p class=\"axis\">{}</p>\n<div class=\"plot\"><svg role=\"img\" aria-label=\"{}\" \
            width=\"100%\" height=\"240\" overflow=\"visible\">\n\
         {body}</svg></div>\n<p class=\"axis x\">{}</p>\n",
        escape(y_label),
        escape(&about),
        escape(x_label)
    );
    let plot = Plot { html };
    if series.len() > 1 {
        let names: Vec<&str> =
            std::iter::once("").chain(series.iter().map(|s| s.name.as_str())).collect();
        return plot.legend(&names);
    }
    plot
}

/// What tells series apart beside their colours.
fn mark(class: usize) -> String {
    match class {
        1 => "<circle class=\"s1\" r=\"4\"/>".into(),
        2 => "<rect class=\"s2\" x=\"-4\" y=\"-4\" width=\"8\" height=\"8\"/>".into(),
        3 => "<path class=\"s3\" d=\"M0 -5L5 4L-5 4Z\"/>".into(),
        _ => "<path class=\"s0\" d=\"M0 -5L5 0L0 5L-5 0Z\"/>".into(),
    }
}

impl Plot {
    /// The same with names of its series above; an empty name stands for none.
    pub fn legend(self, names: &[&str]) -> Plot {
        let named = names.iter().enumerate().filter(|(_, name)| !name.is_empty());
        let one = |(i, name): (usize, &&str)| {
            let key = format!(
                "<svg width=\"14\" height=\"14\" aria-hidden=\"true\"><svg x=\"7\" y=\"7\" \
                    overflow=\"visible\">{}</svg></svg>",
                mark(i % COLOURS)
            );
            format!("<span>{key} {}</span>", escape(name))
        };
        let keys: Vec<String> = named.map(one).collect();
        Plot { html: format!("<p class=\"legend\">{}</p>\n{}", keys.join("\n"), self.html) }
    }
}

/// Distance of an axis's ticks, and its end: a handful of round numbers up to at least `most`.
fn ticks(most: f64) -> (f64, f64) {
    let rough = most.max(1e-9) / 5.0;
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * unit)
        .find(|s| *s >= rough)
        .unwrap_or(10.0 * unit);
    (step, (most / step).ceil() * step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_on_round_numbers() {
        for (most, want) in [
            (1.0, (0.2, 1.0)),
            (1.27, (0.5, 1.5)),
            (6.13, (2.0, 8.0)),
            (5.0, (1.0, 5.0)),
            (23.0, (5.0, 25.0)),
        ] {
            let (step, top) = ticks(most);
            assert!(
                (step - want.0).abs() < 1e-9 && (top - want.1).abs() < 1e-9,
                "{most}: {step} {top}"
            );
        }
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bar = |value| Group {
            label: "<a & b>".into(),
            bars: vec![Bar { value, text: format!("{value} x"), series: 1 }],
        };
        let html = bars(&[bar(4.0), bar(1.0), bar(0.0)], "test").html;
        assert!(
            html.contains("class=\"s1\" x=\"0\" y=\"20\" width=\"100.00%\"")
                && html.contains("width=\"25.00%\"")
                && html.contains("width=\"0.00%\"")
        );
        assert!(html.contains("&lt;a &amp; b&gt;") && !html.contains("<a "), "{html}");
        assert!(
            html.contains("aria-label=\"Bars, test. &lt;a &amp; b&gt;: 4 x; "),
            "the label tells the values: {html}"
        );
        // Two bars in a group have their values at their ends.
        let pair = Group {
            label: "two".into(),
            bars: [bar(4.0), bar(1.0)].into_iter().flat_map(|g| g.bars).collect(),
        };
        let html = bars(&[pair], "test").html;
        assert!(
            html.contains("<text x=\"70.00%\"") && html.contains("<text x=\"17.50%\""),
            "{html}"
        );
        assert!(!bars(&[bar(0.0)], "nothing").html.contains("NaN"));
        assert!(bars_of(&[bar(0.5)], 1.0, "a share").html.contains("width=\"50.00%\""));
    }

    #[test]
    fn lines_lie_where_their_values_are() {
        let point = |x, y| Point { x, y, low: y, high: y };
        let series =
            Series { name: "a".into(), points: vec![point(1, 1.0), point(4, 2.0), point(16, 4.0)] };
        let html = lines(&[series], "M", "c").html;
        assert!(html.contains("x1=\"0.00%\" y1=\"75.00%\" x2=\"50.00%\" y2=\"50.00%\""), "{html}");
        assert!(html.contains("x1=\"50.00%\" y1=\"50.00%\" x2=\"100.00%\" y2=\"0.00%\""), "{html}");
        assert!(html.contains("a: 4.00 at 16"), "the label tells where the lines end: {html}");
        assert!(!html.contains("legend") && !html.contains("NaN"));
    }
}
