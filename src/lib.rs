//! Speculative decoding for Gemma 3: cheap sources propose a tree of tokens, and the quantised
//! target checks the whole tree in one pass.
//!
//! # Floors
//! A file uses lower floors or its own room only; `tests/source/layering.rs` checks it.
//! ```text
//! 7  cli         a file or folder a command, options/ for what several take; what was typed ->
//!                options of a session; the only room that prints
//! 6  runtime     a session: models found, opened, placed and loaded, drafts, what passes cost
//! 5  decode      the scheduler: one loop for all texts; verification, text that is certain,
//!                statistics
//! 4  draft       where proposals come from
//!    quant       conversion of checkpoints
//!    eval        likelihoods of texts
//! 3  engine      one model and the timelines of its texts
//!    grammar     which tokens may follow (JSON Schema, Lark, regular expressions)
//! 2  models      what a model is: config, weights, forward pass, tokenizer, chat template;
//!                gemma3/ what only Gemma 3 has
//!    vulkan      the GPU executor
//!    npu         an executor that hands full pages of global layers to an NPU; a model of one
//! 1  checkpoint  files -> tensors
//!    compute     the list of dispatches, the CPU kernels and their scalar twins
//!    sampler     scores -> a token
//! 0  tensor      formats and codecs
//!    kv, error   pages of keys and values; faults that carry an exit code and a remedy
//!    testing     faults that tests ask for
//!    util        hexadecimal, figures, shell words, directories, files written whole
//! ```
//!
//! # The way of a token
//! text -> tokenizer -> `history` -> [`draft::Drafter::propose`] -> [`engine::TokenTree`] ->
//! [`engine::Engine::begin`] -> scores -> [`decode::verify`](decode::verify()) -> `history` (whose
//! accepted part [`engine::Timeline::adopt`] commits) -> detokenizer -> text. The loop that does
//! it, for one text or many, is [`decode::Scheduler::step`].
//!
//! # Four promises
//! 1. `history` is the only truth; every cache follows it by common prefix.
//! 2. What a row computes depends on its own token path alone, bit for bit.
//! 3. Sampling is a pure function of (seed, position, logits), and under a grammar or a penalty of
//!    the tokens before too.
//! 4. So the text is the same whatever drafter or tree proposes, at every temperature.
//!
//! # Glossary
//! What a name means that is no word of the field's, or that several fields have.
//!
//! Text and drafts:
//! - *session*: a model opened to generate text, with its tokenizer and what ends an answer;
//!   started, it has a loaded target and a drafter.
//! - *target*: the model whose text is wanted. *drafter*: anything that proposes. *partner*: a
//!   draft model that suits a target's tokenizer.
//! - *round*: one proposal, one pass of the target, one commit.
//! - *proposal*: a tree of guesses, each with the chance that its source gives it. *tree*: tokens
//!   that may follow the text, each behind its parent; its root is the newest token. *node*: a
//!   token of a tree. *chain*: a tree without branches.
//! - *source*: what names candidates for a node: a match earlier in the text, a table of pairs, a
//!   draft model. *tree builder*: the drafter that puts their candidates together. *mixer*: what
//!   makes one chance of the sources' opinions, and learns how far to trust each, by the *class* of
//!   a node's context. *prior*: the weights it begins with. *memory*: what it keeps for the next
//!   run.
//! - *policy*: how much of a proposal a pass takes. *allowance*: that, for one text and round.
//!   *loss budget*: how much slower than plain decoding drafts may ever have made a text.
//!   *back-off*: rounds before what did not pay is tried again. *outlier filter*: what keeps a
//!   measured time from being believed that something else on the machine made long.
//! - *accepted length*: tokens committed a round, the target's own included. *acceptance rate*:
//!   accepted / drafted.
//! - *c(M)*: time of a pass over M rows, divided by the time of a pass over one. *cost curve*: c(M)
//!   by M. *passes*: what is known of how long they take.
//! - *verified*: what the target said of the last round's tree.
//! - *forced*: tokens that a grammar leaves no choice about.
//! - *record*: one text of a batch, or the JSON object that is printed for one.
//!
//! Engine:
//! - *pass*: one evaluation of a model over some rows; the weights are read once.
//! - *row*: one token of a pass: a node of a tree, or a token of a prompt. *row set*: all of them,
//!   or those whose logits are wanted.
//! - *position*: index in `history`. *sequence*: the place of a text in an engine, with pages and a
//!   position of its own; a pass may have rows of several.
//! - *commit*: to keep the accepted rows' keys and values, and to forget the others'. *scratch*:
//!   where a pass writes keys and values before that.
//! - *page*: keys and values of 256 positions of a layer. *page table*: which pages of a pool a
//!   sequence consists of; full ones may be in several. *sealed* pages are full. *offloaded* pages
//!   are attended by another device, an NPU. *page partial*: softmax attention over one page, not
//!   divided yet.
//! - *prefix*: the beginning of a text whose pages are kept when its sequence ends, for others to
//!   begin with.
//! - *reduced vocabulary*: a draft model's, a part of the target's. *vocabulary map*: how each
//!   token of the target is spelt in it. *vocabulary adapter*: an engine that looks like one of the
//!   target's vocabulary.
//!
//! Computing:
//! - *executor*: a device that runs dispatches. *op*: an operation of a pass. *dispatch*: an op,
//!   its label and its layer. *plan*: the dispatches of a pass. *step buffer*: what varies from
//!   pass to pass. *bucket*: how many rows and pages recorded commands are for.
//! - *part*: where in a model something belongs: the embedding, a layer, the head. *side*: the
//!   device or the host, where a model is split between them. *placement*: which parts go where.
//! - *twin*: the plain scalar definition of a kernel, to which every fast one is held.
//! - *lowering*: from ops to kernel calls. *access*: what a call reads or writes, for barriers.
//!   *epilogue*: what the last workgroups of a call do, so that a dispatch is saved.
//! - *footprint*: what an executor takes of a device's memory. *dry run*: loading without a device,
//!   to know it. *arena*: memory of a device that is handed out in pieces. *cuts*: where its blocks
//!   end.
//! - *isa*: a set of vector instructions. *lanes*: the numbers of a vector. *tile*: 32 outputs of a
//!   packed matrix; of trellis codes, 16 rows and columns.
//!
//! Weights:
//! - *code*: how one weight is stored. *group*: weights that share a scale. *format*: a code, a
//!   group, and whether a *Hadamard* transform stands in front, which spreads outliers.
//! - *trellis*: codes whose weights are computed from overlapping windows of bits. *Viterbi*: the
//!   search for the best such bits.
//! - *artifact*: a directory that the quantiser wrote. *recipe*: which format each tensor gets.
//!   *distortion*: squared error relative to the squares. *sensitivity*: what it costs a tensor.
//!   *solver*: codes columns in turn, each answering the errors of those before. *journal*: what a
//!   conversion has done, from which it goes on.
//! - *role*: what a tensor is in a model. *synthetic*: a model of made-up weights.

pub mod checkpoint;
pub mod cli;
pub mod compute;
pub mod decode;
pub mod draft;
pub mod engine;
pub mod error;
pub mod eval;
pub mod grammar;
pub mod kv;
pub mod models;
pub mod npu;
pub mod quant;
pub mod runtime;
pub mod sampler;
pub mod tensor;
pub mod testing;
pub mod util;
pub mod vulkan;
