//! Functions with one body that is compiled for every instruction set.

/// Defines `fn $name(isa, args)`, which runs the always-inlined generic function `$body::<L>` in a
/// version for the instruction set.
macro_rules! for_each_isa {
    ($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        pub fn $name(isa: $crate::compute::cpu::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn avx512($($arg: $ty),*) {
                $body::<$crate::compute::cpu::simd::Avx512>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn avx2($($arg: $ty),*) {
                $body::<$crate::compute::cpu::simd::Avx2>($($arg),*)
            }
            match isa {
                // SAFETY: the executor checked that the machine has the instruction set.
                #[cfg(target_arch = "x86_64")]
                $crate::compute::cpu::Isa::Avx512Vnni => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::compute::cpu::Isa::Avx2 | $crate::compute::cpu::Isa::AvxVnni => unsafe {
                    avx2($($arg),*)
                },
                #[cfg(target_arch = "aarch64")]
                $crate::compute::cpu::Isa::NeonDot | $crate::compute::cpu::Isa::NeonI8mm => {
                    $body::<$crate::compute::cpu::neon::Neon>($($arg),*)
                }
                _ => $body::<$crate::compute::cpu::simd::Scalar>($($arg),*),
            }
        }
    };
}
pub(crate) use for_each_isa;
