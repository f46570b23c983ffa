//! `gemma schema`: the JSON Schema of generate's JSON result.

use crate::cli::io::output::print;
use crate::cli::io::record::SCHEMA;
use crate::cli::settings::Typed;
use anyhow::Result;
use clap::Args;

#[derive(Debug, Args)]
pub struct Schema {}

/// Prints the schema.
pub fn run(_: &Schema, _: &Typed) -> Result<u8> {
    print(SCHEMA)?;
    Ok(0)
}
