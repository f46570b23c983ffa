//! `gemma inspect`: the shape, tensors and formats of a model.

use crate::cli::io::output::print;
use crate::cli::io::table::markdown;
use crate::cli::io::ui::Ui;
use crate::cli::options::UiOptions;
use crate::cli::settings::Typed;
use crate::error::Fault;
use crate::models::{LayerSpec, TensorSpec};
use crate::quant::{self, Verification};
use crate::runtime::SightOptions;
use crate::runtime::devices::processor::default_threads;
use crate::runtime::model::{Model, Size, format_name, viewer};
use crate::util::hex;
use crate::util::units::{bytes, thousands};
use crate::vision::beside;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};

const EXAMPLES: &str = "\
Examples:
  gemma inspect
  gemma inspect MODEL --verify --json | jq .bits_per_weight";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct InspectArgs {
    /// Model directory, GGUF file or id [default: the bundled demo model]
    #[arg(value_name = "MODEL")]
    pub which: Option<String>,
    /// MODEL, as an option
    #[arg(short, long, value_name = "PATH|ID")]
    pub model: Option<String>,
    /// Compare every tensor with the report next to it, and its decoders with each other; refuse
    /// NaN and infinity
    #[arg(long)]
    pub verify: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ui: UiOptions,
}

#[derive(Serialize)]
struct Inspection {
    name: String,
    bundled: bool,
    layers: usize,
    dim: usize,
    ffn_dim: usize,
    /// Heads of the first layer.
    #[serde(flatten)]
    heads: Heads,
    /// Heads of layers with another shape.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    other_heads: BTreeSet<Heads>,
    vocab: usize,
    window: Option<usize>,
    global_layers: Vec<usize>,
    max_position: usize,
    /// Parameters of the matrices.
    parameters: u64,
    /// Bytes of all files of weights.
    file_bytes: u64,
    /// Bytes of the matrices.
    bytes: u64,
    bits_per_weight: f64,
    tokenizer_sha256: Option<String>,
    /// The tower that reads images.
    #[serde(skip_serializing_if = "Option::is_none")]
    images: Option<TowerFacts>,
    notes: Vec<String>,
    tensors: Vec<TensorRow>,
}

#[derive(Serialize)]
struct TowerFacts {
    file: String,
    bytes: u64,
    /// Default limit of an image in tokens.
    tokens: usize,
}

#[derive(PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

#[derive(Serialize)]
struct TensorRow {
    name: String,
    role: String,
    format: String,
    shape: Vec<usize>,
    bytes: u64,
    bits_per_weight: f64,
}

pub fn run(options: &InspectArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    let name = options.which.as_deref().or(options.model.as_deref());
    let model = Model::open(name, ui)?;
    let verified = if options.verify { Some(verify(&model, ui)?) } else { None };
    let report = report(&model)?;
    match options.json {
        true => print(&format!("{}\n", serde_json::to_string_pretty(&report)?))?,
        false => print(&text(&report, verified.as_ref()))?,
    }
    Ok(0)
}

fn report(model: &Model) -> Result<Inspection> {
    let (c, checkpoint) = (model.config(), model.checkpoint());
    let mut tensors = Vec::new();
    for &TensorSpec { role, layer, .. } in model.weights.tensors() {
        let name = model.weights.name(role, layer);
        let stored = checkpoint
            .lookup(&name)
            .ok_or_else(|| Fault::model(format!("tensor {name} vanished")))?;
        let elements = stored.shape.iter().product::<usize>().max(1);
        let bits_per_weight = 8.0 * stored.bytes as f64 / elements as f64;
        let format = format_name(&model.weights, role, layer)?;
        let role = role.name().to_owned();
        tensors.push(TensorRow {
            name,
            role,
            format,
            shape: stored.shape,
            bytes: stored.bytes,
            bits_per_weight,
        });
    }
    let mut notes = model.weights.notes().to_vec();
    let images = match viewer::tower(Some(model), &SightOptions::default()) {
        Ok(tower) => Some(TowerFacts {
            file: tower.name().to_owned(),
            bytes: tower.weight_bytes(),
            tokens: tower.most_tokens(None)?,
        }),
        Err(why) => {
            // A model that only reads text has no tower. That is not worth a note.
            let tower = model.place.as_ref().map(|place| beside(&place.path));
            if tower.is_some_and(|found| !matches!(found, Ok(None))) {
                notes.push(format!("images cannot be read: {why:#}"));
            }
            None
        }
    };
    let size = Size::of(&model.weights)?;
    let shape = |layer: &LayerSpec| Heads {
        heads: layer.n_heads,
        kv_heads: layer.n_kv_heads,
        head_dim: layer.head_dim,
    };
    let first = &c.layers[0];
    let others = c.layers.iter().filter(|layer| shape(layer) != shape(first));
    Ok(Inspection {
        name: model.name.clone(),
        bundled: model.place.is_none(),
        layers: c.layers.len(),
        dim: c.dim,
        ffn_dim: c.ffn_dim,
        heads: shape(first),
        other_heads: others.map(shape).collect::<BTreeSet<_>>(),
        vocab: c.vocab,
        window: c.window(),
        global_layers: c.global_layers(),
        max_position: c.max_position,
        parameters: size.parameters,
        file_bytes: checkpoint.file_bytes(),
        bytes: size.bytes,
        bits_per_weight: size.bits_per_weight(),
        tokenizer_sha256: checkpoint
            .side_file("tokenizer.json")?
            .map(|file| hex(Sha256::digest(&file))),
        images,
        notes,
        tensors,
    })
}

fn verify(model: &Model, ui: &Ui) -> Result<Verification> {
    let bar = ui.bar("verifying", model.weights.tensors().len() as u64);
    let verified = quant::verify(&model.weights, default_threads(), &mut |done| {
        bar.set_position(done as u64);
        Ok(())
    });
    bar.finish_and_clear();
    verified
}

fn head(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| cell.to_string()).collect()
}

fn by_role(report: &Inspection) -> Vec<Vec<String>> {
    // First tensor of the role by index, role, format and shape.
    type Alike<'a> = (usize, &'a str, &'a str, &'a [usize]);
    // Number of tensors, and their bytes.
    let mut groups: BTreeMap<Alike<'_>, (usize, u64)> = BTreeMap::new();
    for t in &report.tensors {
        let first = report.tensors.iter().position(|o| o.role == t.role).unwrap_or(0);
        let group = groups.entry((first, &t.role, &t.format, &t.shape)).or_default();
        *group = (group.0 + 1, group.1 + t.bytes);
    }
    let row = |((_, role, format, shape), (n, total)): (Alike<'_>, (usize, u64))| {
        let bits = 8.0 * total as f64 / (n * shape.iter().product::<usize>().max(1)) as f64;
        let (n, shape, bits) = (n.to_string(), format!("{shape:?}"), format!("{bits:.2}"));
        head(&[role, &n, format, &shape, &bytes(total), &bits])
    };
    let first = head(&["role", "tensors", "format", "shape", "size", "bits"]);
    std::iter::once(first).chain(groups.into_iter().map(row)).collect()
}

fn text(report: &Inspection, verified: Option<&Verification>) -> String {
    let r = report;
    let global = r.global_layers.len();
    let mut out = format!("{}{}\n", r.name, if r.bundled { " (bundled)" } else { "" });
    let mut line = |label: &str, value: String| out += &format!("  {label:<13}{value}\n");
    line(
        "layers",
        format!(
            "{}: {} with a window of {}, {global} global",
            r.layers,
            r.layers - global,
            r.window.unwrap_or(0)
        ),
    );
    line("dim", format!("{}, ffn {}", r.dim, thousands(r.ffn_dim as u64)));
    let heads =
        |h: &Heads| format!("{} of {}, {} for keys and values", h.heads, h.head_dim, h.kv_heads);
    let all: Vec<String> = std::iter::once(&r.heads).chain(&r.other_heads).map(heads).collect();
    line("heads", all.join("; "));
    line("vocabulary", thousands(r.vocab as u64));
    line("positions", thousands(r.max_position as u64));
    line("parameters", format!("{} million", thousands(r.parameters / 1_000_000)));
    line("files", format!("{} bytes ({})", thousands(r.file_bytes), bytes(r.file_bytes)));
    line("matrices", format!("{}, {:.3} bits per weight", bytes(r.bytes), r.bits_per_weight));
    if let Some(TowerFacts { file, bytes: size, tokens }) = &r.images {
        line("images", format!("up to {tokens} tokens each, by {file}: {}", bytes(*size)));
    }
    if let Some(hash) = &r.tokenizer_sha256 {
        line("tokenizer", format!("sha256 {hash}"));
    }
    if let Some(v) = verified {
        let hashes = if v.hashed > 0 { ", as the report's hashes say" } else { "" };
        line(
            "verified",
            format!("{} tensors, finite and equal in {}{hashes}", v.tensors, v.backends.join(", ")),
        );
    }
    out.push('\n');
    let mut table = by_role(r);
    let (count, size) =
        (r.tensors.len().to_string(), bytes(r.tensors.iter().map(|t| t.bytes).sum()));
    let elements: usize = r.tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum();
    let bits = format!(
        "{:.2}",
        8.0 * r.tensors.iter().map(|t| t.bytes).sum::<u64>() as f64 / elements.max(1) as f64
    );
    table.push(head(&["all", &count, "", "", &size, &bits]));
    out + &markdown(&table)
}
