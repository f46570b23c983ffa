//! Parsing of request bodies without a server, for fuzzing.

use super::pool::Client;
use super::queue::Delivery;
use crate::cli::api::fields::Fields;
use crate::cli::api::notes::Notes;
use crate::cli::api::served::{ServedModel, Thinking};
use crate::cli::api::{anthropic, llama, ollama, openai, responses, tokens};
use crate::error::Fault;
use crate::models::{ChatTemplate, Config, Tokenizer};
use crate::runtime::constraints::Constraints;
use crate::runtime::model::Size;
use crate::runtime::options::AutoOr;
use crate::sampler::SamplerConfig;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::channel;

/// A parser of request bodies.
pub struct RequestBodies {
    served: Arc<ServedModel>,
    notes: Arc<Notes>,
}

impl RequestBodies {
    /// Makes a parser for a model with this configuration and tokenizer.
    pub fn new(config: Config, tokenizer: Arc<Tokenizer>) -> RequestBodies {
        let served = ServedModel {
            name: "fuzzed".into(),
            created: 0,
            fingerprint: String::new(),
            template: ChatTemplate::built_in(tokenizer.dialect()),
            size: Size::default(),
            stop_ids: config.eos.clone(),
            context: config.max_position,
            constraints: Constraints::new(&tokenizer, &config.eos, 1).into(),
            sampling: SamplerConfig::default(),
            max_tokens: AutoOr::Auto,
            thinking: Thinking::default(),
            viewer: Err(Fault::model("no images are read here")),
            tokenizer,
            config,
        };
        let notes = Arc::new(Notes::new(|_| ()));
        RequestBodies { served: Arc::new(served), notes }
    }

    /// Number of the forms of bodies.
    pub const FORMS: u8 = 10;

    /// Parses a body in one of the API forms, including its tokens and its grammar.
    pub fn read(&self, form: u8, body: &[u8]) {
        let Ok(fields) = Fields::parse(body, &self.notes) else { return };
        let request = match form % Self::FORMS {
            0 => openai::chat(fields, &self.served).map(|(request, _)| request),
            1 => openai::completions(fields, &self.served).map(|(request, _)| request),
            2 => responses::body(fields, &self.served).map(|(request, _)| request),
            3 => anthropic::messages_body(fields, &self.served).map(|(request, _)| request),
            4 => ollama::chat(fields, &self.served).map(|(request, _)| request),
            5 => ollama::generate(fields, &self.served).map(|(request, _)| request),
            9 => llama::completion(fields, &self.served).map(|(request, _)| request),
            6 => {
                let prompt = anthropic::count_body(fields, &self.served);
                return drop(prompt.map(|prompt| prompt.encoded(&self.served).is_ok()));
            }
            7 => return drop(tokens::tokenize(fields, &self.served)),
            _ => return drop(tokens::detokenize(fields, &self.served)),
        };
        if let Ok(mut request) = request {
            let client = Client::at(IpAddr::V4(Ipv4Addr::LOCALHOST));
            let delivery = |choice| Delivery::new(client, choice, channel(1).0, Instant::now());
            let _ = request.prepared(&self.served, &delivery);
        }
    }
}
