//! What an answer must look like.

use crate::cli::io::text_file::read_file;
use crate::grammar::{GrammarSource, parse_schema};
use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Constrained output")]
pub struct GrammarOptions {
    /// Answer with JSON that fits a schema
    ///
    /// The answer has every key and value that the JSON Schema asks for, and no white space but one
    /// space behind `,` and `:`. A keyword that is not supported is refused, not passed over. What
    /// the schema leaves no choice about is guessed at no cost. An answer that --max-tokens cuts
    /// off before it is complete is a failure with exit code 8. The grammar describes what is
    /// generated; --prefill comes before it.
    #[arg(long, value_name = "SCHEMA|@FILE", conflicts_with_all = ["grammar", "regex"])]
    pub json_schema: Option<String>,
    /// Answer with text that follows the grammar in FILE (llguidance's variant of Lark's notation)
    #[arg(long, value_name = "FILE", conflicts_with = "regex")]
    pub grammar: Option<PathBuf>,
    /// Answer with text that matches a regular expression as a whole
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    pub regex: Option<String>,
}

impl GrammarOptions {
    /// What the options ask for, files read.
    pub fn source(&self) -> Result<Option<GrammarSource>> {
        if let Some(schema) = &self.json_schema {
            // A schema is JSON, which is hardly ever the name of a file.
            let named = Some(schema.as_str()).filter(|name| Path::new(name).is_file());
            let (text, what) = match schema.strip_prefix('@').or(named) {
                Some(file) => (read_file(file.as_ref())?, format!("--json-schema: {file}")),
                None => (schema.clone(), "--json-schema".to_owned()),
            };
            return Ok(Some(GrammarSource::JsonSchema(parse_schema(&text, &what)?)));
        }
        if let Some(file) = &self.grammar {
            return Ok(Some(GrammarSource::Lark(read_file(file)?)));
        }
        Ok(self.regex.clone().map(GrammarSource::Regex))
    }
}
