//! Picture files of all kinds, including damaged and hostile ones.

use super::*;
use crate::vision::picture::{decode, measure};
use gemma_base::error::fault_of;

#[derive(Deserialize)]
struct File {
    name: String,
    size: [usize; 2],
    has_alpha: bool,
    file: String, // hexadecimal
    rgb: String,
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks_exact(2);
    digits.map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
}

fn files() -> Vec<File> {
    read("files.json")
}

#[test]
fn pictures_are_those_that_pillow_reads() {
    for File { name, size, has_alpha, file, rgb } in files() {
        let (got, want) = (decode(&bytes(&file), PictureLimits::default()).unwrap(), bytes(&rgb));
        assert_eq!([got.width, got.height], size, "{name}");
        assert_eq!(got.flattened, has_alpha, "{name}");
        assert_eq!(got.rgb.len(), want.len(), "{name}");
        let differences = got.rgb.iter().zip(&want).map(|(a, b)| a.abs_diff(*b));
        // JPEG decoders round differently.
        let most = if name.ends_with("jpg") { 4 } else { 0 };
        let worst = differences.max().unwrap();
        assert!(worst <= most, "{name}: a value differs by {worst}");
    }
}

#[test]
fn damaged_pictures_do_no_harm() {
    let limits = PictureLimits { bytes: 1 << 20, pixels: 1 << 16 };
    let check = |name: &str, bytes: &[u8]| match decode(bytes, limits) {
        Ok(picture) => {
            assert_eq!(picture.rgb.len(), picture.width * picture.height * 3, "{name}");
            assert!(picture.width * picture.height <= 1 << 16, "{name}");
            true
        }
        Err(error) => {
            let fault = fault_of(&error).unwrap_or_else(|| panic!("{name}: no fault: {error:#}"));
            assert!(fault.help.is_some() && fault.kind.exit_code() == 2, "{name}: {fault}");
            false
        }
    };
    let mut state = 1u64;
    for File { name, file, .. } in files() {
        let bytes = bytes(&file);
        // The last bytes of a file may be unused.
        for cut in 0..bytes.len() * 9 / 10 {
            assert!(!check(&name, &bytes[..cut]), "{name}: {cut} bytes are enough");
        }
        for _ in 0..300 {
            let mut damaged = bytes.clone();
            for _ in 0..2 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let at = (state >> 33) as usize % damaged.len();
                damaged[at] ^= 1 << (state >> 29 & 7);
            }
            check(&name, &damaged);
        }
    }
}

fn refusal(bytes: &[u8], limits: PictureLimits) -> String {
    let error = measure(bytes, limits).unwrap_err();
    let fault = fault_of(&error).expect("a fault");
    assert!(fault.help.is_some());
    fault.what.clone()
}

#[test]
fn huge_pictures_are_refused_by_their_header() {
    let limits = PictureLimits::default();
    let file =
        |name: &str| bytes(&files().into_iter().find(|file| file.name == name).unwrap().file);
    // Width and height of a JPEG are in the frame header, those of a lossy WebP in its first bytes.
    let mut jpeg = file("turned-1.jpg");
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 9].fill(0xff);
    assert_eq!(refusal(&jpeg, limits), "the image has 65535 x 65535 pixels");
    let mut webp = file("lossy.webp");
    let start = webp.windows(3).position(|code| code == [0x9d, 0x01, 0x2a]).unwrap();
    webp[start + 3..start + 7].copy_from_slice(&[0xff, 0x3f, 0xff, 0x3f]);
    assert_eq!(refusal(&webp, limits), "the image has 16383 x 16383 pixels");
    let small = PictureLimits { pixels: 100, ..limits };
    assert_eq!(refusal(&file("rgb.png"), small), "the image has 13 x 9 pixels");
    let small = PictureLimits { bytes: 10, ..limits };
    assert_eq!(refusal(&file("rgb.png"), small), "the image has 1 MB");
}

#[test]
fn other_formats_are_named() {
    let limits = PictureLimits::default();
    assert_eq!(refusal(b"hello", limits), "the image is of an unknown format");
    assert_eq!(refusal(b"", limits), "the image is of an unknown format");
    assert_eq!(refusal(b"GIF89a\x01\x00\x01\x00\x00\x00\x00", limits), "the image is a gif file");
    assert_eq!(refusal(b"BM\x00\x00", limits), "the image is a bmp file");
}
