//! Reads `config.json`: values with their limits, and keys that all architectures share.
//!
//! Multimodal files store the language model under `text_config`. That section is sparse: missing
//! keys have the defaults of the architecture's class in transformers.

use super::generation::tokens;
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use serde_json::Value;

/// A parsed file: the text section, and the whole for keys outside of it.
pub struct Reader<'a> {
    pub text: &'a Value,
    whole: &'a Value,
}

impl<'a> Reader<'a> {
    pub fn new(whole: &'a Value) -> Self {
        Reader { text: whole.get("text_config").filter(|v| !v.is_null()).unwrap_or(whole), whole }
    }

    /// Returns a present, non-null value of the text section.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.text.get(key).filter(|v| !v.is_null())
    }

    /// Returns a value of the text section, or else of the whole file.
    fn get_anywhere(&self, key: &str) -> Option<&'a Value> {
        self.get(key).or_else(|| self.whole.get(key).filter(|v| !v.is_null()))
    }

    /// Returns an integer from 1 to `max`.
    pub fn size(&self, key: &str, default: usize, max: usize) -> Result<usize, Fault> {
        size(key, self.get(key), default, max)
    }

    pub fn positive(&self, key: &str, default: f64) -> Result<f64, Fault> {
        positive(key, self.get(key), default)
    }

    /// Returns whether the output head shares the embedding table.
    pub fn tied(&self) -> Result<bool, Fault> {
        match self.get_anywhere("tie_word_embeddings") {
            None => Ok(true),
            Some(Value::Bool(tied)) => Ok(*tied),
            Some(other) => {
                let what = format!("`tie_word_embeddings` should be true or false, not {other}");
                Err(Fault::model(what))
            }
        }
    }

    /// Returns the tokens that end a text, and the token that begins it.
    pub fn ends(&self, vocab: usize) -> Result<(Vec<Token>, Token), Fault> {
        let eos_in = |place: &Value| {
            tokens(place.get("eos_token_id"))
                .ok_or_else(|| Fault::model(format!("`eos_token_id` is {}", place["eos_token_id"])))
        };
        // Multimodal files list the chat model's stop tokens outside text_config.
        let eos = [eos_in(self.whole)?, eos_in(self.text)?, vec![1]]
            .into_iter()
            .find(|list| !list.is_empty())
            .unwrap_or_default();
        let bos = match tokens(self.get_anywhere("bos_token_id")).as_deref() {
            Some([]) => 2,
            Some(&[bos]) => bos,
            _ => return Err(Fault::model("`bos_token_id` is not a token id")),
        };
        if let Some(outside) = eos.iter().chain([&bos]).find(|t| **t as usize >= vocab) {
            let what = format!("token {outside} is outside the vocabulary of {vocab}");
            return Err(Fault::model(what));
        }
        Ok((eos, bos))
    }

    /// Returns which layers are global, from `layer_types`; `None` without that key.
    pub fn layer_types(&self, n_layers: usize) -> Result<Option<Vec<bool>>, Fault> {
        let Some(types) = self.get("layer_types") else { return Ok(None) };
        let list = types.as_array().ok_or_else(|| Fault::model("`layer_types` is not a list"))?;
        if list.len() != n_layers {
            let what = format!("`layer_types` names {} layers of {n_layers}", list.len());
            return Err(Fault::model(what));
        }
        let one = |t: &Value| match t.as_str() {
            Some("full_attention") => Ok(true),
            Some("sliding_attention") => Ok(false),
            _ => Err(Fault::model(format!(
                "`layer_types` holds {t}; known: full_attention, sliding_attention"
            ))),
        };
        list.iter().map(one).collect::<Result<_, _>>().map(Some)
    }

    /// Returns the window of the layers that are not global.
    pub fn window(&self, default: usize, global: &[bool]) -> Result<usize, Fault> {
        match self.text.get("sliding_window") {
            Some(Value::Null) if global.iter().any(|g| !g) => Err(Fault::model(
                "`sliding_window` is null, but some layers are sliding-window layers",
            )),
            _ => self.size("sliding_window", default, 1 << 24),
        }
    }

    /// Fails for any value other than the supported one.
    pub fn refuse_other(&self, key: &str, only: &Value) -> Result<(), Fault> {
        match self.get(key).filter(|v| *v != only) {
            Some(value) => {
                Err(Fault::model(format!("`{key}` is {value}; only {only} is supported")))
            }
            None => Ok(()),
        }
    }
}

/// Returns an integer from 1 to `max`, or the default if there is no value.
pub fn size(key: &str, value: Option<&Value>, default: usize, max: usize) -> Result<usize, Fault> {
    let Some(value) = value else { return Ok(default) };
    match value.as_u64() {
        Some(n) if n >= 1 && n <= max as u64 => Ok(n as usize),
        _ => Err(Fault::model(format!(
            "`{key}` should be a whole number from 1 to {max}, not {value}"
        ))),
    }
}

/// Returns a positive number, or the default if there is no value.
pub fn positive(key: &str, value: Option<&Value>, default: f64) -> Result<f64, Fault> {
    let Some(value) = value else { return Ok(default) };
    match value.as_f64() {
        Some(n) if n > 0.0 && (n as f32).is_normal() => Ok(n),
        _ => Err(Fault::model(format!("`{key}` should be a positive number, not {value}"))),
    }
}

/// Checks the heads of a layer.
pub fn check_heads(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> Result<(), Fault> {
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(Fault::model(format!(
            "{n_heads} attention heads cannot share {n_kv_heads} key-value heads evenly"
        )));
    }
    // Kernels process 16 channels of a head together.
    if !head_dim.is_multiple_of(16) {
        return Err(Fault::model(format!("`head_dim` must be a multiple of 16, not {head_dim}")));
    }
    Ok(())
}
