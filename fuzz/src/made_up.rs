//! Structured mutation: an input is read as the fields of a file, the edits of a valid JSON value,
//! or the words of a text.

use serde_json::{Value, json};
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of inputs that were made up of fields.
pub static MADE_UP: AtomicU64 = AtomicU64::new(0);

/// Bytes of an input, read as the fields of a structure. Zeros follow the last byte.
pub struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    /// Reads a whole input as fields.
    pub fn new(data: &'a [u8]) -> Cursor<'a> {
        MADE_UP.fetch_add(1, Ordering::Relaxed);
        Cursor(data)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        front
    }

    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }

    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub fn word(&mut self) -> u64 {
        let mut word = [0; 8];
        let from = self.bytes(8);
        word[..from.len()].copy_from_slice(from);
        u64::from_le_bytes(word)
    }

    /// Returns a small number in most cases, otherwise one at an edge of arithmetic, where counts,
    /// sizes and offsets tend to overflow.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=200 => small.into(),
            201..=220 => 32 * u64::from(self.byte()),
            221..=235 => self.word(),
            236..=245 => u64::MAX - u64::from(self.byte()),
            _ => 1 << (self.byte() % 64),
        }
    }

    /// Returns an index below `count`, which is at least 1.
    pub fn index(&mut self, count: usize) -> usize {
        let high = if count > 256 { usize::from(self.byte()) << 8 } else { 0 };
        (high + usize::from(self.byte())) % count
    }

    pub fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.index(list.len())]
    }

    /// Returns a word of a list that is separated by white space.
    pub fn word_of<'b>(&mut self, list: &'b str) -> &'b str {
        let count = list.split_whitespace().count();
        list.split_whitespace().nth(self.index(count)).expect("it is below the count")
    }
}

/// Returns the input after its first byte. If the first byte is even, `make` builds the result from
/// that.
pub fn raw_or(data: &[u8], make: impl FnOnce(&mut Cursor<'_>) -> Vec<u8>) -> Vec<u8> {
    match data.split_first() {
        Some((how, rest)) if how % 2 == 0 => make(&mut Cursor::new(rest)),
        Some((_, rest)) => rest.to_vec(),
        None => Vec::new(),
    }
}

/// Returns a text of words of `list`, which are separated by white space, and some characters. `·`
/// in a word means a space, `⏎` a line break.
pub fn text_of(cursor: &mut Cursor<'_>, list: &str) -> String {
    let words: Vec<&str> = list.split_whitespace().collect();
    let mut text = String::new();
    while !cursor.is_empty() {
        match cursor.byte() {
            255 => text.push(char::from(cursor.byte())),
            254 => text.push(char::from_u32(cursor.word() as u32 >> 11).unwrap_or('\u{fffd}')),
            word => text += words[usize::from(word) % words.len()],
        }
    }
    text.replace('·', " ").replace('⏎', "\n")
}

/// Returns a JSON value with up to eight edits, as text. `keys` are names for new fields.
pub fn edited(cursor: &mut Cursor<'_>, base: &Value, keys: &str) -> Vec<u8> {
    let mut value = base.clone();
    for _ in 0..cursor.byte() % 9 {
        edit(cursor, &mut value, base, keys);
        // Repeated duplication would need unlimited memory.
        if value.to_string().len() > 1 << 16 {
            break;
        }
    }
    value.to_string().into_bytes()
}

/// Edits a part of `value`, which is chosen step by step from the root.
fn edit(cursor: &mut Cursor<'_>, value: &mut Value, base: &Value, keys: &str) {
    if !cursor.byte().is_multiple_of(4) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                let nth = cursor.index(map.len());
                let child = map.values_mut().nth(nth).expect("it is below the length");
                return edit(cursor, child, base, keys);
            }
            Value::Array(list) if !list.is_empty() => {
                let nth = cursor.index(list.len());
                return edit(cursor, &mut list[nth], base, keys);
            }
            _ => {}
        }
    }
    match (cursor.byte() % 6, value) {
        (0, Value::Object(map)) if !map.is_empty() => {
            let key = map.keys().nth(cursor.index(map.len())).cloned();
            map.remove(&key.expect("it is below the length"));
        }
        (1 | 2, Value::Object(map)) => {
            map.insert(cursor.word_of(keys).into(), hostile(cursor, base));
        }
        (0, Value::Array(list)) if !list.is_empty() => {
            list.remove(cursor.index(list.len()));
        }
        (1, Value::Array(list)) if !list.is_empty() => {
            let item = list[cursor.index(list.len())].clone();
            list.extend(std::iter::repeat_n(item, cursor.byte().into()));
        }
        (2, Value::Array(list)) => list.push(hostile(cursor, base)),
        (0, Value::String(text)) => {
            let at = (0..=cursor.index(text.len() + 1)).rfind(|at| text.is_char_boundary(*at));
            text.truncate(at.unwrap_or(0));
        }
        (1 | 2, Value::String(text)) => {
            let length = cursor.byte().into();
            *text += &String::from_utf8_lossy(cursor.bytes(length));
        }
        (_, value) => *value = hostile(cursor, base),
    }
}

/// Returns a value that a reader may not expect, or a part of `base` in another place.
fn hostile(cursor: &mut Cursor<'_>, base: &Value) -> Value {
    match cursor.byte() % 16 {
        0 => Value::Null,
        1 => json!(cursor.byte().is_multiple_of(2)),
        2 => json!(cursor.number()),
        3 => json!(-(cursor.number() as i64 & i64::MAX)),
        4 => json!(cursor.one_of(&[0.5, -0.0, 1e308, -1e308, 1e-320, 2.5e9, 1.0])),
        5 => json!(f64::from_bits(cursor.word())),
        6 => json!(""),
        7 => json!("a".repeat(16 * usize::from(cursor.byte()))),
        8 => {
            let length = cursor.byte().into();
            json!(String::from_utf8_lossy(cursor.bytes(length)))
        }
        9 => json!(cursor.number().to_string()),
        10 => json!([]),
        11 => json!({}),
        12 => (0..cursor.byte()).fold(json!(0), |inner, _| json!([inner])),
        13 => (0..cursor.byte()).fold(json!("a"), |inner, _| json!({"a": inner})),
        _ => part_of(cursor, base).clone(),
    }
}

fn part_of<'a>(cursor: &mut Cursor<'_>, value: &'a Value) -> &'a Value {
    if cursor.byte().is_multiple_of(4) {
        return value;
    }
    let child = match value {
        Value::Object(map) if !map.is_empty() => map.values().nth(cursor.index(map.len())),
        Value::Array(list) if !list.is_empty() => list.get(cursor.index(list.len())),
        _ => None,
    };
    child.map_or(value, |child| part_of(cursor, child))
}
