//! Which device a model runs on: what `--device` asks for, what there is, and what fits.

use super::ui::{Ui, bytes};
use crate::error::{Fault, Kind};
use crate::vulkan::{Choice, DeviceInfo, Vulkan, choose};
use anyhow::Result;

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Auto,
    Cpu,
    Vulkan(Choice),
}

impl std::str::FromStr for Device {
    type Err = Fault;

    fn from_str(device: &str) -> Result<Device, Fault> {
        match device.split_once(':') {
            None if device == "auto" => Ok(Device::Auto),
            None if device == "cpu" => Ok(Device::Cpu),
            None if device == "vulkan" => Ok(Device::Vulkan(Choice::Best)),
            Some(("vulkan", index)) if index.parse::<usize>().is_ok() => {
                Ok(Device::Vulkan(Choice::Index(index.parse().expect("just parsed"))))
            }
            _ => {
                Err(Fault::usage(format!("unknown device `{device}`")).help("one of auto, cpu, vulkan, vulkan:0, vulkan:1, ..."))
            }
        }
    }
}

/// Bytes that a model takes on a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Need {
    pub weights: u64,
    pub kv: u64,
    pub activations: u64,
}

impl Need {
    fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.activations)
    }
}

/// Smaller models run from the processor's caches: a GPU's launches would cost more than they bring.
const SMALL: u64 = 200_000_000;

/// The GPU to load a model on; `None` for the processor. `need` says what the model takes there, given the device.
///
/// What is named is taken or refused. Under `auto` a GPU that is there but cannot serve is mentioned once.
pub fn gpu(device: &str, need: impl Fn(&DeviceInfo) -> Need, ui: &Ui) -> Result<Option<Choice>> {
    let device: Device = device.parse()?;
    let found = || Vulkan::open().and_then(|v| v.devices());
    match device {
        Device::Cpu => Ok(None),
        Device::Vulkan(choice) => {
            let devices = found()?;
            let info = choose(&devices, choice)?;
            check_fit(info, need(info))?;
            Ok(Some(choice))
        }
        Device::Auto => {
            let Ok(devices) = found() else { return Ok(None) };
            if !devices.iter().any(|d| !d.is_cpu) || need(&devices[0]).weights < SMALL {
                return Ok(None);
            }
            let fitting = choose(&devices, Choice::Best).and_then(|info| check_fit(info, need(info)).map(|()| info.index));
            match fitting {
                Ok(index) => Ok(Some(Choice::Index(index))),
                Err(why) => {
                    ui.note(format!("running on the processor: {why}"));
                    Ok(None)
                }
            }
        }
    }
}

fn check_fit(info: &DeviceInfo, need: Need) -> Result<()> {
    let free = info.available.unwrap_or(info.memory);
    if need.total() <= free {
        return Ok(());
    }
    let what = format!(
        "{} for weights, {} for keys and values and {} for activations do not fit into {} of free memory on {}",
        bytes(need.weights),
        bytes(need.kv),
        bytes(need.activations),
        bytes(free),
        info.name
    );
    Err(Fault::new(Kind::Memory, what)
        .help("lower --ctx-size, quantise the model further (gemma quantize --target-size), or use --device cpu")
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_exactly() {
        let code = |device: &str| device.parse::<Device>().map_err(|e| e.kind.exit_code());
        assert_eq!(code("auto"), Ok(Device::Auto));
        assert_eq!(code("cpu"), Ok(Device::Cpu));
        assert_eq!(code("vulkan"), Ok(Device::Vulkan(Choice::Best)));
        assert_eq!(code("vulkan:1"), Ok(Device::Vulkan(Choice::Index(1))));
        for wrong in ["cuda", "cpu:1", "vulkan:", "vulkan:x", "vulkan:-1", ""] {
            assert_eq!(code(wrong), Err(2), "{wrong}");
        }
    }
}
