//! Biases of tokens as JSON, in two forms.
//!
//! OpenAI's is an object of ids and numbers, `{"42": -100}`. llama-server's is a list of pairs,
//! `[[42, false]]`, where `false` bans the token.

use crate::tensor::Token;
use serde::Deserialize;
use serde_json::Value;

/// Limit of biases per request. Each of its answers has a copy of them.
const MOST: usize = 4096;
/// Description of the valid forms, for error messages.
pub const FORM: &str =
    "at most 4096 ids of tokens with numbers from -100 to 100, as in {\"42\": -100}";

/// Biases of a request or a record.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Value")]
pub struct LogitBias(pub Vec<(Token, f32)>);

impl TryFrom<Value> for LogitBias {
    type Error = String;

    fn try_from(value: Value) -> Result<LogitBias, String> {
        let bias = |value: &Value| match value {
            Value::Bool(false) => Some(-100.0),
            value => value.as_f64().map(|bias| bias as f32),
        };
        let pair = |pair: &Value| match &pair.as_array()?[..] {
            [token, value] => Some((token.as_u64()?.try_into().ok()?, bias(value)?)),
            _ => None,
        };
        let biases: Option<Vec<_>> = match &value {
            Value::Object(map) => {
                map.iter().map(|(token, value)| Some((token.parse().ok()?, bias(value)?))).collect()
            }
            Value::Array(pairs) => pairs.iter().map(pair).collect(),
            _ => None,
        };
        let biases = biases.filter(|biases| biases.len() <= MOST);
        biases.map(LogitBias).ok_or_else(|| format!("expected {FORM}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_and_pairs_are_read_and_texts_refused() {
        let read = |value| serde_json::from_value::<LogitBias>(value).map(|biases| biases.0);
        assert_eq!(read(json!({"42": -100, "7": 0.5})).unwrap(), [(42, -100.0), (7, 0.5)]);
        assert_eq!(read(json!([[42, false], [7, 1]])).unwrap(), [(42, -100.0), (7, 1.0)]);
        assert_eq!(read(json!({})).unwrap(), []);
        let many = |n: usize| read(vec![json!([1, 1]); n].into());
        assert!(many(MOST).is_ok() && many(MOST + 1).is_err());
        for bad in [
            json!({"a": 1}),
            json!({"-1": 1}),
            json!({"1": "x"}),
            json!({"1": true}),
            json!([["a", 1]]),
            json!([[1]]),
            json!([[4_294_967_296_u64, 1]]),
            json!(5),
        ] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.contains("ids of tokens"), "{error}");
        }
    }
}
