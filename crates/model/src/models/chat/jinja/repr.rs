//! Prints values as Python does.

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use std::fmt::Write;
use std::sync::Arc;

/// A tuple, which Python prints differently from a list.
#[derive(Debug)]
pub struct Tuple(Vec<Value>);

impl Object for Tuple {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}

/// Creates a tuple of these values.
pub fn tuple<const N: usize>(values: [Value; N]) -> Value {
    Value::from_object(Tuple(values.into()))
}

/// Returns the pairs of a mapping as tuples.
pub fn pairs(value: &Value) -> Option<Vec<Value>> {
    let pairs = value.as_object().filter(|object| object.repr() == ObjectRepr::Map)?;
    Some(pairs.try_iter_pairs()?.map(|(key, value)| tuple([key, value])).collect())
}

/// Returns the same text as Python's `str(value)`.
pub fn str_of(value: &Value) -> String {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None => write_repr(&mut out, value),
    }
    out
}

/// Returns whether the value is an integer. `True` is not one.
pub fn is_whole(value: &Value) -> bool {
    value.kind() == ValueKind::Number && value.is_integer()
}

/// Returns a number, or a boolean as 0 or 1.
pub fn float_of(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => value.to_string().parse().ok(),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// Writes the same text as Python's `repr(value)`.
fn write_repr(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if is_whole(value) => out.push_str(&value.to_string()),
        ValueKind::Number => out.push_str(&float(float_of(value).unwrap_or(f64::NAN))),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => write_items(out, value),
        ValueKind::Map => {
            out.push('{');
            let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
            for (i, (key, value)) in pairs.into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(out, &key);
                out.push_str(": ");
                write_repr(out, &value);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn write_items(out: &mut String, value: &Value) {
    let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
    out.push(if is_tuple { '(' } else { '[' });
    for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        write_repr(out, &item);
    }
    out.push(if is_tuple { ')' } else { ']' });
}

/// Returns a number with the fewest digits that distinguish it from its neighbours.
pub fn float(x: f64) -> String {
    if !x.is_finite() {
        let name = if x.is_nan() { "nan" } else { "inf" };
        return format!("{}{name}", if x < 0.0 { "-" } else { "" });
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{x:?}")
}

/// Writes a text in quotes.
///
/// Python also escapes private-use characters. They are kept here, because a caller inserts one to
/// break control tokens, and removes it from the rendered text.
fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            // Writing to a string cannot fail.
            c if (c as u32) < 0x100 => drop(write!(out, "\\x{:02x}", c as u32)),
            c if (c as u32) < 0x10000 => drop(write!(out, "\\u{:04x}", c as u32)),
            c => drop(write!(out, "\\U{:08x}", c as u32)),
        }
    }
    out.push(quote);
}

/// Returns whether Python prints the character unescaped. It escapes control and format characters,
/// and spaces other than the common one.
fn is_printable(c: char) -> bool {
    let is_format = matches!(c, '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}'
        | '\u{70f}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e0fff}');
    c == ' ' || !(c.is_control() || c.is_whitespace() || is_format)
}
