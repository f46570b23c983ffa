//! What holds the machine back on purpose: power profile, governor, battery.

use super::Check;
use super::host::Machine;

pub fn checks(machine: &dyn Machine) -> Vec<Check> {
    let checks: Vec<Check> =
        [profile(machine), frequency(machine), battery(machine)].into_iter().flatten().collect();
    let held = graphics(machine);
    checks.into_iter().chain(held).collect()
}

fn profile(machine: &dyn Machine) -> Option<Check> {
    let now = machine.read("sys/firmware/acpi/platform_profile")?;
    let choices = machine.read("sys/firmware/acpi/platform_profile_choices").unwrap_or_default();
    Some(match now.as_str() {
        "low-power" | "quiet" | "cool" => {
            let best = ["performance", "balanced"]
                .into_iter()
                .find(|p| choices.split_whitespace().any(|c| c == *p))
                .unwrap_or("balanced");
            Check::warn(
                "power profile",
                now.clone(),
                "the firmware holds processor and GPU back; with power-profiles-daemon, or \
                    without:",
            )
            .typing([
                format!("powerprofilesctl set {best}"),
                format!("echo {best} | sudo tee /sys/firmware/acpi/platform_profile"),
            ])
        }
        _ => Check::pass("power profile", now),
    })
}

fn frequency(machine: &dyn Machine) -> Option<Check> {
    let of = |file: &str| machine.read(&format!("sys/devices/system/cpu/cpu0/cpufreq/{file}"));
    let driver = of("scaling_driver")?;
    let (governor, preference) =
        (of("scaling_governor").unwrap_or_default(), of("energy_performance_preference"));
    let mode = machine
        .read("sys/devices/system/cpu/amd_pstate/status")
        .map_or(String::new(), |mode| format!(" ({mode})"));
    let found = format!(
        "{driver}{mode}, governor {governor}{}",
        preference.as_ref().map_or(String::new(), |p| format!(", preference {p}"))
    );
    // Under these drivers powersave is the ordinary governor, and the preference decides.
    let by_preference =
        preference.is_some() && matches!(driver.as_str(), "amd-pstate-epp" | "intel_pstate");
    Some(if by_preference && preference.as_deref() == Some("power") {
        Check::warn(
            "cpu frequency",
            found,
            "the processor saves power first; for as long as the machine is up:",
        )
        .typing([
            "cd /sys/devices/system/cpu",
            "echo balance_performance | sudo tee cpu*/cpufreq/energy_performance_preference",
        ])
    } else if !by_preference && governor == "powersave" {
        Check::warn(
            "cpu frequency",
            found,
            "this governor keeps the lowest frequency; for as long as the machine is up:",
        )
        .typing(["echo schedutil | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"])
    } else {
        Check::pass("cpu frequency", found)
    })
}

fn battery(machine: &dyn Machine) -> Option<Check> {
    let supplies = machine.list("sys/class/power_supply");
    let of =
        |name: &String, file: &str| machine.read(&format!("sys/class/power_supply/{name}/{file}"));
    let batteries: Vec<&String> = supplies
        .iter()
        .filter(|s| {
            of(s, "type").as_deref() == Some("Battery")
                && of(s, "scope").as_deref() != Some("Device")
        })
        .collect();
    if batteries.is_empty() {
        return None;
    }
    let discharging = batteries.iter().any(|b| of(b, "status").as_deref() == Some("Discharging"));
    Some(if discharging {
        Check::warn(
            "power supply",
            "on battery",
            "laptops halve their clocks there: plug the charger in",
        )
    } else {
        Check::pass("power supply", "plugged in")
    })
}

/// AMD graphics whose clocks somebody pinned down.
fn graphics(machine: &dyn Machine) -> Vec<Check> {
    let cards = machine
        .list("sys/class/drm")
        .into_iter()
        .filter(|name| name.starts_with("card") && !name.contains('-'));
    cards
        .filter_map(|card| {
            let (device, level) =
                (format!("sys/class/drm/{card}/device"), "power_dpm_force_performance_level");
            (machine.read(&format!("{device}/{level}"))? == "low").then(|| {
                Check::warn(
                    "gpu clocks",
                    format!("{card} is held at its lowest clocks"),
                    "let the driver choose again:",
                )
                .typing([format!("cd /{device}"), format!("echo auto | sudo tee {level}")])
            })
        })
        .collect()
}
