//! Image files, and the places of images in a prompt.

use crate::error::Fault;
use crate::models::MessageImage;
use crate::vision::PictureLimits;
use anyhow::{Context, Result};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// Mark for an image in a prompt.
const MARK: &str = "<image>";

/// Reads an image file.
pub fn read_image(path: &Path) -> Result<Arc<[u8]>> {
    if path == Path::new("-") {
        return read_all(&mut std::io::stdin().lock(), "standard input");
    }
    let name = path.display().to_string();
    let fault = || {
        Fault::model(format!("cannot read the image {name}"))
            .help("check the path and the file's permissions")
    };
    if path.is_dir() {
        let fault = Fault::model(format!("{name} is a directory, not an image"));
        return Err(fault.help("give its files one by one, each with --image").into());
    }
    let mut file = std::fs::File::open(path).with_context(fault)?;
    read_all(&mut file, &name)
}

fn read_all(from: &mut dyn Read, name: &str) -> Result<Arc<[u8]>> {
    let most = PictureLimits::default().bytes;
    let mut bytes = Vec::new();
    from.take(most as u64 + 1)
        .read_to_end(&mut bytes)
        .with_context(|| Fault::model(format!("cannot read the image {name}")))?;
    if bytes.len() > most {
        let fault = Fault::usage(format!("the image {name} has more than {} MB", most >> 20));
        return Err(fault.help("make it smaller").into());
    }
    Ok(bytes.into())
}

/// Removes the marks from a text and puts an image at each. Without marks, the images come first.
///
/// # Errors
/// A [`Fault`] if the text has another number of marks.
pub fn place(text: &str, files: Vec<Arc<[u8]>>) -> Result<(String, Vec<MessageImage>)> {
    let image = |(at, file)| MessageImage { at, file };
    let marks = text.matches(MARK).count();
    if files.is_empty() || marks == 0 {
        let images = files.into_iter().map(|file| image((0, file)));
        return Ok((text.to_owned(), images.collect()));
    }
    if marks != files.len() {
        let what = format!("the prompt contains {MARK} {marks} times, for {} images", files.len());
        let help = format!("write {MARK} once for each image, or leave it out");
        return Err(Fault::usage(what).help(help).into());
    }
    let mut shown = String::with_capacity(text.len());
    let mut ends = Vec::with_capacity(marks);
    for (i, piece) in text.split(MARK).enumerate() {
        if i > 0 {
            ends.push(shown.len());
        }
        shown.push_str(piece);
    }
    Ok((shown, ends.into_iter().zip(files).map(image).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_stand_at_their_marks_or_first() {
        let files = |n: u8| (0..n).map(|i| Arc::from([i])).collect::<Vec<Arc<[u8]>>>();
        let ends = |images: Vec<MessageImage>| images.iter().map(|i| i.at).collect::<Vec<_>>();
        let (text, images) = place("a <image>b<image>", files(2)).unwrap();
        assert_eq!((&*text, ends(images)), ("a b", vec![2, 3]));
        let (text, images) = place("ab", files(2)).unwrap();
        assert_eq!((&*text, ends(images)), ("ab", vec![0, 0]));
        assert_eq!(place("a <image>", Vec::new()).unwrap().0, "a <image>");
        assert!(place("a <image>", files(2)).is_err());
    }
}
