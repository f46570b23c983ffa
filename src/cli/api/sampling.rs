//! Sampling settings of a request.

use super::error::ApiError;
use super::fields::Fields;
use crate::cli::io::bias::{self, LogitBias};
use crate::sampler::SamplerConfig;

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

impl SamplingFields {
    pub fn take(fields: &mut Fields) -> Result<SamplingFields, ApiError> {
        let penalty = fields.take("repetition_penalty")?;
        Ok(SamplingFields {
            temperature: fields.take("temperature")?,
            top_k: fields.take_top_k()?,
            top_p: fields.take("top_p")?,
            min_p: fields.take("min_p")?,
            repeat_penalty: fields.take("repeat_penalty")?.or(penalty),
            repeat_last_n: fields.take("repeat_last_n")?,
            presence_penalty: fields.take("presence_penalty")?,
            frequency_penalty: fields.take("frequency_penalty")?,
            logit_bias: fields.take_as("logit_bias", bias::FORM)?,
        })
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
