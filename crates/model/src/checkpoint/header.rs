//! The header of a safetensors file: 8 bytes of length, JSON, then the data at the offsets that the
//! JSON lists. The `safetensors` crate parses and checks it; errors here name the file and a
//! remedy.

use super::view::Dtype;
use anyhow::Result;
use gemma_base::error::Fault;
use safetensors::SafeTensors;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

/// Largest accepted header in bytes.
pub const MAX_HEADER: usize = 100_000_000;

/// More elements than any file has.
const MOST_ELEMENTS: u64 = 1 << 48;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub range: Range<usize>,
}

/// A name that occurs twice in a JSON object, if any. A map would silently keep the last value.
struct Duplicate(Option<String>);

impl<'de> Deserialize<'de> for Duplicate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Duplicate;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a map from tensor names to dtype, shape and data_offsets")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Duplicate, A::Error> {
                let (mut names, mut twice) = (HashSet::new(), None);
                while let Some((name, _)) = map.next_entry::<String, IgnoredAny>()? {
                    if !names.insert(name.clone()) {
                        twice = Some(name);
                    }
                }
                Ok(Duplicate(twice))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// Reads and checks the header of a whole file. Tensors must lie inside it, without overlaps or
/// gaps.
///
/// `file` is only used in errors. Tensors are returned in the order of their data.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Vec<Entry>> {
    super::foreign::check_bytes(file, bytes)?;
    let damaged = |what: &dyn fmt::Display| {
        Fault::model(format!("{file} (of {} bytes): {what}", bytes.len()))
            .help("the file is damaged or was not fully downloaded: fetch it again")
    };
    let (length, header) = SafeTensors::read_metadata(bytes).map_err(|e| damaged(&e))?;
    let Duplicate(twice) = serde_json::from_slice(&bytes[8..8 + length])?;
    if let Some(name) = twice {
        return Err(damaged(&format_args!("tensor `{name}` is listed twice")).into());
    }
    let mut infos: Vec<_> = header.tensors().into_iter().collect();
    infos.sort_by_key(|(_, info)| info.data_offsets);
    let entries = infos.into_iter().map(|(name, info)| {
        let shape = &info.shape;
        let dtype = info.dtype;
        if dtype.bitsize() % 8 != 0 {
            let what = format!("{file}: tensor `{name}` has the dtype {dtype}");
            return Err(Fault::model(what).help("weights must be BF16, F16 or F32").into());
        };
        // An empty tensor has no bytes that limit its other dimensions, which also enter products
        // of sizes.
        let room = shape.iter().try_fold(1, |n: u64, d| n.checked_mul(1.max(*d as u64)));
        if room.is_none_or(|room| room > MOST_ELEMENTS) {
            let what = format!("tensor `{name}` has the impossible shape {shape:?}");
            return Err(damaged(&what).into());
        }
        let (start, end) = info.data_offsets;
        let range = 8 + length + start..8 + length + end;
        Ok(Entry { name, dtype, shape: shape.clone(), range })
    });
    entries.collect()
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
        let h = r#"{"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},
            "__metadata__":{"format":"pt"},
            "a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},
            "empty":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]}}  "#;
        let entries = parse("f", &file(h, 8)).unwrap();
        assert_eq!(
            entries.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(),
            ["a", "b", "empty"]
        );
        assert_eq!(entries[1].range, 8 + h.len() + 4..8 + h.len() + 8);
    }

    #[test]
    fn lies_are_refused() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        assert!(refusal(&one("F32", "[2]", "[0,8]"), 4).contains("not fully covered"));
        assert!(refusal(&one("F32", "[2]", "[0,8]"), 12).contains("not fully covered"));
        assert!(refusal(&one("F32", "[2]", "[0,4]"), 4).contains("invalid"));
        assert!(refusal(&one("F32", "[2]", "[8,0]"), 8).contains("`t`"));
        assert!(refusal(&one("F9", "[2]", "[0,8]"), 8).contains("F9"));
        assert!(refusal(&one("F4", "[2]", "[0,1]"), 1).contains("`t` has the dtype"));
        assert!(
            refusal(&one("U8", "[4294967296,4294967296]", "[0,0]"), 0).contains("overflow")
                && refusal(&one("U8", "[0,9223372036854775807]", "[0,0]"), 0)
                    .contains("impossible")
        );
        assert!(
            refusal(&one("U8", "[0]", "[18446744073709551615,18446744073709551615]"), 0)
                .contains("offset")
        );
        assert!(refusal(&one("U8", "[4]", "[2,6]"), 6).contains("`t`"));
        assert!(refusal(&one("U8", "[-1]", "[0,1]"), 1).contains("JSON"));
        let two = r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
            "u":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        assert!(refusal(two, 6).contains("`u`"));
        let twice = r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
            "t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        assert!(refusal(twice, 1).contains("listed twice"));
        assert!(refusal("[]", 0).contains("JSON"));
        assert!(refusal("{} x", 0).contains("JSON"));
        assert!(parse("f", &[]).unwrap_err().to_string().contains("of 0 bytes"));
        assert!(parse("f", &[255; 64]).unwrap_err().to_string().contains("too large"));
        assert!(parse("f", &[99, 0, 0, 0, 0, 0, 0, 0, b'{']).is_err());
    }
}
