//! Ollama's endpoints: answers, facts about models, and refusals of functions that this server
//! lacks.

use super::super::models::catalog::ModelFacts;
use super::response::{answer_json, refusal};
use super::{App, answer, result};
use crate::cli::api::error::{ApiError, ApiFamily};
use crate::cli::api::ids::{date, now};
use crate::cli::api::ollama;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{MethodRouter, any, get, post};
use serde_json::{Value, json};
use std::sync::Arc;

/// Version of Ollama that this server claims to be. Some clients require a recent one.
const VERSION: &str = "0.13.4";

/// Parts of a prompt in the notation of Ollama's templates. Clients search it for tools. Prompts
/// are written by the model's own template.
const TEMPLATE: &str = "{{ .System }}{{ .Tools }}{{ .Messages }}";

/// Expiry time of a model that is never unloaded.
const FOREVER: &str = "9999-12-31T23:59:59Z";

const NO_EMBEDDINGS: &str = "this server has no embeddings, so use another one for them";
const NO_CHANGES: &str = "this server cannot change models";

/// Paths of Ollama's API that are refused, and the reasons.
const REFUSED: [(&str, &str); 8] = [
    ("/api/embed", NO_EMBEDDINGS),
    ("/api/embeddings", NO_EMBEDDINGS),
    ("/api/pull", NO_CHANGES),
    ("/api/push", NO_CHANGES),
    ("/api/create", NO_CHANGES),
    ("/api/copy", NO_CHANGES),
    ("/api/delete", NO_CHANGES),
    ("/api/blobs/{digest}", NO_CHANGES),
];

/// Returns the endpoints by their paths.
pub fn endpoints() -> Vec<(&'static str, MethodRouter<Arc<App>>)> {
    let mut all: Vec<(&str, MethodRouter<Arc<App>>)> = vec![
        ("/api/chat", post(chat)),
        ("/api/generate", post(generate)),
        ("/api/tags", get(tags)),
        ("/api/ps", get(running)),
        ("/api/show", post(show)),
        ("/api/version", get(version)),
    ];
    for (path, why) in REFUSED {
        let refuse = move || async move {
            let error = ApiError::new(404, format!("there is no {path} here: {why}"));
            refusal(&error.code("unsupported"), ApiFamily::Ollama)
        };
        all.push((path, any(refuse)));
    }
    all
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request, ollama::chat).await
}

async fn generate(State(app): State<Arc<App>>, request: Request) -> Response {
    answer(app, request, ollama::generate).await
}

async fn version() -> Response {
    answer_json(json!({"version": VERSION}).to_string())
}

async fn tags(State(app): State<Arc<App>>) -> Response {
    let list = |()| {
        let slots = 0..app.models.slots().len();
        let models: Vec<Value> = slots.map(|slot| app.about(slot, entry)).collect();
        json!({"models": models}).to_string()
    };
    result(app.models.is_open().map(list), ApiFamily::Ollama)
}

/// Lists the models in memory, and when each is unloaded.
async fn running(State(app): State<Arc<App>>) -> Response {
    let list = |()| {
        let models = app.models.running().into_iter().map(|running| {
            let mut entry = app.about(running.slot, entry);
            entry["size"] = running.size.bytes.into();
            entry["expires_at"] = match running.left {
                None => FOREVER.into(),
                Some(left) => date(now() + left.as_secs()).into(),
            };
            entry["size_vram"] = running.size.on_gpu.into();
            entry["context_length"] = running.size.context.into();
            entry
        });
        json!({"models": models.collect::<Vec<_>>()}).to_string()
    };
    result(app.models.is_open().map(list), ApiFamily::Ollama)
}

/// Describes a model. If the server has one model, any name is accepted.
async fn show(State(app): State<Arc<App>>, request: Request) -> Response {
    let answer = async {
        let read = app.read(request, |_, _| 0).await?;
        let name = ["model", "name"].iter().find_map(|name| read.fields.get(name)?.as_str());
        let slot = app.models.choose(name)?;
        Ok(app.about(slot, shown).to_string())
    };
    result(answer.await, ApiFamily::Ollama)
}

fn shown(name: &str, facts: &ModelFacts) -> Value {
    let (family, sampling) = (&facts.family, &facts.sampling);
    let parameters = format!(
        "temperature {}\ntop_k {}\ntop_p {}\nmin_p {}\nrepeat_penalty {}",
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.repeat_penalty
    );
    json!({
        "modelfile": format!("FROM {name}"),
        "parameters": parameters,
        "template": TEMPLATE,
        "details": details(facts),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": facts.size.parameters,
            format!("{family}.context_length"): facts.context,
        },
        "capabilities": facts.capabilities,
        "modified_at": date(facts.created),
    })
}

fn entry(name: &str, facts: &ModelFacts) -> Value {
    json!({"name": name, "model": name, "modified_at": date(facts.created),
        "size": facts.size.bytes, "digest": facts.digest, "details": details(facts)})
}

fn details(facts: &ModelFacts) -> Value {
    let family = &facts.family;
    json!({"parent_model": "", "format": "gemma", "family": family, "families": [family],
        "parameter_size": format!("{:.1}M", facts.size.parameters as f64 / 1e6),
        "quantization_level": facts.quantization})
}
