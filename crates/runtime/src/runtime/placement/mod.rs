//! Chooses where a model runs, from `--device` and `--gpu-layers`, the machine's devices, and their
//! memory.

pub mod host;
pub mod measure;
pub mod predict;
pub mod process;
pub mod prompt;

use crate::runtime::Listener;
use crate::runtime::devices::backends::{choose, probe, ranked};
use crate::runtime::options::RunOptions;
use crate::runtime::options::{Device, GpuLayers};
use anyhow::Result;
use gemma_base::compute::{Choice, DeviceInfo};
use gemma_base::error::{Fault, Kind};
use gemma_base::util::units::bytes;
use measure::{MemoryLayout, Need, Task};

/// Assignment of a model's layers to the machine's devices.
#[derive(Clone, Debug)]
pub struct Placement {
    /// The GPU; `None` if all layers run on the processor.
    pub device: Option<DeviceInfo>,
    pub layout: MemoryLayout,
}

impl Placement {
    /// Describes the placement: `all 62 layers on X (9.9 GB)`, `20 of 62 layers and the head on X
    /// (4.1 GB), 42 on the processor (6.2 GB)`.
    pub fn describe(&self) -> String {
        let (gpu, cpu) = (&self.layout.gpu, &self.layout.cpu);
        let (here, there) = (bytes(cpu.need.total()), bytes(gpu.need.total()));
        match &self.device {
            None => format!("all layers on the processor ({here})"),
            Some(device) if cpu.layers == 0 => {
                format!("all {} layers on {} ({there})", gpu.layers, device.name)
            }
            Some(device) => {
                let all = gpu.layers + cpu.layers;
                let name = &device.name;
                format!(
                    "{} of {all} layers and the head on {name} ({there}), \
                        {} on the processor ({here})",
                    gpu.layers, cpu.layers
                )
            }
        }
    }
}

/// Weight bytes below which a model runs from the processor's caches. A GPU's launch overhead would
/// exceed its gain.
const SMALL: u64 = 200_000_000;

/// Returns the possible placements, the best first.
///
/// A named device is used or an error is returned. Under `auto`, unusable GPUs are reported once.
pub fn candidates(
    task: &Task<'_>,
    options: &RunOptions,
    listener: &dyn Listener,
) -> Result<Vec<Placement>> {
    candidates_among(task, options, probe, listener)
}

/// Like [`candidates`], for the devices that `found` lists.
pub fn candidates_among(
    task: &Task<'_>,
    options: &RunOptions,
    found: impl Fn() -> Result<Vec<DeviceInfo>>,
    listener: &dyn Listener,
) -> Result<Vec<Placement>> {
    let wish = options.gpu_layers;
    match options.device {
        Device::Cpu => {
            if !matches!(wish, GpuLayers::Auto | GpuLayers::N(0)) {
                listener.note("--gpu-layers has no effect where --device cpu runs all layers");
            }
            Ok(vec![on_cpu(task)?])
        }
        _ if wish == GpuLayers::N(0) => Ok(vec![on_cpu(task)?]),
        Device::Vulkan(choice) => Ok(vec![on_gpu(task, choose(&found()?, choice)?, wish)?]),
        Device::Auto if wish != GpuLayers::Auto => {
            let devices = found()?;
            let best = on_gpu(task, choose(&devices, Choice::Best)?, wish);
            let others = ranked(&devices).into_iter().skip(1).map(|d| on_gpu(task, d, wish));
            // If none fits, the error is that of the best one.
            let mut list: Vec<Placement> = others.flatten().collect();
            list.splice(0..0, best.as_ref().ok().cloned());
            if list.is_empty() { best.map(|p| vec![p]) } else { Ok(list) }
        }
        Device::Auto => {
            let cpu = on_cpu(task)?;
            if cpu.layout.cpu.need.weights < SMALL {
                return Ok(vec![cpu]);
            }
            let mut list = gpus(task, &found().unwrap_or_default(), listener);
            list.push(cpu);
            Ok(list)
        }
    }
}

/// Returns the GPUs that fit at least one layer, the one that fits most first.
fn gpus(task: &Task<'_>, devices: &[DeviceInfo], listener: &dyn Listener) -> Vec<Placement> {
    let (mut list, mut why) = (Vec::new(), None);
    for device in ranked(devices) {
        match on_gpu(task, device, GpuLayers::Auto) {
            Ok(placement) => list.push(placement),
            Err(e) => why = why.or(Some(e)),
        }
    }
    // The sort is stable: of devices that fit equally many layers, the better one comes first.
    list.sort_by_key(|p| std::cmp::Reverse(p.layout.gpu.layers));
    if let Some(why) = why.filter(|_| list.is_empty()) {
        listener.note(&format!("running on the processor: {why:#}"));
    }
    list
}

/// Returns a discrete GPU for a second model if it fits completely in the free memory. Returns
/// `None` if the model is small enough for the processor's caches.
pub fn roomy_gpu(task: &Task<'_>) -> Result<Option<usize>> {
    if on_cpu(task)?.layout.cpu.need.weights < SMALL {
        return Ok(None);
    }
    let devices = probe().unwrap_or_default();
    let fits = |d: &&DeviceInfo| on_gpu(task, d, GpuLayers::All).is_ok();
    Ok(ranked(&devices)
        .into_iter()
        .filter(|d| !d.is_integrated && !d.is_cpu)
        .find(fits)
        .map(|d| d.index))
}

fn on_cpu(task: &Task<'_>) -> Result<Placement> {
    Ok(Placement { device: None, layout: task.measure(None, 0)? })
}

/// Places the requested number of layers on this GPU, if they fit.
fn on_gpu(task: &Task<'_>, device: &DeviceInfo, wish: GpuLayers) -> Result<Placement> {
    let here = |layout| Placement { device: Some(device.clone()), layout };
    let layers = match wish {
        GpuLayers::All => task.layers(),
        GpuLayers::N(n) => n.min(task.layers()),
        GpuLayers::Auto => match task.most_layers(device)? {
            Some(layout) => return Ok(here(layout)),
            None => 1,
        },
    };
    let layout = task.measure(Some(device), layers)?;
    let need = layout.gpu.need;
    if need.total() <= device.free() {
        return Ok(here(layout));
    }
    let what = match (wish, layers == task.layers()) {
        (GpuLayers::Auto, _) => "not even one layer fits: ".to_owned(),
        (_, true) => String::new(),
        (_, false) => format!("{layers} of {} layers: ", task.layers()),
    };
    let what = format!(
        "{what}{} do not fit into {} of free memory on {}",
        parts(need),
        bytes(device.free()),
        device.name
    );
    let fewer = match (wish, task.most_layers(device)?) {
        (GpuLayers::Auto, _) | (_, None) => String::new(),
        (_, Some(most)) => format!("give --gpu-layers {} or auto, ", most.gpu.layers),
    };
    let help = "lower --ctx-size, quantise the model further (gemma quantize --target-size), \
        or use --device cpu";
    Err(Fault::new(Kind::Memory, what).help(format!("{fewer}{help}")).into())
}

/// Describes the bytes of a side.
fn parts(need: Need) -> String {
    let staging = if need.staging > 0 {
        format!(" and {} for loading", bytes(need.staging))
    } else {
        String::new()
    };
    let (weights, kv, activations) = (bytes(need.weights), bytes(need.kv), bytes(need.activations));
    format!(
        "{weights} for weights, {kv} for keys and values, {activations} for activations{staging}"
    )
}

/// Fails for a placement that would make the machine swap. `available` is the free memory that the
/// system reports.
pub fn check_memory(placement: &Placement, available: Option<u64>) -> Result<()> {
    let need = placement.layout.cpu.need;
    // A GPU that shares main memory also uses it.
    let shared = placement.device.as_ref().is_some_and(|d| d.is_integrated || d.is_cpu);
    let gpu = if shared { placement.layout.gpu.need.total() } else { 0 };
    let all = [need.total(), gpu, placement.layout.npu].into_iter().fold(0, u64::saturating_add);
    let Some(available) = available.filter(|a| all > *a) else { return Ok(()) };
    let clause = |bytes_more: u64, what: &str| match bytes_more {
        0 => String::new(),
        n => format!(", with {} for {what},", bytes(n)),
    };
    let others = clause(gpu, "the GPU's layers") + &clause(placement.layout.npu, "the NPU's copy");
    let what =
        format!("{}{others} do not fit into {} of available memory", parts(need), bytes(available));
    Err(Fault::new(Kind::Memory, what)
        .help(
            "gemma plan names the sizes that fit: quantise the model (gemma quantize), \
                lower --ctx-size, or close other programs",
        )
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Silence;

    fn device(index: usize, is_integrated: bool, free: u64) -> DeviceInfo {
        DeviceInfo {
            backend: "vulkan",
            index,
            name: format!("device {index}"),
            driver: String::new(),
            is_cpu: false,
            is_integrated,
            api: (1, 3),
            subgroup: 32,
            asks_subgroup: true,
            max_shared: 32768,
            max_workgroup: 1024,
            max_subgroups: 32,
            max_allocation: 1 << 32,
            memory: 1 << 40,
            available: Some(free),
            timestamp_ns: 1.0,
            busy: 16,
            divides_calls: true,
            offers_matrices: false,
            draws: false,
            identity: "made up".into(),
            missing: Vec::new(),
        }
    }

    #[test]
    fn the_gpu_that_takes_most_layers_goes_first() {
        let shape = crate::runtime::model::shapes::Shape::B4;
        let formats = crate::runtime::model::shapes::MadeUpFormats {
            weights: Some("i4-g32".parse().unwrap()),
            ..Default::default()
        };
        let weights = shape.weights(&formats).unwrap();
        let task = Task {
            weights: &weights,
            context: 2048,
            kv: gemma_base::compute::KvFormat::F16,
            sequences: 1,
            prefixes: 0,
            npu: false,
        };
        let chosen = |devices: &[DeviceInfo]| -> Vec<(usize, usize)> {
            let list = gpus(&task, devices, &Silence);
            list.iter().map(|p| (p.device.as_ref().unwrap().index, p.layout.gpu.layers)).collect()
        };
        // Everything fits on two devices, and the discrete one is better. Some fits on the third,
        // nothing on the fourth.
        let devices = [
            device(0, true, 1 << 33),
            device(1, false, 3 << 29),
            device(2, false, 1 << 33),
            device(3, false, 1 << 28),
        ];
        let list = chosen(&devices);
        assert_eq!(list[..2], [(2, 34), (0, 34)]);
        assert!(list[2].0 == 1 && (1..34).contains(&list[2].1) && list.len() == 3, "{list:?}");
        assert_eq!(chosen(&devices[3..]), []);
        // These layers fit, and one more would not.
        let layers = list[2].1;
        let need = |n| task.measure(Some(&devices[1]), n).unwrap().gpu.need.total();
        assert!(need(layers) <= devices[1].free() && need(layers + 1) > devices[1].free());
        // A given number is used, or rejected with a number that fits.
        assert_eq!(on_gpu(&task, &devices[1], GpuLayers::N(1)).unwrap().layout.gpu.layers, 1);
        let refused = on_gpu(&task, &devices[1], GpuLayers::N(layers + 1)).unwrap_err();
        let fault = gemma_base::error::fault_of(&refused).unwrap();
        assert!(
            fault.kind == Kind::Memory
                && fault.help.as_ref().unwrap().contains(&format!("--gpu-layers {layers} "))
        );
    }

    #[test]
    fn what_cannot_fit_is_refused_with_numbers() {
        let mut placement = Placement { device: None, layout: MemoryLayout::default() };
        placement.layout.cpu.need = Need { weights: u64::MAX / 4, kv: 1 << 30, ..Need::default() };
        let error = check_memory(&placement, Some(1 << 40)).unwrap_err();
        assert_eq!(gemma_base::error::fault_of(&error).unwrap().kind.exit_code(), 5);
        assert!(error.to_string().contains("1.07 GB"), "{error}");
        check_memory(&placement, None).unwrap();
        placement.layout.cpu.need = Need { weights: 1, ..Need::default() };
        check_memory(&placement, Some(1)).unwrap();
    }
}
