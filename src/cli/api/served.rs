//! Facts of the model that requests of all forms need.

use super::error::ApiError;
use super::fields::Fields;
use super::functions::ToolOptions;
use super::tools::CallReader;
use crate::cli::io::prompt::chat_template;
use crate::cli::io::ui::Ui;
use crate::cli::options::TemplateArgs;
use crate::error::Fault;
use crate::grammar::tools;
use crate::models::{ChatTemplate, Config, Tokenizer};
use crate::runtime::constraints::Constraints;
use crate::runtime::load::kv_format;
use crate::runtime::model::Size;
use crate::runtime::options::AutoOr;
use crate::runtime::{Session, Viewer};
use crate::sampler::SamplerConfig;
use crate::tensor::Token;
use crate::util::hex;
use anyhow::Result;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Fields that ask for a thought. The first one that is given counts.
const THINKING: [&str; 6] = [
    "chat_template_kwargs",
    "enable_thinking",
    "think",
    "thinking",
    "reasoning",
    "reasoning_effort",
];
/// Subfields that say whether to think.
const WISHES: [&str; 5] = ["enable_thinking", "thinking", "type", "enabled", "effort"];
/// Subfields that limit a thought. A body may also have them at its top level.
const BUDGETS: [&str; 3] = ["budget_tokens", "max_tokens", "thinking_budget"];
const BODY_BUDGETS: [&str; 4] =
    ["thinking_budget", "thinking_budget_tokens", "reasoning_budget", "thinking_token_budget"];
/// Token limits of a thought by the word for its effort, as LiteLLM translates them. Other words
/// set no limit.
const EFFORTS: [(&str, usize); 3] = [("minimal", 128), ("low", 1024), ("medium", 2048)];

/// Whether an answer begins with a thought, and the limit of its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    pub is_on: bool,
    pub budget: Option<usize>,
}

/// Limit of a model's name in bytes: each event of a stream repeats it.
const LONGEST_NAME: usize = 256;

/// Facts of a loaded model for preparing requests.
pub struct ServedModel {
    pub name: String,
    pub created: u64,
    pub fingerprint: String,
    pub tokenizer: Arc<Tokenizer>,
    pub template: ChatTemplate,
    pub config: Config,
    pub size: Size,
    pub stop_ids: Vec<Token>,
    /// Context size in positions.
    pub context: usize,
    /// Settings that the model's authors recommend.
    pub sampling: SamplerConfig,
    pub constraints: Arc<Constraints>,
    /// Default limit of an answer in tokens.
    pub max_tokens: AutoOr,
    /// Whether answers begin with a thought by default, and its limit.
    pub thinking: Thinking,
    /// The tower that reads images, or the reason why there is none.
    pub viewer: Result<Arc<Viewer>, Fault>,
}

/// Default settings of requests.
pub struct ServedOptions {
    /// Context size in positions.
    pub context: usize,
    /// Seconds since 1970, for lists of models.
    pub created: u64,
    pub sampling: SamplerConfig,
    pub constraints: Arc<Constraints>,
    pub max_tokens: AutoOr,
    pub thinking: Thinking,
    pub template: TemplateArgs,
}

impl ServedModel {
    /// Collects the facts of a loaded model. `device` is the engine's report of its device.
    pub fn new(
        session: &Session,
        device: &str,
        options: ServedOptions,
        ui: &Ui,
    ) -> Result<ServedModel> {
        let ServedOptions {
            context,
            created,
            sampling,
            constraints,
            max_tokens,
            thinking,
            template,
        } = options;
        let kv = kv_format(&session.model.weights, session.run.kv)?;
        // The number of threads changes only the speed, so it is not part of the fingerprint.
        let device = device.split(", ").next().unwrap_or_default();
        let mut hash = Sha256::new();
        hash.update(session.model.checkpoint().fingerprint()?);
        hash.update(session.tokenizer.sha256());
        hash.update(format!("{kv:?} {device} {}", env!("CARGO_PKG_VERSION")));
        Ok(ServedModel {
            name: session.model.name.clone(),
            created,
            fingerprint: format!("fp_{}", hex(&hash.finalize()[..6])),
            tokenizer: session.tokenizer.clone(),
            template: chat_template(&session.model, &session.tokenizer, &template, ui)?,
            config: session.config().clone(),
            size: Size::of(&session.model.weights)?,
            stop_ids: session.stop_ids.clone(),
            context,
            sampling,
            constraints,
            max_tokens,
            thinking,
            viewer: session.viewer.clone(),
        })
    }

    /// Returns the tower that reads images, or the reason why there is none.
    pub fn viewer(&self) -> Result<&Viewer, &Fault> {
        self.viewer.as_deref()
    }

    /// Returns the tokens that mark calls; empty if the model has none.
    pub fn call_marks(&self) -> Vec<(Token, char)> {
        tools::call_marks(&self.tokenizer)
    }

    /// Returns a parser of answers that may contain calls.
    pub fn reader(&self, tool_options: Option<&ToolOptions>) -> CallReader {
        let tools = tool_options.map_or(&[][..], |options| &options.tools);
        CallReader::new(tools, !self.call_marks().is_empty())
    }

    /// Takes the name of the model. The one model answers to any name.
    pub fn take_name(&self, fields: &mut Fields) -> Result<Option<String>, ApiError> {
        let name: Option<String> = fields.take("model")?;
        if let Some(other) = name.as_ref().filter(|name| **name != self.name) {
            if other.len() > LONGEST_NAME {
                let what = format!("'model' has more than {LONGEST_NAME} bytes: shorten it");
                return Err(ApiError::bad(what).param("model"));
            }
            fields.note(format!("the model {other:?} is answered by {}", self.name));
        }
        Ok(name)
    }

    /// Takes the fields of all forms that request, forbid or limit a thought.
    ///
    /// For a model that cannot think they have no effect.
    pub fn take_thinking(&self, fields: &mut Fields) -> Result<Thinking, ApiError> {
        let (mut wish, mut effort, mut budget) = (None, None, None);
        for name in BODY_BUDGETS {
            budget = budget.or(fields.take_limit(name)?);
        }
        for name in THINKING {
            let value: Option<Value> = fields.take(name)?;
            let own = value.as_ref().and_then(wishes);
            if wish.is_none() && own.is_some() {
                (wish, effort) = (own, value.as_ref().and_then(most_by_effort));
            }
            let parts = value.as_ref().and_then(Value::as_object).into_iter().flatten();
            for (part, value) in parts.filter(|(part, _)| !WISHES.contains(&&***part)) {
                match BUDGETS.contains(&&**part) {
                    true => budget = budget.or(limit(name, part, value)?),
                    false => {
                        let text = format!("'{name}.{part}' is ignored: it changes no text");
                        fields.note(text);
                    }
                }
            }
            if own == Some(true) && self.tokenizer.channel().is_none() {
                fields.note(format!("'{name}' is ignored: the model has no thoughts"));
            }
        }
        let is_on = wish.unwrap_or(self.thinking.is_on) && self.tokenizer.channel().is_some();
        Ok(Thinking { is_on, budget: budget.or(effort).or(self.thinking.budget) })
    }
}

/// Returns the limit in a part of a field; `None` for a negative number, which is no limit.
fn limit(name: &str, part: &str, value: &Value) -> Result<Option<usize>, ApiError> {
    let number = match value {
        Value::Null => return Ok(None),
        value => value.as_f64().filter(|number| number.fract() == 0.0),
    };
    let what = || format!("'{name}.{part}' must be a whole number of tokens");
    let number = number.ok_or_else(|| ApiError::bad(what()).param(name))?;
    Ok((number >= 0.0).then_some(number as usize))
}

/// Returns the token limit of a thought for a word for its effort.
fn most_by_effort(value: &Value) -> Option<usize> {
    match value {
        Value::String(word) => {
            EFFORTS.iter().find(|(known, _)| known == word).map(|(_, most)| *most)
        }
        Value::Object(fields) => most_by_effort(fields.get("effort")?),
        _ => None,
    }
}

/// Returns whether a value asks for a thought.
///
/// The value is a flag, a word such as `high`, or an object that contains one of them.
fn wishes(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(flag) => Some(*flag),
        Value::String(word) => Some(!matches!(&**word, "none" | "disabled" | "off")),
        Value::Object(fields) => WISHES.iter().find_map(|name| wishes(fields.get(*name)?)),
        _ => None,
    }
}
