//! `strftime_now`, the local time in a prompt.

use super::invalid;
use jiff::civil::DateTime;
use minijinja::Error;
use serde::{Deserialize, Serialize};

/// A local time, without its time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalTime(DateTime);

/// Returns the local time. Each render reads it once, so that its result depends only on its
/// inputs.
pub fn now() -> LocalTime {
    LocalTime(jiff::Zoned::now().datetime())
}

/// Formats a time with a format of Python's `strftime`.
pub fn strftime(LocalTime(time): LocalTime, format: &str) -> Result<String, Error> {
    // jiff formats these directives unlike the C locale. A time without a zone prints an empty
    // zone.
    let mut translated = String::with_capacity(format.len());
    let mut characters = format.chars();
    while let Some(c) = characters.next() {
        match (c, if c == '%' { characters.next() } else { None }) {
            ('%', Some('c')) => translated.push_str("%a %b %e %H:%M:%S %Y"),
            ('%', Some('x')) => translated.push_str("%m/%d/%y"),
            ('%', Some('X')) => translated.push_str("%H:%M:%S"),
            ('%', Some('r')) => translated.push_str("%I:%M:%S %p"),
            ('%', Some('f')) => translated.push_str("%6f"),
            ('%', Some('Z' | 'z')) => {}
            ('%', Some(other)) => translated.extend(['%', other]),
            // A `%` at the end is kept.
            ('%', None) => translated.push_str("%%"),
            (c, _) => translated.push(c),
        }
    }
    jiff::fmt::strtime::format(&translated, time)
        .map_err(|error| invalid(format!("strftime_now({format:?}): {error}")))
}
