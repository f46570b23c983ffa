//! Trellis codes of tiles and products of floats on a device, as the quantiser uses them, compared
//! with the processor's.

use crate::common::vulkan::device;
use gemma::tensor::Code;
use gemma::tensor::encode::{CodingDevice, OnProcessor};
use gemma::tensor::product::View;
use gemma::vulkan::VulkanCoding;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A device finds the same codes as the processor: for weight-like tiles, for far outliers, for
/// equal weights where every path ties, and from several threads at once.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn codes_of_tiles() {
    let Some(device) = device() else { return };
    let device = VulkanCoding::new(device()).unwrap();
    let mut random = SmallRng::seed_from_u64(5);
    for code in [Code::T2, Code::T25, Code::T3, Code::T4] {
        let trellis = code.trellis().unwrap();
        let spread = [9.2f32, 40.0, 0.0, 1e30];
        let wanted: Vec<f32> = (0..5 * 256)
            .map(|i| spread[i / 256 % 4] * (random.random::<f32>() + random.random::<f32>() - 1.0))
            .collect();
        let mut want = vec![[0u64; 16]; 5];
        OnProcessor.encode(trellis, &wanted, &mut want).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut got = vec![[0u64; 16]; 5];
                    device.encode(trellis, &wanted, &mut got).unwrap();
                    assert!(got == want, "{code:?}");
                });
            }
        });
    }
}

/// A device multiplies floats like the processor, bit for bit if it fuses multiply-adds. Tests both
/// orders of factors, whole and partial slices, pieces, gaps in the output, and sums added to
/// existing values.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn products_of_floats() {
    let Some(device) = device() else { return };
    let device = VulkanCoding::new(device()).unwrap();
    let mut random = SmallRng::seed_from_u64(8);
    let mut floats =
        |n: usize| -> Vec<f32> { (0..n).map(|_| random.random::<f32>() - 0.5).collect() };
    for (m, n, k) in [(512, 512, 512), (650, 519, 1037)] {
        let (a, b, c) = (floats(m * k), floats(n * k), floats(m * (n + 3)));
        for (a_along, b_along, keep) in [(true, true, 0.0), (false, true, 1.0), (true, false, 1.0)]
        {
            let a = if a_along { View::of(&a, k) } else { View::of(&a, m).transposed() };
            let b = if b_along { View::of(&b, k).transposed() } else { View::of(&b, n) };
            let [mut exact, mut near, mut want] = [(); 3].map(|_| c.clone());
            device.multiply(&mut exact, n + 3, keep, 1.0, a, b).unwrap();
            device.multiply_inexactly(&mut near, n + 3, keep == 1.0, a, b).unwrap();
            OnProcessor.multiply(&mut want, n + 3, keep, 1.0, a, b).unwrap();
            let case = format!("{m} x {n} x {k}, {a_along}, {b_along}, {keep}");
            let same = |i: &usize| exact[*i].to_bits() == want[*i].to_bits();
            assert_eq!((0..want.len()).find(|i| !same(i)), None, "{case}");
            let far = |i: &usize| (near[*i] - want[*i]).abs() > 1e-5 * k as f32 / 8.0;
            assert_eq!((0..want.len()).find(far), None, "{case}");
        }
    }
}
