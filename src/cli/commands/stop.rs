//! `gemma stop`: makes a running server unload a model.

use crate::cli::options::{ServerOptions, UiOptions};
use crate::cli::settings::Typed;
use crate::error::{Fault, Kind};
use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::time::{Duration, Instant};

/// Time in which the server unloads an idle model.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);

const EXAMPLES: &str = "\
Examples:
  gemma stop gemma-3-4b-it
  gemma stop gemma-3-4b-it --url http://127.0.0.1:9000";

/// Make a running gemma serve unload a model, which frees its memory
///
/// Running answers end first. The next request for the model loads it again.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct StopArgs {
    /// Name of the model, as gemma ps shows it
    #[arg(value_name = "MODEL")]
    pub name: String,
    #[command(flatten)]
    pub server: ServerOptions,
    #[command(flatten)]
    pub ui: UiOptions,
}

pub fn run(options: &StopArgs, typed: &Typed) -> Result<u8> {
    let client = options.server.client();
    let about = client.get(&format!("/v1/models/{}", encoded(&options.name)))?;
    let name = about["id"].as_str().unwrap_or(&options.name);
    let is_loaded = || -> Result<bool> {
        let answer = client.get("/api/ps")?;
        let models = answer["models"].as_array().map_or(&[][..], |models| models);
        Ok(models.iter().any(|model| model["name"] == name))
    };
    if !is_loaded()? {
        typed.ui.note(format!("{name} is not loaded"));
        return Ok(0);
    }
    let answer = client.post("/api/generate", &json!({"model": name, "keep_alive": 0}))?;
    if answer["done_reason"] != "unload" {
        let what = format!("the server did not unload {name}: perhaps it is not gemma serve");
        return Err(Fault::new(Kind::Failure, what).into());
    }
    let begun = Instant::now();
    while is_loaded()? {
        if begun.elapsed() > PATIENCE {
            typed.ui.note(format!("{name} is unloaded once its answers have ended"));
            break;
        }
        std::thread::sleep(LOOK);
    }
    Ok(0)
}

/// Percent-encodes a name for a path.
fn encoded(name: &str) -> String {
    let byte = |byte: u8| match byte {
        b'/' | b':' | b'-' | b'.' | b'_' => char::from(byte).to_string(),
        byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    name.bytes().map(byte).collect()
}
