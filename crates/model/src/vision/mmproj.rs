//! llama.cpp's GGUF files of vision towers: presents their keys and tensor names like those of a
//! Hugging Face directory.
//!
//! Source: ggml-org/llama.cpp, conversion/gemma.py and tools/mtmd.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::gguf::{Metadata, Presentation, Value as Stored};
use crate::models::gguf::{decimal, whole};
use anyhow::Result;
use gemma_base::error::Fault;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Kinds of towers, and the `model_type` of each.
const KINDS: [(&str, &str); 3] =
    [("gemma3", "gemma3"), ("gemma4v", "gemma4"), ("gemma4uv", "gemma4_unified")];

/// Tensors outside the layers: name in the file, and Hugging Face name.
const TENSORS: [(&str, &str); 10] = [
    ("v.patch_embd", "vision_tower.embeddings.patch_embedding"),
    ("v.position_embd", "vision_tower.embeddings.position_embedding"),
    ("v.post_ln", "vision_tower.post_layernorm"),
    ("mm.soft_emb_norm", "multi_modal_projector.mm_soft_emb_norm"),
    ("mm.input_projection.weight", "multi_modal_projector.mm_input_projection_weight"),
    ("v.std_bias", "vision_tower.std_bias"),
    ("v.std_scale", "vision_tower.std_scale"),
    ("v.patch_norm.1", "vision_embedder.patch_ln1"),
    ("v.patch_norm.2", "vision_embedder.patch_ln2"),
    ("v.patch_norm.3", "vision_embedder.pos_norm"),
];

/// Tensors with another Hugging Face name in Gemma 4.
const TENSORS_GEMMA4: [(&str, &str); 3] = [
    ("v.patch_embd.weight", "vision_tower.patch_embedder.input_proj.weight"),
    ("v.position_embd.weight", "vision_tower.patch_embedder.position_embedding_table"),
    ("mm.input_projection.weight", "embed_vision.embedding_projection.weight"),
];
const TENSORS_UNIFIED: [(&str, &str); 3] = [
    ("v.patch_embd", "vision_embedder.patch_dense"),
    ("v.position_embd.weight", "vision_embedder.pos_embedding"),
    ("mm.input_projection.weight", "embed_vision.embedding_projection.weight"),
];

/// Tensors of a layer.
const LAYER: [(&str, &str); 8] = [
    ("ln1", "layer_norm1"),
    ("ln2", "layer_norm2"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_out", "self_attn.out_proj"),
    ("ffn_up", "mlp.fc1"),
    ("ffn_down", "mlp.fc2"),
];
const LAYER_GEMMA4: [(&str, &str); 13] = [
    ("ln1", "input_layernorm"),
    ("attn_post_norm", "post_attention_layernorm"),
    ("ln2", "pre_feedforward_layernorm"),
    ("ffn_post_norm", "post_feedforward_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_out", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Returns the path of the mmproj file in a GGUF model's directory, if there is one.
///
/// # Errors
/// A [`Fault`] if there are several.
pub fn beside(model: &Path) -> Result<Option<PathBuf>, Fault> {
    let dir = match model.is_dir() {
        true => model,
        false => model.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")),
    };
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(None) };
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.retain(|name| name.contains("mmproj") && name.ends_with(".gguf"));
    names.sort();
    match &names[..] {
        [] => Ok(None),
        [only] => Ok(Some(dir.join(only))),
        _ => Err(Fault::model(format!("{} holds {} mmproj files", dir.display(), names.len()))
            .help(format!("name one of them: {}", names.join(", ")))),
    }
}

/// Presents an mmproj file like a Hugging Face directory; returns another checkpoint unchanged.
///
/// # Errors
/// A [`Fault`] if the file has no tower, or a tower of another model.
pub fn present(checkpoint: Checkpoint) -> Result<Checkpoint> {
    let Some(metadata) = checkpoint.unpresented() else { return Ok(checkpoint) };
    let name = checkpoint.name();
    if metadata.text("general.architecture") != Some("clip") {
        return Err(super::file::no_tower(&checkpoint).into());
    }
    let kind = ["clip.vision.projector_type", "clip.projector_type"]
        .into_iter()
        .find_map(|key| metadata.text(key))
        .unwrap_or("of no stated kind");
    let Some((_, model_type)) = KINDS.into_iter().find(|(own, _)| *own == kind) else {
        return Err(Fault::model(format!("{name} holds a vision tower that is {kind}"))
            .help("images of Gemma 3 and Gemma 4 are read: get the mmproj file of your model")
            .into());
    };
    if checkpoint.tensor("v.patch_embd.weight").is_none() {
        return Err(super::file::no_tower(&checkpoint).into());
    }
    let config = config(&checkpoint, metadata, model_type).map_err(|what| {
        Fault::model(format!("{name}: {what}"))
            .help("the file was made wrongly: fetch or convert it again")
    })?;
    let is_swapped = model_type == "gemma3" && is_swapped(&checkpoint, &config);
    let zero_based = checkpoint.tensor("v.patch_norm.0.weight").is_some();
    let rename = |name: &str| rename(name, model_type, is_swapped, zero_based);
    let plus_one = |name: &str| model_type == "gemma3" && name == "mm.soft_emb_norm.weight";
    let (files, notes) = (Vec::new(), Vec::new());
    checkpoint.present(Presentation { config, rename: &rename, plus_one: &plus_one, files, notes })
}

/// Returns whether the first layer names its second matrix `ffn_up`, as older files of Gemma 3 do.
fn is_swapped(checkpoint: &Checkpoint, config: &Value) -> bool {
    let up = checkpoint.lookup("v.blk.0.ffn_up.weight").map(|stored| stored.shape);
    let sizes =
        ["hidden_size", "intermediate_size"].map(|key| config["vision_config"][key].as_u64());
    let [Some(width), Some(hidden)] = sizes else { return false };
    width != hidden && up.is_some_and(|shape| shape == [width as usize, hidden as usize])
}

/// Returns the Hugging Face name of a tensor, without the prefix of the whole model.
fn rename(name: &str, model_type: &str, is_swapped: bool, zero_based: bool) -> Option<String> {
    let is_gemma3 = model_type == "gemma3";
    if let Some(rest) = name.strip_prefix("v.blk.") {
        let (layer, rest) = rest.split_once('.')?;
        let (part, end) = rest.split_once('.')?;
        let table: &[_] = if is_gemma3 { &LAYER } else { &LAYER_GEMMA4 };
        let part = match part {
            "ffn_up" if is_swapped => "ffn_down",
            "ffn_down" if is_swapped => "ffn_up",
            other => other,
        };
        let (_, own) = table.iter().find(|(stored, _)| *stored == part)?;
        // In a linear layer with clipping, the matrix name has one more level than the limits.
        let is_linear = own.ends_with("_proj") && !is_gemma3 && end == "weight";
        let level = if is_linear { ".linear" } else { "" };
        return Some(format!("vision_tower.encoder.layers.{layer}.{own}{level}.{end}"));
    }
    // Norms of the patches are numbered from 1, in some files from 0.
    let counted = match name.strip_prefix("v.patch_norm.").filter(|_| zero_based) {
        Some(rest) => {
            let (number, end) = rest.split_once('.')?;
            &format!("v.patch_norm.{}.{end}", number.parse::<u8>().ok()?.checked_add(1)?)
        }
        None => name,
    };
    let own: &[_] = match model_type {
        "gemma4" => &TENSORS_GEMMA4,
        "gemma4_unified" => &TENSORS_UNIFIED,
        _ => &[],
    };
    let rest = |(stored, own): &(&str, &str)| {
        let rest = counted.strip_prefix(stored)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{own}{rest}"))
    };
    own.iter().chain(&TENSORS).find_map(rest)
}

/// Returns the `config.json` equivalent of the keys.
fn config(checkpoint: &Checkpoint, metadata: &Metadata, model_type: &str) -> Result<Value, String> {
    let optional = |name: &str| whole(metadata, &format!("clip.vision.{name}"));
    let needed =
        |name: &str| optional(name)?.ok_or_else(|| format!("`clip.vision.{name}` is missing"));
    let shape = |name: &str| checkpoint.lookup(name).map(|s| s.shape).unwrap_or_default();
    let scale = optional("projector.scale_factor")?;
    let eps = metadata.float("clip.vision.attention.layer_norm_epsilon").unwrap_or(1e-6);
    let mut vision = json!({ "patch_size": needed("patch_size")? });
    if model_type == "gemma4_unified" {
        vision["mm_embed_dim"] = needed("embedding_length")?.into();
        vision["mm_posemb_size"] = shape("v.position_embd.weight").get(1).copied().into();
        vision["pooling_kernel_size"] = scale.unwrap_or(3).into();
        vision["rms_norm_eps"] = decimal(eps).into();
        return Ok(json!({ "model_type": model_type, "vision_config": vision }));
    }
    let heads = needed("attention.head_count")?;
    vision["hidden_size"] = needed("embedding_length")?.into();
    vision["intermediate_size"] = needed("feed_forward_length")?.into();
    vision["num_hidden_layers"] = needed("block_count")?.into();
    vision["num_attention_heads"] = heads.into();
    let mut config = json!({ "model_type": model_type });
    if model_type == "gemma3" {
        let (image, patch) = (needed("image_size")?, needed("patch_size")?);
        let side = image.checked_div(patch).and_then(|n| n.checked_div(scale.unwrap_or(4)));
        let tokens = side.and_then(|n| n.checked_mul(n)).ok_or("`clip.vision.patch_size` is 0")?;
        vision["image_size"] = image.into();
        vision["layer_norm_eps"] = decimal(eps).into();
        config["mm_tokens_per_image"] = tokens.into();
        for name in ["image_mean", "image_std"] {
            if let Some(Stored::Floats(values)) = metadata.get(&format!("clip.vision.{name}")) {
                config["processor"][name] =
                    values.iter().map(|v| decimal(f64::from(*v))).collect::<Vec<_>>().into();
            }
        }
    } else {
        let query = shape("v.blk.0.attn_q.weight").first().copied().unwrap_or(0) as i64;
        let keys = shape("v.blk.0.attn_k.weight").first().copied().unwrap_or(0) as i64;
        let head_dim = query.checked_div(heads).filter(|n| *n > 0).ok_or("it has no heads")?;
        let positions = shape("v.position_embd.weight").get(1).copied();
        vision["head_dim"] = head_dim.into();
        vision["num_key_value_heads"] = (keys / head_dim).into();
        vision["pooling_kernel_size"] = scale.unwrap_or(3).into();
        vision["position_embedding_size"] = positions.into();
        vision["rms_norm_eps"] = decimal(eps).into();
        vision["standardize"] = checkpoint.tensor("v.std_scale").is_some().into();
        let limit = "v.blk.0.attn_q.input_max";
        vision["use_clipped_linears"] = checkpoint.tensor(limit).is_some().into();
    }
    config["vision_config"] = vision;
    Ok(config)
}
