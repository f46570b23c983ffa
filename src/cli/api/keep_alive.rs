//! Time that a model stays loaded after its last answer, in Ollama's notation.

use super::error::ApiError;
use super::fields::Fields;
use serde_json::Value;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Units of durations in seconds. A longer unit comes before units that are its prefix.
const UNITS: [(&str, f64); 7] = [
    ("ns", 1e-9),
    ("us", 1e-6),
    ("\u{b5}s", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("m", 60.0),
    ("h", 3600.0),
];
/// Limit of a time in seconds: a century.
const LONGEST: f64 = 3.2e9;

/// The time that a model stays loaded after its last answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAlive {
    Forever,
    For(Duration),
}

impl KeepAlive {
    /// Takes the field `keep_alive`: seconds, a duration such as `5m`, 0 to unload at once, or a
    /// negative value to keep the model loaded.
    pub fn take(fields: &mut Fields) -> Result<Option<KeepAlive>, ApiError> {
        let parsed = match fields.take::<Value>("keep_alive") {
            Ok(None) => return Ok(None),
            Ok(Some(Value::String(text))) => text.parse().ok(),
            Ok(Some(value)) => value.as_f64().map(KeepAlive::of_seconds),
            Err(_) => None,
        };
        let what =
            "'keep_alive' is a number of seconds, or a duration such as \"5m\"; -1 is for ever";
        parsed.map(Some).ok_or_else(|| ApiError::bad(what).param("keep_alive"))
    }

    fn of_seconds(seconds: f64) -> KeepAlive {
        match seconds {
            ..0.0 | LONGEST.. => KeepAlive::Forever,
            seconds => KeepAlive::For(Duration::from_secs_f64(seconds)),
        }
    }

    /// Returns whether the model is unloaded right after its last answer.
    pub fn is_none(self) -> bool {
        self == KeepAlive::For(Duration::ZERO)
    }
}

impl FromStr for KeepAlive {
    type Err = String;

    fn from_str(text: &str) -> Result<KeepAlive, String> {
        let wrong = || "expected a time such as 5m, 1h30m or 300, 0 for none, or -1 for ever";
        let (is_negative, mut rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let is_plain = |text: &str| text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let mut seconds = 0.0;
        if is_plain(rest) {
            seconds = rest.parse::<f64>().map_err(|_| wrong())?;
            rest = "";
        }
        while !rest.is_empty() {
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
            let (number, after) = rest.split_at(end);
            let mut units = UNITS.iter();
            let unit = units.find(|(name, _)| after.starts_with(name)).ok_or_else(wrong)?;
            seconds += number.parse::<f64>().map_err(|_| wrong())? * unit.1;
            rest = &after[unit.0.len()..];
        }
        Ok(KeepAlive::of_seconds(if is_negative && seconds > 0.0 { -seconds } else { seconds }))
    }
}

impl fmt::Display for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeepAlive::For(time) = self else { return f.write_str("-1") };
        match time.as_secs() {
            seconds if seconds > 0 && seconds % 3600 == 0 => write!(f, "{}h", seconds / 3600),
            seconds if seconds > 0 && seconds % 60 == 0 => write!(f, "{}m", seconds / 60),
            _ => write!(f, "{}s", time.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::api::notes::Notes;
    use std::sync::Arc;

    #[test]
    fn times_are_spelled_as_ollamas_clients_spell_them() {
        let of = |seconds: f64| KeepAlive::For(Duration::from_secs_f64(seconds));
        for (text, want) in [
            ("5m", of(300.0)),
            ("1h30m", of(5400.0)),
            ("1.5h", of(5400.0)),
            ("300ms", of(0.3)),
            ("10us", of(1e-5)),
            ("300", of(300.0)),
            ("0", of(0.0)),
            ("0s", of(0.0)),
            ("-1", KeepAlive::Forever),
            ("-1m", KeepAlive::Forever),
            ("1000000h", KeepAlive::Forever),
        ] {
            assert_eq!(text.parse(), Ok(want), "{text}");
        }
        for bad in ["", "-", "m", "5", "5x", "5m ", "1 h", "1..5h", "h5", "5m3"] {
            let is_number = bad == "5";
            assert_eq!(bad.parse::<KeepAlive>().is_ok(), is_number, "{bad:?}");
        }
        for spelled in ["5m", "2h", "90s", "0s", "-1", "0.3s"] {
            assert_eq!(spelled.parse::<KeepAlive>().unwrap().to_string(), spelled);
        }
    }

    #[test]
    fn a_field_is_a_number_or_a_duration() {
        let take = |text: &str| {
            let notes = Arc::new(Notes::new(|_| ()));
            KeepAlive::take(&mut Fields::parse(text.as_bytes(), &notes).unwrap())
        };
        let of = |seconds: f64| Ok(Some(KeepAlive::For(Duration::from_secs_f64(seconds))));
        assert_eq!(take("{}"), Ok(None));
        assert_eq!(take(r#"{"keep_alive": null}"#), Ok(None));
        assert_eq!(take(r#"{"keep_alive": 0}"#), of(0.0));
        assert_eq!(take(r#"{"keep_alive": 0.5}"#), of(0.5));
        assert_eq!(take(r#"{"keep_alive": "2m"}"#), of(120.0));
        assert_eq!(take(r#"{"keep_alive": -1}"#), Ok(Some(KeepAlive::Forever)));
        for bad in [r#"{"keep_alive": "soon"}"#, r#"{"keep_alive": [1]}"#] {
            assert_eq!(take(bad).unwrap_err().param.as_deref(), Some("keep_alive"));
        }
    }
}
