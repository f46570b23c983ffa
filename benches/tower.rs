//! Seconds of an image tower: `cargo bench --bench tower [-- -d vulkan] [LAYERS] [once] [check]`.
//!
//! The tower is a made-up SigLIP of So400m's size, with 27 layers or LAYERS. For a device, the
//! lines are the time of loading, which compiles kernels or reads them from their cache, of the
//! first image, and of the best image: the minimum of the first and five others, which `once`
//! leaves out. The tower's file is in the page cache. `check` compares soft tokens with the
//! processor's. Without `-d vulkan` the processor computes one image.

use gemma::vision::made_up::{SigLipSize, write_siglip};
use gemma::vision::{Picture, PreparedImage, Vision};
use gemma::vulkan::{Choice, VulkanDense, VulkanExecutor};
use std::time::Instant;

fn main() {
    let mut words = std::env::args().skip(1).filter(|a| a != "--bench").peekable();
    let on_gpu = words.next_if_eq("-d").and_then(|_| words.next()).is_some_and(|d| d == "vulkan");
    let rest: Vec<String> = words.collect();
    let layers = rest.iter().find_map(|word| word.parse().ok());
    let size = SigLipSize { layers: layers.unwrap_or(27), ..SigLipSize::SO400M };
    let directory = tempfile::tempdir().unwrap();
    write_siglip(directory.path(), size).unwrap();
    let vision = Vision::open(directory.path()).unwrap();
    let (width, height) = (1200, 900);
    let rgb = (0..width * height * 3).map(|i| ((i * i / 7) ^ (i / 3 * 5)) as u8).collect();
    let picture = Picture { width, height, rgb, flattened: false };
    let start = Instant::now();
    let image = vision.prepare_picture(&picture, None).unwrap();
    println!("resizing     {:8.3} s", start.elapsed().as_secs_f64());
    if on_gpu {
        let has = |wanted: &str| rest.iter().any(|word| word == wanted);
        let got = on_device(&vision, &image, if has("once") { 0 } else { 5 });
        if has("check") {
            compare(&got, &on_processor(&vision, &image));
        }
    } else {
        on_processor(&vision, &image);
    }
}

fn on_processor(vision: &Vision, image: &PreparedImage) -> Vec<f32> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let start = Instant::now();
    let soft = vision.encode(image, threads).unwrap();
    println!("processor    {:8.3} s, {threads} threads", start.elapsed().as_secs_f64());
    soft
}

fn on_device(vision: &Vision, image: &PreparedImage, others: usize) -> Vec<f32> {
    let executor = VulkanExecutor::open(Choice::Best).unwrap();
    println!("device       {}", executor.info().name);
    let device = VulkanDense::new(executor).unwrap();
    let start = Instant::now();
    let bytes = vision.load_on(&device).unwrap();
    println!("loading      {:8.3} s, {:.2} GB", start.elapsed().as_secs_f64(), bytes as f64 / 1e9);
    let encode = |_| {
        let start = Instant::now();
        let soft = vision.encode_on(image, &device).unwrap();
        (start.elapsed().as_secs_f64(), soft)
    };
    let (first, soft) = encode(0);
    println!("first image  {first:8.3} s");
    let best = (0..others).map(|i| encode(i).0).fold(first, f64::min);
    let speed = 2.0 * vision.work(image.fit()) as f64 / best / 1e12;
    println!("best image   {best:8.3} s, {speed:.2} TFLOP/s");
    soft
}

fn compare(got: &[f32], want: &[f32]) {
    let equal = got.iter().zip(want).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
    let distance = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs().max(1.0);
    let worst = got.iter().zip(want).map(distance).fold(0.0, f32::max);
    println!(
        "{equal} of {} values have the processor's bits, largest difference {worst:e}",
        got.len()
    );
}
