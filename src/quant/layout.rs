//! What the artifact will hold, to the byte, before anything is written.

use super::gguf;
use crate::checkpoint::gguf::write::Keys;
use crate::checkpoint::{Dtype, artifact};
use crate::error::Fault;
use crate::models::{Role, Weights};
use crate::tensor::{Code, Format};
use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// One tensor of the artifact.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: u64,
}

impl Part {
    fn new(name: String, dtype: Dtype, shape: Vec<usize>) -> Self {
        let bytes = (dtype.bitsize() / 8 * shape.iter().product::<usize>()) as u64;
        Part { name, dtype, shape, bytes }
    }
}

/// What a tensor becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// The source's own values in this type.
    AsIs(Dtype),
    Format(Format),
}

impl Target {
    /// Whether it is stored as codes and scales, rather than as floats under the source's name.
    pub fn is_packed(self) -> bool {
        matches!(self, Target::Format(f) if f.code.is_integer() || f.hadamard)
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::AsIs(dtype) => f.pad(&dtype.to_string().to_lowercase()),
            Target::Format(format) => f.pad(&format.to_string()),
        }
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
    pub target: Target,
    /// Codes, then scales; or one plain tensor.
    pub parts: Vec<Part>,
    /// How a GGUF file stores it; `None` in an artifact.
    pub block: Option<Code>,
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
    /// What stands before the data of a GGUF file.
    gguf: Option<Vec<u8>>,
}

impl Layout {
    /// A layout without tensors.
    pub fn empty() -> Self {
        Layout { entries: Vec::new(), shards: 0, gguf: None }
    }

    /// The same as one GGUF file with these keys; refuses what such a file cannot hold.
    pub fn gguf(weights: &Weights, targets: &[Target], keys: &Keys) -> Result<Self> {
        let mut entries = Vec::new();
        for ((role, layer), &target) in weights.roles().into_iter().zip(targets) {
            let name = weights.name(role, layer);
            let [rows, cols] = role.shape(weights.config());
            let code = gguf::code(&name, role, target, cols)?;
            let parts = vec![gguf::part(role, layer, code, rows, cols)];
            entries.push(Entry {
                role,
                layer,
                name,
                rows,
                cols,
                target,
                parts,
                block: Some(code),
                shard: 0,
            });
        }
        let tensors: Vec<_> = entries
            .iter()
            .filter_map(|e| Some((e.role, e.layer, e.block?, e.rows, e.cols)))
            .collect();
        let header = gguf::header(keys, &tensors);
        Ok(Layout { entries, shards: 1, gguf: Some(header) })
    }

    /// Whether it is one GGUF file rather than a directory.
    pub fn is_gguf(&self) -> bool {
        self.gguf.is_some()
    }

    /// Lays out `weights`, each tensor of [`Weights::roles`] as its target says; refuses widths
    /// that a format cannot cut.
    pub fn new(weights: &Weights, targets: &[Target], shard_bytes: u64) -> Result<Self> {
        let mut entries = Vec::new();
        let (mut shard, mut filled) = (0, 0);
        for ((role, layer), &target) in weights.roles().into_iter().zip(targets) {
            let name = weights.name(role, layer);
            let [rows, cols] = role.shape(weights.config());
            let parts = parts(&name, role, target, rows, cols)?;
            let bytes: u64 = parts.iter().map(|p| p.bytes).sum();
            if filled > 0 && filled + bytes > shard_bytes {
                (shard, filled) = (shard + 1, 0);
            }
            filled += bytes;
            entries.push(Entry {
                role,
                layer,
                name,
                rows,
                cols,
                target,
                parts,
                block: None,
                shard,
            });
        }
        Ok(Layout { entries, shards: shard + 1, gguf: None })
    }

    /// Bytes of all tensors, without headers.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(Entry::bytes).sum()
    }

    /// Bytes of one shard's file, with its header.
    pub fn file_bytes(&self, shard: usize) -> Result<u64> {
        let data: u64 = self.entries.iter().filter(|e| e.shard == shard).map(Entry::bytes).sum();
        Ok(self.header(shard)?.len() as u64 + data)
    }

    pub fn parameters(&self) -> u64 {
        self.entries.iter().map(|e| (e.rows * e.cols) as u64).sum()
    }

    /// Bytes by class of tensor and format, in the order of the forward pass; all norms are one
    /// class.
    pub fn classes(&self) -> Vec<Class> {
        let mut out: Vec<Class> = Vec::new();
        for e in &self.entries {
            let role = e.role.is_matrix().then_some(e.role);
            let at = out
                .iter()
                .position(|c| c.role == role && c.target == e.target)
                .unwrap_or_else(|| {
                    out.push(Class { role, target: e.target, tensors: 0, codes: 0, scales: 0 });
                    out.len() - 1
                });
            out[at].tensors += 1;
            out[at].codes += e.parts[0].bytes;
            out[at].scales += e.parts[1..].iter().map(|p| p.bytes).sum::<u64>();
        }
        // Norms last; several formats of one role together, the largest code first.
        out.sort_by_key(|c| {
            (c.role.is_none(), c.role, std::cmp::Reverse((c.codes + c.scales) / c.tensors as u64))
        });
        out
    }

    /// Name of a shard's file.
    pub fn file(&self, shard: usize) -> String {
        match self.shards {
            1 if self.is_gguf() => gguf::FILE.into(),
            1 => "model.safetensors".into(),
            n => format!("model-{:05}-of-{n:05}.safetensors", shard + 1),
        }
    }

    /// The bytes before a shard's data: length, then JSON padded to 8.
    pub fn header(&self, shard: usize) -> Result<Vec<u8>> {
        if let Some(header) = &self.gguf {
            return Ok(header.clone());
        }
        let mut map = Map::new();
        map.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut at = 0;
        for part in self.entries.iter().filter(|e| e.shard == shard).flat_map(|e| &e.parts) {
            let entry = json!({"dtype": part.dtype.to_string(), "shape": part.shape, "data_offsets": [at, at + part.bytes]});
            map.insert(part.name.clone(), entry);
            at += part.bytes;
        }
        let mut text = serde_json::to_vec(&map)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
    }

    /// `model.safetensors.index.json`, where there are several shards.
    pub fn index(&self) -> Option<Value> {
        let files = self.entries.iter().flat_map(|e| {
            e.parts.iter().map(|p| (p.name.clone(), Value::String(self.file(e.shard))))
        });
        (self.shards > 1).then(|| json!({"metadata": {"total_size": self.bytes()}, "weight_map": files.collect::<Map<_, _>>()}))
    }

    /// The packed tensors' formats, as `config.json` lists them.
    pub fn formats(&self) -> BTreeMap<String, Format> {
        let packed = |e: &Entry| match e.target {
            Target::Format(format) if e.target.is_packed() => Some((e.name.clone(), format)),
            _ => None,
        };
        self.entries.iter().filter_map(packed).collect()
    }
}

/// Tensors of one role that become the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// `None` stands for all norms together.
    pub role: Option<Role>,
    pub target: Target,
    pub tensors: usize,
    pub codes: u64,
    pub scales: u64,
}

/// The tensors of one entry. Plain floats keep the source's name and need no packing.
fn parts(name: &str, role: Role, target: Target, rows: usize, cols: usize) -> Result<Vec<Part>> {
    let plain = |dtype| {
        let shape = if role.is_matrix() { vec![rows, cols] } else { vec![cols] };
        vec![Part::new(name.into(), dtype, shape)]
    };
    let format = match target {
        Target::AsIs(dtype) => return Ok(plain(dtype)),
        Target::Format(Format::F32) => return Ok(plain(Dtype::F32)),
        Target::Format(Format::BF16) => return Ok(plain(Dtype::BF16)),
        Target::Format(format) => format,
    };
    if !role.is_matrix() && format != Format::I8_ROW {
        let what = format!("{name} is a vector, which cannot be stored as {format}");
        return Err(Fault::model(what).help("norms may be as-is, f32, bf16 or i8-row").into());
    }
    format.check_cols(cols).with_context(|| {
        Fault::model(format!(
            "{name} has {cols} columns, which {format} cannot divide into its groups"
        ))
        .help("choose another format")
    })?;
    let mut out = vec![Part::new(
        artifact::codes_name(name),
        Dtype::U8,
        format.codes_shape(rows, cols).to_vec(),
    )];
    match format.row_side(cols) {
        0 => {}
        n => out.push(Part::new(artifact::scales_name(name), Dtype::F16, vec![rows, n / 2])),
    }
    Ok(out)
}
