//! Sizes in recipes and options, in the notation of users.

use anyhow::Result;
use gemma_base::util::units;
use gemma_model::models::TensorSpec;

/// The target size for a choice of formats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aim {
    /// Bytes of all files.
    Bytes(u64),
    /// Bits per weight, with scales and headers, without side files.
    BitsPerWeight(f64),
}

impl From<u64> for Aim {
    fn from(bytes: u64) -> Aim {
        Aim::Bytes(bytes)
    }
}

impl Aim {
    /// Returns the target bytes of all files, for a model with these tensors and side files.
    pub fn bytes(self, tensors: &[TensorSpec], side_files: &[(String, u64)]) -> u64 {
        match self {
            Aim::Bytes(bytes) => bytes,
            Aim::BitsPerWeight(bits) => {
                let weights: usize = tensors.iter().map(TensorSpec::size).sum();
                (bits / 8.0 * weights as f64) as u64
                    + side_files.iter().map(|(_, bytes)| bytes).sum::<u64>()
            }
        }
    }
}

impl std::str::FromStr for Aim {
    type Err = anyhow::Error;

    /// Parses `9.5GB` or `4.5bpw`.
    fn from_str(text: &str) -> Result<Aim> {
        let trimmed = text.trim().to_ascii_lowercase();
        let is_number = trimmed.parse::<f64>().is_ok();
        match trimmed.strip_suffix("bpw").map(|number| number.trim().parse::<f64>()) {
            None if trimmed.starts_with(|c: char| c.is_ascii_digit()) && is_number => {
                anyhow::bail!(
                    "`{text}` has no unit: write {trimmed}GB, or {trimmed}bpw for bits per weight"
                )
            }
            None => parse_size(text).map(Aim::Bytes),
            Some(Ok(bits)) if (1.0..=32.0).contains(&bits) => Ok(Aim::BitsPerWeight(bits)),
            Some(_) => anyhow::bail!(
                "`{text}` is not a number of bits per weight from 1 to 32: write it like 4.5bpw"
            ),
        }
    }
}

impl std::fmt::Display for Aim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Aim::Bytes(bytes) => f.write_str(&units::bytes(*bytes)),
            Aim::BitsPerWeight(bits) => write!(f, "{bits}bpw"),
        }
    }
}

/// Returns the options that are closest to a type of llama.cpp, such as `Q4_K_M`. Returns `None`
/// for other names.
pub fn nearest_to(name: &str) -> Option<&'static str> {
    let upper = name.to_ascii_uppercase();
    let bits = upper.trim_start_matches('I').strip_prefix(['Q', 'T'])?.trim_start_matches('Q');
    let rest = bits.get(1..)?;
    if !(rest.starts_with('_') && rest.len() > 1) {
        return None;
    }
    match bits.as_bytes()[0] {
        b'1' | b'2' => Some("--target-size 2.6bpw"),
        b'3' => Some("--target-size 3.5bpw"),
        b'4' => Some("int4, or --target-size 4.8bpw"),
        b'5' => Some("--target-size 5.7bpw"),
        b'6' => Some("--target-size 6.6bpw"),
        b'8' => Some("--linear i8-g32"),
        _ => None,
    }
}

/// Parses `9.5GB`, `900 MB`, `8GiB` or `512 B`. Refuses a number without a unit, because it is
/// unlikely to mean bytes.
pub fn parse_size(text: &str) -> Result<u64> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let unit: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" if number.parse::<f64>().is_ok() => {
            anyhow::bail!("`{text}` has no unit: write {trimmed}GB or {trimmed}MB")
        }
        "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        _ => anyhow::bail!("`{text}` is not a size: write it like 9.5GB"),
    };
    match number.parse::<f64>() {
        Ok(n) if n > 0.0 && n * unit < 1e18 => Ok((n * unit) as u64),
        _ => anyhow::bail!("`{text}` is not a size: write it like 9.5GB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("9.5GB", 9_500_000_000),
            ("900 MB", 900_000_000),
            ("1GiB", 1 << 30),
            ("123 B", 123),
            ("2g", 2_000_000_000),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for bad in ["", "GB", "-1GB", "9.5.1GB", "1e400GB", "0GB", "9 bananas", "9"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        // Only a target size may be in bits per weight.
        let [size, aim] = [parse_size("2").unwrap_err(), "2".parse::<Aim>().unwrap_err()];
        assert_eq!(size.to_string(), "`2` has no unit: write 2GB or 2MB");
        assert_eq!(aim.to_string(), "`2` has no unit: write 2GB, or 2bpw for bits per weight");
        assert_eq!("4.5 bpw".parse::<Aim>().unwrap(), Aim::BitsPerWeight(4.5));
        assert_eq!("1MB".parse::<Aim>().unwrap(), Aim::Bytes(1_000_000));
        for bad in ["4.5", "bpw", "0.5bpw", "64bpw", "nanbpw"] {
            assert!(bad.parse::<Aim>().is_err(), "{bad}");
        }
    }
}
