//! Ollama's endpoints: its answers, what it tells of the model, and what this server does not do.

use super::response::{answer_json, refusal};
use super::{App, answer, result};
use crate::cli::api::error::{ApiError, ApiFamily};
use crate::cli::api::ids::date;
use crate::cli::api::ollama;
use crate::cli::api::served::ServedModel;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{MethodRouter, any, get, post};
use serde_json::{Value, json};
use std::sync::Arc;

/// Version of Ollama whose requests are known. Some clients ask for a recent one.
const VERSION: &str = "0.13.4";

/// Parts of a prompt in the notation of Ollama's templates, where clients look for tools. The
/// model's own template writes the prompt.
const TEMPLATE: &str = "{{ .System }}{{ .Tools }}{{ .Messages }}";

const NO_EMBEDDINGS: &str = "this server gives no embeddings, so use another one for them";
const ONE_MODEL: &str = "this server has one model and changes none";

/// Paths of Ollama that are refused, and the reasons.
const REFUSED: [(&str, &str); 8] = [
    ("/api/embed", NO_EMBEDDINGS),
    ("/api/embeddings", NO_EMBEDDINGS),
    ("/api/pull", ONE_MODEL),
    ("/api/push", ONE_MODEL),
    ("/api/create", ONE_MODEL),
    ("/api/copy", ONE_MODEL),
    ("/api/delete", ONE_MODEL),
    ("/api/blobs/{digest}", ONE_MODEL),
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
    tell(&app, |served| json!({"models": [entry(served)]}))
}

/// Lists the model as loaded for good.
async fn running(State(app): State<Arc<App>>) -> Response {
    tell(&app, |served| {
        let mut entry = entry(served);
        entry["expires_at"] = "9999-12-31T23:59:59Z".into();
        entry["size_vram"] = served.size.bytes.into();
        entry["context_length"] = served.context.into();
        json!({"models": [entry]})
    })
}

/// Describes the model under any name: any name is answered.
async fn show(State(app): State<Arc<App>>) -> Response {
    tell(&app, |served| {
        let family = family(served);
        let mut capabilities = vec!["completion", "tools"];
        capabilities.extend(served.tokenizer.channel().map(|_| "thinking"));
        capabilities.extend(served.viewer.is_ok().then_some("vision"));
        let sampling = &served.sampling;
        let parameters = format!(
            "temperature {}\ntop_k {}\ntop_p {}\nmin_p {}\nrepeat_penalty {}",
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repeat_penalty
        );
        json!({
            "modelfile": format!("FROM {}", served.name),
            "parameters": parameters,
            "template": TEMPLATE,
            "details": details(served),
            "model_info": {
                "general.architecture": family,
                "general.basename": served.name,
                "general.parameter_count": served.size.parameters,
                format!("{family}.context_length"): served.context,
            },
            "capabilities": capabilities,
            "modified_at": date(served.created),
        })
    })
}

fn tell(app: &App, object: impl Fn(&ServedModel) -> Value) -> Response {
    result(app.served().map(|served| object(served).to_string()), ApiFamily::Ollama)
}

fn entry(served: &ServedModel) -> Value {
    json!({"name": served.name, "model": served.name, "modified_at": date(served.created),
        "size": served.size.bytes, "digest": served.fingerprint, "details": details(served)})
}

fn details(served: &ServedModel) -> Value {
    let family = family(served);
    let bits = served.size.bits_per_weight();
    json!({"parent_model": "", "format": "gemma", "family": family, "families": [family],
        "parameter_size": format!("{:.1}M", served.size.parameters as f64 / 1e6),
        "quantization_level": format!("{bits:.1} bits")})
}

/// Returns the name of the architecture as Ollama spells it, such as `gemma3`.
fn family(served: &ServedModel) -> String {
    served.config.architecture.name().to_lowercase().replace(' ', "")
}
