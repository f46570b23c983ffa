//! Options of constrained output.

use crate::cli::io::text_file::read_file;
use crate::grammar::{GrammarSource, parse_schema};
use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct GrammarOptions {
    /// Generate JSON that matches a JSON Schema
    ///
    /// The answer has no white space except one space after `,` and `:`. An unsupported keyword is
    /// an error. Tokens without an alternative are drafted at no cost. An answer that --max-tokens
    /// cuts off is a failure with exit code 8. The schema describes the generated text; --prefill
    /// comes before it.
    #[arg(long, value_name = "SCHEMA|@FILE", conflicts_with_all = ["grammar", "regex"])]
    pub json_schema: Option<String>,
    /// Generate text that follows a grammar (Lark notation as llguidance reads it)
    #[arg(long, value_name = "FILE", conflicts_with = "regex", hide_short_help = true)]
    pub grammar: Option<PathBuf>,
    /// Generate text that matches a regular expression as a whole
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true, hide_short_help = true)]
    pub regex: Option<String>,
}

impl GrammarOptions {
    /// Returns the grammar that the options name. Reads its file.
    pub fn source(&self) -> Result<Option<GrammarSource>> {
        if let Some(schema) = &self.json_schema {
            // A schema is JSON, which is hardly ever the name of an existing file.
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
