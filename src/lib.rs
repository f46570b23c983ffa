//! Speculative decoding for Gemma 3: a small draft proposes a tree of tokens, the quantised target checks it in one pass.
//!
//! # Floors (a file uses lower floors, or its own room; `tests/layering.rs` checks it)
//! ```text
//! 6  cli         what was typed -> a validated setup; the only room that prints
//! 5  decode      the loop, verification, statistics
//! 4  draft       where proposals come from     quant  offline conversion     eval  likelihoods
//! 3  engine      one model and the timelines of its texts    grammar  which tokens may follow (JSON Schema, Lark, regular expressions)
//! 2  gemma       what Gemma 3 is: config, weights, forward pass, tokenizer, chat     vulkan  the GPU executor
//!    npu         an executor that hands sealed pages of global layers to the NPU, and a model of the device
//! 1  checkpoint  files -> tensors              compute  dispatch list, kernels and their scalar twins    sampler
//! 0  tensor      formats and codecs            kv, error
//! ```
//!
//! # The way of a token
//! text -> tokenizer -> `history` -> [`draft::Drafter::propose`] -> [`engine::TokenTree`] -> [`engine::Engine::forward`] ->
//! scores -> [`decode::verify`](decode::verify()) -> `history` (whose accepted part the next [`engine::Timeline::sync`] commits)
//! -> detokenizer -> text.
//!
//! # Four promises
//! 1. `history` is the only truth; every cache follows it by common prefix.
//! 2. What a row computes depends on its own token path alone, bit for bit.
//! 3. Sampling is a pure function of (seed, position, logits), and under a grammar or penalty of the tokens before.
//! 4. So the text is the same whatever drafter or tree proposes, at every temperature.
//!
//! # Glossary
//! *target*: the model whose text is wanted. *drafter*: anything that proposes. *round*: one proposal, one pass, one commit.
//! *accepted length*: tokens committed per round, the target's own included. *acceptance rate*: accepted / drafted.
//! *c(M)*: time of a pass over M rows divided by that of one row. *position*: index in `history`. *sequence*: the place of a text in an
//! engine, with pages and a position of its own; a pass may have rows of several.

pub mod checkpoint;
pub mod cli;
pub mod compute;
pub mod decode;
pub mod draft;
pub mod engine;
pub mod error;
pub mod eval;
pub mod gemma;
pub mod grammar;
pub mod kv;
pub mod npu;
pub mod quant;
pub mod sampler;
pub mod tensor;
pub mod vulkan;
