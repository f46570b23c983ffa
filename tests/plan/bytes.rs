//! Plans compared with allocators: the process's own, which counts here, and the device's.

use crate::common::vulkan::device;
use gemma::compute::cpu::{CpuExecutor, CpuFootprint, CpuOptions};
use gemma::compute::dry::Footprint;
use gemma::compute::{
    BufferId, Caps, Executor, Held, KvFormat, LoadJob, Part, Plan, PlanId, Report, Reports,
    StepLayout, WeightId,
};
use gemma::engine::PlannedEngine;
use gemma::engine::planned::EngineOptions;
use gemma::models::forward::{self, ForwardOptions, SparePages};
use gemma::models::{Config, Weights};
use gemma::runtime::model::shapes::{MadeUpFormats, Shape};
use gemma::runtime::placement::measure::{MemoryLayout, Task};
use gemma::vulkan::{Choice, DeviceInfo, Vulkan, VulkanExecutor, blocks, choose};
use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An allocator that counts the requested bytes of the process.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work, and counting does not affect it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Memory) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Memory) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        LIVE.fetch_add(size, Ordering::Relaxed);
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Unused bytes at the ends of the blocks that small matrices share, most of them in the last
/// block.
const ROOM: u64 = 8 << 20;

/// Asserts that the taken bytes are within one percent of the plan, or up to `room` above that.
#[track_caller]
fn near(planned: u64, taken: u64, room: u64, what: &str) {
    let range = planned - taken / 100..=planned + taken / 100 + room;
    assert!(range.contains(&taken), "{what}: {planned} planned, {taken} taken");
}

/// Returns the configuration of 27B with fewer and narrower layers.
fn config() -> Config {
    let mut json = Shape::B27.config();
    for (key, value) in [
        ("hidden_size", 1024),
        ("intermediate_size", 4096),
        ("num_hidden_layers", 6),
        ("vocab_size", 8192),
    ] {
        json[key] = value.into();
    }
    json["num_attention_heads"] = 8.into();
    json["num_key_value_heads"] = 4.into();
    Config::from_json(&json).unwrap()
}

/// Returns the recipes of 27B. Their target sizes are scaled down in proportion.
fn recipes() -> Vec<(String, MadeUpFormats)> {
    let inline = |weights: &str| MadeUpFormats {
        weights: Some(weights.parse().unwrap()),
        ..MadeUpFormats::default()
    };
    let named = ["seed", "int4", "9gb", "10gb", "12gb"];
    let named = named.map(|name| (name.to_owned(), MadeUpFormats::of_recipe(name)));
    std::iter::once(("i4-g32".to_owned(), inline("i4-g32"))).chain(named).collect()
}

/// Returns the recipe scaled to a model of fewer weights.
fn scaled(name: &str, formats: &MadeUpFormats, directory: &std::path::Path) -> MadeUpFormats {
    let Some(gb) = name.strip_suffix("gb") else { return formats.clone() };
    let text = std::fs::read_to_string(format!("{}/quant/{name}.toml", env!("CARGO_MANIFEST_DIR")))
        .unwrap();
    let bytes = gb.parse::<u64>().unwrap() * 1_000_000_000 / 27_009 * 110;
    let text = text.replace(
        &format!("target-size = \"{gb}GB\""),
        &format!("target-size = \"{}MB\"", bytes / 1_000_000),
    );
    let path = directory.join(format!("{name}.toml"));
    std::fs::write(&path, text).unwrap();
    MadeUpFormats::of_recipe(path.to_str().unwrap())
}

fn task(weights: &Weights, context: usize) -> Task<'_> {
    Task { weights, context, kv: KvFormat::F16, sequences: 1, prefixes: 0, npu: false }
}

/// Runs a test in its own process, where nothing else allocates. The process is this program,
/// started for that one test.
#[track_caller]
fn alone(test: &str) {
    let test = format!("bytes::{test}");
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--ignored"])
        .output()
        .unwrap();
    assert!(
        out.status.success() && String::from_utf8_lossy(&out.stdout).contains("1 passed"),
        "{out:?}"
    );
}

#[test]
fn a_processor_takes_what_was_planned() {
    alone("allocations");
}

#[test]
fn a_device_is_asked_for_what_was_planned() {
    // The child process opens the device itself.
    if device().is_some() {
        alone("device_allocations");
    }
}

#[test]
#[ignore = "counts all allocations of its process: \
    a_processor_takes_what_was_planned runs it alone"]
fn allocations() {
    let directory = tempfile::tempdir().unwrap();
    for (name, formats) in recipes() {
        let weights = scaled(&name, &formats, directory.path()).weights(config()).unwrap();
        let planned = task(&weights, 3000).measure(None, 0).unwrap().cpu;
        let before = LIVE.load(Ordering::SeqCst);
        let exec = CpuExecutor::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
        let engine = PlannedEngine::new(
            &weights,
            Box::new(exec),
            EngineOptions { context: 3000, kv: KvFormat::F16 },
        )
        .unwrap();
        let taken = LIVE.load(Ordering::SeqCst) - before;
        near(planned.need.total(), taken as u64, ROOM, &name);
        drop(engine);
        if name == "i4-g32" {
            // Each of several texts has its own context.
            let planned =
                Task { sequences: 5, ..task(&weights, 3000) }.measure(None, 0).unwrap().cpu;
            let before = LIVE.load(Ordering::SeqCst);
            let exec =
                CpuExecutor::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
            let options = EngineOptions { context: 3000, kv: KvFormat::F16 };
            let engine =
                PlannedEngine::for_sequences(&weights, Box::new(exec), options, 5).unwrap();
            let taken = (LIVE.load(Ordering::SeqCst) - before) as u64;
            near(planned.need.total(), taken, ROOM, "five texts");
            drop(engine);
        }
    }
}

/// Returns the device of the tests as a plan sees it.
fn info() -> DeviceInfo {
    let devices = Vulkan::open().unwrap().devices().unwrap();
    choose(&devices, Choice::Best).unwrap().clone()
}

#[test]
#[ignore = "the device's count is the process's: \
    a_device_is_asked_for_what_was_planned runs it alone"]
fn device_allocations() {
    let (info, directory) = (info(), tempfile::tempdir().unwrap());
    for (name, formats) in recipes().into_iter().filter(|(name, _)| name != "12gb") {
        let weights = scaled(&name, &formats, directory.path()).weights(config()).unwrap();
        let planned = task(&weights, 3000).measure(Some(&info), 6).unwrap();
        // The last engine is closed, so its memory is no longer counted.
        let mut exec = VulkanExecutor::open(Choice::Best).unwrap();
        exec.expect(&planned.pieces);
        let options = ForwardOptions {
            context: 3000,
            kv: KvFormat::F16,
            max_rows: exec.caps().max_rows,
            sequences: 1,
            spare: SparePages::default(),
        };
        forward::load(&weights, &mut exec, options).unwrap();
        // Staging memory is freed after all weights are loaded.
        let (live, peak) = exec.requested();
        near(planned.gpu.need.total(), peak, 0, &name);
        assert!(
            live < peak && live >= planned.gpu.need.total() - planned.gpu.need.staging,
            "{name}: {live} of {peak}"
        );
    }
}

/// The processor's executor with real buffers. Matrices are counted by the rule that packs them.
struct Untouched {
    inner: CpuExecutor,
    weights: u64,
    matrices: u32,
}

impl Executor for Untouched {
    fn caps(&self) -> Caps {
        Caps { is_dry: true, ..self.inner.caps() }
    }

    fn key_block(&self, part: Part) -> fn(KvFormat) -> usize {
        self.inner.key_block(part)
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> anyhow::Result<BufferId> {
        self.inner.alloc(label, bytes)
    }

    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> anyhow::Result<Vec<WeightId>> {
        for LoadJob { label, matrix: m, .. } in &jobs {
            let taken = CpuFootprint.weight(label, m.format, m.rows, m.cols)?;
            self.weights += taken.iter().sum::<u64>();
        }
        let first = self.matrices;
        self.matrices += jobs.len() as u32;
        Ok((first..self.matrices).map(WeightId).collect())
    }

    fn write(&mut self, _: BufferId, _: usize, _: &[u8]) -> anyhow::Result<()> {
        Ok(())
    }

    fn read(&mut self, _: BufferId, _: usize, _: &mut [u8]) -> anyhow::Result<()> {
        Ok(())
    }

    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> anyhow::Result<PlanId> {
        self.inner.record(plan, step, layout)
    }

    fn start(&mut self, _: PlanId, _: Option<(BufferId, usize)>) -> anyhow::Result<bool> {
        unreachable!("its matrices are not there")
    }

    fn is_busy(&self) -> bool {
        false
    }

    fn finish(&mut self, _: Option<(BufferId, &mut [u8])>) -> anyhow::Result<()> {
        unreachable!("its matrices are not there")
    }

    fn lend(&self, _: BufferId, _: usize) -> Option<&[u8]> {
        None
    }
}

impl Reports for Untouched {
    fn report(&self) -> Report {
        let report = self.inner.report();
        Report { held: Held { weights: self.weights, ..report.held }, ..report }
    }

    fn start_profile(&mut self) {
        self.inner.start_profile();
    }

    fn read_bandwidth(&mut self) -> Option<f64> {
        self.inner.read_bandwidth()
    }

    fn upload_bandwidth(&mut self) -> Option<f64> {
        self.inner.upload_bandwidth()
    }

    fn set_poison(&mut self, on: bool) {
        self.inner.set_poison(on);
    }
}

/// Returns a laptop's GPU, with allocations of at most 4 GiB.
fn laptop() -> DeviceInfo {
    DeviceInfo {
        backend: "vulkan",
        index: 0,
        name: "laptop".into(),
        driver: String::new(),
        is_cpu: false,
        is_integrated: true,
        divides_calls: true,
        api: (1, 3),
        subgroup: 32,
        asks_subgroup: true,
        max_shared: 65536,
        max_workgroup: 1024,
        max_subgroups: 32,
        max_allocation: 4 << 30,
        memory: 64 << 30,
        available: None,
        timestamp_ns: 1.0,
        busy: 16,
        offers_matrices: false,
        draws: false,
        identity: "made up".into(),
        missing: Vec::new(),
    }
}

/// 27B: the processor's buffers are really allocated, with a short context. The device's blocks are
/// computed as an arena would cut them.
#[test]
fn the_27b_shape_takes_what_was_planned() {
    let config = Config::from_json(&Shape::B27.config()).unwrap();
    for (name, formats) in recipes().into_iter().filter(|(name, _)| name == "i4-g32") {
        let weights = formats.weights(config.clone()).unwrap();
        for context in [2048, 131_072] {
            let task = task(&weights, context);
            let what = format!("{name} at {context}");
            if context == 2048 {
                let planned: MemoryLayout = task.measure(None, 0).unwrap();
                let inner = CpuExecutor::new(CpuOptions::default()).unwrap();
                let mut exec = Untouched { inner, weights: 0, matrices: 0 };
                let options = ForwardOptions {
                    context,
                    kv: KvFormat::F16,
                    max_rows: exec.caps().max_rows,
                    sequences: 1,
                    spare: SparePages::default(),
                };
                forward::load(&weights, &mut exec, options).unwrap();
                let Held { weights: packed, buffers } = exec.report().held;
                near(planned.cpu.need.total(), packed + buffers, 0, &what);
            }

            let planned = task.measure(Some(&laptop()), 62).unwrap();
            let [weights, buffers] =
                blocks(&planned.pieces, &laptop()).map(|b| b.iter().sum::<u64>());
            let taken = weights + buffers + planned.gpu.need.staging;
            near(planned.gpu.need.total(), taken, 0, &what);
            assert!(
                blocks(&planned.pieces, &laptop()).iter().flatten().all(|block| *block <= 4 << 30),
                "{what}"
            );
        }
    }
}
