//! Sampling settings of a request.

use super::error::ApiError;
use super::fields::Fields;
use crate::cli::io::bias::{self, LogitBias};
use crate::sampler::SamplerConfig;
use serde_json::Value;

/// Sampling settings of a request. Missing ones come from the model.
#[derive(Clone, Debug, Default)]
pub struct SamplingFields {
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<LogitBias>,
}

/// Samplers in llama-server's names and letters, in their order. It is the order of this program,
/// but for the temperature, which comes before the filters here.
const SAMPLERS: [(&[&str], char); 10] = [
    (&["penalties"], 'e'),
    (&["dry"], 'd'),
    (&["top_n_sigma"], 's'),
    (&["top_k"], 'k'),
    (&["typ_p", "typical_p", "tfs_z"], 'y'),
    (&["top_p"], 'p'),
    (&["min_p"], 'm'),
    (&["xtc"], 'x'),
    (&["temperature"], 't'),
    (&["adaptive_p"], 'a'),
];

impl SamplingFields {
    pub fn take(fields: &mut Fields) -> Result<SamplingFields, ApiError> {
        // Some clients send one value under several names.
        let penalty = fields.take("repetition_penalty")?.or(fields.take("rep_pen")?);
        let range = fields.take("repetition_penalty_range")?.or(fields.take("rep_pen_range")?);
        let samplers = fields.take::<Value>("samplers")?;
        let mut taken = SamplingFields {
            temperature: fields.take("temperature")?,
            top_k: fields.take_top_k()?,
            top_p: fields.take("top_p")?,
            min_p: fields.take("min_p")?,
            repeat_penalty: fields.take("repeat_penalty")?.or(penalty),
            repeat_last_n: fields.take("repeat_last_n")?.or(range),
            presence_penalty: fields.take("presence_penalty")?,
            frequency_penalty: fields.take("frequency_penalty")?,
            logit_bias: fields.take_as("logit_bias", bias::FORM)?,
        };
        if let Some(list) = samplers {
            taken.keep_only(&list)?;
        }
        Ok(taken)
    }

    /// Turns off what a list of samplers does not name.
    fn keep_only(&mut self, list: &Value) -> Result<(), ApiError> {
        let place = |named: &dyn Fn(&[&str], char) -> bool| {
            SAMPLERS.iter().position(|(names, letter)| named(names, *letter))
        };
        let places: Option<Vec<usize>> = match list {
            Value::String(text) => text.chars().map(|own| place(&|_, is| is == own)).collect(),
            Value::Array(list) => list
                .iter()
                .map(|name| name.as_str().and_then(|own| place(&|names, _| names.contains(&own))))
                .collect(),
            _ => None,
        };
        let named = places.filter(|places| places.is_sorted()).ok_or_else(|| {
            let names: Vec<&str> = SAMPLERS.iter().map(|(names, _)| names[0]).collect();
            let what = format!("'samplers' lists some of {}, in this order", names.join(", "));
            ApiError::bad(what).param("samplers")
        })?;
        let lacks = |name: &str| !named.iter().any(|place| SAMPLERS[*place].0.contains(&name));
        if lacks("penalties") {
            (self.repeat_penalty, self.repeat_last_n) = (Some(1.0), None);
            (self.presence_penalty, self.frequency_penalty) = (Some(0.0), Some(0.0));
        }
        if lacks("top_k") {
            self.top_k = Some(0);
        }
        if lacks("top_p") {
            self.top_p = Some(1.0);
        }
        if lacks("min_p") {
            self.min_p = Some(0.0);
        }
        if lacks("temperature") {
            self.temperature = Some(1.0);
        }
        Ok(())
    }

    /// Returns the settings of an answer: the request's, or else those of `base`.
    pub fn config(&self, base: &SamplerConfig, seed: u64) -> SamplerConfig {
        SamplerConfig {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(base.repeat_penalty),
            repeat_last_n: self.repeat_last_n.unwrap_or(base.repeat_last_n),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            logit_bias: self.logit_bias.as_ref().map_or(&base.logit_bias, |own| &own.0).clone(),
            seed,
        }
    }
}
