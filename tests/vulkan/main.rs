//! The GPU. Without a Vulkan driver at build time these tests are ignored.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/invariance.rs"]
mod invariance;

mod addresses;
mod check;
mod coding;
mod device;
mod drafts;
mod driver;
mod experts;
mod failures;
mod images;
mod listing;
mod load;
mod order;
mod pieces;
mod poison;
mod rows;
mod towers;
mod twins;
