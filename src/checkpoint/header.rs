//! The header of a safetensors file: 8 bytes of length, JSON, then the data that its offsets cut
//! up.
//!
//! Parsed here rather than by the `safetensors` crate so that a refusal names the tensor and what
//! is wrong with it, and so that duplicate names are seen at all (a JSON map silently keeps the
//! last). Spec: huggingface.co/docs/safetensors.

use super::view::Dtype;
use crate::error::Fault;
use anyhow::Result;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

/// The longest header that is believed.
pub const MAX_HEADER: usize = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes of the file, counted from its start.
    pub range: Range<usize>,
}

#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// The header's map with its duplicates.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a map from tensor names to dtype, shape and data_offsets")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A damaged file, with the usual remedy.
fn damaged(file: &str, what: impl fmt::Display) -> Fault {
    Fault::model(format!("{file}: {what}"))
        .help("the file is damaged or was not fully downloaded: fetch it again")
}

/// Reads and checks the header of a whole file: every tensor lies inside it, none overlaps another,
/// none is left over.
///
/// `file` is only named in errors. Tensors come back in the order of their data.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Vec<Entry>> {
    let len = bytes.len();
    super::foreign::check_bytes(file, bytes)?;
    let Some((prefix, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(damaged(
            file,
            format!("it is {len} bytes long; a safetensors file has at least 8"),
        )
        .into());
    };
    let header_len = u64::from_le_bytes(*prefix);
    if header_len > MAX_HEADER as u64 {
        let what = format!(
            "it claims a header of {header_len} bytes; more than {MAX_HEADER} is not believed"
        );
        return Err(damaged(file, what).help("this is probably not a safetensors file").into());
    }
    let header_len = header_len as usize;
    let Some(header) = rest.get(..header_len) else {
        return Err(damaged(
            file,
            format!("it claims a header of {header_len} bytes but is {len} bytes long"),
        )
        .into());
    };
    let RawHeader(raw) = serde_json::from_slice(header)
        .map_err(|e| damaged(file, format!("its header is not valid JSON: {e}")))?;
    let mut names = HashSet::new();
    let mut entries = Vec::with_capacity(raw.len());
    for (name, raw) in raw {
        if !names.insert(name.clone()) {
            return Err(damaged(file, format!("tensor `{name}` is listed twice")).into());
        }
        entries.push(check(file, name, raw, 8 + header_len, len)?);
    }
    entries.sort_by_key(|e| (e.range.start, e.range.end));
    let mut end = 8 + header_len;
    for entry in &entries {
        if entry.range.start != end {
            let what = if entry.range.start < end {
                "overlaps the tensor before it"
            } else {
                "leaves a gap before it"
            };
            return Err(damaged(file, format!("tensor `{}` {what}", entry.name)).into());
        }
        end = entry.range.end;
    }
    if end != len {
        return Err(damaged(
            file,
            format!("its header accounts for {end} bytes but the file has {len}"),
        )
        .into());
    }
    Ok(entries)
}

/// More than any file has.
const MOST_ELEMENTS: u64 = 1 << 48;

/// One entry against its own claims and the length of the file.
fn check(file: &str, name: String, raw: RawEntry, data_start: usize, len: usize) -> Result<Entry> {
    let bad = |what: String| damaged(file, format!("tensor `{name}` {what}"));
    let Ok(dtype) = raw.dtype.parse::<Dtype>() else {
        return Err(bad(format!("has the unknown dtype {:?}", raw.dtype))
            .help("weights must be BF16, F16 or F32")
            .into());
    };
    let [begin, end] = raw.data_offsets;
    let size = raw.shape.iter().try_fold(dtype.bytes(), |n, d| n.checked_mul(*d));
    // An empty tensor has no bytes to bound its other dimensions; sizes are products of those too.
    let room = raw.shape.iter().try_fold(1, |n: u64, d| n.checked_mul(1.max(*d as u64)));
    let is_possible = room.is_some_and(|room| room <= MOST_ELEMENTS);
    let Some(size) = size.filter(|_| is_possible) else {
        return Err(bad(format!("has the impossible shape {:?}", raw.shape)).into());
    };
    if end.checked_sub(begin) != Some(size) {
        let what =
            format!("of {dtype} {:?} needs {size} bytes but has offsets {begin}..{end}", raw.shape);
        return Err(bad(what).into());
    }
    match (data_start.checked_add(begin), data_start.checked_add(end)) {
        (Some(start), Some(stop)) if stop <= len => {
            Ok(Entry { name, dtype, shape: raw.shape, range: start..stop })
        }
        _ => {
            let have = len - data_start;
            Err(bad(format!(
                "ends at byte {end} of the data, but the file holds only {have}: it is truncated"
            ))
            .into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn refusal(header: &str, data: usize) -> String {
        parse("f", &file(header, data)).unwrap_err().to_string()
    }

    #[test]
    fn good_headers_come_back_in_the_order_of_the_data() {
        let h = r#"{"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"__metadata__":{"format":"pt"},
            "a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},"empty":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]}}  "#;
        let entries = parse("f", &file(h, 8)).unwrap();
        assert_eq!(
            entries.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(),
            ["a", "b", "empty"]
        );
        assert_eq!(entries[1].range, 8 + h.len() + 4..8 + h.len() + 8);
    }

    #[test]
    fn lies_are_named() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        assert!(refusal(&one("F32", "[2]", "[0,8]"), 4).contains("truncated"));
        assert!(refusal(&one("F32", "[2]", "[0,8]"), 12).contains("accounts for"));
        assert!(refusal(&one("F32", "[2]", "[0,4]"), 4).contains("needs 8 bytes"));
        assert!(refusal(&one("F32", "[2]", "[8,0]"), 8).contains("needs 8 bytes"));
        assert!(refusal(&one("F9", "[2]", "[0,8]"), 8).contains("unknown dtype"));
        assert!(
            refusal(&one("U8", "[4294967296,4294967296]", "[0,0]"), 0).contains("impossible shape")
                && refusal(&one("U8", "[0,9223372036854775807]", "[0,0]"), 0)
                    .contains("impossible")
        );
        assert!(
            refusal(&one("U8", "[0]", "[18446744073709551615,18446744073709551615]"), 0)
                .contains("truncated")
        );
        assert!(refusal(&one("U8", "[4]", "[2,6]"), 6).contains("gap"));
        assert!(refusal(&one("U8", "[-1]", "[0,1]"), 1).contains("JSON"));
        let two = r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"u":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        assert!(refusal(two, 6).contains("`u` overlaps"));
        let twice = r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        assert!(refusal(twice, 1).contains("listed twice"));
        assert!(refusal("[]", 0).contains("JSON"));
        assert!(refusal("{} x", 0).contains("JSON"));
        assert!(parse("f", &[]).unwrap_err().to_string().contains("0 bytes"));
        assert!(parse("f", &[255; 64]).unwrap_err().to_string().contains("not believed"));
        assert!(
            parse("f", &[99, 0, 0, 0, 0, 0, 0, 0, b'{'])
                .unwrap_err()
                .to_string()
                .contains("is 9 bytes long")
        );
    }
}
