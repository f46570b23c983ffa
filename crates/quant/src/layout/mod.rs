//! Layout of an artifact, exact to the byte, computed before anything is written.

mod gguf;

use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::tensor::{Code, Format};
use gemma_model::checkpoint::gguf::write::Keys;
use gemma_model::checkpoint::{Dtype, artifact};
use gemma_model::models::{Role, TensorSpec, Weights};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// A stored tensor: plain values, codes or scales.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: u64,
}

impl StoredTensor {
    fn new(name: String, dtype: Dtype, shape: Vec<usize>) -> Self {
        let bytes = (dtype.bitsize() / 8 * shape.iter().product::<usize>()) as u64;
        StoredTensor { name, dtype, shape, bytes }
    }
}

/// The format to which a tensor is converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TargetFormat {
    /// The source's values, copied in this data type.
    AsIs(Dtype),
    Format(Format),
}

impl TargetFormat {
    /// Returns whether the tensor is stored as codes and scales. Floats keep their name in the
    /// source.
    pub fn is_packed(self) -> bool {
        matches!(self, TargetFormat::Format(f) if f.code.is_integer() || f.hadamard)
    }
}

impl std::fmt::Display for TargetFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TargetFormat::AsIs(dtype) => f.pad(&dtype.to_string().to_lowercase()),
            TargetFormat::Format(format) => f.pad(&format.to_string()),
        }
    }
}

/// A tensor of the source with its name, format and file in the artifact.
#[derive(Clone, Debug)]
pub struct TensorPlan {
    pub role: Role,
    pub layer: usize,
    /// Whether it is the last tensor of its layer.
    pub ends_layer: bool,
    /// Name in the source.
    pub name: String,
    pub rows: usize,
    pub cols: usize,
    /// See [`TensorSpec::stack`].
    pub stack: usize,
    pub target: TargetFormat,
    /// Codes, then scales, or one plain tensor.
    pub parts: Vec<StoredTensor>,
    /// Code of the blocks in a GGUF file; `None` in an artifact.
    pub block: Option<Code>,
    /// Constant that is added to a vector in a GGUF file; 0 in an artifact.
    pub base: f32,
    /// Index of its file.
    pub shard: usize,
}

impl TensorPlan {
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }

    /// Returns the number of zero bytes after the data that align the next tensor of a GGUF file.
    pub fn padding(&self) -> usize {
        self.block.map_or(0, |code| gguf::tensor(&self.spec(), code).padding())
    }

    /// Returns the tensor of the source.
    pub fn spec(&self) -> TensorSpec {
        let TensorPlan { role, layer, rows, cols, stack, .. } = *self;
        TensorSpec { role, layer, rows, cols, stack }
    }
}

/// Tensors of an artifact or of a GGUF file, in the order of the forward pass.
#[derive(Clone, Debug)]
pub struct ArtifactLayout {
    pub entries: Vec<TensorPlan>,
    pub shards: usize,
    /// The bytes before the data of a GGUF file; `None` for an artifact.
    gguf: Option<Vec<u8>>,
}

/// Returns whether a tensor is the last of its layer.
fn ends_layer(tensors: &[TensorSpec], i: usize) -> bool {
    let layer = |t: &TensorSpec| t.role.is_layer().then_some(t.layer);
    let own = layer(&tensors[i]);
    own.is_some() && own != tensors.get(i + 1).and_then(layer)
}

impl ArtifactLayout {
    /// Returns a layout without tensors.
    pub fn empty() -> Self {
        ArtifactLayout { entries: Vec::new(), shards: 0, gguf: None }
    }

    /// Returns the layout of `weights` as one GGUF file with these keys. Refuses formats that GGUF
    /// does not have.
    pub fn gguf(weights: &Weights, targets: &[TargetFormat], keys: &Keys) -> Result<Self> {
        let mut entries = Vec::new();
        let tensors = weights.tensors();
        let norm_base = weights.config().architecture.norm_base();
        for (i, &target) in (0..tensors.len()).zip(targets) {
            let TensorSpec { role, layer, rows, cols, stack } = tensors[i];
            let name = weights.name(role, layer);
            let code = gguf::code(&name, role, target, cols)?;
            let parts = vec![gguf::part(&tensors[i], code)];
            entries.push(TensorPlan {
                role,
                layer,
                ends_layer: ends_layer(tensors, i),
                name,
                rows,
                cols,
                stack,
                target,
                parts,
                block: Some(code),
                base: if role.is_norm() { norm_base } else { 0.0 },
                shard: 0,
            });
        }
        let tensors: Vec<_> = entries.iter().filter_map(|e| Some((e.spec(), e.block?))).collect();
        let header = gguf::header(keys, &tensors);
        Ok(ArtifactLayout { entries, shards: 1, gguf: Some(header) })
    }

    /// Returns whether the layout is one GGUF file instead of a directory.
    pub fn is_gguf(&self) -> bool {
        self.gguf.is_some()
    }

    /// Returns the layout of `weights` as an artifact, with one target for each tensor. Refuses a
    /// format if the columns of the matrix are not a multiple of its groups.
    pub fn new(weights: &Weights, targets: &[TargetFormat], shard_bytes: u64) -> Result<Self> {
        let mut entries = Vec::new();
        let (mut shard, mut filled) = (0, 0);
        let tensors = weights.tensors();
        for (i, &target) in (0..tensors.len()).zip(targets) {
            let TensorSpec { role, layer, rows, cols, stack } = tensors[i];
            let name = weights.name(role, layer);
            let parts = parts(&name, &tensors[i], target)?;
            let bytes: u64 = parts.iter().map(|p| p.bytes).sum();
            if filled > 0 && filled + bytes > shard_bytes {
                (shard, filled) = (shard + 1, 0);
            }
            filled += bytes;
            entries.push(TensorPlan {
                role,
                layer,
                ends_layer: ends_layer(tensors, i),
                name,
                rows,
                cols,
                stack,
                target,
                parts,
                block: None,
                base: 0.0,
                shard,
            });
        }
        Ok(ArtifactLayout { entries, shards: shard + 1, gguf: None })
    }

    /// Returns the bytes of all tensors without headers.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(TensorPlan::bytes).sum()
    }

    /// Returns the bytes of one shard's file with its header.
    pub fn file_bytes(&self, shard: usize) -> Result<u64> {
        let data: u64 =
            self.entries.iter().filter(|e| e.shard == shard).map(TensorPlan::bytes).sum();
        Ok(self.header(shard)?.len() as u64 + data)
    }

    pub fn parameters(&self) -> u64 {
        self.entries.iter().map(|e| (e.rows * e.cols) as u64).sum()
    }

    /// Returns the bytes by class of tensor and format, in the order of the forward pass. All norms
    /// are one class.
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
        // Norms come last. Formats of one role are adjacent, the largest first.
        out.sort_by_key(|c| {
            (c.role.is_none(), c.role, std::cmp::Reverse((c.codes + c.scales) / c.tensors as u64))
        });
        out
    }

    /// Returns the name of a shard's file.
    pub fn file(&self, shard: usize) -> String {
        match self.shards {
            1 if self.is_gguf() => gguf::FILE.into(),
            1 => "model.safetensors".into(),
            n => format!("model-{:05}-of-{n:05}.safetensors", shard + 1),
        }
    }

    /// Returns the bytes before a shard's data: the length of the JSON, then the JSON, padded to a
    /// multiple of 8.
    pub fn header(&self, shard: usize) -> Result<Vec<u8>> {
        if let Some(header) = &self.gguf {
            return Ok(header.clone());
        }
        let mut map = Map::new();
        map.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut at = 0;
        for part in self.entries.iter().filter(|e| e.shard == shard).flat_map(|e| &e.parts) {
            let dtype = part.dtype.to_string();
            let offsets = [at, at + part.bytes];
            let entry = json!({"dtype": dtype, "shape": part.shape, "data_offsets": offsets});
            map.insert(part.name.clone(), entry);
            at += part.bytes;
        }
        let mut text = serde_json::to_vec(&map)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
    }

    /// Returns `model.safetensors.index.json` if there are several shards.
    pub fn index(&self) -> Option<Value> {
        let files = self.entries.iter().flat_map(|e| {
            e.parts.iter().map(|p| (p.name.clone(), Value::String(self.file(e.shard))))
        });
        (self.shards > 1).then(|| {
            let files = files.collect::<Map<_, _>>();
            json!({"metadata": {"total_size": self.bytes()}, "weight_map": files})
        })
    }

    /// Returns the formats of the packed tensors, as `config.json` lists them.
    pub fn formats(&self) -> BTreeMap<String, Format> {
        let packed = |e: &TensorPlan| match e.target {
            TargetFormat::Format(format) if e.target.is_packed() => Some((e.name.clone(), format)),
            _ => None,
        };
        self.entries.iter().filter_map(packed).collect()
    }
}

/// Tensors of one role that get the same format.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// The role; `None` for all norms together.
    pub role: Option<Role>,
    pub target: TargetFormat,
    pub tensors: usize,
    pub codes: u64,
    pub scales: u64,
}

/// Returns the stored tensors for one tensor. Plain floats keep the source's name.
fn parts(name: &str, spec: &TensorSpec, target: TargetFormat) -> Result<Vec<StoredTensor>> {
    let TensorSpec { role, rows, cols, .. } = *spec;
    let plain = |dtype| vec![StoredTensor::new(name.into(), dtype, spec.shape())];
    let format = match target {
        TargetFormat::AsIs(dtype) => return Ok(plain(dtype)),
        TargetFormat::Format(Format::F32) => return Ok(plain(Dtype::F32)),
        TargetFormat::Format(Format::BF16) => return Ok(plain(Dtype::BF16)),
        TargetFormat::Format(format) => format,
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
    let mut out = vec![StoredTensor::new(
        artifact::codes_name(name),
        Dtype::U8,
        format.codes_shape(rows, cols).to_vec(),
    )];
    match format.row_side(cols) {
        0 => {}
        n => {
            out.push(StoredTensor::new(artifact::scales_name(name), Dtype::F16, vec![rows, n / 2]))
        }
    }
    Ok(out)
}
