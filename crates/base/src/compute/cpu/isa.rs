//! Instruction sets of the CPU kernels, detected at run time.

use std::fmt;
use std::str::FromStr;

/// An instruction set with its own kernels. All return the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, on any machine.
    Scalar,
    /// AVX2 with FMA, F16C and BMI2.
    Avx2,
    /// AVX2 with AVX-VNNI.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// NEON with dotprod.
    NeonDot,
    /// NEON with dotprod and i8mm.
    NeonI8mm,
}

impl Isa {
    /// All instruction sets. The sets of one machine are in order of speed, the slowest first.
    const ALL: [Isa; 6] =
        [Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512Vnni, Isa::NeonDot, Isa::NeonI8mm];

    /// Returns the fastest instruction set of this machine.
    pub fn detect() -> Isa {
        Isa::all_supported().pop().unwrap_or(Isa::Scalar)
    }

    /// Returns all instruction sets of this machine, the slowest first.
    pub fn all_supported() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_supported()).collect()
    }

    /// Returns whether this machine has the instructions.
    pub fn is_supported(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_supported() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => {
                Isa::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => {
                std::arch::is_aarch64_feature_detected!("neon")
                    && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => {
                Isa::NeonDot.is_supported() && std::arch::is_aarch64_feature_detected!("i8mm")
            }
            _ => false,
        }
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(text: &str) -> Result<Isa, String> {
        let isa = Isa::ALL
            .into_iter()
            .find(|isa| isa.to_string() == text)
            .ok_or("expected scalar, avx2, avx-vnni, avx512, neon-dot or neon-i8mm")?;
        if isa.is_supported() { Ok(isa) } else { Err(format!("this machine has no {isa}")) }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512Vnni => "avx512",
            Isa::NeonDot => "neon-dot",
            Isa::NeonI8mm => "neon-i8mm",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detection_picks_the_last_of_what_is_supported() {
        assert_eq!("scalar".parse(), Ok(Isa::Scalar));
        assert!("mmx".parse::<Isa>().is_err());
        let all = Isa::all_supported();
        assert_eq!(all[0], Isa::Scalar);
        assert_eq!(all.last(), Some(&Isa::detect()));
        assert!(all.iter().all(|isa| isa.to_string().parse() == Ok(*isa)));
    }
}
