//! Under which conditions a run measured: when, how it was called, and whether the machine did
//! something else meanwhile.

use super::report::Report;
use crate::util::shell::quoted;

/// Repetitions of one test that differ by more than this were disturbed.
const SPREAD: f64 = 1.10;
/// Answers of fewer tokens than this, on average, end before drafts have learnt anything of them.
const LONG_ENOUGH: u64 = 48;

/// The program's version, with its commit where the build knew it.
pub fn version() -> String {
    option_env!("DESCRIPTION_OF_BUILD").unwrap_or(env!("CARGO_PKG_VERSION")).to_owned()
}

/// The command line, quoted where a shell needs it.
pub fn command_line() -> String {
    let args = std::env::args_os().skip(1).map(|arg| quoted(&arg.to_string_lossy()));
    std::iter::once("gemma".to_owned()).chain(args).collect::<Vec<_>>().join(" ")
}

/// Processes that ran or wanted to, on average over the last minute; `None` where the system does
/// not say.
pub fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// What makes the figures doubtful, in sentences. The rule: a machine is busy if its load average
/// before the run was above its number of cores, or if repetitions of one test differ by more than
/// 10 %.
pub fn doubts(report: &Report, load: Option<f64>, cores: usize) -> Vec<String> {
    let mut doubts = Vec::new();
    if let Some(load) = load.filter(|load| *load > cores as f64) {
        doubts.push(format!(
            "The load average was {load:.1} on {cores} cores before the run: other programs take \
             time from it. Repeat it when they are done."
        ));
    }
    // Pairs of texts differ by what they say.
    let disturbed =
        |row: &&super::report::Row| row.unit != "x" && row.figure.max > SPREAD * row.figure.min;
    let names: Vec<&str> =
        report.results.iter().filter(disturbed).map(|row| row.name.as_str()).collect();
    if let Some((first, more)) = names.split_first() {
        let more = if more.is_empty() {
            String::new()
        } else {
            format!(" and of {} other tests", more.len())
        };
        doubts.push(format!(
            "Repetitions of {first}{more} differ by more than 10 %: the machine did something else \
                meanwhile, or changed its clock."
        ));
    }
    if let Some(text) = &report.text {
        let texts = text.prompts() as u64 * text.runs as u64;
        let tokens = text.acceptance.tokens / texts.max(1);
        if texts > 0 && tokens < LONG_ENOUGH {
            doubts.push(format!(
                "The texts have {tokens} tokens on average, too few to judge drafts by: they learn \
                 as a text goes on. Give --text-tokens 128 or more, or other --prompts."
            ));
        }
    }
    doubts
}

#[cfg(test)]
mod tests {
    use super::super::measure::Figure;
    use super::super::report::{Acceptance, Row, Text, TextKind};
    use super::*;

    #[test]
    fn a_busy_machine_and_short_texts_are_told() {
        let row = |name: &str, unit: &str, runs: &[f64]| Row {
            name: name.into(),
            unit: unit.into(),
            figure: Figure::of(runs.to_vec()),
            ..Row::default()
        };
        let mut report = Report {
            results: vec![row("tg8", "tok/s", &[10.0, 10.9]), row("texts", "x", &[1.0, 3.0])],
            ..Report::default()
        };
        assert_eq!(doubts(&report, Some(2.0), 2), Vec::<String>::new());
        assert_eq!(doubts(&report, None, 2).len(), 0);
        assert!(doubts(&report, Some(2.1), 2)[0].contains("load average was 2.1 on 2 cores"));
        report.results.push(row("pp8", "tok/s", &[10.0, 11.1]));
        assert!(doubts(&report, None, 2)[0].contains("Repetitions of pp8 differ"));
        let text = |tokens| Text {
            runs: 2,
            kinds: vec![TextKind { prompts: 3, ..TextKind::default() }],
            acceptance: Acceptance { tokens, ..Acceptance::default() },
            ..Text::default()
        };
        let quiet = |tokens| {
            doubts(&Report { text: Some(text(tokens)), ..Report::default() }, None, 1).is_empty()
        };
        assert!(quiet(6 * LONG_ENOUGH) && !quiet(6 * LONG_ENOUGH - 6));
    }
}
