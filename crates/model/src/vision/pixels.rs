//! Converts pictures to a tower's input: the size to resize to, and patches as f32 values.
//!
//! Source: transformers, `Gemma3ImageProcessorPil` and `Gemma4ImageProcessorPil`.

use super::resize::{CHANNELS, Filter};
use crate::checkpoint::Checkpoint;
use crate::models::reader;
use anyhow::Result;
use gemma_base::error::Fault;
use serde_json::Value;

/// Selectable limits for the soft tokens of a Gemma 4 image.
pub const BUDGETS: [usize; 5] = [70, 140, 280, 560, 1120];
/// The limit unless a file or the user specifies another one.
const DEFAULT_BUDGET: usize = 280;

/// Fails for a budget that no model was trained with.
pub fn check_budget(budget: usize) -> Result<usize, Fault> {
    match BUDGETS.contains(&budget) {
        true => Ok(budget),
        false => {
            let list = BUDGETS.map(|n| n.to_string()).join(", ");
            let what = format!("an image cannot have up to {budget} tokens");
            Err(Fault::usage(what).help(format!("choose one of {list}")))
        }
    }
}

/// Returns the size to which a picture is resized, in cells of `cell` x `cell` pixels.
///
/// Keeps the aspect ratio and uses at most `budget` cells. Small pictures are enlarged.
///
/// # Errors
/// A [`Fault`] for a picture without pixels.
pub fn cells(
    width: usize,
    height: usize,
    cell: usize,
    budget: usize,
) -> Result<(usize, usize), Fault> {
    let bad = || Fault::usage(format!("an image of {width} x {height} pixels cannot be resized"));
    if width == 0 || height == 0 {
        return Err(bad());
    }
    let (w, h) = (width as f64, height as f64);
    let factor = ((budget * cell * cell) as f64 / (w * h)).sqrt();
    let side = |length: f64| (factor * length / cell as f64).floor() as usize;
    // A very thin picture gets one row or column of cells.
    let thin = |long: f64, short: f64| ((long / short).floor() as usize).min(budget);
    let (columns, rows) = match (side(w), side(h)) {
        (columns, 0) if columns > 0 => (thin(w, h), 1),
        (0, rows) if rows > 0 => (1, thin(h, w)),
        both => both,
    };
    match columns * rows {
        n if n > 0 && n <= budget => Ok((columns, rows)),
        _ => Err(bad()),
    }
}

/// Conversion of pixels to values: the variable part of `preprocessor_config.json`.
#[derive(Clone, Debug)]
pub struct Processor {
    pub filter: Filter,
    /// Value of each byte, per channel.
    values: [[f32; 256]; CHANNELS],
    /// Tokens of an image unless the user chooses another number.
    pub budget: usize,
}

impl Processor {
    /// Reads `preprocessor_config.json`, or the image processor in `processor_config.json`.
    ///
    /// Without either file the family's defaults apply: `filter`, and whether values are `(v - 1/2)
    /// / (1/2)` instead of in 0..1.
    ///
    /// # Errors
    /// A [`Fault`] for a file with unsupported values.
    pub fn open(checkpoint: &Checkpoint, filter: Filter, is_centred: bool) -> Result<Processor> {
        let own = checkpoint.side_json("preprocessor_config.json")?;
        let json = match own {
            Some(json) => json,
            None => checkpoint
                .side_json("processor_config.json")?
                .and_then(|mut json| json.get_mut("image_processor").map(Value::take))
                .unwrap_or(Value::Null),
        };
        Ok(Self::read(&json, filter, is_centred)?)
    }

    /// Reads the settings from parsed JSON.
    pub fn read(json: &Value, filter: Filter, is_centred: bool) -> Result<Processor, Fault> {
        let filter = match json.get("resample").filter(|v| !v.is_null()).map(Value::as_u64) {
            None => filter,
            Some(Some(2)) => Filter::Bilinear,
            Some(Some(3)) => Filter::Bicubic,
            Some(_) => {
                let what = format!("`resample` is {}: only 2 and 3 are computed", json["resample"]);
                return Err(Fault::model(what));
            }
        };
        let list = |key: &str, default: f32| -> Result<[f32; CHANNELS], Fault> {
            let Some(value) = json.get(key).filter(|v| !v.is_null()) else {
                return Ok([default; CHANNELS]);
            };
            let numbers: Option<Vec<f32>> = value
                .as_array()
                .map(|list| list.iter().filter_map(|v| Some(v.as_f64()? as f32)).collect());
            numbers
                .and_then(|numbers| numbers.try_into().ok())
                .filter(|n: &[f32; CHANNELS]| n.iter().all(|v| v.is_finite()))
                .ok_or_else(|| Fault::model(format!("`{key}` is {value}, not three numbers")))
        };
        let scale = reader::positive("rescale_factor", json.get("rescale_factor"), 1.0 / 255.0)?;
        let is_centred = json.get("do_normalize").and_then(Value::as_bool).unwrap_or(is_centred);
        let (mean, std) = (list("image_mean", 0.5)?, list("image_std", 0.5)?);
        if is_centred && std.iter().any(|v| !v.is_normal()) {
            return Err(Fault::model(format!("`image_std` is {std:?}")));
        }
        // Computed as in transformers: the scale in f64, the rest in f32.
        let value = |byte: usize, channel: usize| {
            let value = (byte as f64 * scale) as f32;
            if is_centred { (value - mean[channel]) / std[channel] } else { value }
        };
        let values = std::array::from_fn(|channel| std::array::from_fn(|b| value(b, channel)));
        let budget =
            reader::size("max_soft_tokens", json.get("max_soft_tokens"), DEFAULT_BUDGET, 1120)?;
        Ok(Processor { filter, values, budget: check_budget(budget)? })
    }

    /// Cuts a picture of `width` pixels into square patches of `side` pixels.
    ///
    /// Returns one row of values per patch, from the top left. Values are ordered by row, column
    /// and channel of the patch, or by channel first.
    pub fn patches(
        &self,
        rgb: &[u8], // [height, width, 3]
        width: usize,
        side: usize,
        is_channel_first: bool,
    ) -> Vec<f32> {
        let height = rgb.len() / (width * CHANNELS);
        let mut out = Vec::with_capacity(rgb.len());
        let at = |x: usize, y: usize, c: usize| {
            self.values[c][usize::from(rgb[(y * width + x) * CHANNELS + c])]
        };
        for top in (0..height).step_by(side) {
            for left in (0..width).step_by(side) {
                let places =
                    (top..top + side).flat_map(|y| (left..left + side).map(move |x| (x, y)));
                match is_channel_first {
                    true => out.extend(
                        (0..CHANNELS).flat_map(|c| places.clone().map(move |(x, y)| at(x, y, c))),
                    ),
                    false => out
                        .extend(places.flat_map(|(x, y)| (0..CHANNELS).map(move |c| at(x, y, c)))),
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_fill_their_budget() {
        assert_eq!(cells(640, 480, 48, 280).unwrap(), (19, 14));
        assert_eq!(cells(1, 1, 48, 70).unwrap(), (8, 8));
        assert_eq!(cells(5, 900, 48, 70).unwrap(), (1, 70));
        assert_eq!(cells(900, 5, 48, 280).unwrap(), (224, 1));
        assert!(cells(0, 5, 48, 280).is_err());
        assert!(check_budget(281).is_err() && check_budget(1120).is_ok());
    }

    #[test]
    fn patches_are_cut_in_either_order() {
        let processor = Processor::read(&Value::Null, Filter::Bicubic, false).unwrap();
        let rgb: Vec<u8> = (0..4 * 2 * 3).collect();
        let value = |bytes: [u8; 12]| bytes.map(|v| (f64::from(v) / 255.0) as f32);
        let second = [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23];
        assert_eq!(processor.patches(&rgb, 4, 2, false)[12..], value(second));
        let second = [6, 9, 18, 21, 7, 10, 19, 22, 8, 11, 20, 23];
        assert_eq!(processor.patches(&rgb, 4, 2, true)[12..], value(second));
    }
}
