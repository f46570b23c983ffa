//! Speculative decoding for Gemma 3 and 4: cheap sources propose a tree of tokens, and the
//! quantised target verifies the whole tree in one pass.
//!
//! # Crates, folders and floors This crate is the program; those in `crates/` are its libraries,
//! and this crate re-exports all their modules. A file uses only lower floors or its own folder.
//! The compiler holds the floors of crates, and `tests/source/layering.rs` those of folders.
//! ```text
//! gemma    9  cli         commands/ has a file or folder for each command, options/ the options
//!                         that several take, io/ what they read and write; no other folder
//!                         prints
//! runtime  8  runtime     a session: finds, opens, places and loads models, sets up drafts,
//!                         remembers the measured times of passes
//!          7  decode      the scheduler: one loop for all texts; verification, the part of a text
//!                         that can no longer change, statistics
//!          6  draft       sources of drafts, their mixer and the policy
//!          5  grammar     which tokens may follow (JSON Schema, Lark, regular expressions)
//! quant    6  quant       quantisation of checkpoints
//! vulkan   4  vulkan      the GPU executor
//! npu      4  npu         an executor that sends full pages of global layers to an NPU; a software
//!                         model of an NPU
//! model    6  eval        likelihoods of texts
//!          5  engine      one model and the timelines of its texts
//!             vision      images: pictures -> soft tokens, embeddings that take a token's place
//!          4  models      a model's config, weights, forward pass, tokenizer and template;
//!                         gemma3/ and gemma4/ hold the parts of one architecture
//!          3  checkpoint  files -> tensors
//!             sampler     scores -> a token
//! base     3  compute     the list of dispatches, the CPU kernels and their scalar twins
//!          2  util        child processes, figures, shell words, directories, files written whole
//!          1  os          the operating system, in functions that every system can offer
//!          0  tensor      formats and codecs
//!             kv, error   pages of keys and values; faults that carry an exit code and a remedy
//!             testing     faults that tests inject
//! ```
//!
//! # The path of a token text -> tokenizer -> `history` -> [`draft::Drafter::propose`] ->
//! [`engine::TokenTree`] -> [`engine::Engine::begin`] -> scores ->
//! [`decode::verify`](decode::verify()) -> `history` -> detokenizer -> text.
//! [`engine::Timeline::adopt`] commits the accepted part of `history`. [`decode::Scheduler::step`]
//! is the loop that does all this, for one text or many.
//!
//! # Four promises
//! 1. `history` is the only source of truth. Every cache follows it by common prefix.
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
