//! Speculative decoding for Gemma 3 and 4: cheap sources propose a tree of tokens, and the
//! quantised target verifies the whole tree in one pass.
//!
//! # Crates, rooms and floors
//! This crate is the program; those in `crates/` are its libraries, and all their rooms can be
//! named from here. A file uses only lower floors or its own room. The compiler holds the floors of
//! crates, and `tests/source/layering.rs` those of rooms.
//! ```text
//! gemma    9  cli         commands/ has a file or folder for each command, options/ the options
//!                         that several take, io/ what they read and write; the only room that
//!                         prints
//! runtime  8  runtime     a session: models found, opened, placed and loaded, drafts, what passes
//!                         cost
//!          7  decode      the scheduler: one loop for all texts; verification, text that is
//!                         certain, statistics
//!          6  draft       where proposals come from
//!          5  grammar     which tokens may follow (JSON Schema, Lark, regular expressions)
//! quant    6  quant       conversion of checkpoints
//! vulkan   4  vulkan      the GPU executor
//! npu      4  npu         an executor that hands full pages of global layers to an NPU; a model of
//!                         one
//! model    6  eval        likelihoods of texts
//!          5  engine      one model and the timelines of its texts
//!             vision      images: pictures -> soft tokens, which stand in a text as embeddings do
//!          4  models      what a model is: config, weights, forward pass, tokenizer, template;
//!                         gemma3/ and gemma4/ what only one of them has
//!          3  checkpoint  files -> tensors
//!             sampler     scores -> a token
//! base     3  compute     the list of dispatches, the CPU kernels and their scalar twins
//!          2  util        child processes, figures, shell words, directories, files written whole
//!          1  os          the operating system, in functions that every system can offer
//!          0  tensor      formats and codecs
//!             kv, error   pages of keys and values; faults that carry an exit code and a remedy
//!             testing     faults that tests ask for
//! ```
//!
//! # The way of a token
//! text -> tokenizer -> `history` -> [`draft::Drafter::propose`] -> [`engine::TokenTree`] ->
//! [`engine::Engine::begin`] -> scores -> [`decode::verify`](decode::verify()) -> `history` (whose
//! accepted part [`engine::Timeline::adopt`] commits) -> detokenizer -> text. The loop that does
//! it, for one text or many, is [`decode::Scheduler::step`].
//!
//! # Four promises
//! 1. `history` is the only truth. Every cache follows it by common prefix.
//! 2. The result of a row depends on its own token path and on the images that the path names,
//!    bit for bit.
//! 3. Sampling is a pure function of (seed, position, logits), and under a grammar or a penalty
//!    also of the earlier tokens.
//! 4. The text is therefore the same with any drafter and any tree, at every temperature.
//!
//! The terms are explained in `docs/GLOSSARY.md`.

pub mod cli;

pub use gemma_base::{compute, error, kv, os, tensor, testing, util};
pub use gemma_model::{checkpoint, engine, eval, models, sampler, vision};
pub use gemma_npu as npu;
pub use gemma_quant as quant;
pub use gemma_runtime::{decode, draft, grammar, runtime};
pub use gemma_vulkan as vulkan;
