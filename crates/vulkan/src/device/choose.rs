//! Chooses a device.

use super::{ALLOW_CPU_DRIVER, DeviceInfo, is_set, no_driver};
use anyhow::{Context, Result};
pub use gemma_base::compute::device::Choice;
use gemma_base::error::{Fault, Kind};

/// Returns whether a device may be chosen automatically.
fn allowed(device: &DeviceInfo, allow_cpu: bool) -> bool {
    !device.is_cpu || allow_cpu
}

/// Returns the devices that [`Choice::Best`] chooses from, the best first.
pub fn ranked(devices: &[DeviceInfo]) -> Vec<&DeviceInfo> {
    rank(devices, is_set(ALLOW_CPU_DRIVER))
}

fn rank(devices: &[DeviceInfo], allow_cpu: bool) -> Vec<&DeviceInfo> {
    let usable = |d: &&DeviceInfo| allowed(d, allow_cpu) && d.missing.is_empty();
    let mut list: Vec<&DeviceInfo> = devices.iter().filter(usable).collect();
    list.sort_by_key(|d| std::cmp::Reverse((!d.is_cpu, !d.is_integrated, d.memory)));
    list
}

/// Chooses a device. The error explains why there is none.
pub fn choose(devices: &[DeviceInfo], choice: Choice) -> Result<&DeviceInfo> {
    pick(devices, choice, is_set(ALLOW_CPU_DRIVER))
}

fn pick(devices: &[DeviceInfo], choice: Choice, allow_cpu: bool) -> Result<&DeviceInfo> {
    match choice {
        Choice::Index(index) => {
            let found = devices.get(index).with_context(|| {
                let what = format!("there is no Vulkan device {index}: {} found", devices.len());
                Fault::new(Kind::Device, what).help("gemma devices lists them")
            })?;
            if !found.missing.is_empty() {
                return Err(lacking(found));
            }
            Ok(found)
        }
        Choice::Best => {
            let permitted = devices.iter().find(|d| allowed(d, allow_cpu));
            rank(devices, allow_cpu).first().copied().ok_or_else(|| match permitted {
                Some(device) => lacking(device),
                None if devices.is_empty() => no_driver("no Vulkan device on this machine".into()),
                None => Fault::new(
                    Kind::Device,
                    "the only Vulkan driver here computes on the processor, \
                        slower than this program's own kernels",
                )
                .help(
                    "install the GPU's Vulkan driver, use --device cpu, \
                    or name the driver with --device vulkan:0",
                )
                .into(),
            })
        }
    }
}

fn lacking(device: &DeviceInfo) -> anyhow::Error {
    Fault::new(Kind::Device, format!("{} lacks {}", device.name, device.missing.join(", ")))
        .help("update its driver, or use --device cpu")
        .into()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use gemma_base::error::fault_of;

    const GB: u64 = 1 << 30;

    /// Returns a discrete GPU with every feature except matrix instructions.
    pub fn device(index: usize, name: &str, memory: u64) -> DeviceInfo {
        DeviceInfo {
            backend: "vulkan",
            index,
            name: name.into(),
            driver: "made up".into(),
            is_cpu: false,
            is_integrated: false,
            api: (1, 3),
            subgroup: 32,
            asks_subgroup: true,
            max_shared: 32 << 10,
            max_workgroup: 1024,
            max_subgroups: 32,
            max_allocation: memory,
            memory,
            available: None,
            timestamp_ns: 1.0,
            busy: 256,
            divides_calls: true,
            offers_matrices: false,
            draws: false,
            identity: "made up".into(),
            missing: Vec::new(),
        }
    }

    /// Returns the devices of a fully equipped laptop: a driver on the processor, an integrated GPU
    /// with much memory, and two discrete GPUs.
    fn all() -> Vec<DeviceInfo> {
        vec![
            DeviceInfo { is_cpu: true, ..device(0, "llvmpipe", 64 * GB) },
            DeviceInfo { is_integrated: true, ..device(1, "in the processor", 48 * GB) },
            device(2, "old board", 4 * GB),
            device(3, "board", 8 * GB),
        ]
    }

    /// Returns exit code and message of an error.
    fn refused(devices: &[DeviceInfo], choice: Choice) -> (u8, String) {
        let error = pick(devices, choice, false).unwrap_err();
        let fault = fault_of(&error).unwrap();
        (fault.kind.exit_code(), format!("{error}; help: {}", fault.help.as_ref().unwrap()))
    }

    #[test]
    fn the_largest_board_wins_then_what_is_left() {
        let mut devices = all();
        for name in ["board", "old board", "in the processor"] {
            let best = pick(&devices, Choice::Best, false).unwrap();
            assert_eq!(best.name, name);
            let index = best.index;
            devices.retain(|d| d.index != index);
        }
        let (code, words) = refused(&devices, Choice::Best);
        assert_eq!(code, 4);
        assert!(
            words.contains("computes on the processor") && words.contains("--device vulkan:0"),
            "{words}"
        );
        assert_eq!(
            pick(&devices, Choice::Best, true).unwrap().name,
            "llvmpipe",
            "tests may ask for it"
        );
        assert_eq!(
            pick(&all(), Choice::Best, true).unwrap().name,
            "board",
            "but a GPU is still better"
        );
        assert!(refused(&[], Choice::Best).1.contains("no Vulkan device"));
    }

    #[test]
    fn what_is_named_is_taken_or_refused() {
        let devices = all();
        for index in 0..4 {
            assert_eq!(pick(&devices, Choice::Index(index), false).unwrap().index, index);
        }
        let (code, words) = refused(&devices, Choice::Index(4));
        assert_eq!(
            (code, words.as_str()),
            (4, "there is no Vulkan device 4: 4 found; help: gemma devices lists them")
        );
    }

    #[test]
    fn a_device_that_lacks_something_is_passed_over_or_refused_by_the_name_of_it() {
        let mut devices = all();
        devices[3].missing = vec!["int8 in shaders"];
        assert_eq!(pick(&devices, Choice::Best, false).unwrap().name, "old board");
        for missing in [
            &["int8 in shaders"][..],
            &["f16 in shaders"],
            &["Vulkan 1.3"],
            &["8-bit storage", "subgroup shuffles"],
        ] {
            let lacking = [DeviceInfo { missing: missing.to_vec(), ..device(0, "relic", GB) }];
            for choice in [Choice::Best, Choice::Index(0)] {
                let (code, words) = refused(&lacking, choice);
                assert_eq!(code, 4);
                assert!(
                    words.starts_with(&format!("relic lacks {}; help: ", missing.join(", "))),
                    "{words}"
                );
                assert!(words.contains("--device cpu"), "{words}");
            }
        }
    }
}
