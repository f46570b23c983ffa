//! Loads opened weights into an engine, at the best place where they fit.

use crate::runtime::devices::backends::backend_of;
use crate::runtime::devices::lock;
use crate::runtime::devices::npu;
use crate::runtime::devices::processor::default_threads;
use crate::runtime::model::Size;
use crate::runtime::options::{AutoOr, Kv, RunOptions};
use crate::runtime::placement::measure::{Need, Task};
use crate::runtime::placement::predict::Speeds;
use crate::runtime::placement::{self, Placement};
use crate::runtime::{Listener, LoadingBar};
use anyhow::{Context, Result};
use gemma_base::compute::cpu::{CpuExecutor, CpuOptions, Isa, Pool};
use gemma_base::compute::split::SplitExecutor;
use gemma_base::compute::{DeviceInfo, Executor, KvFormat};
use gemma_base::error::{Fault, Kind, fault_of};
use gemma_base::util::threads;
use gemma_base::util::units::{bytes, thousands};
use gemma_model::engine::planned::EngineOptions;
use gemma_model::engine::{Engine, PlannedEngine};
use gemma_model::models::{Config, Role, Weights};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Returns the number of positions per sequence: the requested number, or enough for `needed`
/// tokens, at most the model's maximum.
pub fn context(option: AutoOr, needed: usize, config: &Config, listener: &dyn Listener) -> usize {
    match option {
        AutoOr::N(n) => {
            if n > config.max_position {
                let (n, max) = (thousands(n as u64), thousands(config.max_position as u64));
                listener.note(&format!(
                    "--ctx-size {n} is more than the {max} positions that the model was trained for"
                ));
            }
            n
        }
        AutoOr::Auto => needed.min(config.max_position).max(1),
    }
}

/// Fails for a prompt of `tokens` that leaves no room for an answer.
pub fn check_prompt(tokens: usize, at_least: bool, option: AutoOr, config: &Config) -> Result<()> {
    let (limit, remedy) = match option {
        AutoOr::N(n) => (n, "raise --ctx-size, or shorten the prompt"),
        AutoOr::Auto => {
            (config.max_position, "shorten the prompt: the model's context is not longer")
        }
    };
    if tokens < limit {
        return Ok(());
    }
    let about = if at_least { "at least " } else { "" };
    let what = format!(
        "the prompt has {about}{} tokens, and the context holds {}",
        thousands(tokens as u64),
        thousands(limit as u64)
    );
    Err(Fault::new(Kind::Context, what).help(remedy).into())
}

/// Capacity of an engine: positions, sequences and prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Positions of each sequence.
    pub context: usize,
    pub sequences: usize,
    /// Bytes for prefixes that outlive their sequences, in addition to unused pages.
    pub prefixes: u64,
}

impl Room {
    /// Returns the room for one text.
    pub fn of(context: usize) -> Room {
        Room { context, sequences: 1, prefixes: 0 }
    }
}

/// An engine and its load time.
pub struct Loaded {
    pub engine: Box<dyn Engine>,
    pub seconds: f64,
    /// Threads shared with other work on the processor.
    pub pool: Arc<Pool>,
    /// The GPU that runs all or some layers.
    pub device: Option<DeviceInfo>,
    /// Bytes of the model on the GPU.
    pub on_gpu: u64,
}

/// Creates the thread pool that everything in one run shares, in turn.
pub fn pool(options: &RunOptions) -> Result<Arc<Pool>> {
    Ok(Arc::new(Pool::new(threads(options))?))
}

/// Returns the number of threads of a run.
pub fn threads(options: &RunOptions) -> usize {
    options.threads.unwrap_or_else(default_threads)
}

/// Smallest model with a progress bar; smaller ones load too quickly.
const WORTH_A_BAR: u64 = 200_000_000;

/// Returns the precision of the KV cache.
pub fn kv_format(weights: &Weights, option: Kv) -> Result<KvFormat> {
    Ok(match option {
        Kv::F16 => KvFormat::F16,
        Kv::F32 => KvFormat::F32,
        Kv::Q8 => KvFormat::Q8,
        Kv::Auto if weights.format(Role::Q, 0)?.code.is_integer() => KvFormat::F16,
        Kv::Auto => KvFormat::F32,
    })
}

/// Loads the weights at the best place where they fit. Under `auto`, tries the next place if one
/// fails.
pub fn load(
    weights: &Weights,
    label: &str,
    options: &RunOptions,
    room: Room,
    pool: &Arc<Pool>,
    listener: &dyn Listener,
) -> Result<Loaded> {
    let Room { context, sequences, prefixes } = room;
    let kv = kv_format(weights, options.kv)?;
    // The NPU supports the pages of only one text.
    let npu = options.npu.is_asked() && sequences == 1;
    let task = Task { weights, context, kv, sequences, prefixes, npu };
    load_task(&task, label, options, pool, listener).map_err(|error| with_remedy(error, room))
}

/// Adds a remedy: fewer sequences and spare pages need less memory.
fn with_remedy(mut error: anyhow::Error, room: Room) -> anyhow::Error {
    let Room { sequences, prefixes, .. } = room;
    let remedy = match (sequences, prefixes) {
        (1, 0) => return error,
        (_, 0) => format!("lower --parallel or --ctx-size: there are {sequences} contexts"),
        _ => format!("lower --cache-ram, which is {}", bytes(prefixes)),
    };
    if let Some(fault) = error.downcast_mut::<Fault>().filter(|f| f.kind == Kind::Memory) {
        let other = fault.help.take().map_or(String::new(), |help| format!(", or: {help}"));
        fault.help = Some(remedy + &other);
    }
    error
}

fn load_task(
    task: &Task<'_>,
    label: &str,
    options: &RunOptions,
    pool: &Arc<Pool>,
    listener: &dyn Listener,
) -> Result<Loaded> {
    let Task { weights, context, kv, sequences, .. } = *task;
    let size = Size::of(weights)?;
    let start = Instant::now();
    let mut candidates = placement::candidates(task, options, listener)?.into_iter().peekable();
    let (engine, device, on_gpu) = loop {
        let placement = candidates.next().context("there is always a placement to try")?;
        if let Some(device) = &placement.device {
            lock::acquire(options.lock, &device.name, device.index, listener)?;
        }
        say_split(&placement, pool, listener);
        let bar = match size.bytes >= WORTH_A_BAR {
            true => listener.loading(&format!("loading {label}"), weights.bytes_to_read()?),
            false => None,
        };
        let sizes = (kv, size.bytes, context);
        let is_split = placement.device.is_some() && placement.layout.cpu.layers > 0;
        let load = || {
            place(&placement, pool, options.check, options.isa, listener)
                .and_then(|executor| match sequences {
                    1 => npu::wrap(
                        executor,
                        options.npu,
                        weights.config(),
                        sizes,
                        is_split,
                        listener,
                    ),
                    _ => Ok(executor),
                })
                .and_then(|executor| {
                    let options = EngineOptions { context, kv };
                    PlannedEngine::with_spare(weights, executor, options, sequences, task.spare())
                })
        };
        let loaded = shown(bar, weights, load);
        match (loaded, candidates.peek()) {
            (Ok(engine), _) => {
                let Need { weights, kv, activations, .. } = placement.layout.gpu.need;
                break (Box::new(engine), placement.device, weights + kv + activations);
            }
            (Err(e), Some(next)) if is_the_devices(&e) => {
                listener.note(&format!("{e:#}; instead: {}", next.describe()))
            }
            (Err(e), _) => return Err(e.context(format!("loading {label}"))),
        }
    };
    let seconds = start.elapsed().as_secs_f64();
    let memory = engine.report().memory;
    listener.detail(
        1,
        &format!(
            "{label}: {} weights at {:.2} bits, {} kv for {}{} positions, {} other, {}, \
                loaded in {seconds:.2} s",
            bytes(memory.weights),
            size.bits_per_weight(),
            bytes(memory.kv),
            if sequences > 1 { format!("{sequences} x ") } else { String::new() },
            thousands(context as u64),
            bytes(memory.activations),
            engine.report().device
        ),
    );
    Ok(Loaded { engine, seconds, pool: pool.clone(), device, on_gpu })
}

/// Runs `load` while a bar shows the read bytes of the weights. Removes the bar at the end.
fn shown<T>(bar: Option<Box<dyn LoadingBar>>, weights: &Weights, load: impl FnOnce() -> T) -> T {
    let Some(bar) = bar else { return load() };
    let (before, (done, is_done)) = (weights.bytes_read(), mpsc::channel::<()>());
    std::thread::scope(|scope| {
        // Without a thread there is no bar.
        let _ = threads::start(scope, move || {
            while is_done.recv_timeout(Duration::from_millis(100))
                == Err(mpsc::RecvTimeoutError::Timeout)
            {
                bar.set(weights.bytes_read() - before);
            }
        });
        // Ends the thread, even if loading panics.
        let _done = done;
        load()
    })
}

/// Opens the devices of a placement, sized exactly for its contents.
fn place(
    placement: &Placement,
    pool: &Arc<Pool>,
    check: bool,
    isa: Option<Isa>,
    listener: &dyn Listener,
) -> Result<Box<dyn Executor>> {
    let host = || -> Result<Box<dyn Executor>> {
        placement::check_memory(placement, gemma_base::os::machine::available_memory())?;
        Ok(Box::new(CpuExecutor::on(
            pool.clone(),
            CpuOptions { check, isa, ..CpuOptions::default() },
        )))
    };
    let Some(info) = &placement.device else { return host() };
    let pieces = Some(&placement.layout.pieces);
    let device = backend_of(info).open(info, pieces, check, listener)?;
    let (on_gpu, on_cpu) = (placement.layout.gpu.layers, placement.layout.cpu.layers);
    if on_cpu == 0 {
        return Ok(device);
    }
    Ok(Box::new(SplitExecutor::new(device, host()?, on_gpu as u16, (on_gpu + on_cpu) as u16)))
}

/// Reports a split: its layers, its predicted speed, and the option that repeats it.
fn say_split(placement: &Placement, pool: &Pool, listener: &dyn Listener) {
    let Some(device) = placement
        .device
        .as_ref()
        .filter(|_| placement.layout.cpu.layers > 0 && listener.hears_notes())
    else {
        return;
    };
    let speeds = Speeds::new(pool, Some(device));
    listener.note(&format!(
        "{}; predicted {}; --gpu-layers {} repeats this split",
        placement.describe(),
        speeds.describe(&speeds.predict(placement)),
        placement.layout.gpu.layers,
    ));
}

/// Returns whether another device may succeed.
fn is_the_devices(error: &anyhow::Error) -> bool {
    fault_of(error).is_some_and(|fault| matches!(fault.kind, Kind::Device | Kind::Memory))
}
