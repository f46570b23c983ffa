//! The tensors of a Gemma 3 model by role: the only file that spells Hugging Face tensor names.
//!
//! Every shape is checked when the weights are opened; tensors that this program does not know are
//! refused, because leaving out, say, a bias would change what the model says without a word.

use super::Config;
use super::progress::Progress;
use super::synthetic::Synthetic;
use crate::checkpoint::{Checkpoint, Kind, Stored, is_weight};
use crate::error::Fault;
use crate::tensor::{Format, Matrix, StoredMatrix};
use anyhow::Result;
use std::borrow::Cow;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// `[vocab, dim]`; also the output head, unless the model has its own
    Embed,
    /// `[n_heads * head_dim, dim]`
    Q,
    K,
    V,
    /// `[dim, n_heads * head_dim]`
    O,
    /// `[ffn_dim, dim]`
    Gate,
    Up,
    /// `[dim, ffn_dim]`
    Down,
    /// `[dim]`, like the other norms around blocks
    InputNorm,
    PostAttnNorm,
    PreFfnNorm,
    PostFfnNorm,
    /// `[head_dim]`
    QNorm,
    KNorm,
    /// `[dim]`
    FinalNorm,
    /// `[vocab, dim]`
    Head,
}

impl Role {
    /// Roles that every layer has, in the order of the forward pass.
    pub const LAYER: [Role; 13] = [
        Role::InputNorm,
        Role::Q,
        Role::K,
        Role::V,
        Role::QNorm,
        Role::KNorm,
        Role::O,
        Role::PostAttnNorm,
        Role::PreFfnNorm,
        Role::Gate,
        Role::Up,
        Role::Down,
        Role::PostFfnNorm,
    ];

    /// Roles of matrices.
    pub const MATRICES: [Role; 9] = [
        Role::Embed,
        Role::Q,
        Role::K,
        Role::V,
        Role::O,
        Role::Gate,
        Role::Up,
        Role::Down,
        Role::Head,
    ];

    pub fn is_matrix(self) -> bool {
        Self::MATRICES.contains(&self)
    }

    /// Whether every layer has one.
    pub fn is_layer(self) -> bool {
        Self::LAYER.contains(&self)
    }

    /// What recipes call a tensor: its name without the model's prefix and `.weight`; `layer`
    /// counts for what a layer has.
    pub fn short_name(self, layer: usize) -> String {
        let name = self.suffix().trim_end_matches(".weight");
        if self.is_layer() { format!("layers.{layer}.{name}") } else { name.to_owned() }
    }

    /// The last part of that: `q_proj`, `embed_tokens`.
    pub fn name(self) -> &'static str {
        let name = self.suffix().trim_end_matches(".weight");
        name.rsplit('.').next().unwrap_or(name)
    }

    /// Rows and columns; a vector has one row.
    pub fn shape(self, c: &Config) -> [usize; 2] {
        match self {
            Role::Embed | Role::Head => [c.vocab, c.dim],
            Role::Q => [c.n_heads * c.head_dim, c.dim],
            Role::K | Role::V => [c.n_kv_heads * c.head_dim, c.dim],
            Role::O => [c.dim, c.n_heads * c.head_dim],
            Role::Gate | Role::Up => [c.ffn_dim, c.dim],
            Role::Down => [c.dim, c.ffn_dim],
            Role::QNorm | Role::KNorm => [1, c.head_dim],
            _ => [1, c.dim],
        }
    }

    /// Name behind the model's prefix, and behind `layers.N.` for what a layer has.
    fn suffix(self) -> &'static str {
        match self {
            Role::Embed => "embed_tokens.weight",
            Role::Q => "self_attn.q_proj.weight",
            Role::K => "self_attn.k_proj.weight",
            Role::V => "self_attn.v_proj.weight",
            Role::O => "self_attn.o_proj.weight",
            Role::Gate => "mlp.gate_proj.weight",
            Role::Up => "mlp.up_proj.weight",
            Role::Down => "mlp.down_proj.weight",
            Role::InputNorm => "input_layernorm.weight",
            Role::PostAttnNorm => "post_attention_layernorm.weight",
            Role::PreFfnNorm => "pre_feedforward_layernorm.weight",
            Role::PostFfnNorm => "post_feedforward_layernorm.weight",
            Role::QNorm => "self_attn.q_norm.weight",
            Role::KNorm => "self_attn.k_norm.weight",
            Role::FinalNorm => "norm.weight",
            Role::Head => "lm_head.weight",
        }
    }
}

/// Where the language model's tensors hang, as files in the wild have it; see [`HEADS`].
const PREFIXES: [&str; 5] =
    ["language_model.model.", "model.language_model.", "model.", "language_model.", ""];

/// Where an output head of its own may hang.
const HEADS: [&str; 3] =
    ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"];

/// Parts of a multimodal model that text does not need.
const SKIPPED: [&str; 4] = [
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
];

/// The weights of one model: from a checkpoint, or made up.
#[derive(Debug)]
pub struct Weights {
    config: Config,
    source: Source,
    notes: Vec<String>,
    pub(super) progress: Progress,
}

#[derive(Debug)]
enum Source {
    Files { checkpoint: Box<Checkpoint>, prefix: &'static str, head: Option<&'static str> },
    Synthetic(Synthetic),
}

impl Weights {
    /// Finds every tensor of the model and checks its shape and dtype.
    pub fn open(checkpoint: Checkpoint) -> Result<Weights> {
        let checkpoint = super::gemma3::gguf::present(checkpoint)?;
        let mut config = Config::from_json(checkpoint.config())?;
        let mut notes = checkpoint.notes().to_vec();
        let stored = checkpoint.stored();
        let prefix = find_prefix(&checkpoint, &stored)?;
        settle_vocab(&checkpoint, prefix, &mut config, &mut notes)?;
        let head = find_head(&checkpoint, prefix, &config, &mut notes)?;
        let source = Source::Files { checkpoint: checkpoint.into(), prefix, head };
        Weights { config, source, notes, progress: Progress::default() }.check_all(stored)
    }

    /// Random weights of any shape and format, made on demand; for measurements and tests.
    pub fn synthetic(config: Config, format_of: impl Fn(Role) -> Format, seed: u64) -> Weights {
        Self::synthetic_by_layer(config, |role, _| format_of(role), seed)
    }

    /// The same where a layer's matrix may have a format of its own.
    pub fn synthetic_by_layer(
        config: Config,
        format_of: impl Fn(Role, usize) -> Format,
        seed: u64,
    ) -> Weights {
        let source = Source::Synthetic(Synthetic::new(config.n_layers, format_of, seed));
        Weights { config, source, notes: Vec::new(), progress: Progress::default() }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The files behind the weights; `None` for synthetic ones.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            Source::Files { checkpoint, .. } => Some(checkpoint),
            Source::Synthetic(_) => None,
        }
    }

    /// What was passed over or settled in silence; worth one line to the user each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether the output head is a matrix of its own ([`Role::Head`]) rather than the embedding
    /// table.
    pub fn has_own_head(&self) -> bool {
        matches!(self.source, Source::Files { head: Some(_), .. })
    }

    /// Every tensor of the model in the order of the forward pass: role and layer (0 for what does
    /// not belong to a layer).
    pub fn roles(&self) -> Vec<(Role, usize)> {
        let mut out = vec![(Role::Embed, 0)];
        for layer in 0..self.config.n_layers {
            out.extend(Role::LAYER.map(|role| (role, layer)));
        }
        out.push((Role::FinalNorm, 0));
        if self.has_own_head() {
            out.push((Role::Head, 0));
        }
        out
    }

    /// The checkpoint's name of a tensor; for synthetic weights, the name it would have.
    pub fn name(&self, role: Role, layer: usize) -> String {
        let (prefix, head) = match &self.source {
            Source::Files { prefix, head, .. } => (*prefix, *head),
            Source::Synthetic(_) => ("model.", None),
        };
        name_of(role, layer, prefix, head)
    }

    /// The format that [`Weights::matrix`] gives a matrix in, without loading it.
    pub fn format(&self, role: Role, layer: usize) -> Result<Format> {
        match &self.source {
            Source::Synthetic(synthetic) => Ok(synthetic.format(role, layer)),
            Source::Files { checkpoint, .. } => {
                let name = self.name(role, layer);
                checkpoint.format(&name).ok_or_else(|| {
                    Fault::model(format!("{}: tensor `{name}` is missing", checkpoint.name()))
                        .into()
                })
            }
        }
    }

    /// A matrix as the file stores it: bf16, f32 and packed formats without a copy, f16 as f32.
    pub fn matrix(&self, role: Role, layer: usize) -> Result<Matrix<'_>> {
        assert!(role.is_matrix(), "{role:?} is no matrix");
        let [rows, cols] = role.shape(&self.config);
        match &self.source {
            Source::Synthetic(synthetic) => synthetic.matrix(role, layer, rows, cols),
            Source::Files { checkpoint, .. } => {
                checkpoint.matrix(&self.name(role, layer)).map(|m| first_rows(m, rows))
            }
        }
    }

    /// The same matrix, not read yet.
    pub fn stored(&self, role: Role, layer: usize) -> Result<StoredMatrix<'_>> {
        assert!(role.is_matrix(), "{role:?} is no matrix");
        let [rows, cols] = role.shape(&self.config);
        let matrix = match &self.source {
            Source::Synthetic(synthetic) => synthetic.stored(role, layer, rows, cols)?,
            // Without padding rows, which come last.
            Source::Files { checkpoint, .. } => {
                let matrix = checkpoint.stored_matrix(&self.name(role, layer))?;
                StoredMatrix { rows: rows.min(matrix.rows), ..matrix }
            }
        };
        Ok(self.progress.counted(matrix))
    }

    /// Takes back a matrix that is no longer needed, see [`Checkpoint::recycle`].
    pub fn recycle(&self, matrix: Matrix<'_>) {
        if let Source::Files { checkpoint, .. } = &self.source {
            checkpoint.recycle(matrix);
        }
    }

    /// A matrix's format and size alone, without its contents.
    pub fn shape(&self, role: Role, layer: usize) -> Result<Matrix<'static>> {
        let [rows, cols] = role.shape(&self.config);
        let (codes, side) = (Cow::Borrowed(&[][..]), Cow::Borrowed(&[][..]));
        Ok(Matrix { rows, cols, format: self.format(role, layer)?, codes, side })
    }

    /// A norm's weights as stored, to which the norm adds 1.
    pub fn vector(&self, role: Role, layer: usize) -> Result<Vec<f32>> {
        assert!(!role.is_matrix(), "{role:?} is no vector");
        let [_, cols] = role.shape(&self.config);
        let Source::Files { checkpoint, .. } = &self.source else {
            let Source::Synthetic(synthetic) = &self.source else { unreachable!() };
            return Ok(synthetic.vector(role, layer, cols));
        };
        let name = self.name(role, layer);
        let bad =
            |what: &str| Fault::model(format!("{}: tensor `{name}` {what}", checkpoint.name()));
        let values = match checkpoint.formats().contains_key(&name) {
            true => checkpoint.matrix(&name)?.dequantize(),
            false => checkpoint.tensor(&name).ok_or_else(|| bad("is missing"))?.to_f32()?,
        };
        if values.iter().any(|v| !v.is_finite()) {
            return Err(bad("holds values that are not finite")
                .help("the file is damaged: fetch it again")
                .into());
        }
        Ok(values)
    }

    /// Every tensor is there with the right shape, and nothing else is.
    fn check_all(mut self, stored: Vec<Stored>) -> Result<Weights> {
        let Source::Files { checkpoint, .. } = &self.source else { return Ok(self) };
        let shown = checkpoint.name();
        let (mut missing, mut expected) = (Vec::new(), std::collections::HashSet::new());
        for (role, layer) in self.roles() {
            let name = self.name(role, layer);
            match checkpoint.lookup(&name) {
                Some(tensor) => self.check(role, &tensor, shown)?,
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
        let mut skipped = 0u64;
        for tensor in &stored {
            let skip = SKIPPED.iter().any(|p| tensor.name.starts_with(p))
                || HEADS.contains(&tensor.name.as_str());
            if !expected.contains(&tensor.name)
                && !skip
                && !tensor.name.ends_with("rotary_emb.inv_freq")
            {
                let layers = self.config.n_layers;
                return Err(Fault::model(format!(
                    "{shown}: tensor `{}` does not belong to a Gemma 3 \
                    model of {layers} layers",
                    tensor.name
                ))
                .help(
                    "config.json and the weights do not belong together, or the model was \
                        changed in a way this program does not compute",
                )
                .into());
            }
            skipped +=
                if SKIPPED.iter().any(|p| tensor.name.starts_with(p)) { tensor.bytes } else { 0 };
        }
        if skipped > 0 {
            self.notes.push(format!(
                "the vision tower is skipped ({:.2} GB): only text is supported",
                skipped as f64 / 1e9
            ));
        }
        Ok(self)
    }

    /// One tensor against its role.
    fn check(&self, role: Role, tensor: &Stored, shown: &str) -> Result<(), Fault> {
        let [rows, cols] = role.shape(&self.config);
        let fits = match role {
            // Rows beyond the vocabulary pad the table; they are never looked at.
            Role::Embed | Role::Head => {
                matches!(tensor.shape[..], [r, c] if r >= rows && c == cols)
            }
            _ if role.is_matrix() || matches!(tensor.kind, Kind::Packed(_)) => {
                tensor.shape == [rows, cols]
            }
            _ => tensor.shape == [cols],
        };
        let bad = |what: String| Fault::model(format!("{shown}: tensor `{}` {what}", tensor.name));
        if !fits {
            let want =
                if role.is_matrix() { format!("[{rows}, {cols}]") } else { format!("[{cols}]") };
            return Err(bad(format!("has shape {:?}; config.json asks for {want}", tensor.shape))
                .help(
                    "config.json and the weights do not belong together: fetch both from the \
                    same place",
                ));
        }
        match tensor.kind {
            Kind::Plain(dtype) if !is_weight(dtype) => Err(bad(format!("has dtype {dtype}"))
                .help("weights must be BF16, F16 or F32: use the original checkpoint")),
            _ => Ok(()),
        }
    }
}

fn name_of(role: Role, layer: usize, prefix: &str, head: Option<&str>) -> String {
    match role {
        Role::Head => head.unwrap_or(role.suffix()).to_string(),
        Role::Embed | Role::FinalNorm => format!("{prefix}{}", role.suffix()),
        _ => format!("{prefix}layers.{layer}.{}", role.suffix()),
    }
}

/// The name that a text-only model has for a tensor.
pub(super) fn standard_name(role: Role, layer: usize) -> String {
    name_of(role, layer, "model.", None)
}

/// `, ...` where a list was cut.
fn dots(len: usize, shown: usize) -> &'static str {
    if len > shown { ", ..." } else { "" }
}

/// The matrix without its padding rows.
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

/// The prefix under which this checkpoint keeps its language model.
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
                "a Gemma 3 checkpoint has `model.embed_tokens.weight` or \
                    `language_model.model.embed_tokens.weight`",
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

/// Sparse configurations leave the vocabulary to the class default, which text-only exports do not
/// match: then the table decides.
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

/// The output head where it differs from the embedding table.
fn find_head(
    checkpoint: &Checkpoint,
    prefix: &str,
    config: &Config,
    notes: &mut Vec<String>,
) -> Result<Option<&'static str>> {
    let Some(name) = HEADS.into_iter().find(|name| checkpoint.lookup(name).is_some()) else {
        if !config.tied {
            notes.push(
                "no output head in the files although config.json unties it: the embedding \
                table serves"
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
        // transformers 4 would use the table, transformers 5 the head: the file does not say what
        // its model says.
        return Err(Fault::model(format!(
            "{}: `{name}` differs from the embedding table although config.json ties them",
            checkpoint.name()
        ))
        .help(
            "set \"tie_word_embeddings\": false in config.json to use it, or remove the tensor \
            to use the table",
        )
        .into());
    }
    Ok(Some(name))
}
