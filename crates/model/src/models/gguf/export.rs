//! Builds the metadata that llama.cpp needs to run a model.

use super::vocab::{self, GgufVocabulary};
use super::{ADD_BOS, BOS, CHAT_TEMPLATE, EOS, EOT, PAD, SAMPLING, TURN_ENDS, UNK};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::gguf::write::Keys;
use crate::models::{ChatTemplate, Config, Dialect, Generation, Weights};
use anyhow::{Context, Result};
use gemma_base::error::Fault;

/// Returns all keys except those that depend on the storage of tensors. Fails for a model that
/// llama.cpp would compute differently.
pub fn keys(weights: &Weights) -> Result<Keys> {
    let c = weights.config();
    let checkpoint = weights.checkpoint().context("made-up weights have no files")?;
    let mut keys = Keys::default();
    let architecture = c.architecture;
    keys.text("general.architecture", architecture.gguf());
    keys.text("general.type", "model");
    keys.text("general.name", checkpoint.name().trim_end_matches(".gguf"));
    architecture.gguf_keys(c, &mut keys)?;
    sampling(&Generation::of(checkpoint)?, &mut keys);
    let dialect = tokenizer(checkpoint, c, &mut keys)?;
    keys.text(CHAT_TEMPLATE, ChatTemplate::from_checkpoint(checkpoint, dialect)?.source());
    Ok(keys)
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

/// Adds the keys of the tokenizer. Returns its dialect.
fn tokenizer(checkpoint: &Checkpoint, c: &Config, keys: &mut Keys) -> Result<&'static Dialect> {
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
    let vocabulary = GgufVocabulary::of(&bytes, c.vocab).with_context(unreadable)?;
    keys.text(vocab::MODEL, vocabulary.dialect.gguf);
    if !vocabulary.dialect.has_merges {
        keys.text("tokenizer.ggml.pre", "default");
    }
    keys.texts(vocab::TOKENS, &vocabulary.tokens);
    keys.f32s(vocab::SCORES, &vocabulary.scores);
    keys.i32s(vocab::TYPES, &vocabulary.types.iter().map(|t| *t as i32).collect::<Vec<_>>());
    if let Some(merges) = &vocabulary.merges {
        keys.texts(vocab::MERGES, merges);
    }
    keys.u32(BOS.0, c.bos);
    keys.u32(EOS.0, c.eos.first().copied().unwrap_or(EOS.1));
    if let Some(turn) = TURN_ENDS.into_iter().find_map(|piece| vocabulary.id(piece)) {
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
    Ok(vocabulary.dialect)
}
