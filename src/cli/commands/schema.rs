//! `gemma schema`: the JSON Schema of generate's JSON result.

use crate::cli::io::output::print;
use crate::cli::io::record::SCHEMA;
use crate::cli::settings::Typed;
use anyhow::Result;
use clap::Args;

const EXAMPLES: &str = "\
Examples:
  gemma schema >result.schema.json
  gemma schema | jq '.properties | keys'";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct SchemaArgs {}

/// Prints the schema.
pub fn run(_: &SchemaArgs, _: &Typed) -> Result<u8> {
    print(SCHEMA)?;
    Ok(0)
}
