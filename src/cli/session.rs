//! From what was typed to an opened model, a loaded engine and a drafter.

use super::args::{AutoOr, Kv, RunOptions};
use super::devices::{default_threads, memory};
use super::driver;
use super::model::{Source, find};
use super::npu;
use super::placement::measure::Task;
use super::placement::predict::Speeds;
use super::placement::{self, Placement};
use super::ui::Ui;
use crate::checkpoint::Checkpoint;
use crate::compute::cpu::{CpuExecutor, CpuOptions, Isa, Pool};
use crate::compute::split::SplitExecutor;
use crate::compute::{Executor, KvFormat};
use crate::engine::planned::EngineOptions;
use crate::engine::{Engine, PlannedEngine};
use crate::error::{Fault, Kind, fault_of};
use crate::gemma::{Config, Role, Tokenizer, Weights};
use crate::util::units::{bytes, thousands};
use crate::vulkan::{CheckedExecutor, DeviceInfo};
use anyhow::{Context, Result};
use indicatif::ProgressBar;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// A model's files, opened and checked, nothing loaded yet.
pub struct Model {
    pub weights: Weights,
    pub name: String,
    pub bundled: bool,
}

/// Opens what `--model` names, the bundled demo model without it, and says what the user should know about it.
pub fn open(name: Option<&str>, ui: &Ui) -> Result<Model> {
    let (checkpoint, bundled) = match find(name)? {
        Source::Bundled => {
            ui.note("no --model is given: the small bundled demo model answers, which knows little and is not Gemma");
            (crate::gemma::bundled::target()?, true)
        }
        Source::Directory(path) => {
            (Checkpoint::open(&path).with_context(|| format!("cannot open the model {}", path.display()))?, false)
        }
    };
    let model = Model { name: checkpoint.name().to_owned(), weights: Weights::open(checkpoint)?, bundled };
    for note in model.weights.notes() {
        ui.note(note);
    }
    Ok(model)
}

impl Model {
    pub fn config(&self) -> &Config {
        self.weights.config()
    }

    pub fn checkpoint(&self) -> &Checkpoint {
        self.weights.checkpoint().expect("an opened model has files")
    }

    /// The model's tokenizer; an error where it has none.
    pub fn tokenizer(&self, ui: &Ui) -> Result<Tokenizer> {
        let start = Instant::now();
        let tokenizer = tokenizer_of(self.checkpoint())?;
        tokenizer.notes().iter().for_each(|note| ui.note(note));
        ui.detail(
            2,
            format!("tokenizer: {} tokens, read in {:.2} s", thousands(tokenizer.vocab() as u64), start.elapsed().as_secs_f64()),
        );
        Ok(tokenizer)
    }
}

pub fn tokenizer_of(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    let Some(file) = checkpoint.side_file("tokenizer.json")? else {
        if checkpoint.metadata().is_some() {
            let what = format!("{} holds no tokenizer", checkpoint.name());
            return Err(Fault::model(what).help("use a complete GGUF file, or give token ids where a command takes them").into());
        }
        let what = format!("{} is missing", checkpoint.display("tokenizer.json"));
        return Err(Fault::model(what).help("copy tokenizer.json from the model's page into the directory").into());
    };
    let shown = checkpoint.display("tokenizer.json");
    crate::checkpoint::check_bytes(&shown, &file)?;
    Tokenizer::from_bytes(&file).with_context(|| format!("reading {shown}"))
}

/// Bytes and parameters of a model's weights as stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    pub bytes: u64,
    pub parameters: u64,
}

impl Size {
    pub fn of(weights: &Weights) -> Result<Size> {
        let mut size = Size::default();
        for (role, layer) in weights.roles() {
            if role.is_matrix() {
                let [rows, cols] = role.shape(weights.config());
                size.bytes += weights.format(role, layer)?.bytes(rows, cols) as u64;
                size.parameters += (rows * cols) as u64;
            }
        }
        Ok(size)
    }

    pub fn bits_per_weight(self) -> f64 {
        if self.parameters == 0 { 0.0 } else { 8.0 * self.bytes as f64 / self.parameters as f64 }
    }
}

/// Positions to make room for: what was asked for, or what `needed` tokens take, as far as the model goes.
pub fn context(asked: AutoOr, needed: usize, config: &Config, ui: &Ui) -> usize {
    match asked {
        AutoOr::N(n) => {
            if n > config.max_position {
                let (n, max) = (thousands(n as u64), thousands(config.max_position as u64));
                ui.note(format!("--ctx-size {n} is more than the {max} positions that the model was trained for"));
            }
            n
        }
        AutoOr::Auto => needed.min(config.max_position).max(1),
    }
}

/// Refuses a prompt of `tokens` that leaves no room for an answer.
pub fn check_prompt(tokens: usize, at_least: bool, asked: AutoOr, config: &Config) -> Result<()> {
    let (limit, remedy) = match asked {
        AutoOr::N(n) => (n, "raise --ctx-size, or shorten the prompt"),
        AutoOr::Auto => (config.max_position, "shorten the prompt: the model's context is not longer"),
    };
    if tokens < limit {
        return Ok(());
    }
    let about = if at_least { "at least " } else { "" };
    let what =
        format!("the prompt has {about}{} tokens, and the context holds {}", thousands(tokens as u64), thousands(limit as u64));
    Err(Fault::new(Kind::Context, what).help(remedy).into())
}

/// An engine and how long it took to load.
pub struct Loaded {
    pub engine: Box<dyn Engine>,
    pub seconds: f64,
    /// The GPU that runs all layers or some.
    pub device: Option<DeviceInfo>,
}

/// The threads that everything of one run shares, in turn.
pub fn pool(options: &RunOptions) -> Result<Arc<Pool>> {
    Ok(Arc::new(Pool::new(options.threads.map_or_else(default_threads, usize::from))?))
}

/// Smaller models are there before anyone could read what a bar says.
const WORTH_A_BAR: u64 = 200_000_000;

/// Precision of the cache.
pub fn kv_format(weights: &Weights, asked: Kv) -> Result<KvFormat> {
    Ok(match asked {
        Kv::F16 => KvFormat::F16,
        Kv::F32 => KvFormat::F32,
        Kv::Q8 => KvFormat::Q8,
        Kv::Auto if weights.format(Role::Q, 0)?.code.is_integer() => KvFormat::F16,
        Kv::Auto => KvFormat::F32,
    })
}

/// Loads the weights where they fit best; under `auto`, into the next place if one fails.
pub fn load(weights: &Weights, label: &str, options: &RunOptions, context: usize, pool: &Arc<Pool>, ui: &Ui) -> Result<Loaded> {
    load_for(weights, label, options, (context, 1), pool, ui)
}

/// The same for several sequences, each with room for `context` positions.
pub fn load_for(
    weights: &Weights,
    label: &str,
    options: &RunOptions,
    (context, sequences): (usize, usize),
    pool: &Arc<Pool>,
    ui: &Ui,
) -> Result<Loaded> {
    let kv = kv_format(weights, options.kv)?;
    // The NPU knows the pages of one text.
    let npu = options.npu.is_asked() && sequences == 1;
    let task = Task { weights, context, kv, sequences, npu };
    load_task(&task, label, options, pool, ui).map_err(|error| with_remedy(error, sequences))
}

/// Fewer sequences take less.
fn with_remedy(mut error: anyhow::Error, sequences: usize) -> anyhow::Error {
    if let Some(fault) = error.downcast_mut::<Fault>().filter(|f| f.kind == Kind::Memory && sequences > 1) {
        let other = fault.help.take().map_or(String::new(), |help| format!(", or: {help}"));
        fault.help = Some(format!("lower --parallel or --ctx-size: there are {sequences} contexts{other}"));
    }
    error
}

fn load_task(task: &Task<'_>, label: &str, options: &RunOptions, pool: &Arc<Pool>, ui: &Ui) -> Result<Loaded> {
    let Task { weights, context, kv, sequences, .. } = *task;
    let size = Size::of(weights)?;
    let start = Instant::now();
    let mut candidates = placement::candidates(task, options, ui)?.into_iter().peekable();
    let (engine, device) = loop {
        let placement = candidates.next().context("there is always a place to try")?;
        if let Some(device) = &placement.device {
            super::lock::acquire(options.device_lock, &device.name, device.index, ui)?;
        }
        say_split(&placement, pool, ui);
        let worth = size.bytes >= WORTH_A_BAR;
        let bar = ui.bytes_bar(&format!("loading {label}"), if worth { weights.bytes_to_read()? } else { 0 }, worth);
        let sizes = (kv, size.bytes, context);
        let is_split = placement.device.is_some() && placement.layout.cpu.layers > 0;
        let load = || {
            place(&placement, pool, options.check, options.isa, ui)
                .and_then(|executor| match sequences {
                    1 => npu::beside(executor, options, weights.config(), sizes, is_split, ui),
                    _ => Ok(executor),
                })
                .and_then(|executor| PlannedEngine::for_sequences(weights, executor, EngineOptions { context, kv }, sequences))
        };
        let loaded = shown(&bar, weights, load);
        bar.finish_and_clear();
        match (loaded, candidates.peek()) {
            (Ok(engine), _) => break (Box::new(engine), placement.device),
            (Err(e), Some(next)) if is_the_devices(&e) => ui.note(format!("{e:#}; instead: {}", next.describe())),
            (Err(e), _) => return Err(e.context(format!("loading {label}"))),
        }
    };
    let seconds = start.elapsed().as_secs_f64();
    let memory = engine.memory();
    ui.detail(
        1,
        format!(
            "{label}: {} weights at {:.2} bits, {} kv for {}{} positions, {} other, {}, loaded in {seconds:.2} s",
            bytes(memory.weights),
            size.bits_per_weight(),
            bytes(memory.kv),
            if sequences > 1 { format!("{sequences} x ") } else { String::new() },
            thousands(context as u64),
            bytes(memory.activations),
            engine.describe()
        ),
    );
    Ok(Loaded { engine, seconds, device })
}

/// Does what `load` says while a bar shows how many bytes of the weights are read.
fn shown<T>(bar: &ProgressBar, weights: &Weights, load: impl FnOnce() -> T) -> T {
    if bar.is_hidden() {
        return load();
    }
    let (before, (done, is_done)) = (weights.bytes_read(), mpsc::channel::<()>());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while is_done.recv_timeout(Duration::from_millis(100)) == Err(mpsc::RecvTimeoutError::Timeout) {
                bar.set_position(weights.bytes_read() - before);
            }
        });
        // Ends the thread, also where loading panics.
        let _done = done;
        load()
    })
}

/// Opens what a placement needs, for exactly what it will hold.
fn place(placement: &Placement, pool: &Arc<Pool>, check: bool, isa: Option<Isa>, ui: &Ui) -> Result<Box<dyn Executor>> {
    let host = || -> Result<Box<dyn Executor>> {
        placement::check_memory(placement, memory("MemAvailable"))?;
        Ok(Box::new(CpuExecutor::on(pool.clone(), CpuOptions { check, isa, ..CpuOptions::default() })))
    };
    let Some(info) = &placement.device else { return host() };
    let mut device = driver::open(info, ui)?;
    device.expect(&placement.layout.pieces);
    let device: Box<dyn Executor> = if check { Box::new(CheckedExecutor::new(device)) } else { Box::new(device) };
    let (on_gpu, on_cpu) = (placement.layout.gpu.layers, placement.layout.cpu.layers);
    if on_cpu == 0 {
        return Ok(device);
    }
    Ok(Box::new(SplitExecutor::new(device, host()?, on_gpu as u16, (on_gpu + on_cpu) as u16)))
}

/// A split is worth a word: what it is, what it costs, and how to get it again.
fn say_split(placement: &Placement, pool: &Pool, ui: &Ui) {
    let Some(device) = placement.device.as_ref().filter(|_| placement.layout.cpu.layers > 0 && !ui.is_quiet()) else { return };
    let speeds = Speeds::new(pool, Some(device));
    ui.note(format!(
        "{}; predicted {}; --gpu-layers {} repeats this split",
        placement.describe(),
        speeds.describe(&speeds.predict(placement)),
        placement.layout.gpu.layers,
    ));
}

/// Whether another device may do better.
fn is_the_devices(error: &anyhow::Error) -> bool {
    fault_of(error).is_some_and(|fault| matches!(fault.kind, Kind::Device | Kind::Memory))
}
