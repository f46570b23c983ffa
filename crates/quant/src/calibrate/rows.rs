//! Arithmetic on single rows for the calibration's forward pass, compiled for AVX2 if the machine
//! has it. Results have the same bits with and without it, because [`math`] fixes the order of
//! every sum.

use gemma_base::tensor::math;

/// Defines functions that are compiled twice: for the default instructions, and with AVX2 and FMA.
macro_rules! vectorised {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $body:block)*) => {$(
        $(#[$doc])*
        pub fn $name($($arg: $type),*) {
            #[inline(always)]
            fn body($($arg: $type),*) $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $type),*) {
                    body($($arg),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the condition above has checked that the machine has AVX2 and FMA.
                    return unsafe { wide($($arg),*) };
                }
            }
            body($($arg),*)
        }
    )*};
}

vectorised! {
    /// RMSNorm in place; `weight` is the stored weight plus 1.
    fn norm(x: &mut [f32], weight: &[f32], eps: f32) {
        let scale = math::inv_rms(x, eps);
        x.iter_mut().zip(weight).for_each(|(v, w)| *v *= scale * w);
    }

    /// Softmax in place: scores become weights that sum to 1.
    fn softmax(x: &mut [f32]) {
        let max = x.iter().fold(f32::NEG_INFINITY, |m, v| if *v > m { *v } else { m });
        x.iter_mut().for_each(|v| *v = math::exp(*v - max));
        let mut lanes = [0f32; math::LANES];
        for block in x.chunks(math::LANES) {
            lanes.iter_mut().zip(block).for_each(|(l, v)| *l += v);
        }
        let inverse = 1.0 / math::fold(lanes);
        x.iter_mut().for_each(|v| *v *= inverse);
    }

    /// `gate = gelu_tanh(gate) * up`
    fn gate(gate: &mut [f32], up: &[f32]) {
        gate.iter_mut().zip(up).for_each(|(g, u)| *g = math::gelu_tanh(*g) * u);
    }
}
