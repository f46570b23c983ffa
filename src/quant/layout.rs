//! What the artifact will hold, to the byte, before anything is written.

use super::Recipe;
use crate::checkpoint::artifact;
use crate::error::Fault;
use crate::gemma::{Role, Weights};
use crate::tensor::Format;
use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// One tensor of the artifact.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    pub name: String,
    /// As safetensors spells it.
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: u64,
}

impl Part {
    fn new(name: String, dtype: &'static str, shape: Vec<usize>, width: usize) -> Self {
        let bytes = (width * shape.iter().product::<usize>()) as u64;
        Part { name, dtype, shape, bytes }
    }
}

/// One tensor of the source and what it becomes.
#[derive(Clone, Debug)]
pub struct Entry {
    pub role: Role,
    pub layer: usize,
    /// The source's name.
    pub name: String,
    pub rows: usize,
    pub cols: usize,
    /// `None`: copied as it is.
    pub format: Option<Format>,
    /// Codes, then scales; or one plain tensor.
    pub parts: Vec<Part>,
    /// Index of its file.
    pub shard: usize,
}

impl Entry {
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }
}

/// The whole artifact.
#[derive(Clone, Debug)]
pub struct Layout {
    pub entries: Vec<Entry>,
    pub shards: usize,
}

impl Layout {
    /// Lays out `weights` as the recipe says; refuses widths that a format cannot cut.
    pub fn new(weights: &Weights, recipe: &Recipe, shard_bytes: u64) -> Result<Self> {
        let mut entries = Vec::new();
        let (mut shard, mut filled) = (0, 0);
        for (role, layer) in weights.roles() {
            let name = weights.name(role, layer);
            let [rows, cols] = role.shape(weights.config());
            let format = recipe.format(role);
            let parts = match format {
                Some(format) => {
                    format.check_cols(cols).with_context(|| {
                        Fault::model(format!("{name} has {cols} columns, which {format} cannot cut"))
                            .help("choose another format")
                    })?;
                    packed(&name, format, rows, cols)
                }
                None => vec![Part::new(name.clone(), "F32", vec![cols], 4)],
            };
            let bytes: u64 = parts.iter().map(|p| p.bytes).sum();
            if filled > 0 && filled + bytes > shard_bytes {
                (shard, filled) = (shard + 1, 0);
            }
            filled += bytes;
            entries.push(Entry { role, layer, name, rows, cols, format, parts, shard });
        }
        Ok(Layout { entries, shards: shard + 1 })
    }

    /// Of all tensors, without headers.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(Entry::bytes).sum()
    }

    /// Of one shard's file.
    pub fn file_bytes(&self, shard: usize) -> Result<u64> {
        let data: u64 = self.entries.iter().filter(|e| e.shard == shard).map(Entry::bytes).sum();
        Ok(self.header(shard)?.len() as u64 + data)
    }

    pub fn parameters(&self) -> u64 {
        self.entries.iter().map(|e| (e.rows * e.cols) as u64).sum()
    }

    /// Bytes by kind of tensor, in the order of the forward pass.
    pub fn by_role(&self) -> Vec<(Role, Option<Format>, u64)> {
        let mut out: Vec<(Role, Option<Format>, u64)> = Vec::new();
        for e in &self.entries {
            match out.iter_mut().find(|(role, ..)| *role == e.role) {
                Some(sum) => sum.2 += e.bytes(),
                None => out.push((e.role, e.format, e.bytes())),
            }
        }
        out
    }

    /// Name of a shard's file.
    pub fn file(&self, shard: usize) -> String {
        match self.shards {
            1 => "model.safetensors".into(),
            n => format!("model-{:05}-of-{n:05}.safetensors", shard + 1),
        }
    }

    /// The bytes before a shard's data: length, then JSON padded to 8.
    pub fn header(&self, shard: usize) -> Result<Vec<u8>> {
        let mut map = Map::new();
        map.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut at = 0;
        for part in self.entries.iter().filter(|e| e.shard == shard).flat_map(|e| &e.parts) {
            let entry = json!({"dtype": part.dtype, "shape": part.shape, "data_offsets": [at, at + part.bytes]});
            map.insert(part.name.clone(), entry);
            at += part.bytes;
        }
        let mut text = serde_json::to_vec(&map)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
    }

    /// `model.safetensors.index.json`, where there are several shards.
    pub fn index(&self) -> Option<Value> {
        let files = self.entries.iter().flat_map(|e| e.parts.iter().map(|p| (p.name.clone(), Value::String(self.file(e.shard)))));
        (self.shards > 1).then(|| json!({"metadata": {"total_size": self.bytes()}, "weight_map": files.collect::<Map<_, _>>()}))
    }

    /// The packed matrices' formats, as `config.json` lists them.
    pub fn formats(&self) -> BTreeMap<String, Format> {
        self.entries
            .iter()
            .filter_map(|e| Some((e.name.clone(), e.format.filter(|f| f.code.is_integer() || f.hadamard)?)))
            .collect()
    }
}

/// The tensors of one matrix. Plain floats keep the source's name and need no packing.
fn packed(name: &str, format: Format, rows: usize, cols: usize) -> Vec<Part> {
    if !format.code.is_integer() && !format.hadamard {
        let (dtype, width) = if format == Format::F32 { ("F32", 4) } else { ("BF16", 2) };
        return vec![Part::new(name.into(), dtype, vec![rows, cols], width)];
    }
    let mut out = vec![Part::new(artifact::codes_name(name), "U8", vec![rows, format.row_bytes(cols)], 1)];
    match format.groups(cols) {
        0 => {}
        groups => out.push(Part::new(artifact::scales_name(name), "F16", vec![rows, groups], 2)),
    }
    out
}
