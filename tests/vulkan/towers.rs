//! Image towers on Vulkan: the golden towers give the processor's soft tokens.

use crate::common::vulkan::device;
use gemma::vision::{Picture, Vision};
use gemma::vulkan::VulkanDense;
use std::path::Path;

/// Limit of a value's relative difference, if the driver does not fuse multiply-adds.
const TOLERANCE: f32 = 1e-5;

fn picture(width: usize, height: usize) -> Picture {
    let rgb = (0..width * height * 3).map(|i| ((i * i / 7) ^ (i / 3 * 5)) as u8).collect();
    Picture { width, height, rgb, flattened: false }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn soft_tokens_are_those_of_the_processor() {
    let Some(open) = device() else { return };
    for family in ["gemma3", "gemma4", "gemma4-unified"] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision");
        let vision = Vision::open(&root.join(family)).unwrap();
        let dense = VulkanDense::new(open()).unwrap();
        // Workgroups, and calls between two barriers, run in another order.
        let shuffled = VulkanDense::new(open().shuffled(5)).unwrap();
        assert!(vision.load_on(&dense).unwrap() >= vision.weight_bytes() / 2, "{family}");
        for (width, height) in [(60, 40), (90, 200), (60, 40)] {
            let image = vision.prepare_picture(&picture(width, height), None).unwrap();
            let want = vision.encode(&image, 2).unwrap();
            let got = vision.encode_on(&image, &dense).unwrap();
            assert_eq!(got.len(), want.len());
            assert!(got == vision.encode_on(&image, &shuffled).unwrap(), "{family}, shuffled");
            let distance = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs().max(1.0);
            let worst = got.iter().zip(&want).map(distance).fold(0.0, f32::max);
            println!("{family}, {width} x {height}: {worst}");
            assert!(worst < TOLERANCE, "{family}, {width} x {height}: {worst}");
        }
    }
}

/// One device computes the towers of two models in turn.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_device_changes_towers() {
    let Some(open) = device() else { return };
    let dense = VulkanDense::new(open()).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision");
    let towers = ["gemma3", "gemma4"].map(|family| Vision::open(&root.join(family)).unwrap());
    let encode = |vision: &Vision| {
        let image = vision.prepare_picture(&picture(50, 50), None).unwrap();
        vision.encode_on(&image, &dense).unwrap()
    };
    let [first, second] = towers.each_ref().map(encode);
    assert!(first == encode(&towers[0]) && second == encode(&towers[1]));
}
