//! The header of a GGUF file: magic, version, metadata, tensor list. The data of the tensors
//! follows, each at a multiple of the alignment.
//!
//! Nothing in the file is trusted. Every count is compared with the remaining bytes before memory
//! is allocated for it. Every tensor must lie inside the file without overlapping others. Spec:
//! github.com/ggml-org/ggml, docs/gguf.md.

use super::metadata::{Metadata, Value};
use super::types;
use crate::checkpoint::foreign;
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::{Code, GgmlType};
use std::collections::HashSet;
use std::fmt::Display;
use std::ops::Range;

pub const MAGIC: &[u8; 4] = b"GGUF";
/// The version that is written. Version 2 is read too; the differences do not matter here.
pub const VERSION: u32 = 3;
/// Alignment if the file does not set one.
pub const ALIGNMENT: usize = 32;
pub const ALIGNMENT_KEY: &str = "general.alignment";

/// Largest accepted header in bytes; Gemma's has about 8 MB.
const MAX_HEADER: usize = super::super::header::MAX_HEADER;
/// Largest accepted name of a tensor or a key, in bytes.
const MAX_NAME: usize = 1 << 16;

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct GgufEntry {
    pub name: String,
    /// A code with a GGUF type.
    pub code: Code,
    /// Its GGUF type.
    pub ggml: GgmlType,
    /// Outermost dimension first: the reverse of the file's order.
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub range: Range<usize>,
}

fn damaged(file: &str, what: impl Display) -> Fault {
    Fault::model(format!("{file}: {what}"))
        .help("the file is damaged or was not fully downloaded: fetch it again")
}

/// Converts an unsigned number to i64, clamped at its maximum.
fn cut(bytes: [u8; 8]) -> i64 {
    i64::try_from(u64::from_le_bytes(bytes)).unwrap_or(i64::MAX)
}

/// Cursor over the bytes of the header.
struct HeaderReader<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> HeaderReader<'a> {
    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], Fault> {
        let part = self.at.checked_add(n).and_then(|end| self.bytes.get(self.at..end));
        let Some(part) = part else {
            return Err(damaged(
                self.file,
                format!("ends at byte {} inside {what}: it is truncated", self.bytes.len()),
            ));
        };
        self.at += n;
        if self.at > MAX_HEADER {
            let what = format!("its header is longer than the limit of {MAX_HEADER} bytes");
            return Err(damaged(self.file, what));
        }
        Ok(part)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        Ok(*self.take(N, what)?.first_chunk().expect("as many were taken"))
    }

    fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads a count of items of at least `least` bytes each.
    fn count(&mut self, least: usize, what: &str) -> Result<usize, Fault> {
        let n = self.u64(what)?;
        let room = (self.bytes.len() - self.at) / least;
        if n > room as u64 {
            return Err(damaged(
                self.file,
                format!("claims {n} {what}, but is too short for them"),
            ));
        }
        Ok(n as usize)
    }

    fn text(&mut self, what: &str) -> Result<String, Fault> {
        let n = self.count(1, &format!("bytes of {what}"))?;
        let bytes = self.take(n, what)?;
        // Pieces of a vocabulary may be invalid UTF-8 on purpose. A tensor with an invalid name is
        // never found.
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    fn name(&mut self, what: &str) -> Result<String, Fault> {
        let name = self.text(what)?;
        match name.len() {
            1..=MAX_NAME => Ok(name),
            n => Err(damaged(self.file, format!("{what} of {n} bytes"))),
        }
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value, Fault> {
        let what = format!("the value of `{key}`");
        let value = match kind {
            0 => Value::Int(self.array::<1>(&what)?[0].into()),
            1 => Value::Int((self.array::<1>(&what)?[0] as i8).into()),
            2 => Value::Int(u16::from_le_bytes(self.array(&what)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array(&what)?).into()),
            4 => Value::Int(self.u32(&what)?.into()),
            5 => Value::Int((self.u32(&what)? as i32).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(&what)?).into()),
            7 => Value::Bool(self.array::<1>(&what)?[0] != 0),
            8 => Value::Text(self.text(&what)?),
            9 => self.list(key)?,
            10 => Value::Int(cut(self.array(&what)?)),
            11 => Value::Int(self.u64(&what)? as i64),
            12 => Value::Float(f64::from_le_bytes(self.array(&what)?)),
            other => {
                return Err(damaged(self.file, format!("`{key}` has the unknown type {other}")));
            }
        };
        Ok(value)
    }

    fn list(&mut self, key: &str) -> Result<Value, Fault> {
        let what = format!("the list `{key}`");
        let kind = self.u32(&what)?;
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => {
                return Err(damaged(self.file, format!("`{key}` is a list of lists"))
                    .help("no Gemma model has one"));
            }
            other => {
                return Err(damaged(
                    self.file,
                    format!("`{key}` is a list of the unknown type {other}"),
                ));
            }
        };
        let n = self.count(least, &format!("elements of `{key}`"))?;
        if kind == 8 {
            return Ok(Value::Texts((0..n).map(|_| self.text(&what)).collect::<Result<_, _>>()?));
        }
        let bytes = self.take(n * least, &what)?;
        Ok(match kind {
            0 | 7 => Value::Ints(bytes.iter().map(|b| i64::from(*b)).collect()),
            1 => Value::Ints(bytes.iter().map(|b| i64::from(*b as i8)).collect()),
            2 => Value::Ints(
                bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect(),
            ),
            3 => Value::Ints(
                bytes.as_chunks().0.iter().map(|b| i16::from_le_bytes(*b).into()).collect(),
            ),
            4 => Value::Ints(
                bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b).into()).collect(),
            ),
            5 => Value::Ints(
                bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
            ),
            10 => Value::Ints(bytes.as_chunks().0.iter().map(|b| cut(*b)).collect()),
            11 => Value::Ints(bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
            6 => Value::Floats(
                bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            ),
            _ => Value::Floats(
                bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b) as f32).collect(),
            ),
        })
    }

    /// Reads one entry of the tensor list. Its range is relative to the start of the data.
    fn tensor(&mut self) -> Result<GgufEntry, Fault> {
        let name = self.name("the name of a tensor")?;
        let bad = |what: String| damaged(self.file, format!("tensor `{name}` {what}"));
        let n_dims = self.u32("the list of tensors")?;
        if !(1..=4).contains(&n_dims) {
            return Err(bad(format!("has {n_dims} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..n_dims {
            let n = self.u64("the list of tensors")?;
            shape
                .insert(0, usize::try_from(n).map_err(|_| bad(format!("has a dimension of {n}")))?);
        }
        let number = self.u32("the list of tensors")?;
        let offset = self.u64("the list of tensors")?;
        let code = types::code(number);
        let Some((code, ggml)) = code.and_then(|code| Some((code, code.spec().ggml?))) else {
            let stored = types::name(number).map_or(format!("type {number}"), str::to_owned);
            let what = format!(
                "{}: tensor `{name}` is stored as {stored}, which cannot be read",
                self.file
            );
            return Err(Fault::model(what).help(format!("use a file of {}", types::readable())));
        };
        let cols = shape[shape.len() - 1];
        if shape.contains(&0) || !cols.is_multiple_of(ggml.weights) {
            return Err(bad(format!("has the shape {shape:?}, which {} cannot cut", ggml.name)));
        }
        let bytes = shape
            .iter()
            .try_fold(1usize, |n, d| n.checked_mul(*d))
            .and_then(|n| (n / ggml.weights).checked_mul(ggml.bytes));
        let end = bytes.and_then(|n| usize::try_from(offset).ok()?.checked_add(n));
        match end {
            Some(end) => Ok(GgufEntry { name, code, ggml, shape, range: offset as usize..end }),
            None => Err(bad(format!("has the impossible shape {shape:?} at offset {offset}"))),
        }
    }
}

/// Reads and checks the header of a whole file. `file` is only used in errors. Tensors are in the
/// order of their data.
pub fn parse(file: &str, bytes: &[u8]) -> Result<(Metadata, Vec<GgufEntry>)> {
    Ok(read(&mut HeaderReader { file, bytes, at: 0 })?)
}

fn read(r: &mut HeaderReader<'_>) -> Result<(Metadata, Vec<GgufEntry>), Fault> {
    if r.bytes.get(..4) != Some(MAGIC) {
        foreign::check_bytes(r.file, r.bytes)?;
        return Err(damaged(r.file, "it does not begin with the letters GGUF"));
    }
    r.at = 4;
    match r.u32("the version")? {
        2 | VERSION => {}
        v if v.swap_bytes() <= 0xffff => {
            return Err(Fault::model(format!("{}: a big-endian GGUF file", r.file))
                .help("convert it on a little-endian machine"));
        }
        v => {
            let help = "convert the model again with a current llama.cpp";
            return Err(Fault::model(format!(
                "{}: version {v} of GGUF; 2 and 3 can be read",
                r.file
            ))
            .help(help));
        }
    }
    // 8 bytes for the name's length, 1 for the name, 4 for the number of dimensions, 8 for one
    // dimension, 4 for the type, 8 for the offset.
    let n_tensors = r.count(33, "tensors")?;
    let n_values = r.count(14, "metadata values")?;
    let mut metadata = Metadata::default();
    for _ in 0..n_values {
        let key = r.name("a key")?;
        let kind = r.u32(&format!("the value of `{key}`"))?;
        let value = r.value(kind, &key)?;
        if !metadata.insert(key.clone(), value) {
            return Err(damaged(r.file, format!("`{key}` is given twice")));
        }
    }
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    for _ in 0..n_tensors {
        let entry = r.tensor()?;
        if !names.insert(entry.name.clone()) {
            return Err(damaged(r.file, format!("tensor `{}` is listed twice", entry.name)));
        }
        entries.push(entry);
    }
    let alignment = match metadata.get(ALIGNMENT_KEY) {
        None => ALIGNMENT,
        Some(Value::Int(n)) if (1..=1 << 20).contains(n) && n.count_ones() == 1 => *n as usize,
        Some(other) => {
            return Err(damaged(
                r.file,
                format!("`{ALIGNMENT_KEY}` is {other:?}, not a power of two"),
            ));
        }
    };
    place(r.file, &mut entries, r.at.next_multiple_of(alignment), alignment, r.bytes.len())?;
    Ok((metadata, entries))
}

/// Converts ranges in the data to ranges in the file. Sorts them and checks bounds and overlaps.
fn place(
    file: &str,
    entries: &mut [GgufEntry],
    start: usize,
    alignment: usize,
    len: usize,
) -> Result<(), Fault> {
    entries.sort_by_key(|e| (e.range.start, e.range.end));
    let mut end = start;
    for entry in entries {
        let bad = |what: String| damaged(file, format!("tensor `{}` {what}", entry.name));
        if !entry.range.start.is_multiple_of(alignment) {
            return Err(bad(format!(
                "begins at byte {} of the data, which is not a multiple of {alignment}",
                entry.range.start
            )));
        }
        let range = start.checked_add(entry.range.start).zip(start.checked_add(entry.range.end));
        let Some((first, last)) = range.filter(|r| r.1 <= len) else {
            let have = len.saturating_sub(start);
            return Err(bad(format!(
                "ends at byte {} of the data, but the file holds only {have}: it is truncated",
                entry.range.end
            )));
        };
        if first < end {
            return Err(bad("overlaps the tensor before it".into()));
        }
        end = last;
        entry.range = first..last;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a file without tensors and with one key `a` of this type and value.
    fn value(kind: u32, bytes: &[u8]) -> Option<Value> {
        let head = [&b"GGUF"[..], &3u32.to_le_bytes(), &0u64.to_le_bytes(), &1u64.to_le_bytes()];
        let key = [&1u64.to_le_bytes()[..], b"a", &kind.to_le_bytes(), bytes];
        let file = [head.concat(), key.concat(), vec![0; 64]].concat();
        parse("a.gguf", &file).unwrap().0.get("a").cloned()
    }

    /// All number types, each with its bytes and the parsed value.
    fn numbers() -> Vec<(u32, Vec<u8>, Value)> {
        let int = |kind, bytes: &[u8], n| (kind, bytes.to_vec(), Value::Int(n));
        vec![
            int(0, &[200], 200),
            int(1, &[200], -56),
            int(2, &60000u16.to_le_bytes(), 60000),
            int(3, &(-300i16).to_le_bytes(), -300),
            int(4, &4_000_000_000u32.to_le_bytes(), 4_000_000_000),
            int(5, &(-70_000i32).to_le_bytes(), -70_000),
            int(10, &(1u64 << 40).to_le_bytes(), 1 << 40),
            int(10, &u64::MAX.to_le_bytes(), i64::MAX),
            int(11, &(-1i64 << 40).to_le_bytes(), -1 << 40),
            (6, 1.5f32.to_le_bytes().to_vec(), Value::Float(1.5)),
            (12, (-2.5f64).to_le_bytes().to_vec(), Value::Float(-2.5)),
            (7, vec![1], Value::Bool(true)),
        ]
    }

    #[test]
    fn numbers_and_lists_of_every_type_are_read() {
        for (kind, bytes, want) in numbers() {
            assert_eq!(value(kind, &bytes), Some(want.clone()), "type {kind}");
            let list = [&kind.to_le_bytes()[..], &2u64.to_le_bytes(), &bytes, &bytes].concat();
            let both = match want {
                Value::Int(n) => Value::Ints(vec![n, n]),
                Value::Float(v) => Value::Floats(vec![v as f32, v as f32]),
                _ => Value::Ints(vec![1, 1]),
            };
            assert_eq!(value(9, &list), Some(both), "a list of type {kind}");
        }
    }
}
