//! `gemma draft-memory`: what is kept of earlier texts to draft from, and how to forget it.

use super::output::print;
use super::settings::Typed;
use crate::cli::options::UiOptions;
use crate::draft::memory::{Found, found};
use crate::error::{Fault, Kind};
use crate::runtime::options::MemoryPlace;
use crate::util::units::bytes;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Show or clear what drafting has learnt from earlier texts
///
/// It holds fragments of prompts and answers, readable by you alone, and changes how fast the next
/// texts are, never what they say. --draft-memory off keeps none in the first place.
#[derive(Debug, Args)]
pub struct DraftMemory {
    /// What to do
    #[arg(value_enum, value_name = "show|clear", default_value_t = Action::Show)]
    pub action: Action,
    /// Where it lies, if not in $XDG_STATE_HOME/gemma/draft-memory: a directory (./memory/)
    #[arg(long, value_name = "DIR", default_value = "auto", hide_default_value = true)]
    pub draft_memory: MemoryPlace,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ui: UiOptions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Action {
    /// Say what is kept
    Show,
    /// Remove it
    Clear,
}

/// What there is, or was.
#[derive(Serialize)]
struct Report {
    directory: Option<PathBuf>,
    cleared: bool,
    /// Files that hold something, one a target.
    targets: Vec<Target>,
    bytes: u64,
}

#[derive(Serialize)]
struct Target {
    file: String,
    bytes: u64,
}

pub fn run(options: &DraftMemory, typed: &Typed) -> Result<u8> {
    // A switch says whether runs learn; what they have learnt lies in one place.
    let directory = match &options.draft_memory {
        MemoryPlace::Directory(path) => Some(path.clone()),
        _ => MemoryPlace::On.directory(true),
    };
    let files = directory.as_deref().map_or(Ok(Vec::new()), of)?;
    let cleared = options.action == Action::Clear;
    if cleared {
        for file in &files {
            let what =
                || Fault::new(Kind::Failure, format!("cannot remove {}", file.path.display()));
            std::fs::remove_file(&file.path).with_context(what)?;
        }
    }
    let targets = files.iter().filter(|file| file.is_table);
    let report = Report {
        directory,
        cleared,
        bytes: targets.clone().map(|file| file.bytes).sum(),
        targets: targets
            .map(|file| Target {
                file: file.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                bytes: file.bytes,
            })
            .collect(),
    };
    if options.json {
        print(&(serde_json::to_string_pretty(&report)? + "\n"))?;
    } else {
        print(&super::ui::clean(&text(&report)))?;
        if !cleared && !report.targets.is_empty() {
            typed.ui.help("gemma draft-memory clear forgets it");
        }
    }
    Ok(0)
}

fn of(directory: &Path) -> Result<Vec<Found>> {
    found(directory)
        .with_context(|| Fault::new(Kind::Failure, format!("cannot read {}", directory.display())))
}

fn text(report: &Report) -> String {
    let Some(directory) = &report.directory else {
        return "nothing is kept: this system names no directory for it\n".into();
    };
    let (n, of) = (report.targets.len(), directory.display());
    let models = if n == 1 { "model" } else { "models" };
    match (n, report.cleared) {
        (0, _) => format!("nothing is kept in {of}\n"),
        (_, true) => {
            format!("removed what was learnt of {n} {models}, {}, from {of}\n", bytes(report.bytes))
        }
        (_, false) => {
            let line = |t: &Target| format!("  {:<40} {}\n", t.file, bytes(t.bytes));
            let lines: String = report.targets.iter().map(line).collect();
            format!("{of} holds what was learnt of {n} {models}, {}:\n{lines}", bytes(report.bytes))
        }
    }
}
