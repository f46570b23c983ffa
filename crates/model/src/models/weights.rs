//! The weights of a model by role and layer.
//!
//! Every shape is checked when the weights are opened. Unknown tensors are errors, because ignoring
//! one, such as a bias, would silently change the model's text.

use super::images::{Images, Sight};
use super::progress::Progress;
use super::synthetic::Synthetic;
use super::{Config, Role, TensorSpec};
use crate::checkpoint::{Checkpoint, Stored, TensorStorage, is_weight};
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::{Format, Matrix, StoredMatrix, Token};
use std::borrow::Cow;
use std::sync::Arc;

/// Largest valid factor of a norm or a layer. Activations of trained models are below 1e6, so a
/// larger factor means damage.
const LARGEST: f32 = 1e9;

/// Prefixes of the language model's tensors in published files; see [`HEADS`].
const PREFIXES: [&str; 5] =
    ["language_model.model.", "model.language_model.", "model.", "language_model.", ""];

/// Names of a separate output head.
const HEADS: [&str; 3] =
    ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"];

/// Parts of a multimodal model that text does not need.
const SKIPPED: [&str; 8] = [
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "model.audio_tower.",
    "model.vision_embedder.",
    "model.embed_vision.",
    "model.embed_audio.",
];

/// Ends of the names of tensors that the configuration makes redundant.
const FREQUENCIES: [&str; 2] = ["rotary_emb.inv_freq", "rope_freqs.weight"];

/// The weights of one model: from a checkpoint, or random.
#[derive(Debug)]
pub struct Weights {
    config: Config,
    tensors: Vec<TensorSpec>,
    source: WeightSource,
    notes: Vec<String>,
    /// A draft model that is loaded next to it.
    assistant: Option<Box<Weights>>,
    sight: Sight,
    pub(super) progress: Progress,
}

#[derive(Debug)]
enum WeightSource {
    Files { checkpoint: Box<Checkpoint>, prefix: &'static str, head: Option<&'static str> },
    Synthetic(Synthetic),
}

impl Weights {
    /// Finds every tensor of the model and checks its shape and dtype.
    pub fn open(checkpoint: Checkpoint) -> Result<Weights> {
        let checkpoint = super::gguf::present(checkpoint)?;
        let mut config = Config::from_json(checkpoint.config())?;
        let mut notes = checkpoint.notes().to_vec();
        let stored = checkpoint.stored();
        let prefix = find_prefix(&checkpoint, &stored)?;
        settle_vocab(&checkpoint, prefix, &mut config, &mut notes)?;
        let head = find_head(&checkpoint, prefix, &config, &mut notes)?;
        let tensors = config.tensors(head.is_some());
        let source = WeightSource::Files { checkpoint: checkpoint.into(), prefix, head };
        let (assistant, sight, progress) = Default::default();
        Weights { config, tensors, source, notes, assistant, sight, progress }.check_all(stored)
    }

    /// Creates random weights of any shape and format on demand, for measurements and tests.
    pub fn synthetic(config: Config, format_of: impl Fn(Role) -> Format, seed: u64) -> Weights {
        Self::synthetic_by_layer(config, |role, _| format_of(role), seed)
    }

    /// Creates random weights with a format per matrix.
    pub fn synthetic_by_layer(
        config: Config,
        format_of: impl Fn(Role, usize) -> Format,
        seed: u64,
    ) -> Weights {
        let tensors = config.tensors(false);
        let source = WeightSource::Synthetic(Synthetic::new(&tensors, format_of, seed));
        let (notes, assistant, sight, progress) = Default::default();
        Weights { config, tensors, source, notes, assistant, sight, progress }
    }

    /// Adds an assistant to the model.
    pub fn assisted_by(mut self, assistant: Option<Weights>) -> Weights {
        self.assistant = assistant.map(Box::new);
        self
    }

    /// Returns the draft model that is loaded next to it and reads its caches.
    pub fn assistant(&self) -> Option<&Weights> {
        self.assistant.as_deref()
    }

    /// Allows texts to contain the images of a registry. Passes then have room for the largest
    /// image, and engines of the model share the registry.
    pub fn seeing(mut self, images: Arc<Images>) -> Weights {
        self.sight = Sight::Sees(images);
        self
    }

    /// Reads every image placeholder as `token`. For a draft model, since its text is only a guess.
    pub fn blind(mut self, token: Token) -> Weights {
        self.sight = Sight::Blind(token);
        self
    }

    /// Returns how image placeholders are read.
    pub fn sight(&self) -> &Sight {
        &self.sight
    }

    /// Returns the images that texts may contain; `None` if the model runs without images.
    pub fn images(&self) -> Option<&Arc<Images>> {
        match &self.sight {
            Sight::Sees(images) => Some(images),
            Sight::Refuses | Sight::Blind(_) => None,
        }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the files of the weights; `None` for random ones.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            WeightSource::Files { checkpoint, .. } => Some(checkpoint),
            WeightSource::Synthetic(_) => None,
        }
    }

    /// Returns notes for the user about the files, one line each, such as skipped parts.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns whether the output head is a separate matrix ([`Role::Head`]) instead of the
    /// embedding table.
    pub fn has_own_head(&self) -> bool {
        matches!(self.source, WeightSource::Files { head: Some(_), .. })
    }

    /// Returns every tensor of the model in the order of the forward pass.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Returns the matrices among them.
    pub fn matrices(&self) -> impl Iterator<Item = &TensorSpec> + Clone {
        self.tensors.iter().filter(|tensor| tensor.is_matrix())
    }

    /// Returns a tensor. Panics if the model does not have it.
    pub fn tensor(&self, role: Role, layer: usize) -> TensorSpec {
        let found = self.tensors.iter().find(|t| t.role == role && t.layer == layer);
        *found.unwrap_or_else(|| panic!("layer {layer} has no {role:?}"))
    }

    /// Returns the name of a tensor in the checkpoint; for random weights, the name it would have.
    pub fn name(&self, role: Role, layer: usize) -> String {
        let (prefix, head) = match &self.source {
            WeightSource::Files { prefix, head, .. } => (*prefix, *head),
            WeightSource::Synthetic(_) => ("model.", None),
        };
        name_of(role, layer, prefix, head)
    }

    /// Returns the format in which [`Weights::matrix`] returns a matrix, without loading it.
    pub fn format(&self, role: Role, layer: usize) -> Result<Format> {
        match &self.source {
            WeightSource::Synthetic(synthetic) => Ok(synthetic.format(role, layer)),
            WeightSource::Files { checkpoint, .. } => {
                let name = self.name(role, layer);
                checkpoint.format(&name).ok_or_else(|| {
                    Fault::model(format!("{}: tensor `{name}` is missing", checkpoint.name()))
                        .into()
                })
            }
        }
    }

    /// Returns a matrix as stored. bf16, f32 and packed formats are not copied; f16 becomes f32.
    pub fn matrix(&self, role: Role, layer: usize) -> Result<Matrix<'_>> {
        assert!(role.is_matrix(), "{role:?} is not a matrix");
        let TensorSpec { rows, cols, .. } = self.tensor(role, layer);
        match &self.source {
            WeightSource::Synthetic(synthetic) => synthetic.matrix(role, layer, rows, cols),
            WeightSource::Files { checkpoint, .. } => {
                checkpoint.matrix(&self.name(role, layer)).map(|m| first_rows(m, rows))
            }
        }
    }

    /// Returns a matrix that has not been read yet.
    pub fn stored(&self, role: Role, layer: usize) -> Result<StoredMatrix<'_>> {
        assert!(role.is_matrix(), "{role:?} is not a matrix");
        let TensorSpec { rows, cols, .. } = self.tensor(role, layer);
        let matrix = match &self.source {
            WeightSource::Synthetic(synthetic) => synthetic.stored(role, layer, rows, cols)?,
            // Without padding rows, which come last.
            WeightSource::Files { checkpoint, .. } => {
                let matrix = checkpoint.stored_matrix(&self.name(role, layer))?;
                StoredMatrix { rows: rows.min(matrix.rows), ..matrix }
            }
        };
        Ok(self.progress.counted(matrix))
    }

    /// Returns a matrix with its format and size, but without contents.
    pub fn shape(&self, role: Role, layer: usize) -> Result<Matrix<'static>> {
        let TensorSpec { rows, cols, .. } = self.tensor(role, layer);
        let (codes, side) = (Cow::Borrowed(&[][..]), Cow::Borrowed(&[][..]));
        Ok(Matrix { rows, cols, format: self.format(role, layer)?, codes, side })
    }

    /// Returns a vector in the form that a pass needs: a norm's factors, or the number that scales
    /// a layer.
    pub fn vector(&self, role: Role, layer: usize) -> Result<Vec<f32>> {
        assert!(!role.is_matrix(), "{role:?} is not a vector");
        let cols = self.tensor(role, layer).cols;
        let WeightSource::Files { checkpoint, .. } = &self.source else {
            let WeightSource::Synthetic(synthetic) = &self.source else { unreachable!() };
            return Ok(synthetic.vector(role, layer, cols));
        };
        let name = self.name(role, layer);
        let bad =
            |what: &str| Fault::model(format!("{}: tensor `{name}` {what}", checkpoint.name()));
        let mut values = match checkpoint.formats().contains_key(&name) {
            true => checkpoint.matrix(&name)?.dequantize(),
            false => checkpoint.tensor(&name).ok_or_else(|| bad("is missing"))?.to_f32()?,
        };
        if let Some(v) = values.iter().find(|v| !v.is_finite() || v.abs() > LARGEST) {
            return Err(bad(&format!("holds {v}, which no model does"))
                .help("the file is damaged: fetch it again")
                .into());
        }
        if role.is_norm() {
            let base = self.config.architecture.norm_base();
            values.iter_mut().for_each(|w| *w += base);
        }
        Ok(values)
    }

    /// Checks that all tensors exist with the right shapes, and no others.
    fn check_all(self, stored: Vec<Stored>) -> Result<Weights> {
        let WeightSource::Files { checkpoint, .. } = &self.source else { return Ok(self) };
        let shown = checkpoint.name();
        let (mut missing, mut expected) = (Vec::new(), std::collections::HashSet::new());
        for spec in &self.tensors {
            let name = self.name(spec.role, spec.layer);
            match checkpoint.lookup(&name) {
                Some(tensor) => check(spec, &tensor, shown)?,
                None => missing.push(name.clone()),
            }
            expected.insert(name);
        }
        if !missing.is_empty() {
            let first =
                missing.iter().take(4).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
            let what = format!(
                "{shown}: {} of {} tensors are missing: {first}{}",
                missing.len(),
                expected.len(),
                dots(missing.len(), 4)
            );
            return Err(Fault::model(what)
                .help("the download or the export is incomplete: fetch the model again")
                .into());
        }
        for tensor in &stored {
            let skip = SKIPPED.iter().any(|p| tensor.name.starts_with(p))
                || HEADS.contains(&tensor.name.as_str());
            if !expected.contains(&tensor.name)
                && !skip
                && !FREQUENCIES.iter().any(|name| tensor.name.ends_with(name))
            {
                return Err(Fault::model(format!(
                    "{shown}: tensor `{}` does not belong to a {} model of {} layers",
                    tensor.name,
                    self.config.architecture.name(),
                    self.config.layers.len()
                ))
                .help(
                    "config.json and the weights do not belong together, \
                        or the model was changed in a way this program does not compute",
                )
                .into());
            }
        }
        Ok(self)
    }
}

/// Checks a stored tensor against its specification.
fn check(spec: &TensorSpec, tensor: &Stored, shown: &str) -> Result<(), Fault> {
    let TensorSpec { role, rows, cols, .. } = *spec;
    let fits = match role {
        // Rows beyond the vocabulary are padding and never used.
        Role::Embed | Role::Head => {
            matches!(tensor.shape[..], [r, c] if r >= rows && c == cols)
        }
        _ if matches!(tensor.kind, TensorStorage::Packed(_)) => {
            tensor.shape == [rows, cols] || tensor.shape == spec.shape()
        }
        _ => tensor.shape == spec.shape(),
    };
    let bad = |what: String| Fault::model(format!("{shown}: tensor `{}` {what}", tensor.name));
    if !fits {
        let want = spec.shape();
        return Err(bad(format!("has shape {:?}; config.json asks for {want:?}", tensor.shape))
            .help(
                "config.json and the weights do not belong together: \
                fetch both from the same place",
            ));
    }
    match tensor.kind {
        TensorStorage::Plain(dtype) if !is_weight(dtype) => Err(bad(format!("has dtype {dtype}"))
            .help("weights must be BF16, F16 or F32: use the original checkpoint")),
        _ => Ok(()),
    }
}

fn name_of(role: Role, layer: usize, prefix: &str, head: Option<&str>) -> String {
    match role {
        Role::Head => head.unwrap_or(role.suffix()).to_string(),
        Role::PreProjection | Role::PostProjection => role.suffix().to_string(),
        Role::Embed | Role::FinalNorm => format!("{prefix}{}", role.suffix()),
        _ => format!("{prefix}layers.{layer}.{}", role.suffix()),
    }
}

/// Returns the name of a tensor in a text-only model.
pub(super) fn standard_name(role: Role, layer: usize) -> String {
    name_of(role, layer, "model.", None)
}

/// Returns `, ...` if a list was shortened.
fn dots(len: usize, shown: usize) -> &'static str {
    if len > shown { ", ..." } else { "" }
}

/// Returns the matrix without its padding rows.
fn first_rows(matrix: Matrix<'_>, rows: usize) -> Matrix<'_> {
    if rows >= matrix.rows {
        return matrix;
    }
    let format = matrix.format;
    let (codes, side) = (
        format.stored_rows(rows) * format.row_bytes(matrix.cols),
        rows * format.row_side(matrix.cols),
    );
    fn cut(values: Cow<'_, [u8]>, n: usize) -> Cow<'_, [u8]> {
        match values {
            Cow::Borrowed(v) => Cow::Borrowed(&v[..n]),
            Cow::Owned(mut v) => {
                v.truncate(n);
                Cow::Owned(v)
            }
        }
    }
    Matrix { rows, codes: cut(matrix.codes, codes), side: cut(matrix.side, side), ..matrix }
}

/// Returns the prefix of the language model's tensors in this checkpoint.
fn find_prefix(checkpoint: &Checkpoint, stored: &[Stored]) -> Result<&'static str> {
    let shown = checkpoint.name();
    if let Some(tensor) = stored
        .iter()
        .find(|t| t.name.starts_with("base_model.model.") || t.name.contains(".lora_A."))
    {
        return Err(Fault::model(format!(
            "{shown}: tensor `{}` belongs to a PEFT model that was not merged",
            tensor.name
        ))
        .help("merge it first: peft's `merge_and_unload()`, then `save_pretrained`")
        .into());
    }
    let found: Vec<&'static str> = PREFIXES
        .into_iter()
        .filter(|p| checkpoint.lookup(&format!("{p}{}", Role::Embed.suffix())).is_some())
        .collect();
    match found[..] {
        [prefix] => Ok(prefix),
        [] => {
            let first = stored
                .first()
                .map_or("none at all".to_string(), |t| format!("the first is `{}`", t.name));
            Err(Fault::model(format!(
                "{shown}: there is no embedding table among the {} tensors; \
                {first}",
                stored.len()
            ))
            .help(
                "a checkpoint has `model.embed_tokens.weight`, \
                    or `language_model.model.embed_tokens.weight`",
            )
            .into())
        }
        _ => Err(Fault::model(format!(
            "{shown} holds more than one language model, under {found:?}"
        ))
        .help("remove the tensors of the one that is not wanted")
        .into()),
    }
}

/// Sets the vocabulary to the rows of the table if the configuration does not specify it. Sparse
/// configurations rely on the class default, which does not match text-only exports.
fn settle_vocab(
    checkpoint: &Checkpoint,
    prefix: &str,
    config: &mut Config,
    notes: &mut Vec<String>,
) -> Result<()> {
    let table = checkpoint.lookup(&format!("{prefix}{}", Role::Embed.suffix()));
    let Some(&[rows, _]) = table.as_ref().map(|t| t.shape.as_slice()) else { return Ok(()) };
    let out_of_reach = config.eos.iter().chain([&config.bos]).any(|t| *t as usize >= rows);
    if config.vocab_is_explicit || out_of_reach || rows == config.vocab {
        if rows > config.vocab {
            notes.push(format!(
                "{} padding rows of the embedding table are ignored",
                rows - config.vocab
            ));
        }
    } else {
        config.vocab = rows;
    }
    Ok(())
}

/// Returns the name of the output head if it differs from the embedding table.
fn find_head(
    checkpoint: &Checkpoint,
    prefix: &str,
    config: &Config,
    notes: &mut Vec<String>,
) -> Result<Option<&'static str>> {
    let Some(name) = HEADS.into_iter().find(|name| checkpoint.lookup(name).is_some()) else {
        if !config.tied {
            notes.push(
                "no output head in the files although config.json unties it: \
                the embedding table serves"
                    .into(),
            );
        }
        return Ok(None);
    };
    let embed = checkpoint.matrix(&format!("{prefix}{}", Role::Embed.suffix()))?;
    let head = checkpoint.matrix(name)?;
    if head.format == embed.format && head.codes == embed.codes && head.side == embed.side {
        return Ok(None);
    }
    if config.tied {
        // The file is ambiguous: transformers 4 would use the table, transformers 5 the head.
        return Err(Fault::model(format!(
            "{}: `{name}` differs from the embedding table although config.json ties them",
            checkpoint.name()
        ))
        .help(
            "set \"tie_word_embeddings\": false in config.json to use it, \
            or remove the tensor to use the table",
        )
        .into());
    }
    Ok(Some(name))
}
