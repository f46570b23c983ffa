//! The APIs of OpenAI, Anthropic, Ollama and llama-server: JSON to requests for the engine, and
//! answers to JSON.
//!
//! [`request`] has the request that all forms are parsed into, [`form`] the trait that writes
//! answers. This module does no networking. The server and `generate --batch` use it.

pub mod answer;
pub mod anthropic;
mod conversation;
mod echo;
pub mod error;
pub mod fields;
pub mod form;
mod functions;
pub mod ids;
pub mod keep_alive;
pub mod llama;
mod log_probs;
pub mod notes;
pub mod ollama;
pub mod openai;
pub mod request;
pub mod responses;
mod sampling;
pub mod served;
pub mod tokens;
mod tools;
