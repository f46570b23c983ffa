//! `gemma doctor`: checks whether this machine runs a model well, and prints a remedy for each
//! problem.
//!
//! A check fails if `gemma generate` with the same options would stop, and has the same exit code.
//! It warns if a run would not use all that the machine offers. Checks read a
//! [`checks::MachineFacts`], so that tests can make up machines.

mod checks;
#[cfg(test)]
mod tests;

use crate::cli::io::output::print_painted;
use crate::cli::io::ui::{Ui, page_columns, paragraph_in};
use crate::cli::options::{ModelArgs, UiOptions};
use crate::cli::settings::Typed;
use crate::cli::sizes::Sizes;
use crate::compute::cpu::isa::Isa;
use crate::error::{Kind, fault_of};
use crate::os::{machine, remedies};
use crate::runtime::devices::backends::{self, NpuSystem, backend_of};
use crate::runtime::devices::processor::default_threads;
use crate::runtime::load;
use crate::runtime::options::Device;
use crate::runtime::options::{GpuLayers, RunOptions};
use crate::runtime::placement::host::Host;
use crate::runtime::placement::predict::Speeds;
use crate::runtime::{ModelOptions, Silence, trial};
use crate::util::xdg;
use anyhow::Result;
use checks::MachineFacts;
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

const EXAMPLES: &str = "\
Examples:
  gemma doctor
  gemma doctor -m MODEL --device vulkan
  gemma doctor --json | jq '.checks[] | select(.status != \"PASS\")'";

/// Check this machine: processor, memory, GPU and its driver, NPU, cache
///
/// Prints problems that would stop or slow gemma generate, with their remedies. Without --model it
/// also prints the sizes of Gemma that fit.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// Outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Status {
    Pass,
    Warn,
    /// `generate` would stop with these options.
    Fail,
}

/// Result of a check, and a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub status: Status,
    pub found: String,
    /// Null if nothing is wrong.
    pub remedy: Option<String>,
    /// Commands of the remedy.
    pub commands: Vec<String>,
    /// Exit code of a failure.
    #[serde(skip)]
    code: u8,
}

impl Check {
    fn pass(name: &'static str, found: impl Into<String>) -> Check {
        Check {
            name,
            status: Status::Pass,
            found: found.into(),
            remedy: None,
            commands: Vec::new(),
            code: 0,
        }
    }

    fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { status: Status::Warn, remedy: Some(remedy.into()), ..Check::pass(name, found) }
    }

    /// Makes a failure. `generate` would stop with this exit code.
    fn fail(
        name: &'static str,
        kind: Kind,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Check {
        Check { status: Status::Fail, code: kind.exit_code(), ..Check::warn(name, found, remedy) }
    }

    /// Makes a failure from an error.
    fn error(name: &'static str, error: &anyhow::Error) -> Check {
        let fault = fault_of(error);
        let remedy = fault.and_then(|f| f.help.clone());
        let code = fault.map_or(1, |f| f.kind.exit_code());
        Check { status: Status::Fail, remedy, code, ..Check::pass(name, format!("{error:#}")) }
    }

    /// Turns a failure into a warning, because a run would continue without the device.
    fn only_warns(self) -> Check {
        match self.status {
            Status::Fail => Check { status: Status::Warn, code: 0, ..self },
            _ => self,
        }
    }

    fn typing<S: Into<String>>(mut self, commands: impl IntoIterator<Item = S>) -> Check {
        self.commands.extend(commands.into_iter().map(Into::into));
        self
    }
}

/// Returns whether `generate` would stop without a GPU.
fn needs_gpu(options: &ModelOptions) -> bool {
    let layers = options.run.gpu_layers;
    match options.run.device {
        Device::Cpu => false,
        Device::Vulkan(_) => layers != GpuLayers::N(0),
        Device::Auto => !matches!(layers, GpuLayers::Auto | GpuLayers::N(0)),
    }
}

/// Runs the checks on this machine and prints them.
pub fn run(options: &DoctorArgs, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    let model = options.model.settled()?;
    let machine = MachineFacts {
        root: "/".into(),
        remedies: remedies::HERE,
        processor: machine::processor_name(),
        memory: machine::memory(),
        available_memory: machine::available_memory(),
        threads: model.run.threads.unwrap_or_else(default_threads),
        arch: std::env::consts::ARCH,
        isa: model.run.isa.unwrap_or_else(Isa::detect),
        listed: backends::probe(),
        verdict: &|device| backend_of(device).diagnose(device, &Silence),
        trial: &|device| trial::run(&model.run, device, &Ui::plain()),
        npu: NpuSystem::here(),
        cache: xdg::cache(),
    };
    let checks = checks::all(&machine, &model, ui);
    // A failure already explains why no model runs.
    let wanted = model.model.is_none() && exit_code(&checks) == 0;
    let sizes = wanted.then(|| sizes(&machine, &model.run)).transpose()?;
    let columns = page_columns();
    print_painted(&match options.json {
        true => format!("{:#}\n", report(&checks, sizes.as_ref())),
        false => {
            ui.verdicts(&text(&checks, columns))
                + &sizes.map_or(String::new(), |sizes| format!("\n{}", sizes.text(columns)))
        }
    })?;
    Ok(exit_code(&checks))
}

/// Returns the sizes of Gemma that fit.
fn sizes(machine: &MachineFacts<'_>, run: &RunOptions) -> Result<Sizes> {
    let host = Host::known(run, &machine.listed, machine.available_memory);
    Sizes::of(&host, run, Speeds::new(&*load::pool(run)?, None))
}

/// Returns the exit code of the first failure.
fn exit_code(checks: &[Check]) -> u8 {
    checks.iter().find(|c| c.status == Status::Fail).map_or(0, |c| c.code)
}

fn count(checks: &[Check], status: Status) -> usize {
    checks.iter().filter(|c| c.status == status).count()
}

fn report(checks: &[Check], sizes: Option<&Sizes>) -> Value {
    let [pass, warn, fail] = [Status::Pass, Status::Warn, Status::Fail].map(|s| count(checks, s));
    json!({
        "v": 1, "version": env!("CARGO_PKG_VERSION"),
        "pass": pass, "warn": warn, "fail": fail, "exit_code": exit_code(checks),
        "checks": checks, "sizes": sizes.map(Sizes::json),
    })
}

/// Column at which findings begin.
const INDENT: usize = 20;

fn text(checks: &[Check], columns: usize) -> String {
    let mut out = String::new();
    for check in checks {
        let head = format!("{}  {}", format!("{:?}", check.status).to_uppercase(), check.name);
        out += &paragraph_in(&head, INDENT, &check.found, columns);
        if let Some(remedy) = &check.remedy {
            out += &paragraph_in("", INDENT, &format!("-> {remedy}"), columns);
        }
        check.commands.iter().for_each(|command| out += &format!("    {command}\n"));
    }
    let [warn, fail] = [Status::Warn, Status::Fail].map(|s| count(checks, s));
    let counted = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let verdict = match (fail, warn) {
        (0, 0) => "nothing would stop a run".to_owned(),
        (0, n) => format!("a run would work, with {}", counted(n, "warning")),
        (n, _) => {
            format!("a run would stop: {}, exit code {}", counted(n, "failure"), exit_code(checks))
        }
    };
    out + &format!("\n{verdict}\n")
}
