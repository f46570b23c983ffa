//! The fields of a request's body. Parsers take them by name.
//!
//! At the end, each remaining field is ignored with a note in the log if it changes no text, and
//! refused by name otherwise.

use super::error::ApiError;
use super::ids::Ids;
use super::notes::Notes;
use crate::util::json;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::any::type_name;
use std::sync::Arc;

/// Fields of the APIs and their clients that change no text here: wishes about effort and length,
/// names of users and caches, requests for extra figures, and settings of unsupported samplers.
const WITHOUT_EFFECT: &str = "
    adaptive_decay allow_fallback anthropic_beta api_server api_type background_tasks betas
    cache_control cache_prompt cache_salt chat_id client_metadata container context_management
    dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
    embedding_only f16_kv fallbacks features id id_slot include include_reasoning inference_geo
    keep_alive legacy_api logits_all low_vram main_gpu max_tool_calls metadata mirostat_eta
    mirostat_tau model_item n_keep negative_prompt num_batch num_ctx num_gpu num_gqa num_keep
    num_thread numa output_config parallel_tool_calls parse_tool_calls penalize_newline
    post_sampling_probs prediction priority prompt_cache_key prompt_cache_options
    prompt_cache_retention provider reasoning_format reasoning_split request_id response_fields
    return_progress return_tokens safety_identifier service_tier session_id slot_id
    smoothing_curve speed store stream_options t_max_predict_ms t_max_prompt_ms
    timings_per_token tool_stream top_logprobs transforms truncation truncation_length ttl usage
    use_mlock use_mmap user user_id variables verbosity vocab_only web_search_options
    xtc_threshold
";

/// Unsupported fields, each with the JSON values that have no effect.
const NEUTRAL: &str = r#"{
    "adaptive_target": [-0.01, -1], "add_bos_token": [true], "add_generation_prompt": [true],
    "add_special_tokens": [false], "background": [false], "ban_eos_token": [false],
    "banned_strings": [[]], "best_of": [1], "context": [[]], "continue_final_message": [false],
    "custom_token_bans": [""], "dry_multiplier": [0], "dynatemp_range": [0], "echo": [false],
    "epsilon_cutoff": [0], "eta_cutoff": [0], "files": [[]], "filter_ids": [[]],
    "grammar_string": [""], "guidance_scale": [1], "include_stop_str_in_output": [false],
    "length_penalty": [1], "lora": [[]], "max_tokens_second": [0], "mcp_servers": [[]],
    "min_keep": [0], "min_tokens": [0], "mirostat": [0], "mirostat_mode": [0],
    "modalities": [["text"]], "n": [1], "n_indent": [0], "n_probs": [0],
    "no_repeat_ngram_size": [0], "nsigma": [0], "num_beams": [1], "options": [{}],
    "params": [{}], "rep_pen_slope": [1, 0], "shift": [true, false], "skew": [0],
    "skip_special_tokens": [true], "smoothing_factor": [0],
    "spaces_between_special_tokens": [true], "stop_token_ids": [[]], "suffix": [""],
    "template": [""], "tfs": [1], "tfs_z": [1], "thread": [{"type": "create"}],
    "tool_ids": [[]], "tool_servers": [[]], "top_a": [0], "top_n_sigma": [-1, 0],
    "truncate": [true, false], "typ_p": [1], "typical": [1], "typical_p": [1],
    "use_beam_search": [false], "xtc_probability": [0]
}"#;

/// Remedies for fields where "leave it out" is not enough.
const REMEDIES: &[(&str, &str)] = &[
    ("conversation", "nothing is stored, so send the earlier messages along"),
    ("extra_body", "send its fields at the top level of the body"),
    ("guided_json", "send 'response_format' instead"),
    ("mcp_servers", "let the client call them, and send their functions as tools"),
    ("previous_response_id", "nothing is stored, so send the earlier messages along"),
    ("thread", "nothing is stored, so send the earlier messages along"),
    ("template", "the model's own template is always used, except with 'raw'"),
    ("suffix", "the model cannot fill text in, so send only the text before the gap"),
];

/// The smallest float above which not every whole number can be represented.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Fields that were not taken yet.
pub struct Fields {
    left: Map<String, Value>,
    notes: Arc<Notes>,
    /// Ids for the response.
    pub(super) ids: Ids,
}

impl Fields {
    pub fn parse(body: &[u8], notes: &Arc<Notes>) -> Result<Fields, ApiError> {
        let wrong =
            |error| ApiError::bad(format!("the body is not valid JSON: {error}: send an object"));
        Fields::of(json::parse(body).map_err(wrong)?, notes, Ids::Random)
    }

    /// Returns the fields of a parsed body.
    pub fn of(body: Value, notes: &Arc<Notes>, ids: Ids) -> Result<Fields, ApiError> {
        let Value::Object(mut left) = body else {
            return Err(ApiError::bad("the body is not a JSON object: send {\"name\": ...}"));
        };
        left.values_mut().for_each(whole);
        Ok(Fields { left, notes: notes.clone(), ids })
    }

    /// Logs a note about the request, once for each text.
    pub fn note(&self, text: String) {
        self.notes.once(text);
    }

    /// Returns a field without taking it.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.left.get(name).filter(|value| !value.is_null())
    }

    /// Takes a field. A null field counts as missing.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        self.take_as(name, form::<T>())
    }

    /// Takes a field. `form` describes the valid forms for the error message.
    pub fn take_as<T: DeserializeOwned>(
        &mut self,
        name: &str,
        form: &str,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.left.remove(name).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let given = match &value {
            Value::String(_) => "a text".to_owned(),
            Value::Array(_) => "a list".to_owned(),
            Value::Object(_) => "an object".to_owned(),
            plain => plain.to_string(),
        };
        serde_json::from_value(value).map(Some).map_err(|_| {
            ApiError::bad(format!("'{name}' must be {form}, and is {given}")).param(name)
        })
    }

    /// Moves the fields of an object to the top level and removes the object.
    pub fn open(&mut self, name: &str) -> Result<(), ApiError> {
        let mut inner: Map<String, Value> = self.take(name)?.unwrap_or_default();
        inner.values_mut().for_each(whole);
        self.left.extend(inner);
        Ok(())
    }

    /// Takes a number. Some clients write -1 for no limit.
    pub fn take_limit<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        if self.left.get(name).and_then(Value::as_i64) == Some(-1) {
            self.left.remove(name);
        }
        self.take(name)
    }

    /// Takes `top_k`. Both 0 and -1 turn it off.
    pub fn take_top_k(&mut self) -> Result<Option<usize>, ApiError> {
        let is_off = self.get("top_k").and_then(Value::as_i64) == Some(-1);
        self.take_limit("top_k").map(|given| given.or(is_off.then_some(0)))
    }

    /// Takes a seed. A negative seed is read as its 64 bits, and -1 as no seed.
    ///
    /// `sampler_seed` is another name of it.
    pub fn take_seed(&mut self) -> Result<Option<u64>, ApiError> {
        let mut take = |name: &str| match self.get(name).and_then(Value::as_i64) {
            Some(seed @ ..=-2) => {
                self.left.remove(name);
                Ok(Some(seed as u64))
            }
            _ => self.take_limit(name),
        };
        let other = take("sampler_seed")?;
        Ok(take("seed")?.or(other))
    }

    /// Takes the first of these limits that is given. The others are dropped.
    pub fn take_limit_of(&mut self, names: &[&str]) -> Result<Option<usize>, ApiError> {
        let taken = names.iter().map(|name| self.take_limit(name));
        Ok(taken.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next())
    }

    pub fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| missing(name))
    }

    /// Drops fields that do not affect the answer.
    pub fn pass_over(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.left.remove(*name)));
    }

    /// Takes a field. Refuses values other than `plain`, which have no effect.
    pub fn only(&mut self, name: &str, plain: &[Value]) -> Result<(), ApiError> {
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if plain.contains(&value) => Ok(()),
            Some(_) => Err(unsupported(name, plain)),
        }
    }

    /// Refuses the remaining fields, except those that change no text.
    pub fn finish(mut self) -> Result<(), ApiError> {
        self.left.retain(|_, value| !value.is_null());
        for name in WITHOUT_EFFECT.split_whitespace() {
            if self.left.remove(name).is_some() {
                self.note(format!("'{name}' is ignored: it changes no text"));
            }
        }
        if self.left.is_empty() {
            return Ok(());
        }
        let neutral = neutral();
        for (name, value) in &self.left {
            let plain = neutral[name].as_array().map_or(&[][..], |plain| plain);
            if !plain.contains(value) {
                return Err(unsupported(name, plain));
            }
        }
        Ok(())
    }
}

fn neutral() -> Value {
    serde_json::from_str(NEUTRAL).expect("the table is JSON")
}

/// Makes the error of a required field that is missing.
pub fn missing(name: &str) -> ApiError {
    ApiError::bad(format!("'{name}' is missing: send it")).param(name)
}

/// Makes the error of a field that this server does not support. `plain` are values without effect.
fn unsupported(name: &str, plain: &[Value]) -> ApiError {
    let remedy = REMEDIES.iter().find(|(known, _)| *known == name);
    let remedy = match (remedy, plain.first()) {
        (Some((_, remedy)), _) => (*remedy).to_owned(),
        (None, Some(plain)) => format!("leave it out or send {plain}"),
        (None, None) => "leave it out".to_owned(),
    };
    ApiError::unsupported(name, &remedy)
}

/// Converts whole numbers that are spelled as floats to integers.
fn whole(value: &mut Value) {
    let float = value.as_f64().filter(|float| value.is_f64() && float.fract() == 0.0);
    if let Some(float) = float.filter(|float| float.abs() < EXACT) {
        *value = (float as i64).into();
    }
}

/// Returns a description of a field's type.
fn form<T>() -> &'static str {
    let name = type_name::<T>();
    match name.split('<').next().unwrap_or(name) {
        "f32" | "f64" => "a number",
        "u16" | "u32" | "u64" | "usize" => "a whole number from 0",
        "i64" => "a whole number",
        "bool" => "true or false",
        "alloc::string::String" => "a text",
        "alloc::vec::Vec" => "a list",
        _ => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Fields, ApiError> {
        Fields::parse(text.as_bytes(), &Arc::new(Notes::new(|_| ())))
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(parse("[1]").is_err() && parse("{").is_err() && parse("\u{0}").is_err());
        let mut fields = parse(r#"{"a": 1, "b": null, "c": "x", "n": 1.0, "d": 3}"#).unwrap();
        assert_eq!(fields.take::<u32>("a").unwrap(), Some(1));
        assert_eq!(fields.take::<u32>("b").unwrap(), None);
        let wrong = fields.take::<u32>("c").unwrap_err();
        assert_eq!((wrong.status, wrong.param.as_deref()), (400, Some("c")));
        assert!(fields.only("n", &[1.into()]).is_ok() && fields.need::<u32>("e").is_err());
        let left = fields.finish().unwrap_err();
        assert_eq!((left.param.as_deref(), left.code), (Some("d"), Some("unsupported_parameter")));
    }

    #[test]
    fn limits_may_be_none_and_numbers_floats() {
        let mut limits = parse(r#"{"a": -1, "b": -2, "c": 5.0, "d": -1.0, "e": 0.5}"#).unwrap();
        assert_eq!(limits.take_limit::<usize>("a").unwrap(), None);
        assert_eq!(limits.take_limit_of(&["d", "c"]).unwrap(), Some(5));
        let wrong = limits.take_limit::<usize>("b").unwrap_err();
        assert_eq!(wrong.message, "'b' must be a whole number from 0, and is -2");
        let wrong = limits.take::<usize>("e").unwrap_err();
        assert_eq!(wrong.message, "'e' must be a whole number from 0, and is 0.5");
        let mut wrong = parse(r#"{"a": "secret", "b": {"c": 1}}"#).unwrap();
        let says = |error: ApiError| error.message;
        let list = wrong.take::<Vec<String>>("a").map_err(says);
        assert_eq!(list.unwrap_err(), "'a' must be a list, and is a text");
        let flag = wrong.take::<bool>("b").map_err(says);
        assert_eq!(flag.unwrap_err(), "'b' must be true or false, and is an object");
    }

    #[test]
    fn neutral_values_pass_and_others_are_refused_with_a_remedy() {
        let finish = |text: &str| parse(text).unwrap().finish().map_err(|error| error.message);
        assert_eq!(finish(r#"{"store": true, "typical_p": 1.0, "suffix": "", "x": null}"#), Ok(()));
        let says = |text: &str| finish(text).unwrap_err();
        assert_eq!(
            says(r#"{"typical_p": 0.9}"#),
            "'typical_p' is not supported by this server: leave it out or send 1"
        );
        assert!(says(r#"{"temprature": 1}"#).ends_with("leave it out"));
        assert!(says(r#"{"previous_response_id": "x"}"#).contains("send the earlier messages"));
        for (name, plain) in neutral().as_object().unwrap() {
            for value in plain.as_array().unwrap() {
                assert_eq!(finish(&format!("{{\"{name}\": {value}}}")), Ok(()));
            }
        }
    }
}
