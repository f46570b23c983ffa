//! The server from the view of its clients.

// Some tests are for Unix only, with their imports and helpers.
#![cfg_attr(windows, allow(unused))]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/server.rs"]
mod server;
#[path = "../common/shell.rs"]
mod shell;

mod bodies;
mod equality;
mod forms;
mod gemma4;
mod hostile;
mod hosts;
mod images;
mod llama;
mod models;
mod ollama;
mod prompt_cache;
mod scores;
mod tools;
mod wishes;
