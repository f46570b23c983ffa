//! `gemma quantize`: a checkpoint of floats to a packed artifact.

use super::args::UiOptions;
use super::devices::default_threads;
use super::output::print;
use super::signals::Interrupt;
use super::ui::{Ui, bytes, thousands};
use super::{model, session};
use crate::checkpoint::Checkpoint;
use crate::error::Fault;
use crate::gemma::Weights;
use crate::quant::{self, Layout, Options, Recipe};
use crate::tensor::Format;
use anyhow::{Context, Result};
use clap::Args;
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Debug, Args)]
pub struct Quantize {
    /// Model directory or id, with bf16, f16 or f32 weights
    #[arg(value_name = "SRC")]
    pub source: String,
    /// Directory to make; it appears complete or not at all
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// Format of the linear layers: bf16, i8-row, i4-row, i4-g32, i2-g128, ...; +h128 puts a Hadamard in front
    #[arg(long, value_name = "FORMAT", default_value = "i4-g32", value_parser = format)]
    pub linear: Format,
    /// Format of the embedding table and the output head
    #[arg(long, value_name = "FORMAT", default_value = "i8-row", value_parser = format)]
    pub embedding: Format,
    /// Print what would be written, to the byte, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// CPU threads [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    #[command(flatten)]
    pub ui: UiOptions,
}

fn format(text: &str) -> Result<Format, String> {
    text.parse().map_err(|e: anyhow::Error| e.to_string())
}

pub fn run(options: &Quantize, ui: &Ui) -> Result<u8> {
    let model::Source::Directory(path) = model::find(Some(&options.source))? else {
        return Err(Fault::usage("quantize needs a source directory").into());
    };
    let source = Weights::open(Checkpoint::open(&path).with_context(|| format!("cannot open the model {}", path.display()))?)?;
    source.notes().iter().for_each(|note| ui.note(note));
    let recipe = Recipe { linear: options.linear, embedding: options.embedding };
    let threads = options.threads.map_or_else(default_threads, usize::from);
    let how = Options { threads, ..Options::default() };
    if options.dry_run {
        print(&plan(&Layout::new(&source, &recipe, how.shard_bytes)?)?)?;
        return Ok(0);
    }
    let size = session::Size::of(&source)?;
    let start = Instant::now();
    let bar = ui.bar("quantising", size.parameters);
    let interrupt = Interrupt::watch()?;
    let result = quant::quantize(&source, &options.destination, &recipe, &how, &mut |p| {
        bar.set_position(p.done);
        bar.set_message(p.tensor.to_owned());
        // An error makes the quantiser remove what it wrote.
        anyhow::ensure!(interrupt.exit_code().is_none(), "interrupted");
        Ok(())
    });
    bar.finish_and_clear();
    if let (Err(_), Some(code)) = (&result, interrupt.exit_code()) {
        return Ok(code);
    }
    let report = result?;
    if !ui.is_quiet() {
        ui.line(&format!(
            "{} parameters at {:.2} bits: {} in {}, {:.1} minutes",
            thousands(report.parameters),
            report.bits_per_weight,
            bytes(report.bytes),
            options.destination.display(),
            start.elapsed().as_secs_f64() / 60.0
        ));
    }
    Ok(0)
}

/// Bytes by kind of tensor.
fn plan(layout: &Layout) -> Result<String> {
    let mut out = String::from("| tensors | format | bytes |\n|---|---|---:|\n");
    for (role, format, bytes) in layout.by_role() {
        let format = format.map_or("f32".to_owned(), |f| f.to_string());
        writeln!(out, "| {role:?} | {format} | {} |", thousands(bytes))?;
    }
    let bits = 8.0 * layout.bytes() as f64 / layout.parameters() as f64;
    writeln!(out, "| all | {bits:.3} bits per weight | {} |", thousands(layout.bytes()))?;
    Ok(out)
}
