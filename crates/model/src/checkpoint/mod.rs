//! Reads tensors from files: Hugging Face directories, this program's quantised checkpoints,
//! bundled models and GGUF files.
//!
//! Errors of a file are found when it is opened, before its bytes are used. They name the file, the
//! tensor and a remedy (exit 3). This module knows no model: tensor names are plain strings here.

pub mod artifact;
mod foreign;
pub mod gguf;
pub mod header;
mod identity;
pub mod shards;
mod source;
mod store;
mod view;

pub use foreign::check_bytes;
pub use gguf::GgufNames;
pub use view::{Dtype, TensorView, is_weight};

use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::tensor::{Code, Format, GgmlType, Matrix};
use gemma_base::util::files::is_portable_name;
use gemma_base::util::threads;
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use store::{Bytes, Store};

const _: () = assert!(
    cfg!(target_endian = "little"),
    "files are little-endian and are used without conversion"
);

/// Bytes that a thread reads at once.
const PIECE: usize = 4 << 20;

/// An open source of tensors and of the files next to them. Weights are memory-mapped, not copied.
#[derive(Debug)]
pub struct Checkpoint {
    name: String,
    store: Store,
    config: serde_json::Value,
    shards: Vec<Bytes>,
    shard_names: Vec<String>,
    raw: Vec<(usize, header::Entry)>, // (shard, entry) in file order
    by_name: HashMap<String, usize>,  // name -> index into `raw`
    formats: BTreeMap<String, Format>,
    notes: Vec<String>,
    gguf: Option<Box<gguf::Gguf>>,
}

/// A tensor of the model. A packed matrix is one tensor here, although files store two.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub name: String,
    pub kind: TensorStorage,
    /// Lower-case GGUF type, for block-quantised tensors.
    pub file_type: Option<String>,
    pub shape: Vec<usize>,
    /// Bytes in the file, including scales.
    pub bytes: u64,
}

/// Storage of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorStorage {
    Plain(Dtype),
    Packed(Format),
}

impl std::fmt::Display for TensorStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TensorStorage::Plain(dtype) => f.write_str(&dtype.to_string().to_lowercase()),
            TensorStorage::Packed(format) => format.fmt(f),
        }
    }
}

/// Returns rows and columns of a matrix, or of matrices stacked vertically.
fn flat(shape: &[usize]) -> Option<[usize; 2]> {
    match *shape {
        [rows, cols] => Some([rows, cols]),
        [stack, rows, cols] => Some([stack.checked_mul(rows)?, cols]),
        _ => None,
    }
}

impl Checkpoint {
    /// Opens a Hugging Face directory (one file or shards), a checkpoint written by `gemma
    /// quantize`, or a GGUF file. The caller must call [`Checkpoint::present`] for a GGUF file.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        if let Some(file) = gguf::find(path)? {
            return Self::open_gguf(&file);
        }
        foreign::check_path(path)?;
        let name = path
            .file_name()
            .map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
        Self::from_store(name, Store::Directory(path.to_path_buf()), &path.display().to_string())
    }

    /// Opens a model in memory: `files` are the files of a directory, by name.
    pub fn from_memory(
        name: &str,
        files: Vec<(&'static str, &'static [u8])>,
    ) -> Result<Checkpoint> {
        Self::from_store(name.to_string(), Store::Memory(name.to_string(), files), name)
    }

    fn from_store(name: String, store: Store, shown: &str) -> Result<Checkpoint> {
        foreign::check_files(&store, shown)?;
        let Some(config) = store.json("config.json")? else {
            return Err(Fault::model(format!("{shown}: there is no config.json"))
                .help("copy config.json from the model's page, or fetch the model again")
                .into());
        };
        let config_name = store.display("config.json");
        foreign::check_config(&config, &config_name)?;
        let formats = artifact::formats(&config, &config_name)?;
        let found = shards::find(&store, shown)?;
        let mut checkpoint = Checkpoint {
            name,
            config,
            shards: Vec::new(),
            shard_names: found.files.clone(),
            raw: Vec::new(),
            by_name: HashMap::new(),
            formats,
            notes: Vec::new(),
            gguf: None,
            store,
        };
        for file in &found.files {
            checkpoint.add_shard(file)?;
        }
        if let Some(map) = &found.weight_map {
            checkpoint.check_index(map)?;
        }
        for name in checkpoint.formats.keys() {
            checkpoint.packed(name)?;
        }
        Ok(checkpoint)
    }

    fn add_shard(&mut self, file: &str) -> Result<()> {
        let shown = self.store.display(file);
        let bytes = self.store.map(file)?;
        let shard = self.shards.len();
        for entry in header::parse(&shown, &bytes)? {
            if let Some(other) = self.by_name.insert(entry.name.clone(), self.raw.len()) {
                let other = &self.shard_names[self.raw[other].0];
                let what = format!("{shown}: tensor `{}` is also in {other}", entry.name);
                let help = "the shards are of different exports: \
                    fetch the model again into an empty directory";
                return Err(Fault::model(what).help(help).into());
            }
            self.raw.push((shard, entry));
        }
        self.shards.push(bytes);
        Ok(())
    }

    /// Checks that the index agrees with the shards.
    fn check_index(&self, map: &BTreeMap<String, String>) -> Result<()> {
        let index = self.store.display(shards::INDEX);
        let help = "index and shards are of different exports: \
            fetch the model again into an empty directory";
        for (tensor, file) in map {
            let actual = self.by_name.get(tensor).map(|i| &self.shard_names[self.raw[*i].0]);
            if actual != Some(file) {
                let actual = actual.map_or("in no shard".to_string(), |a| format!("in {a}"));
                let what =
                    format!("{index}: tensor `{tensor}` should be in {file} but is {actual}");
                return Err(Fault::model(what).help(help).into());
            }
        }
        match self.raw.iter().find(|(_, e)| !map.contains_key(&e.name)) {
            Some((shard, e)) => {
                let what = format!(
                    "{index}: does not list tensor `{}` of {}",
                    e.name, self.shard_names[*shard]
                );
                Err(Fault::model(what).help(help).into())
            }
            None => Ok(()),
        }
    }

    /// Returns the last part of its path, or the name of a bundled model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns `config.json`, a JSON object.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// Returns the name of one of its files for errors.
    pub fn display(&self, file: &str) -> String {
        match &self.gguf {
            Some(_) => format!("{}:{file}", self.store.display(&self.name)),
            None => self.store.display(file),
        }
    }

    /// Returns a file next to the weights, such as `tokenizer.json`; `None` if there is none.
    pub fn side_file(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>> {
        anyhow::ensure!(is_portable_name(name), "side file {name:?} is not a plain name");
        match &self.gguf {
            Some(gguf) => gguf.side_file(name),
            None => self.store.read(name),
        }
    }

    /// Like [`Checkpoint::side_file`], parsed as a JSON object.
    pub fn side_json(&self, name: &str) -> Result<Option<serde_json::Value>> {
        match &self.gguf {
            Some(gguf) => {
                Ok(gguf.side_file(name)?.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
            }
            None => self.store.json(name),
        }
    }

    /// Returns the stored tensors in file order; a packed matrix appears as codes and scales.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, TensorView<'_>)> {
        self.raw.iter().map(|(shard, e)| (e.name.as_str(), self.view(*shard, e)))
    }

    /// Returns one stored tensor.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.by_name.get(name).map(|i| self.view(self.raw[*i].0, &self.raw[*i].1))
    }

    /// Reads bytes of a stored tensor from its file, not through the memory map.
    ///
    /// A pass over a large checkpoint then leaves nothing in memory, and a file that was truncated
    /// in the meantime is an error.
    pub fn read(
        &self,
        tensor: &str,
        bytes: std::ops::Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let index = *self.by_name.get(tensor).with_context(|| format!("no tensor `{tensor}`"))?;
        out.resize(bytes.len(), 0);
        self.read_at(index, bytes.start, out)
    }

    /// Reads all weight files once with all threads and discards the data. Returns their bytes.
    ///
    /// The time is a lower bound for loading.
    pub fn read_through(&self) -> Result<u64> {
        threads::prepare_common_pool();
        let pieces =
            self.shards.iter().enumerate().flat_map(|(shard, bytes)| {
                (0..bytes.len()).step_by(PIECE).map(move |at| (shard, at))
            });
        pieces.collect::<Vec<_>>().into_par_iter().try_for_each_init(
            || vec![0; PIECE],
            |buffer, (shard, at)| {
                let size = PIECE.min(self.shards[shard].len() - at);
                self.read_shard(shard, at, &mut buffer[..size], &format_args!("byte {at}"))
            },
        )?;
        Ok(self.file_bytes())
    }

    /// Returns the total bytes of all weight files.
    pub fn file_bytes(&self) -> u64 {
        // Shards after those of the files hold converted tensors of a GGUF file.
        let files = self.shards.iter().take(self.shard_names.len());
        files.map(|shard| shard.len() as u64).sum()
    }

    /// Releases the memory of a stored tensor's mapped bytes. Later accesses read them again.
    pub fn release(&self, tensor: &str) {
        if let Some((shard, entry)) = self.by_name.get(tensor).map(|i| &self.raw[*i]) {
            self.shards[*shard].release(entry.range.clone());
        }
    }

    /// Returns the names of the weight files.
    pub fn weight_files(&self) -> &[String] {
        &self.shard_names
    }

    fn view<'a>(&'a self, shard: usize, entry: &'a header::Entry) -> TensorView<'a> {
        TensorView {
            dtype: entry.dtype,
            shape: &entry.shape,
            data: &self.shards[shard][entry.range.clone()],
        }
    }

    /// Returns the formats of the packed matrices by name; empty if none is packed.
    pub fn formats(&self) -> &BTreeMap<String, Format> {
        &self.formats
    }

    /// Returns notes for the user about skipped parts, one line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the model's tensors in file order.
    pub fn stored(&self) -> Vec<Stored> {
        let mut out = Vec::new();
        for (_, entry) in &self.raw {
            match entry.name.rsplit_once('.') {
                Some((matrix, "codes")) if self.formats.contains_key(matrix) => {
                    out.extend(self.lookup(matrix))
                }
                Some((matrix, "scales")) if self.formats.contains_key(matrix) => {}
                _ => out.extend(self.lookup(&entry.name)),
            }
        }
        out
    }

    /// Returns name, kind, shape and size of one of the model's tensors.
    pub fn lookup(&self, name: &str) -> Option<Stored> {
        if let Some(format) = self.formats.get(name) {
            let matrix = self.packed(name).ok()?;
            let shape = vec![matrix.rows, matrix.cols];
            return Some(Stored {
                name: name.into(),
                kind: TensorStorage::Packed(*format),
                file_type: None,
                shape,
                bytes: matrix.bytes() as u64,
            });
        }
        let view = self.tensor(name)?;
        let bytes = view.data.len() as u64;
        if let Some((code, ggml)) = self.block(name) {
            let mut shape = view.shape.to_vec();
            shape.last_mut().into_iter().for_each(|n| *n = *n / ggml.bytes * ggml.weights);
            let kind = TensorStorage::Packed(Format::of_file(code)?);
            let file_type = Some(ggml.name.to_lowercase());
            return Some(Stored { name: name.into(), kind, file_type, shape, bytes });
        }
        Some(Stored {
            name: name.into(),
            kind: TensorStorage::Plain(view.dtype),
            file_type: None,
            shape: view.shape.to_vec(),
            bytes,
        })
    }

    /// Returns the block type of a tensor of a GGUF file, if it is block-quantised.
    fn block(&self, name: &str) -> Option<(Code, GgmlType)> {
        let code = self.gguf.as_ref()?.block(name)?;
        Some((code, code.spec().ggml?))
    }

    /// Returns the format in which [`Checkpoint::matrix`] returns a tensor, without loading it.
    pub fn format(&self, name: &str) -> Option<Format> {
        Some(match self.lookup(name)?.kind {
            TensorStorage::Packed(format) => format,
            TensorStorage::Plain(Dtype::BF16) => Format::BF16,
            TensorStorage::Plain(_) => Format::F32,
        })
    }

    /// Returns a two-dimensional tensor as a matrix.
    ///
    /// bf16, f32 and packed tensors are not copied. f16 becomes f32. Blocks of a GGUF file become
    /// the same integers in this program's order.
    pub fn matrix(&self, name: &str) -> Result<Matrix<'_>> {
        let matrix = self.whole_matrix(name)?;
        let (kind, row) = (matrix.format.code.spec().side, matrix.format.row_side(matrix.cols));
        self.check_side(name, kind, row, (0, &matrix.side))?;
        Ok(matrix)
    }

    fn whole_matrix(&self, name: &str) -> Result<Matrix<'_>> {
        if self.formats.contains_key(name) {
            return self.packed(name);
        }
        let view = self
            .tensor(name)
            .with_context(|| Fault::model(format!("{}: there is no tensor `{name}`", self.name)))?;
        let bad = |what: String| Fault::model(format!("{}: tensor `{name}` {what}", self.name));
        let Some([rows, cols]) = flat(view.shape) else {
            return Err(bad(format!("of shape {:?} is not a matrix", view.shape)).into());
        };
        if let Some((code, ggml)) = self.block(name) {
            let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
            let cols = cols / ggml.bytes * ggml.weights;
            return gguf::types::matrix(code, rows, cols, view.data, threads);
        }
        match view.dtype {
            Dtype::F32 => Matrix::new(Format::F32, rows, cols, view.data, Vec::new()),
            Dtype::BF16 => Matrix::new(Format::BF16, rows, cols, view.data, Vec::new()),
            Dtype::F16 => {
                let values = view.to_f32()?;
                Matrix::new(
                    Format::F32,
                    rows,
                    cols,
                    bytemuck::cast_slice(&values).to_vec(),
                    Vec::new(),
                )
            }
            other => Err(bad(format!("has dtype {other}"))
                .help("weights must be BF16, F16 or F32")
                .into()),
        }
    }

    /// Returns a packed matrix after checking its format, shapes and types.
    fn packed(&self, name: &str) -> Result<Matrix<'_>> {
        let format = self.formats[name];
        let bad = |what: String| {
            Fault::model(format!("{}: packed matrix `{name}` {what}", self.name))
                .help("the artifact is damaged: quantise the model again")
        };
        let part = |part: String, dtype: Dtype| -> Result<(usize, usize, &[u8])> {
            match self.tensor(&part) {
                Some(TensorView { dtype: d, shape: &[rows, cols], data }) if d == dtype => {
                    Ok((rows, cols, data))
                }
                Some(v) => Err(bad(format!(
                    "has `{part}` as {} {:?}, not as a matrix of {dtype}",
                    v.dtype, v.shape
                ))
                .into()),
                None => Err(bad(format!("lacks `{part}`")).into()),
            }
        };
        let (blocks, block_bytes, codes) = part(artifact::codes_name(name), Dtype::U8)?;
        let cols = format.cols_of(block_bytes);
        if !format.code.is_integer() {
            return Matrix::new(format, blocks, cols, codes, Vec::new())
                .map_err(|e| bad(format!("{e:#}")).into());
        }
        // Rows of trellis codes are padded; the scales tell the number of actual rows.
        let (rows, row_scales, side) = part(artifact::scales_name(name), Dtype::F16)?;
        let fits = format.check_cols(cols).is_ok() && 2 * row_scales == format.row_side(cols);
        if !fits || format.codes_shape(rows, cols) != [blocks, block_bytes] {
            let what = format!(
                "as {format} with codes [{blocks}, {block_bytes}] does not fit scales [{rows}, \
                    {row_scales}]"
            );
            return Err(bad(what).into());
        }
        Matrix::new(format, rows, cols, codes, side).map_err(|e| bad(format!("{e:#}")).into())
    }
}
