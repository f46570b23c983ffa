//! JSON from untrusted sources as a tree of values. A value takes many times the two bytes of its
//! shortest spelling, so the number of values is bounded before any is made.

use serde::de::Error as _;
use serde_json::{Error, Value};
use std::io::Write;

/// Most values of a text; they take about 100 MB of memory.
pub const MOST_VALUES: usize = 1 << 20;
/// Bytes of memory for each byte of a text, and for each of its values.
pub const COPIES: usize = 3;
const VALUE: usize = 100;

/// Parses a text, unless it may have more than [`MOST_VALUES`] values.
pub fn parse(text: &[u8]) -> Result<Value, Error> {
    if most_values(text) > MOST_VALUES {
        return Err(Error::custom(format_args!("it has more than {MOST_VALUES} values")));
    }
    serde_json::from_slice(text)
}

/// Returns the bytes of memory that a text of this length may take as text and as values.
pub fn memory(length: usize) -> usize {
    COPIES * length + VALUE * (length / 2).min(MOST_VALUES)
}

/// Returns the length of a value's shortest spelling, without writing it.
pub fn bytes(value: &Value) -> usize {
    let mut counter = ByteCounter(0);
    serde_json::to_writer(&mut counter, value).expect("a counter takes any bytes");
    counter.0
}

/// A sink that counts bytes.
struct ByteCounter(usize);

impl Write for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the most values that a text can have, if it is JSON.
fn most_values(text: &[u8]) -> usize {
    let (mut values, mut in_text, mut escaped) = (1, false, false);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b',' | b'[' | b'{' if !in_text => values += 1,
            _ => {}
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_spelling() {
        let value = serde_json::json!({"a\"": [1, 2.5, null, "\u{e4}\n"], "b": {"c": true}});
        assert_eq!(bytes(&value), value.to_string().len());
    }

    #[test]
    fn values_are_counted_before_they_are_made() {
        assert_eq!(most_values(br#"{"a,[\",": [1, 2, {"b": "[,,,\\"}], "c": 3}"#), 7);
        assert!(parse(br#"{"a": [1, 2]}"#).is_ok() && parse(b"[").is_err());
        let many = |n: usize| format!("[{}0]", "0,".repeat(n));
        assert!(parse(many(1000).as_bytes()).is_ok());
        let refused = parse(many(MOST_VALUES).as_bytes()).unwrap_err();
        assert!(refused.to_string().contains("values"), "{refused}");
        // A long text is one value.
        assert!(parse(format!("\"{}\"", ",".repeat(2 * MOST_VALUES)).as_bytes()).is_ok());
    }
}
