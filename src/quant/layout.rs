//! What the artifact will hold, to the byte, before anything is written.

use super::Recipe;
use crate::checkpoint::artifact;
use crate::error::Fault;
use crate::gemma::{Role, Weights};
use crate::tensor::Format;
use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Largest file of tensors: what copies, mounts and hubs all take.
const SHARD_BYTES: u64 = 4_000_000_000;

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
    /// Tensors of the artifact: name, dtype, shape, bytes.
    pub parts: Vec<(String, &'static str, Vec<usize>, u64)>,
    /// Index of its file.
    pub shard: usize,
}

impl Entry {
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.3).sum()
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
    pub fn new(weights: &Weights, recipe: &Recipe) -> Result<Self> {
        let mut entries = Vec::new();
        let (mut shard, mut filled) = (0, 0);
        for (role, layer) in weights.roles() {
            let name = weights.name(role, layer);
            let (rows, cols, format, parts) = match recipe.format(role) {
                Some(format) => {
                    let matrix = weights.matrix(role, layer)?;
                    let (rows, cols) = (matrix.rows, matrix.cols);
                    format.check_cols(cols).with_context(|| {
                        Fault::model(format!("{name} has {cols} columns, which {format} cannot cut"))
                            .help("choose another format")
                    })?;
                    (rows, cols, Some(format), parts(&name, format, rows, cols))
                }
                None => {
                    let cols = weights.vector(role, layer)?.len();
                    (1, cols, None, vec![(name.clone(), "F32", vec![cols], 4 * cols as u64)])
                }
            };
            let bytes: u64 = parts.iter().map(|p| p.3).sum();
            if filled > 0 && filled + bytes > SHARD_BYTES {
                (shard, filled) = (shard + 1, 0);
            }
            filled += bytes;
            entries.push(Entry { role, layer, name, rows, cols, format, parts, shard });
        }
        Ok(Layout { entries, shards: shard + 1 })
    }

    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(Entry::bytes).sum()
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
        for (name, dtype, shape, bytes) in self.entries.iter().filter(|e| e.shard == shard).flat_map(|e| &e.parts) {
            map.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]}));
            at += bytes;
        }
        let mut text = serde_json::to_vec(&map)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
    }

    /// `model.safetensors.index.json`, where there are several shards.
    pub fn index(&self) -> Option<Value> {
        let files = self.entries.iter().flat_map(|e| e.parts.iter().map(|p| (p.0.clone(), Value::String(self.file(e.shard)))));
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
fn parts(name: &str, format: Format, rows: usize, cols: usize) -> Vec<(String, &'static str, Vec<usize>, u64)> {
    let row_bytes = format.row_bytes(cols);
    let codes = (rows * row_bytes) as u64;
    if !format.code.is_integer() && !format.hadamard {
        let dtype = if format == Format::F32 { "F32" } else { "BF16" };
        return vec![(name.into(), dtype, vec![rows, cols], codes)];
    }
    let mut out = vec![(artifact::codes_name(name), "U8", vec![rows, row_bytes], codes)];
    let groups = format.groups(cols);
    if groups > 0 {
        out.push((artifact::scales_name(name), "F16", vec![rows, groups], (2 * rows * groups) as u64));
    }
    out
}
