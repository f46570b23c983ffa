//! JSON from untrusted sources as a tree of values. A value uses many times the memory of its
//! shortest text of two bytes, so the number of values is limited before parsing.

use serde::de::Error as _;
use serde_json::{Error, Value};
use std::io::Write;

/// Most values of a text; they use about 70 MB of memory. See [`values`].
pub const MOST_VALUES: usize = 1 << 18;
/// Estimated bytes of memory per byte of text, and per value: includes lists with room for twice
/// their values, and a copy.
pub const COPIES: usize = 3;
const VALUE: usize = 256;
/// Number of values that a list and an object count as, including their minimum capacity.
const LIST: usize = 3;
const OBJECT: usize = 4;

/// Parses a text. Fails if it may have more than [`MOST_VALUES`] values.
pub fn parse(text: &[u8]) -> Result<Value, Error> {
    parse_up_to(MOST_VALUES, text)
}

/// Parses a text. Fails if it may have more than `most` values.
pub fn parse_up_to(most: usize, text: &[u8]) -> Result<Value, Error> {
    if values(text) > most {
        return Err(Error::custom(format_args!("it has more than {most} values")));
    }
    serde_json::from_slice(text)
}

/// Returns the most memory that any text of this length can use as text and as values, in bytes.
pub fn memory(length: usize) -> usize {
    // The densest texts are like `[{}]`, with fewer than two values per byte.
    COPIES * length + VALUE * (2 * length).min(MOST_VALUES)
}

/// Returns an upper bound of the memory that a text uses as text and as values, in bytes.
pub fn memory_of(text: &[u8]) -> usize {
    COPIES * text.len() + VALUE * values(text).min(MOST_VALUES)
}

/// Returns the bytes of memory that a value uses.
pub fn held(value: &Value) -> usize {
    size_of::<Value>() + allocated(value)
}

/// Returns the bytes of heap memory that a value owns.
fn allocated(value: &Value) -> usize {
    // Allocations are rounded up. A field has a name, a hash and table entries; an object has room
    // for two or three times its fields.
    const ROUNDED: usize = 16;
    const FIELD: usize = 48;
    match value {
        Value::String(text) => text.capacity() + ROUNDED,
        Value::Array(items) => {
            let inner: usize = items.iter().map(allocated).sum();
            items.capacity() * size_of::<Value>() + inner + ROUNDED
        }
        Value::Object(fields) if !fields.is_empty() => {
            let room = (2 * fields.len()).max(3) * (size_of::<Value>() + FIELD);
            let inner =
                |(name, value): (&String, &Value)| name.capacity() + ROUNDED + allocated(value);
            room + fields.iter().map(inner).sum::<usize>() + ROUNDED
        }
        _ => 0,
    }
}

/// Returns the length of a value's shortest text, without writing it.
pub fn bytes(value: &Value) -> usize {
    let mut counter = ByteCounter(0);
    serde_json::to_writer(&mut counter, value).expect("a counter takes any bytes");
    counter.0
}

/// A writer that only counts bytes.
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

/// Returns an upper bound of the number of values in a text, if it is JSON. A list and an object
/// count as several values, a field of an object as two.
fn values(text: &[u8]) -> usize {
    let (mut values, mut in_text, mut escaped) = (1, false, false);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b',' | b':' if !in_text => values += 1,
            b'[' if !in_text => values += LIST,
            b'{' if !in_text => values += OBJECT,
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

    /// Memory that the allocator returns for the densest texts of each kind.
    #[test]
    fn values_take_no_more_memory_than_is_counted() {
        for piece in
            ["0", "[]", "[0]", "[[[[0]]]]", "{}", r#"{"":0}"#, r#"{"a":{"b":"c"}}"#, r#""a""#]
        {
            let text = format!("[{}]", vec![piece; 1000].join(","));
            let value = parse(text.as_bytes()).unwrap();
            let copy = value.clone();
            let (held, counted) = (held(&value) + held(&copy), memory_of(text.as_bytes()));
            assert!(held <= counted, "{piece}: {held} bytes of {counted}");
            assert!(counted <= memory(text.len()), "{piece}: {counted} bytes");
        }
    }

    #[test]
    fn values_are_counted_before_they_are_made() {
        let text = br#"{"a,[\",": [1, 2, {"b": "[,,,\\"}], "c": 3}"#;
        assert_eq!(values(text), 1 + 2 * OBJECT + LIST + 3 + 3);
        assert!(parse(br#"{"a": [1, 2]}"#).is_ok() && parse(b"[").is_err());
        let many = |n: usize| format!("[{}0]", "0,".repeat(n));
        assert!(parse(many(1000).as_bytes()).is_ok());
        let refused = parse(many(MOST_VALUES).as_bytes()).unwrap_err();
        assert!(refused.to_string().contains("values"), "{refused}");
        // A long text is one value.
        assert!(parse(format!("\"{}\"", ",".repeat(2 * MOST_VALUES)).as_bytes()).is_ok());
    }
}
