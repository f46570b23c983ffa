//! The promises: the same text with any drafts, trees, threads and neighbours; exact rows and exact
//! sampling.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/invariance.rs"]
mod invariance;
#[path = "../common/reduced.rs"]
mod reduced;
#[path = "../common/shell.rs"]
mod shell;
#[path = "../common/toy.rs"]
mod toy;

mod assistant;
mod bundled;
mod draft_prompt;
mod drafter_invariance;
mod edges;
mod file_blocks;
mod images;
mod kv_q8;
mod linear;
mod operations;
mod policy_size;
mod prefixes;
mod prompt_cache;
mod row_exactness;
mod sampling;
mod split;
mod systems;
