//! Times of an image: decoding and resizing its pixels, and the tower.

use super::measure::Figure;
use super::report::Measurement;
use crate::cli::io::image_file::read_image;
use crate::runtime::model::viewer::device_for;
use crate::runtime::options::Device;
use crate::runtime::{RunOptions, load};
use crate::util::units::{digits3, thousands};
use crate::vision::made_up::{SigLipSize, write_siglip};
use crate::vision::{Picture, PreparedImage, Vision};
use anyhow::Result;
use std::path::Path;
use std::time::Instant;

/// Width and height of the made-up picture.
const MADE_UP: [usize; 2] = [1024, 768];

/// Measures decoding and resizing of an image, and its tower. A made-up image needs no decoding.
pub fn measure(
    vision: &Vision,
    file: Option<&Path>,
    tokens: Option<usize>,
    run: &RunOptions,
    repetitions: usize,
) -> Result<Vec<Measurement>> {
    let device = match run.device {
        Device::Cpu => None,
        Device::Auto => device_for(run.device, run.lock).ok(),
        Device::Vulkan(_) => Some(device_for(run.device, run.lock)?),
    };
    let encode = |image: &PreparedImage| match &device {
        Some(device) => vision.encode_on(image, &**device),
        None => vision.encode(image, load::threads(run)),
    };
    let file = file.map(read_image).transpose()?;
    let made_up = picture();
    let prepare = || match &file {
        Some(file) => vision.prepare(file, tokens, Default::default()),
        None => vision.prepare_picture(&made_up, tokens),
    };
    let (prepared, preparing) = timed(repetitions, prepare)?;
    let (_, encoding) = timed(repetitions, || encode(&prepared))?;
    let PreparedImage { original: (width, height), .. } = prepared;
    let fit = prepared.fit();
    let what = if file.is_some() { "decoded and resized" } else { "resized" };
    let sizes = format!("{width} x {height} {what} to {} x {}", fit.width, fit.height);
    let work = 2.0 * vision.work(fit) as f64;
    let rate = work / (encoding.median * 1e-3) / 1e9;
    let work = format!(
        "{} tokens on the {}, {} GFLOP at {} GFLOP/s",
        fit.tokens(),
        if device.is_some() { "GPU" } else { "processor" },
        thousands((work / 1e9) as u64),
        digits3(rate)
    );
    let row = |name: &str, figure, note| Measurement {
        name: name.into(),
        unit: "ms".into(),
        figure,
        note,
        pass: None,
    };
    Ok(vec![row("image pixels", preparing, sizes), row("image tower", encoding, work)])
}

/// Makes up a SigLIP of So400m's size with soft tokens of `dim` values.
pub fn made_up(dim: usize, directory: &Path) -> Result<Vision> {
    write_siglip(directory, SigLipSize { embedding: dim, ..SigLipSize::SO400M })?;
    Vision::open(directory)
}

/// Runs `work` once, and then `repetitions` times for the figure, which is in milliseconds.
fn timed<T>(repetitions: usize, mut work: impl FnMut() -> Result<T>) -> Result<(T, Figure)> {
    let mut made = work()?;
    let mut times = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        let begun = Instant::now();
        made = work()?;
        times.push(1e3 * begun.elapsed().as_secs_f64());
    }
    Ok((made, Figure::of(times)))
}

fn picture() -> Picture {
    let [width, height] = MADE_UP;
    let value = |i: usize| ((i * 7 + i / width * 13) ^ (i >> 9)) as u8;
    Picture { width, height, rgb: (0..3 * width * height).map(value).collect(), flattened: false }
}
