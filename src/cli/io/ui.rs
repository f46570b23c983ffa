//! Output on standard error: errors, notes, progress bars, figures.

use crate::cli::options::{Colour, OnTerminal, UiOptions};
use crate::error::fault_of;
use crate::runtime::{Listener, LoadingBar};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Settings of the output on standard error.
pub struct Ui {
    quiet: bool,
    verbose: u8,
    /// Whether standard error is a terminal.
    terminal: bool,
    colour: bool,
    /// Whether standard output is coloured.
    colour_output: bool,
    bars: bool,
    /// Notes that were printed. Each is printed only once.
    printed: Mutex<Vec<String>>,
    /// Kinds of notes. Only the first note of a kind is printed.
    kinds: Mutex<Vec<&'static str>>,
}

impl Ui {
    pub fn new(options: &UiOptions) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let env = |name: &str| std::env::var_os(name);
        let dumb = env("TERM").is_some_and(|v| v == "dumb");
        Ui {
            quiet: options.quiet,
            verbose: options.verbose,
            terminal,
            colour: wants_colour(options.color, terminal, env),
            colour_output: wants_colour(options.color, std::io::stdout().is_terminal(), env),
            bars: terminal && !dumb && !options.quiet && options.progress == OnTerminal::Auto,
            printed: Mutex::default(),
            kinds: Mutex::default(),
        }
    }

    /// Returns the settings of commands that have no such options.
    pub fn plain() -> Self {
        let options = UiOptions {
            quiet: false,
            verbose: 0,
            progress: OnTerminal::Off,
            color: Colour::Auto,
            print_config: false,
        };
        Ui::new(&options)
    }

    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    pub fn is_verbose(&self) -> bool {
        self.verbose > 0
    }

    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Colours a report for standard output: PASS, WARN and FAIL at the start of lines become
    /// green, yellow and red.
    pub fn verdicts(&self, report: &str) -> String {
        let report = clean(report);
        if !self.colour_output {
            return report;
        }
        let paint = |line: &str| {
            let styles = [("PASS", GREEN), ("WARN", YELLOW), ("FAIL", RED)];
            match styles
                .iter()
                .find_map(|(word, style)| Some((word, style, line.strip_prefix(word)?)))
            {
                Some((word, style, rest)) => format!("\x1b[{style}m{word}\x1b[0m{rest}"),
                None => line.to_owned(),
            }
        };
        report.split_inclusive('\n').map(paint).collect()
    }

    /// Prints `error: what`, the causes indented below it, and `help: what to do`.
    pub fn error(&self, error: &anyhow::Error) {
        let mut lines = self.labelled(RED, "error:", &error.to_string());
        let mut last = error.to_string();
        for cause in error.chain().skip(1) {
            let cause = cause.to_string();
            // A library's error often contains its cause.
            if !last.contains(&cause) {
                lines += &self.fit(&format!("  {}\n", clean(&cause)));
            }
            last = cause;
        }
        if let Some(help) = fault_of(error).and_then(|fault| fault.help.as_deref()) {
            lines += &self.labelled(GREEN, "help:", help);
        }
        self.write(&lines);
    }

    /// Prints a note, unless it was printed before.
    pub fn note(&self, text: impl AsRef<str>) {
        let text = clean(text.as_ref());
        if self.quiet || list(&self.printed).contains(&text) {
            return;
        }
        self.write(&self.labelled(YELLOW, "note:", &text));
        list(&self.printed).push(text);
    }

    /// Prints the first note of a kind.
    pub fn once(&self, kind: &'static str, text: impl AsRef<str>) {
        if !list(&self.kinds).contains(&kind) {
            self.note(text);
            list(&self.kinds).push(kind);
        }
    }

    /// Prints a remedy for the previous message.
    pub fn help(&self, text: &str) {
        self.write(&self.labelled(GREEN, "help:", text));
    }

    /// Prints a detail for `-v` (level 1) or `-vv` (level 2).
    pub fn detail(&self, level: u8, text: impl AsRef<str>) {
        if !self.quiet && self.verbose >= level {
            self.line(text.as_ref());
        }
    }

    /// Prints a line that the user asked for, such as figures, even if notes are off.
    pub fn line(&self, text: &str) {
        self.write(&format!("{}\n", self.paint(DIM, &self.fit(&clean(text)))));
    }

    /// Prints a piece of a thought.
    pub fn thought(&self, text: &str) {
        self.write(&self.paint(DIM, &clean(text)));
    }

    /// Returns text for standard output, dimmed if colours are allowed.
    pub fn dimmed_output(&self, text: String) -> String {
        if self.colour_output && !text.is_empty() {
            format!("\x1b[{DIM}m{text}\x1b[0m")
        } else {
            text
        }
    }

    /// Prints JSON on a line by itself, without colours.
    pub fn json(&self, text: &str) {
        self.write(&format!("{text}\n"));
    }

    /// Returns a bar of `len` steps, or a hidden one.
    pub fn bar(&self, label: &str, len: u64) -> ProgressBar {
        if self.bars {
            self.shown(label, len, "{msg:10} BAR {pos}/{len} {eta}")
        } else {
            ProgressBar::hidden()
        }
    }

    /// Returns a bar of `len` steps that shows percent, or a hidden one. It fits 80 columns.
    pub fn percent_bar(&self, label: &str, len: u64) -> ProgressBar {
        if self.bars {
            self.shown(label, len, "{msg:27!} BAR {percent}% {eta}")
        } else {
            ProgressBar::hidden()
        }
    }

    /// Returns a bar of `len` bytes, or a hidden one.
    pub fn bytes_bar(&self, label: &str, len: u64, wanted: bool) -> ProgressBar {
        let shown = self.bars && wanted;
        if shown {
            self.shown(label, len, "{msg} BAR {decimal_bytes} of {decimal_total_bytes} {eta}")
        } else {
            ProgressBar::hidden()
        }
    }

    fn shown(&self, label: &str, len: u64, template: &str) -> ProgressBar {
        let template =
            template.replace("BAR", if self.colour { "{bar:30.cyan/dim}" } else { "{bar:30}" });
        let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr_with_hz(10));
        bar.set_style(
            ProgressStyle::with_template(&template)
                .expect("a constant template")
                .progress_chars("━╸─"),
        );
        bar.set_message(label.to_owned());
        bar
    }

    /// Returns a spinner for work of unknown length, or a hidden one.
    pub fn spinner(&self, label: &str, wanted: bool) -> ProgressBar {
        if !self.bars || !wanted {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        bar.set_style(
            ProgressStyle::with_template("{spinner} {msg} {elapsed}").expect("a constant template"),
        );
        bar.set_message(label.to_owned());
        bar.enable_steady_tick(std::time::Duration::from_millis(120));
        bar
    }

    /// Returns a message with a label in colour.
    fn labelled(&self, style: &str, label: &str, text: &str) -> String {
        let text = self.fit(&format!("{label} {}\n", clean(text)));
        self.paint(style, label) + &text[label.len()..]
    }

    /// Wraps a message at the current width of the window.
    fn fit(&self, text: &str) -> String {
        let size = terminal_size::terminal_size_of(std::io::stderr());
        size.map_or_else(|| text.to_owned(), |(width, _)| fitted(text, width.0.into()))
    }

    fn paint(&self, style: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A failed write to standard error is ignored, since it cannot be reported.
    fn write(&self, text: &str) {
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}

/// Prints the messages of a session on standard error too.
impl Listener for Ui {
    fn note(&self, text: &str) {
        self.note(text);
    }

    fn detail(&self, level: u8, text: &str) {
        self.detail(level, text);
    }

    fn hears_notes(&self) -> bool {
        !self.quiet
    }

    fn loading(&self, label: &str, bytes: u64) -> Option<Box<dyn LoadingBar>> {
        let bar = self.bytes_bar(label, bytes, true);
        (!bar.is_hidden()).then(|| Box::new(Bar(bar)) as Box<dyn LoadingBar>)
    }
}

/// A progress bar that disappears at the end of its work.
struct Bar(ProgressBar);

impl LoadingBar for Bar {
    fn set(&self, bytes: u64) {
        self.0.set_position(bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

const RED: &str = "1;31";
const GREEN: &str = "1;32";
const YELLOW: &str = "1;33";
const DIM: &str = "2";

/// Returns whether to use colours.
///
/// By default this needs a terminal and an environment that permits it; `always` needs neither.
fn wants_colour(choice: Colour, terminal: bool, env: impl Fn(&str) -> Option<OsString>) -> bool {
    let set = |name: &str| env(name).is_some_and(|v| !v.is_empty());
    match choice {
        Colour::Always => true,
        Colour::Never => false,
        Colour::Auto => {
            terminal
                && !set("NO_COLOR")
                && env("CLICOLOR").is_none_or(|v| v != "0")
                && env("TERM").is_some_and(|v| v != "dumb" && !v.is_empty())
        }
    }
}

/// Replaces control characters other than line feeds and tabs, and characters that change the
/// direction of text. File names, requests and model texts may contain them, and a terminal must
/// not obey them.
pub fn clean(text: &str) -> String {
    let is_obeyed = |c: char| match c {
        '\n' | '\t' => false,
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        _ => c.is_control(),
    };
    text.chars().map(|c| if is_obeyed(c) { '\u{fffd}' } else { c }).collect()
}

/// Columns of a line that is not shown on a terminal.
pub const COLUMNS: usize = 79;

/// Returns the name that is most similar to `word`, if one is similar enough.
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let likeness =
        |name: &'a str| (strsim::jaro_winkler(&word.to_lowercase(), &name.to_lowercase()), name);
    let best = names.into_iter().map(likeness).max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(likeness, _)| *likeness > 0.85).map(|(_, name)| name)
}

/// Columns for a page of text on standard output: one less than the terminal's width, and no more
/// than is easy to read.
pub fn page_columns() -> usize {
    let out = std::io::stdout();
    let shown = out.is_terminal().then(|| terminal_size::terminal_size_of(&out)).flatten();
    shown.map_or(COLUMNS, |(width, _)| usize::from(width.0).clamp(20, 101) - 1)
}

/// Wraps a text between words at `columns`. 0 means an unknown width, and the text stays unchanged.
pub fn wrapped(text: &str, columns: usize) -> String {
    paragraph_in("", 0, text, if columns == 0 { 1 << 20 } else { columns }).trim_end().to_owned()
}

/// Formats a paragraph after `label`, in lines of at most `columns`.
///
/// Lines after the first are indented by `indent`. If that leaves little room, the label gets a
/// line of its own.
pub fn paragraph_in(label: &str, indent: usize, text: &str, columns: usize) -> String {
    let narrow = indent > NARROW && columns < indent + ROOM;
    let (indent, first) = match narrow {
        true if label.is_empty() => (NARROW, String::new()),
        true => (NARROW, format!("{label}\n")),
        false => (indent, String::new()),
    };
    let label = if narrow { "" } else { label };
    let blank = " ".repeat(indent);
    let label = format!("{label:indent$}");
    let options = between_words(columns).subsequent_indent(&blank).initial_indent(&label);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines = if words.is_empty() { label.clone() } else { textwrap::fill(&words, options) };
    first + lines.trim_end() + "\n"
}

/// Wraps lines that are wider than `columns` between words.
///
/// Continuation lines keep the indentation of their line. Other lines stay unchanged.
fn fitted(text: &str, columns: usize) -> String {
    let fit = |line: &str| {
        if textwrap::core::display_width(line) <= columns {
            return line.to_owned();
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        textwrap::fill(line, between_words(columns).subsequent_indent(indent))
    };
    text.split('\n').map(fit).collect::<Vec<_>>().join("\n")
}

/// Breaks lines at spaces only, so that paths and commands stay whole.
fn between_words(columns: usize) -> textwrap::Options<'static> {
    textwrap::Options::new(columns)
        .break_words(false)
        .word_separator(textwrap::WordSeparator::AsciiSpace)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .wrap_algorithm(textwrap::WrapAlgorithm::FirstFit)
}

/// Indent on narrow terminals. A wider indent has to leave this much room for text.
const NARROW: usize = 4;
const ROOM: usize = 25;

/// Locks the list of printed notes.
fn list<T>(list: &Mutex<Vec<T>>) -> MutexGuard<'_, Vec<T>> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_needs_a_terminal_and_permission_or_an_order() {
        let env = |pairs: &'static [(&str, &str)]| {
            move |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v))
        };
        let xterm: &'static [(&str, &str)] = &[("TERM", "xterm")];
        assert!(wants_colour(Colour::Auto, true, env(xterm)));
        assert!(!wants_colour(Colour::Auto, false, env(xterm)));
        assert!(wants_colour(Colour::Always, false, env(xterm)));
        assert!(!wants_colour(Colour::Never, true, env(xterm)));
        assert!(!wants_colour(Colour::Auto, true, env(&[("TERM", "xterm"), ("NO_COLOR", "1")])));
        assert!(wants_colour(Colour::Auto, true, env(&[("TERM", "xterm"), ("NO_COLOR", "")])));
        assert!(!wants_colour(Colour::Auto, true, env(&[("TERM", "xterm"), ("CLICOLOR", "0")])));
        assert!(!wants_colour(Colour::Auto, true, env(&[("TERM", "dumb")])));
        assert!(wants_colour(Colour::Always, true, env(&[("TERM", "dumb"), ("NO_COLOR", "1")])));
    }

    #[test]
    fn paragraphs_keep_to_their_columns() {
        assert_eq!(paragraph_in("a", 3, "b c", 20), "a  b c\n");
        assert_eq!(paragraph_in("a", 3, "", 20), "a\n");
        for columns in [40, 79, 120] {
            let long = paragraph_in("label", 8, &"words of a text ".repeat(20), columns);
            assert!(
                long.lines().count() > 2 && long.lines().all(|l| l.chars().count() <= columns),
                "{long}"
            );
            assert!(
                long.lines()
                    .skip(1)
                    .all(|l| l.starts_with("        ") && !l.starts_with("         ")),
                "{long}"
            );
        }
        // A long word is not broken and has a line of its own.
        let word = "x".repeat(100);
        assert_eq!(
            paragraph_in("a", 2, &format!("b {word} c"), 20),
            format!("a b\n  {word}\n  c\n")
        );
        // A narrow terminal has no room for a column of labels.
        assert_eq!(
            paragraph_in("label", 20, "words of a text", 20),
            "label\n    words of a text\n"
        );
    }

    #[test]
    fn lines_that_are_too_wide_break_between_words() {
        let text = "  /help  a list\n  /retry  answers the last message again\n\nshort";
        let want = "  /help  a list\n  /retry  answers the\n  last message again\n\nshort";
        assert_eq!(fitted(text, 21), want);
        assert_eq!(fitted(text, 80), text);
        let path = "a /path/that/is/longer/than/the/window b";
        assert_eq!(fitted(path, 12), "a\n/path/that/is/longer/than/the/window\nb");
    }

    #[test]
    fn escape_codes_do_not_reach_the_terminal() {
        assert_eq!(clean("a\x1b[31mb\n"), "a\u{fffd}[31mb\n");
    }
}
