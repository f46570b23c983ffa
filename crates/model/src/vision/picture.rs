//! Decodes the bytes of a picture file to RGB, within limits that are checked before any pixel is
//! decoded.
//!
//! Reads JPEG, PNG and WebP, and the first frame of an animation. Applies the EXIF orientation, and
//! composes transparent parts over white.

use anyhow::Result;
use gemma_base::error::Fault;
use image::error::{ImageError, LimitErrorKind};
use image::metadata::Orientation;
use image::{ColorType, DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits, RgbImage};
use rayon::prelude::*;
use std::io::Cursor;

/// Supported formats, for messages.
const FORMATS: &str = "JPEG, PNG and WebP pictures are read";

/// Limits of a picture's size.
#[derive(Clone, Copy, Debug)]
pub struct PictureLimits {
    /// Bytes of the file.
    pub bytes: usize,
    /// Width times height.
    pub pixels: u64,
}

impl Default for PictureLimits {
    /// Suits pictures of phones and cameras: 64 MB and 64 million pixels.
    fn default() -> Self {
        PictureLimits { bytes: 64 << 20, pixels: 64_000_000 }
    }
}

/// A decoded picture in upright orientation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    pub width: usize,
    pub height: usize,
    /// `[height, width, 3]`, red first.
    pub rgb: Vec<u8>,
    /// Whether it had transparent parts, which were composed over white.
    pub flattened: bool,
}

fn refuse(what: impl std::fmt::Display) -> Fault {
    Fault::usage(format!("the image {what}"))
}

/// Returns the fault for a file that cannot be decoded.
fn fault(error: ImageError, limits: PictureLimits) -> Fault {
    match error {
        ImageError::Limits(limit) => match limit.kind() {
            LimitErrorKind::DimensionError => refuse("is too large").help(smaller(limits)),
            _ => refuse("needs too much memory to be decoded").help(smaller(limits)),
        },
        ImageError::Unsupported(error) => {
            refuse(format!("has a form that is not read: {error}")).help(FORMATS)
        }
        error => {
            refuse(format!("is damaged: {error}")).help("save it again as a PNG or JPEG picture")
        }
    }
}

fn smaller(limits: PictureLimits) -> String {
    let (megabytes, megapixels) = (limits.bytes >> 20, limits.pixels / 1_000_000);
    format!("at most {megabytes} MB and {megapixels} million pixels are read: make it smaller")
}

/// Opens a decoder and checks the size in the file's header.
fn decoder(bytes: &[u8], limits: PictureLimits) -> Result<(impl ImageDecoder + '_, ImageFormat)> {
    if bytes.len() > limits.bytes {
        let what = format!("has {} MB", bytes.len().div_ceil(1 << 20));
        return Err(refuse(what).help(smaller(limits)).into());
    }
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format()?;
    let Some(format) = reader.format() else {
        return Err(refuse("is of an unknown format").help(FORMATS).into());
    };
    if !matches!(format, ImageFormat::Jpeg | ImageFormat::Png | ImageFormat::WebP) {
        let name = format.extensions_str().first().map_or("of another kind", |name| name);
        return Err(refuse(format!("is a {name} file")).help(FORMATS).into());
    }
    let mut most = Limits::no_limits();
    // Room for 16-bit colours with alpha, plus the same again for the decoder's tables.
    most.max_alloc = Some(limits.pixels.saturating_mul(16).saturating_add(16 << 20));
    reader.limits(most);
    let decoder = reader.into_decoder().map_err(|e| fault(e, limits))?;
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if pixels == 0 {
        return Err(refuse("has no pixels").help("save it again").into());
    }
    if pixels > limits.pixels {
        let what = format!("has {width} x {height} pixels");
        return Err(refuse(what).help(smaller(limits)).into());
    }
    Ok((decoder, format))
}

/// Returns the stored width and height of a picture. Decodes only the header.
///
/// # Errors
/// A [`Fault`] for a file of another format, a damaged one, or one that exceeds the limits.
pub fn measure(bytes: &[u8], limits: PictureLimits) -> Result<(usize, usize)> {
    let (width, height) = decoder(bytes, limits)?.0.dimensions();
    Ok((width as usize, height as usize))
}

/// Decodes a picture.
///
/// # Errors
/// A [`Fault`] for a file of another format, a damaged or truncated one, or one that exceeds the
/// limits.
pub fn decode(bytes: &[u8], limits: PictureLimits) -> Result<Picture> {
    let (mut decoder, format) = decoder(bytes, limits)?;
    let is_whole = match format {
        ImageFormat::Jpeg => jpeg_ends(bytes),
        ImageFormat::WebP => webp_ends(bytes),
        _ => true,
    };
    if !is_whole {
        let help = "the file was not fully downloaded or written: fetch it again";
        return Err(refuse("is truncated").help(help).into());
    }
    // Pictures with damaged EXIF data are not rotated, as in other programs.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut picture = read(decoder).map_err(|e| fault(e, limits))?;
    picture.apply_orientation(orientation);
    let (width, height) = (picture.width() as usize, picture.height() as usize);
    let (rgb, flattened) = to_rgb(picture);
    Ok(Picture { width, height, rgb, flattened })
}

/// Decodes a picture into memory that several threads touch first. A single thread would need half
/// the decoding time for the page faults.
fn read(decoder: impl ImageDecoder) -> Result<DynamicImage, ImageError> {
    if decoder.color_type() != ColorType::Rgb8 {
        return DynamicImage::from_decoder(decoder);
    }
    let (width, height) = decoder.dimensions();
    let mut rgb = vec![0; decoder.total_bytes() as usize];
    rgb.par_chunks_mut(1 << 20).for_each(|part| part.fill(0));
    decoder.read_image(&mut rgb)?;
    let picture = RgbImage::from_raw(width, height, rgb);
    Ok(picture.expect("the decoder named the number of bytes").into())
}

/// Returns whether a WebP file has its full length. Its decoder accepts some truncated files.
fn webp_ends(bytes: &[u8]) -> bool {
    let length = bytes.get(4..8).and_then(|length| length.first_chunk::<4>());
    length.is_some_and(|length| u32::from_le_bytes(*length) as usize + 8 <= bytes.len())
}

/// Returns whether a JPEG file has an end marker. The decoder fills missing parts with grey.
fn jpeg_ends(bytes: &[u8]) -> bool {
    let mut at = 2;
    // Skips segments by their lengths, up to the first scan. This also skips a thumbnail in a
    // segment.
    while let Some(&[0xff, marker]) = bytes.get(at..at + 2) {
        let length = match marker {
            0xff => -1i64,
            0x01 | 0xd0..=0xd8 => 0,
            _ => match bytes.get(at + 2..at + 4) {
                Some(&[high, low]) => i64::from(high) << 8 | i64::from(low),
                _ => return false,
            },
        };
        at += (2 + length) as usize;
        if marker == 0xda {
            break;
        }
    }
    // The end marker does not occur inside scans.
    bytes.get(at..).is_some_and(|scans| scans.windows(2).any(|pair| pair == [0xff, 0xd9]))
}

/// Composes a value with `alpha` over white.
fn on_white(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}

/// Returns the RGB bytes of a picture, and whether it had transparent parts. Uses the upper 8 bits
/// of 16-bit values.
fn to_rgb(picture: DynamicImage) -> (Vec<u8>, bool) {
    let high = |v: u16| (v >> 8) as u8;
    let grey = |v: u8| [v, v, v];
    let opaque = |rgb: Vec<u8>| (rgb, false);
    match picture {
        DynamicImage::ImageRgb8(p) => opaque(p.into_raw()),
        DynamicImage::ImageLuma8(p) => opaque(p.iter().flat_map(|v| grey(*v)).collect()),
        DynamicImage::ImageLuma16(p) => opaque(p.iter().flat_map(|v| grey(high(*v))).collect()),
        DynamicImage::ImageRgb16(p) => opaque(p.iter().map(|v| high(*v)).collect()),
        DynamicImage::ImageLumaA8(p) => flatten(p.pixels().map(|p| (grey(p.0[0]), p.0[1]))),
        DynamicImage::ImageLumaA16(p) => {
            flatten(p.pixels().map(|p| (grey(high(p.0[0])), high(p.0[1]))))
        }
        DynamicImage::ImageRgba16(p) => flatten(p.pixels().map(|p| {
            let [r, g, b, a] = p.0.map(high);
            ([r, g, b], a)
        })),
        other => flatten(other.to_rgba8().pixels().map(|p| {
            let [r, g, b, a] = p.0;
            ([r, g, b], a)
        })),
    }
}

/// Composes colours with their alpha over white.
fn flatten(pixels: impl Iterator<Item = ([u8; 3], u8)>) -> (Vec<u8>, bool) {
    let mut flattened = false;
    let rgb = pixels
        .flat_map(|(colour, alpha)| {
            flattened |= alpha < 255;
            colour.map(|value| on_white(value, alpha))
        })
        .collect();
    (rgb, flattened)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alpha_lies_on_white() {
        assert_eq!([0, 100, 255].map(|v| on_white(v, 255)), [0, 100, 255]);
        assert_eq!([0, 100, 255].map(|v| on_white(v, 0)), [255; 3]);
        assert_eq!([0, 255].map(|v| on_white(v, 128)), [127, 255]);
    }

    #[test]
    fn a_jpeg_ends_behind_its_scan() {
        // A thumbnail with its own end marker inside a segment, followed by a scan.
        let head = [0xff, 0xd8, 0xff, 0xe1, 0, 6, 0xff, 0xd8, 0xff, 0xd9, 0xff, 0xda, 0, 2];
        let scan = [1, 0xff, 0, 2];
        assert!(!jpeg_ends(&[&head[..], &scan].concat()));
        assert!(jpeg_ends(&[&head[..], &scan, &[0xff, 0xd9]].concat()));
        for cut in 0..head.len() {
            assert!(!jpeg_ends(&head[..cut]), "{cut}");
        }
    }
}
