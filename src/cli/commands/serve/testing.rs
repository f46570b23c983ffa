//! The server's requests without a server: for who makes up bodies by the million.

use super::ask::{Sender, Served};
use super::fields::Fields;
use super::shares::Client;
use super::{anthropic, openai, responses};
use crate::models::{ChatTemplate, Config, Tokenizer};
use crate::runtime::constraints::Constraints;
use crate::runtime::options::AutoOr;
use crate::sampler::SamplerConfig;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::channel;

/// What reads bodies.
pub struct Bodies(Arc<Served>);

impl Bodies {
    /// For a model of this configuration and tokenizer.
    pub fn new(config: Config, tokenizer: Arc<Tokenizer>) -> Bodies {
        Bodies(Arc::new(Served {
            name: "fuzzed".into(),
            aliases: vec!["*".into()],
            created: 0,
            fingerprint: String::new(),
            template: ChatTemplate::built_in(),
            stop_ids: config.eos.clone(),
            context: config.max_position,
            constraints: Constraints::new(&tokenizer, &config.eos, 1),
            sampling: SamplerConfig::default(),
            max_tokens: AutoOr::Auto,
            tokenizer,
            config,
        }))
    }

    /// Reads a body of one of the forms, down to the tokens and the grammar that it asks for.
    pub fn read(&self, form: u8, body: &[u8]) {
        let Ok(fields) = Fields::parse(body) else { return };
        let asked = match form % 5 {
            0 => openai::chat(fields, &self.0).map(|(asked, _)| asked),
            1 => openai::completions(fields, &self.0).map(|(asked, _)| asked),
            2 => responses::body(fields, &self.0).map(|(asked, _)| asked),
            3 => anthropic::messages_body(fields, &self.0).map(|(asked, _)| asked),
            _ => return drop(anthropic::count_body(fields, &self.0)),
        };
        if let Ok(asked) = asked {
            let client = Client::at(IpAddr::V4(Ipv4Addr::LOCALHOST));
            let from = Sender { client, events: channel(1).0, asked: Instant::now() };
            let compile = |source| self.0.constraints.get(&source, asked.ignore_eos, &|| true);
            let grammar = asked.source().and_then(|source| source.map(compile).transpose());
            if let Ok(grammar) = grammar {
                let _ = asked.jobs(&self.0, grammar, &from);
            }
        }
    }
}
