//! `gemma ps`: the models that a running server has loaded.

use crate::cli::io::output::print;
use crate::cli::io::table::markdown;
use crate::cli::io::ui::clean;
use crate::cli::options::{ServerOptions, UiOptions};
use crate::cli::settings::Typed;
use crate::util::units::bytes;
use anyhow::Result;
use clap::Args;
use serde_json::Value;

const EXAMPLES: &str = "\
Examples:
  gemma ps
  gemma ps --url http://127.0.0.1:9000 --json | jq '.models[].name'";

/// Show the models that a running gemma serve has loaded, and until when
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct PsArgs {
    #[command(flatten)]
    pub server: ServerOptions,
    /// Print the server's answer: one JSON object in the form of Ollama's /api/ps
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ui: UiOptions,
}

pub fn run(options: &PsArgs, _: &Typed) -> Result<u8> {
    let answer = options.server.client().get("/api/ps")?;
    if options.json {
        print(&format!("{answer:#}\n"))?;
        return Ok(0);
    }
    let models = answer["models"].as_array().map_or(&[][..], |models| models);
    print(&match models {
        [] => "No model is loaded.\n".to_owned(),
        models => {
            let head = ["model", "size", "processor", "context", "loaded until"];
            let mut rows = vec![head.map(str::to_owned).to_vec()];
            rows.extend(models.iter().map(row));
            markdown(&rows)
        }
    })?;
    Ok(0)
}

fn row(model: &Value) -> Vec<String> {
    let number = |name: &str| model[name].as_u64().unwrap_or(0);
    let (size, on_gpu) = (number("size"), number("size_vram"));
    let processor = match (on_gpu, size) {
        (0, _) => "CPU".to_owned(),
        (on_gpu, size) if on_gpu >= size => "GPU".to_owned(),
        (on_gpu, size) => format!("{:.0} % GPU", 100.0 * on_gpu as f64 / size as f64),
    };
    let until = model["expires_at"].as_str().unwrap_or_default();
    let until = if until.starts_with("9999") { "for ever" } else { until };
    let context = number("context_length").to_string();
    let name = clean(model["name"].as_str().unwrap_or_default());
    vec![name, bytes(size), processor, context, clean(until)]
}
