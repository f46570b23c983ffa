//! Parses the processor's name from the text of Linux's /proc/cpuinfo.

/// Cores of ARM64 processors: implementer, part and name. The numbers are fields of the register
/// MIDR_EL1, as in util-linux's `lscpu`.
const CORES: [(u32, u32, &str); 40] = [
    (0x41, 0xd03, "Cortex-A53"),
    (0x41, 0xd04, "Cortex-A35"),
    (0x41, 0xd05, "Cortex-A55"),
    (0x41, 0xd07, "Cortex-A57"),
    (0x41, 0xd08, "Cortex-A72"),
    (0x41, 0xd09, "Cortex-A73"),
    (0x41, 0xd0a, "Cortex-A75"),
    (0x41, 0xd0b, "Cortex-A76"),
    (0x41, 0xd0c, "Neoverse-N1"),
    (0x41, 0xd0d, "Cortex-A77"),
    (0x41, 0xd0e, "Cortex-A76AE"),
    (0x41, 0xd40, "Neoverse-V1"),
    (0x41, 0xd41, "Cortex-A78"),
    (0x41, 0xd42, "Cortex-A78AE"),
    (0x41, 0xd44, "Cortex-X1"),
    (0x41, 0xd46, "Cortex-A510"),
    (0x41, 0xd47, "Cortex-A710"),
    (0x41, 0xd48, "Cortex-X2"),
    (0x41, 0xd49, "Neoverse-N2"),
    (0x41, 0xd4b, "Cortex-A78C"),
    (0x41, 0xd4c, "Cortex-X1C"),
    (0x41, 0xd4d, "Cortex-A715"),
    (0x41, 0xd4e, "Cortex-X3"),
    (0x41, 0xd4f, "Neoverse-V2"),
    (0x41, 0xd80, "Cortex-A520"),
    (0x41, 0xd81, "Cortex-A720"),
    (0x41, 0xd82, "Cortex-X4"),
    (0x41, 0xd84, "Neoverse-V3"),
    (0x41, 0xd85, "Cortex-X925"),
    (0x41, 0xd87, "Cortex-A725"),
    (0x41, 0xd8e, "Neoverse-N3"),
    (0x46, 0x001, "A64FX"),
    (0x48, 0xd01, "TaiShan-v110"),
    (0x4e, 0x004, "Carmel"),
    (0x51, 0x001, "Oryon"),
    (0x61, 0x022, "Icestorm-M1"),
    (0x61, 0x023, "Firestorm-M1"),
    (0x61, 0x032, "Blizzard-M2"),
    (0x61, 0x033, "Avalanche-M2"),
    (0xc0, 0xac3, "Ampere-1"),
];

/// Returns the processor's model name.
///
/// ARM64 has none: the result lists the names of its different cores.
pub fn processor_name(text: &str) -> Option<String> {
    let fields = || {
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        lines.map(|(name, value)| (name.trim(), value.trim()))
    };
    if let Some((_, model)) = fields().find(|(name, _)| *name == "model name") {
        return Some(model.to_owned());
    }
    let numbers = |wanted| {
        let values = fields().filter(move |(name, _)| *name == wanted);
        values.filter_map(|(_, value)| u32::from_str_radix(value.strip_prefix("0x")?, 16).ok())
    };
    let mut names = Vec::new();
    for (implementer, part) in numbers("CPU implementer").zip(numbers("CPU part")) {
        let known = CORES.iter().find(|core| (core.0, core.1) == (implementer, part));
        let name = known.map_or_else(
            || format!("ARM64 core {implementer:#04x}:{part:#05x}"),
            |(_, _, name)| (*name).to_owned(),
        );
        if !names.contains(&name) {
            names.push(name);
        }
    }
    (!names.is_empty()).then(|| names.join(" + "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_the_model_or_from_the_cores() {
        let core = |implementer: &str, part: &str| {
            format!(
                "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: {implementer}\n\
                 CPU architecture: 8\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
            )
        };
        let (small, large) = (core("0x41", "0xd05"), core("0x41", "0xd0b"));
        for (text, name) in [
            (
                "processor : 0\nmodel name\t: AMD Ryzen 7 7840HS\nflags : fpu\n",
                "AMD Ryzen 7 7840HS",
            ),
            (&large.repeat(4), "Cortex-A76"),
            (&(small.repeat(4) + &large), "Cortex-A55 + Cortex-A76"),
            (&core("0x61", "0x9"), "ARM64 core 0x61:0x009"),
        ] {
            assert_eq!(processor_name(text).as_deref(), Some(name));
        }
        assert_eq!(processor_name("processor : 0\n"), None);
    }
}
