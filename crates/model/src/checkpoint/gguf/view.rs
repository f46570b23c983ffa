//! A GGUF model as a checkpoint. It is presented like a Hugging Face directory, using names and a
//! configuration that the model's architecture provides.

use super::{Metadata, files, types};
use crate::checkpoint::header::Entry;
use crate::checkpoint::store::Bytes;
use crate::checkpoint::{Checkpoint, Dtype, TensorView};
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::Code;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::OnceLock;

/// Function that generates a side file from the metadata.
pub type Make = fn(&Metadata) -> Result<Vec<u8>>;

/// Description of how to present a GGUF model.
pub struct Presentation<'a> {
    /// Configuration in the form of `config.json`.
    pub config: serde_json::Value,
    /// Maps the file's tensor name to the presented name; `None` keeps the file's name.
    pub rename: &'a dyn Fn(&str) -> Option<String>,
    /// Returns whether a tensor, by the file's name, stores its values plus 1. These tensors are
    /// converted in memory.
    pub plus_one: &'a dyn Fn(&str) -> bool,
    /// Files that a directory would have next to its weights, generated on first use.
    pub files: Vec<(&'static str, Make)>,
    pub notes: Vec<String>,
}

/// The parts of a checkpoint that exist only for GGUF files.
#[derive(Debug)]
pub struct Gguf {
    metadata: Metadata,
    /// Codes of the block-quantised tensors, by presented name.
    blocks: HashMap<String, Code>,
    files: Vec<(&'static str, Make, OnceLock<Vec<u8>>)>,
}

impl Gguf {
    pub fn block(&self, tensor: &str) -> Option<Code> {
        self.blocks.get(tensor).copied()
    }

    pub fn side_file(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>> {
        let Some((_, make, made)) = self.files.iter().find(|(n, ..)| *n == name) else {
            return Ok(None);
        };
        if made.get().is_none() {
            let bytes = make(&self.metadata)?;
            // Another thread may have set it first, to the same bytes.
            let _ = made.set(bytes);
        }
        Ok(made.get().map(|bytes| Cow::Borrowed(bytes.as_slice())))
    }
}

impl Checkpoint {
    /// Opens a GGUF file with all its parts.
    pub(in crate::checkpoint) fn open_gguf(path: &Path) -> Result<Checkpoint> {
        let model = files::open(path)?;
        let (mut raw, mut by_name, mut blocks) = (Vec::new(), HashMap::new(), HashMap::new());
        for (part, tensor) in model.tensors {
            let mut shape = tensor.shape;
            let dtype = types::dtype(tensor.code).unwrap_or_else(|| {
                blocks.insert(tensor.name.clone(), tensor.code);
                shape.last_mut().into_iter().for_each(|n| *n = tensor.ggml.bytes_of(*n));
                Dtype::U8
            });
            by_name.insert(tensor.name.clone(), raw.len());
            raw.push((part, Entry { name: tensor.name, dtype, shape, range: tensor.range }));
        }
        Ok(Checkpoint {
            name: model.names[0].clone(),
            store: model.store,
            config: serde_json::Value::Null,
            shards: model.parts,
            shard_names: model.names,
            raw,
            by_name,
            formats: BTreeMap::new(),
            notes: Vec::new(),
            gguf: Some(Box::new(Gguf { metadata: model.metadata, blocks, files: Vec::new() })),
        })
    }

    /// Returns the metadata of a GGUF file; `None` for other checkpoints.
    pub fn metadata(&self) -> Option<&Metadata> {
        self.gguf.as_ref().map(|g| &g.metadata)
    }

    /// Returns the metadata of a GGUF file if [`Checkpoint::present`] was not called yet.
    pub fn unpresented(&self) -> Option<&Metadata> {
        self.metadata().filter(|_| self.config.is_null())
    }

    /// Presents the GGUF file like a directory with this configuration, these names and these
    /// files.
    pub fn present(mut self, how: Presentation<'_>) -> Result<Checkpoint> {
        let Some(gguf) = &mut self.gguf else { anyhow::bail!("{} is not a GGUF model", self.name) };
        gguf.files =
            how.files.into_iter().map(|(name, make)| (name, make, OnceLock::new())).collect();
        let mut made: Vec<u8> = Vec::new();
        for (i, (shard, entry)) in self.raw.iter_mut().enumerate() {
            if (how.plus_one)(&entry.name) {
                if let Some(code) = gguf.block(&entry.name) {
                    let stored = code.spec().ggml.map_or("blocks", |ggml| ggml.name);
                    let what = format!(
                        "{}: tensor `{}` is stored as {stored}; norms are F32",
                        self.name, entry.name
                    );
                    return Err(Fault::model(what)
                        .help("the file was made wrongly: fetch or convert the model again")
                        .into());
                }
                let view = TensorView {
                    dtype: entry.dtype,
                    shape: &entry.shape,
                    data: &self.shards[*shard][entry.range.clone()],
                };
                let start = made.len();
                // The subtraction is exact if the result is above -1/2.
                made.extend(view.to_f32()?.iter().flat_map(|v| (v - 1.0).to_le_bytes()));
                (*shard, entry.dtype, entry.range) =
                    (self.shards.len(), Dtype::F32, start..made.len());
            }
            let Some(name) = (how.rename)(&entry.name) else { continue };
            if let Some(code) = gguf.blocks.remove(&entry.name) {
                gguf.blocks.insert(name.clone(), code);
            }
            self.by_name.remove(&entry.name);
            if self.by_name.insert(name.clone(), i).is_some() {
                return Err(Fault::model(format!(
                    "{}: more than one tensor serves as `{name}`",
                    self.name
                ))
                .help("the file was made wrongly: fetch or convert the model again")
                .into());
            }
            entry.name = name;
        }
        self.shards.push(Bytes::Owned(made));
        self.config = how.config;
        self.notes.extend(how.notes);
        Ok(self)
    }
}
