//! Sampling settings of a request.

use super::error::ApiError;
use super::fields::Fields;
use crate::sampler::SamplerConfig;
use serde_json::Value;

/// Sampling settings that a request names. The others are the model's.
#[derive(Clone, Debug, Default)]
pub struct SamplingFields {
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
}

impl SamplingFields {
    pub fn take(fields: &mut Fields) -> Result<SamplingFields, ApiError> {
        let zero = [0.into(), 0.0.into()];
        fields.only("frequency_penalty", &zero)?;
        fields.only("presence_penalty", &zero)?;
        fields.only("logit_bias", &[Value::Object(Default::default())])?;
        let penalty = fields.take("repetition_penalty")?;
        Ok(SamplingFields {
            temperature: fields.take("temperature")?,
            top_k: fields.take_limit("top_k")?,
            top_p: fields.take("top_p")?,
            min_p: fields.take("min_p")?,
            repeat_penalty: fields.take("repeat_penalty")?.or(penalty),
        })
    }

    /// Returns the settings of an answer: the request's, then those of `base`.
    pub fn config(&self, base: &SamplerConfig, seed: u64) -> SamplerConfig {
        SamplerConfig {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(base.repeat_penalty),
            seed,
        }
    }
}
