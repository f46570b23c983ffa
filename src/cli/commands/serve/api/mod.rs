//! The APIs of OpenAI and Anthropic: from JSON to requests for the engine, and answers to JSON.
//!
//! [`request`] has the request that all forms are parsed into, [`form`] the trait by which answers
//! are written. Nothing here knows a connection.

pub mod anthropic;
mod conversation;
mod echo;
pub mod error;
pub mod fields;
pub mod form;
mod functions;
mod log_probs;
pub mod ollama;
pub mod openai;
pub mod request;
pub mod responses;
mod sampling;
pub mod tokens;
mod tools;
