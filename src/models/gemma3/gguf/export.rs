//! The metadata that llama.cpp needs to run a model, from what its files say.

use super::vocab::{self, Vocabulary};
use super::{ADD_BOS, ARCHITECTURE, BOS, CHAT_TEMPLATE, EOS, EOT, PAD, SAMPLING, UNK};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::gguf::write::Keys;
use crate::error::Fault;
use crate::models::{ChatTemplate, Config, Generation, LayerSpec, RopeSpec, Weights};
use anyhow::{Context, Result};

/// Every n-th layer sees all positions; llama.cpp takes no other pattern from every file.
const PATTERN: usize = 6;

/// All keys but those that depend on how the tensors are stored. Models that llama.cpp would
/// compute otherwise are refused.
pub fn keys(weights: &Weights) -> Result<Keys> {
    let c = weights.config();
    let checkpoint = weights.checkpoint().context("made-up weights have no files")?;
    let (local, global) = layers(c)?;
    let of = |key: &str| format!("{ARCHITECTURE}.{key}");
    let mut keys = Keys::default();
    keys.text("general.architecture", ARCHITECTURE);
    keys.text("general.type", "model");
    keys.text("general.name", checkpoint.name().trim_end_matches(".gguf"));
    for (key, n) in [
        ("context_length", c.max_position),
        ("embedding_length", c.dim),
        ("block_count", c.layers.len()),
        ("feed_forward_length", c.ffn_dim),
        ("attention.head_count", local.n_heads),
        ("attention.head_count_kv", local.n_kv_heads),
        ("attention.key_length", local.head_dim),
        ("attention.value_length", local.head_dim),
        ("attention.sliding_window", local.window.unwrap_or(0)),
        ("vocab_size", c.vocab),
    ] {
        keys.u32(&of(key), u32::try_from(n)?);
    }
    keys.f32(&of("attention.layer_norm_rms_epsilon"), c.eps);
    keys.f32(&of("rope.freq_base"), global.theta);
    keys.f32(&of("rope.freq_base_swa"), local.rope.theta);
    // Said either way, because readers guess a factor where nothing is said.
    if global.factor == 1.0 {
        keys.text(&of("rope.scaling.type"), "none");
    } else {
        keys.text(&of("rope.scaling.type"), "linear");
        keys.f32(&of("rope.scaling.factor"), global.factor);
    }
    sampling(&Generation::of(checkpoint)?, &mut keys);
    tokenizer(checkpoint, c, &mut keys)?;
    keys.text(CHAT_TEMPLATE, ChatTemplate::from_checkpoint(checkpoint)?.source());
    Ok(keys)
}

/// Returns the shape of local layers and the rotation of global ones. Refuses a model that a GGUF
/// file cannot describe.
fn layers(c: &Config) -> Result<(LayerSpec, RopeSpec)> {
    let first = c.layers[0];
    let is_27b = c.layers.len() == super::config::LAYERS_27B as usize;
    let scale = if is_27b { c.dim / first.n_heads } else { first.head_dim };
    let expected = (scale as f64).sqrt().recip() as f32;
    let is_placed = |i: usize| c.layers[i].is_global() == (i + 1).is_multiple_of(PATTERN);
    // Without a global layer, llama.cpp's default stands in the file.
    let rope = RopeSpec { theta: 1e6, factor: 1.0, share: 1.0 };
    let global = c.layers.iter().find(|layer| layer.is_global()).map_or(rope, |layer| layer.rope);
    let shape = |layer: &LayerSpec| LayerSpec { window: first.window, rope, ..*layer };
    let what = if first.query_scale != expected {
        format!("its attention scale is {}, where llama.cpp computes {expected}", first.query_scale)
    } else if !(0..c.layers.len()).all(is_placed) {
        format!("its global layers are not every {PATTERN}th")
    } else if first.rope != (RopeSpec { theta: 1e4, ..rope }) || global.share != 1.0 {
        "its layers rotate otherwise than Gemma 3's".into()
    } else if c.layers.iter().any(|layer| shape(layer) != shape(&first)) {
        "its layers differ in their heads".into()
    } else {
        return Ok((first, global));
    };
    Err(Fault::model(format!("the model cannot be written as GGUF: {what}"))
        .help("make a directory instead: a destination that does not end in .gguf")
        .into())
}

fn sampling(generation: &Generation, keys: &mut Keys) {
    let values = [
        generation.temperature,
        None,
        generation.top_p,
        generation.min_p,
        generation.repeat_penalty,
    ];
    for ((_, key), value) in SAMPLING.iter().zip(values) {
        if let Some(value) = value {
            keys.f32(key, value);
        }
    }
    if let Some(k) = generation.top_k.and_then(|k| i32::try_from(k).ok()) {
        keys.i32(SAMPLING[1].1, k);
    }
}

fn tokenizer(checkpoint: &Checkpoint, c: &Config, keys: &mut Keys) -> Result<()> {
    let name = "tokenizer.json";
    let Some(bytes) = checkpoint.side_file(name)? else {
        let what = format!("{} is missing", checkpoint.display(name));
        return Err(Fault::model(what)
            .help("a GGUF file holds its tokenizer: copy tokenizer.json from the model's page")
            .into());
    };
    let unreadable = || {
        Fault::model(format!("{} cannot be read", checkpoint.display(name)))
            .help("download the file again")
    };
    let vocabulary = Vocabulary::of(&bytes, c.vocab).with_context(unreadable)?;
    keys.text(vocab::MODEL, "llama");
    keys.text("tokenizer.ggml.pre", "default");
    keys.texts(vocab::TOKENS, &vocabulary.tokens);
    keys.f32s(vocab::SCORES, &vocabulary.scores);
    keys.i32s(vocab::TYPES, &vocabulary.types.iter().map(|t| *t as i32).collect::<Vec<_>>());
    if let Some(merges) = &vocabulary.merges {
        keys.texts(vocab::MERGES, merges);
    }
    keys.u32(BOS.0, c.bos);
    keys.u32(EOS.0, c.eos.first().copied().unwrap_or(EOS.1));
    if let Some(turn) = vocabulary.id("<end_of_turn>") {
        keys.u32(EOT.0, turn);
    }
    for ((key, _), piece) in [(PAD, "<pad>"), (UNK, "<unk>")] {
        if let Some(id) = vocabulary.id(piece) {
            keys.u32(key, id);
        }
    }
    keys.bool(ADD_BOS, true);
    keys.bool("tokenizer.ggml.add_eos_token", false);
    keys.bool("tokenizer.ggml.add_space_prefix", false);
    Ok(())
}
