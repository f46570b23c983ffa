//! `gemma doctor`: what stands between this machine and a good run, each with what to type.
//!
//! The verdict on a machine is what `generate` with the same options would do there: FAIL where it
//! would stop, with its exit code; WARN where it would run with less than the machine has; PASS
//! otherwise. Checks ask through [`Machine`], so that tests can play any machine.

mod gpu;
mod host;
mod kernels;
mod npu;
mod system;
#[cfg(test)]
mod tests;

use crate::cli::io::output::print_painted;
use crate::cli::io::ui::{Ui, command, page_columns, paragraph_in};
use crate::cli::options::{ModelArgs, UiOptions};
use crate::cli::settings::Typed;
use crate::cli::sizes::Sizes;
use crate::error::{Kind, fault_of};
use crate::runtime::load;
use crate::runtime::options::Device;
use crate::runtime::options::{GpuLayers, RunOptions};
use crate::runtime::placement::host::Host;
use crate::runtime::placement::predict::Speeds;
use crate::runtime::{Model, ModelOptions, Size};
use crate::util::units::bytes;
use anyhow::Result;
use clap::Args;
use host::{Here, Machine};
use serde::Serialize;
use serde_json::{Value, json};

/// Check this machine: drivers, devices, permissions, memory, power
///
/// Says what would stop or slow gemma generate, and what to type about it; without --model also
/// which sizes of Gemma 3 fit.
#[derive(Debug, Args)]
pub struct Doctor {
    /// One JSON object instead of text
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
    /// `generate` with these options would stop.
    Fail,
}

/// A finding, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub status: Status,
    pub found: String,
    /// Null where all is well.
    pub remedy: Option<String>,
    /// What to type for that, line by line.
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

    /// Makes a failure that `generate` would stop with.
    fn fail(
        name: &'static str,
        kind: Kind,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Check {
        Check { status: Status::Fail, code: kind.exit_code(), ..Check::warn(name, found, remedy) }
    }

    /// Makes a failure of an error.
    fn error(name: &'static str, error: &anyhow::Error) -> Check {
        let fault = fault_of(error);
        let remedy = fault.and_then(|f| f.help.clone());
        let code = fault.map_or(1, |f| f.kind.exit_code());
        Check { status: Status::Fail, remedy, code, ..Check::pass(name, format!("{error:#}")) }
    }

    /// Turns a failure into a warning: something else takes its place and the run goes on.
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

pub fn run(options: &Doctor, typed: &Typed) -> Result<u8> {
    let ui = &typed.ui;
    let model = options.model.settled()?;
    let machine = Here::new(&model.run);
    let found = machine.vulkan();
    let checks = examine(&machine, &model, &found, ui);
    // Where a run would stop, nothing fits, and the failure says why.
    let wanted = model.model.is_none() && exit_code(&checks) == 0;
    let sizes = wanted.then(|| sizes(&machine, &model.run, &found)).transpose()?;
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

/// Returns the sizes of Gemma 3 that fit.
fn sizes(machine: &dyn Machine, run: &RunOptions, found: &host::Found) -> Result<Sizes> {
    let host = Host::known(run, found, machine.memory("MemAvailable"));
    Sizes::of(&host, run, Speeds::new(&*load::pool(run)?, None))
}

/// Returns every check, in the order of a run.
fn examine(
    machine: &dyn Machine,
    asked: &ModelOptions,
    found: &host::Found,
    ui: &Ui,
) -> Vec<Check> {
    let mut checks = vec![kernels::processor(machine)];
    checks.push(system::memory(machine));
    checks.extend(gpu::checks(machine, asked, found));
    checks.extend(kernels::trials(machine, asked, found));
    checks.push(npu::check(machine, asked));
    checks.extend(system::power(machine));
    checks.push(system::cache(machine));
    if asked.model.is_some() {
        checks.push(model(machine, asked, found, ui));
    }
    checks
}

/// Checks that the model that was named opens, has a tokenizer, and fits.
fn model(machine: &dyn Machine, asked: &ModelOptions, found: &host::Found, ui: &Ui) -> Check {
    let judge = || -> Result<Check> {
        let model = Model::open(asked.model.as_deref(), ui)?;
        model.tokenizer(ui)?;
        let (run, size) = (&asked.run, Size::of(&model.weights)?);
        let context = load::context(run.context, 4096, model.config(), ui);
        let available = machine.memory("MemAvailable");
        let check = gpu::fits(&model.weights, context, run, found, available, ui)?;
        let (name, size, bits) = (&model.name, bytes(size.bytes), size.bits_per_weight());
        let found = format!("{name}, {size} at {bits:.2} bits per weight: {}", check.found);
        Ok(Check { found, ..check })
    };
    judge().unwrap_or_else(|e| Check::error("model", &e))
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
        "v": 1, "version": env!("CARGO_PKG_VERSION"), "pass": pass, "warn": warn, "fail": fail, "exit_code": exit_code(checks),
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
        check.commands.iter().for_each(|typed| out += &command(INDENT, typed, columns));
    }
    let [warn, fail] = [Status::Warn, Status::Fail].map(|s| count(checks, s));
    let counted = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let verdict = match (fail, warn) {
        (0, 0) => "nothing stands in the way of a run".to_owned(),
        (0, n) => format!("a run would work, with {}", counted(n, "warning")),
        (n, _) => {
            format!("a run would stop: {}, exit code {}", counted(n, "failure"), exit_code(checks))
        }
    };
    out + &format!("\n{verdict}\n")
}
