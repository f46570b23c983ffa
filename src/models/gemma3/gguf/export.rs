//! The metadata that llama.cpp needs to run a model, from what its files say.

use super::vocab::{self, Vocabulary};
use super::{ADD_BOS, ARCHITECTURE, BOS, CHAT_TEMPLATE, EOS, EOT, PAD, SAMPLING, UNK};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::gguf::write::Keys;
use crate::error::Fault;
use crate::models::{ChatTemplate, Config, Generation, Weights};
use anyhow::{Context, Result};

/// Every n-th layer sees all positions; llama.cpp takes no other pattern from every file.
const PATTERN: usize = 6;

/// All keys but those that depend on how the tensors are stored. Models that llama.cpp would
/// compute otherwise are refused.
pub fn keys(weights: &Weights) -> Result<Keys> {
    let c = weights.config();
    let checkpoint = weights.checkpoint().context("made-up weights have no files")?;
    check(c)?;
    let of = |key: &str| format!("{ARCHITECTURE}.{key}");
    let mut keys = Keys::default();
    keys.text("general.architecture", ARCHITECTURE);
    keys.text("general.type", "model");
    keys.text("general.name", checkpoint.name().trim_end_matches(".gguf"));
    for (key, n) in [
        ("context_length", c.max_position),
        ("embedding_length", c.dim),
        ("block_count", c.n_layers),
        ("feed_forward_length", c.ffn_dim),
        ("attention.head_count", c.n_heads),
        ("attention.head_count_kv", c.n_kv_heads),
        ("attention.key_length", c.head_dim),
        ("attention.value_length", c.head_dim),
        ("attention.sliding_window", c.window),
        ("vocab_size", c.vocab),
    ] {
        keys.u32(&of(key), u32::try_from(n)?);
    }
    keys.f32(&of("attention.layer_norm_rms_epsilon"), c.eps);
    keys.f32(&of("rope.freq_base"), c.rope_global.theta);
    keys.f32(&of("rope.freq_base_swa"), c.rope_local.theta);
    // Said either way, because readers guess a factor where nothing is said.
    if c.rope_global.factor == 1.0 {
        keys.text(&of("rope.scaling.type"), "none");
    } else {
        keys.text(&of("rope.scaling.type"), "linear");
        keys.f32(&of("rope.scaling.factor"), c.rope_global.factor);
    }
    sampling(&Generation::of(checkpoint)?, &mut keys);
    tokenizer(checkpoint, c, &mut keys)?;
    keys.text(CHAT_TEMPLATE, ChatTemplate::from_checkpoint(checkpoint)?.source());
    Ok(keys)
}

/// Refuses what a GGUF file cannot say.
fn check(c: &Config) -> Result<()> {
    let scale = if c.n_layers == super::config::LAYERS_27B as usize {
        c.dim / c.n_heads
    } else {
        c.head_dim
    };
    let expected = (scale as f64).sqrt().recip() as f32;
    let what = if c.query_scale != expected {
        format!("its attention scale is {}, where llama.cpp computes {expected}", c.query_scale)
    } else if (0..c.n_layers).any(|layer| c.is_global(layer) != (layer + 1).is_multiple_of(PATTERN))
    {
        format!("its global layers are not every {PATTERN}th")
    } else if (c.rope_local.theta, c.rope_local.factor) != (1e4, 1.0) {
        "its local layers rotate otherwise than Gemma 3's".into()
    } else {
        return Ok(());
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
