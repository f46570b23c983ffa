//! The filter `tojson`, which transformers implements with Python's `json.dumps`.

use super::repr::{float, float_of, is_whole};
use super::{invalid, option};
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, Value};
use std::fmt::Write;

/// JSON formatting options.
struct JsonStyle {
    is_ascii: bool,
    /// One level of indentation; `None` writes a single line.
    indent: Option<String>,
    between_items: String,
    after_key: String,
    is_sorted: bool,
}

/// Returns a value as JSON. The parameters are those of transformers' filter.
pub fn tojson(value: &Value, options: Rest<Value>) -> Result<String, Error> {
    type JsonOptions = (Option<Value>, Option<Value>, Option<Value>, Option<Value>, Kwargs);
    let (ensure_ascii, indent, separators, sort_keys, kwargs): JsonOptions = from_args(&options)?;
    let flag = |given, name| Ok::<bool, Error>(option(given, &kwargs, name)?.is_true());
    let (is_ascii, is_sorted) =
        (flag(ensure_ascii, "ensure_ascii")?, flag(sort_keys, "sort_keys")?);
    let indent = option(indent, &kwargs, "indent")?;
    let separators = option(separators, &kwargs, "separators")?;
    kwargs.assert_all_used()?;
    let indent = match indent.kind() {
        ValueKind::None | ValueKind::Undefined => None,
        ValueKind::String => indent.as_str().map(str::to_owned),
        // A Python boolean is a number.
        ValueKind::Bool => Some(" ".repeat(indent.is_true().into())),
        _ => match indent.as_i64() {
            Some(width) if width <= 64 => Some(" ".repeat(width.max(0) as usize)),
            _ => return Err(invalid("tojson: indent is a number up to 64, or a text")),
        },
    };
    let (between_items, after_key) = match separators.is_none() || separators.is_undefined() {
        true => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        false => {
            let texts: Vec<Value> = separators.try_iter()?.collect();
            match texts.as_slice() {
                [a, b] if a.as_str().is_some() && b.as_str().is_some() => {
                    (a.to_string(), b.to_string())
                }
                _ => return Err(invalid("tojson: separators are two texts")),
            }
        }
    };
    let mut out = String::new();
    JsonStyle { is_ascii, indent, between_items, after_key, is_sorted }
        .write(&mut out, value, 0)
        .map(|()| out)
}

impl JsonStyle {
    fn write(&self, out: &mut String, value: &Value, level: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.quote(out, value.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => out.push_str(&scalar(value)),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut items = value.try_iter()?.peekable();
                let is_empty = items.peek().is_none();
                out.push('[');
                for (i, item) in items.enumerate() {
                    self.begin_item(out, i, level + 1);
                    self.write(out, &item, level + 1)?;
                }
                self.end(out, is_empty, level, ']');
            }
            ValueKind::Map => {
                let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
                let mut pairs: Vec<(String, Value)> = pairs
                    .into_iter()
                    .flatten()
                    .map(|(key, value)| Ok((key_text(&key)?, value)))
                    .collect::<Result<_, Error>>()?;
                if self.is_sorted {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                out.push('{');
                for (i, (key, value)) in pairs.iter().enumerate() {
                    self.begin_item(out, i, level + 1);
                    self.quote(out, key);
                    out.push_str(&self.after_key);
                    self.write(out, value, level + 1)?;
                }
                self.end(out, pairs.is_empty(), level, '}');
            }
            ValueKind::Undefined => return Err(invalid("tojson of a value that is not defined")),
            other => return Err(invalid(format!("tojson of a value of the kind {other}"))),
        }
        Ok(())
    }

    fn begin_item(&self, out: &mut String, index: usize, level: usize) {
        if index > 0 {
            out.push_str(&self.between_items);
        }
        self.new_line(out, level);
    }

    fn end(&self, out: &mut String, is_empty: bool, level: usize, bracket: char) {
        if !is_empty {
            self.new_line(out, level);
        }
        out.push(bracket);
    }

    fn new_line(&self, out: &mut String, level: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..level).for_each(|_| out.push_str(indent));
        }
    }

    /// Writes a text in quotes. Private-use characters are kept even in ASCII mode: a caller
    /// inserts one to break control tokens, and removes it from the rendered text.
    fn quote(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' | '\\' => out.extend(['\\', c]),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' => escape(out, c),
                ' '..='~' | '\u{e000}'..='\u{f8ff}' => out.push(c),
                c if self.is_ascii => escape(out, c),
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn escape(out: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        // Writing to a string cannot fail.
        let _ = write!(out, "\\u{unit:04x}");
    }
}

/// Returns a number, a boolean or null as JSON.
fn scalar(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "null".into(),
        ValueKind::Bool => if value.is_true() { "true" } else { "false" }.into(),
        _ if is_whole(value) => value.to_string(),
        _ => match float_of(value).unwrap_or(f64::NAN) {
            x if x.is_nan() => "NaN".into(),
            x if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
            x => float(x),
        },
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.to_string()),
        ValueKind::None | ValueKind::Bool | ValueKind::Number => Ok(scalar(key)),
        other => Err(invalid(format!("tojson of a key of the kind {other}"))),
    }
}
