//! Sampling defaults of a model: `generation_config.json`.

use super::Config;
use crate::checkpoint::Checkpoint;
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use serde_json::Value;

/// Sampling settings that the model's authors recommend; `None` without a recommendation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// 0 if the file says `"do_sample": false`.
    pub temperature: Option<f32>,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repeat_penalty: Option<f32>,
    /// Tokens that end a turn; empty if the file lists none.
    pub eos: Vec<Token>,
}

impl Generation {
    /// Reads the checkpoint's `generation_config.json`; all fields are `None` without one.
    pub fn of(checkpoint: &Checkpoint) -> Result<Generation> {
        let file = "generation_config.json";
        match checkpoint.side_json(file)? {
            Some(json) => Self::from_json(&json).map_err(|what| {
                Fault::model(format!("{}: {what}", checkpoint.display(file))).into()
            }),
            None => Ok(Generation::default()),
        }
    }

    /// Returns the tokens that end the text: `eos` of this file, or else those of config.json.
    pub fn stop_ids(&self, config: &Config) -> Vec<Token> {
        if self.eos.is_empty() { config.eos.clone() } else { self.eos.clone() }
    }

    fn from_json(json: &Value) -> Result<Generation, String> {
        let number = |key: &str, low: f64, high: f64| match json.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(v) => match v.as_f64() {
                Some(n) if (low..=high).contains(&n) => Ok(Some(n)),
                _ => Err(format!("`{key}` should be a number from {low} to {high}, not {v}")),
            },
        };
        let mut out = Generation {
            temperature: number("temperature", 0.0, 100.0)?.map(|v| v as f32),
            top_k: number("top_k", 0.0, 1e9)?.map(|v| v as usize),
            top_p: number("top_p", 0.0, 1.0)?.map(|v| v as f32),
            min_p: number("min_p", 0.0, 1.0)?.map(|v| v as f32),
            repeat_penalty: number("repetition_penalty", 0.01, 100.0)?.map(|v| v as f32),
            eos: tokens(json.get("eos_token_id"))
                .ok_or_else(|| format!("`eos_token_id` is {}", json["eos_token_id"]))?,
        };
        if json.get("do_sample") == Some(&Value::Bool(false)) {
            out.temperature = Some(0.0);
        }
        Ok(out)
    }
}

/// Reads a token id or a list of ids. Returns an empty list if absent or null, and `None` for any
/// other value.
pub(super) fn tokens(value: Option<&Value>) -> Option<Vec<Token>> {
    let one = |v: &Value| v.as_u64().and_then(|n| Token::try_from(n).ok());
    match value {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(single) => Some(vec![one(single)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn gemmas_file_is_read() {
        let json = json!({"bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": true,
            "eos_token_id": [1, 106],
            "pad_token_id": 0, "top_k": 64, "top_p": 0.95});
        let want = Generation {
            top_k: Some(64),
            top_p: Some(0.95),
            eos: vec![1, 106],
            ..Generation::default()
        };
        assert_eq!(Generation::from_json(&json).unwrap(), want);
        assert_eq!(
            Generation::from_json(&json!({"do_sample": false, "eos_token_id": 1}))
                .unwrap()
                .temperature,
            Some(0.0)
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for json in [
            json!({"top_p": 7}),
            json!({"temperature": "hot"}),
            json!({"eos_token_id": [-1]}),
            json!({"top_k": -1}),
        ] {
            assert!(Generation::from_json(&json).is_err(), "{json}");
        }
    }
}
