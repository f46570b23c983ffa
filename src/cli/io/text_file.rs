//! Text files that are read as a whole, with remedies for files that are not text.

use crate::error::{Fault, Kind};
use anyhow::{Context, Result};
use std::io::Read;

/// Limit of a text in bytes: 64 MiB, more than any context holds.
pub const MAX_BYTES: usize = 64 << 20;

/// Reads a text file.
pub fn read_file(path: &std::path::Path) -> Result<String> {
    let name = path.display().to_string();
    if path.is_dir() {
        let help =
            "give its files one by one, each with -f, or join them: cat DIR/* | gemma generate";
        return Err(Fault::model(format!("{name} is a directory, not a file")).help(help).into());
    }
    let mut file = std::fs::File::open(path).with_context(|| {
        let fault = Fault::model(format!("cannot read {name}"));
        match std::env::current_dir() {
            Ok(here) if path.is_relative() && !path.exists() => {
                fault.help(format!("check the path: it is relative to {}", here.display()))
            }
            _ => fault.help("check the path and the file's permissions"),
        }
    })?;
    read(&mut file, &name)
}

/// Reads a text to its end. Removes a byte order mark and one final line break.
pub fn read(from: &mut dyn Read, name: &str) -> Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .with_context(|| Fault::model(format!("cannot read {name}")))?;
    if bytes.len() > MAX_BYTES {
        let what =
            format!("{name} is longer than {} MiB, more than any model's context", MAX_BYTES >> 20);
        return Err(Fault::new(Kind::Context, what).help("give only the part that matters").into());
    }
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let utf16 = bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]);
        if !utf16 && bytes[..bytes.len().min(8192)].contains(&0) {
            let fault = Fault::model(format!("{name} is a binary file, not text"));
            return fault.help(
                "give text: of a document, \
                 what a converter such as pdftotext or pandoc makes of it",
            );
        }
        let fault = Fault::model(format!(
            "{name} is not UTF-8 text: byte {:#04x} at offset {at}",
            bytes[at]
        ));
        let from = if utf16 { "UTF-16" } else { "LATIN1" };
        fault.help(format!("convert it first, for example: iconv -f {from} -t UTF-8"))
    })?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cleaned_and_bad_text_is_located() {
        assert_eq!(read(&mut &b"\xef\xbb\xbfhi\r\n"[..], "x").unwrap(), "hi");
        let error = read(&mut &b"ab\xffcd"[..], "x").unwrap_err();
        assert_eq!(crate::error::fault_of(&error).unwrap().kind.exit_code(), 3);
        assert!(error.to_string().contains("offset 2"), "{error}");
        assert!(
            read(&mut &b"\xff\xfea\0"[..], "x")
                .unwrap_err()
                .downcast_ref::<Fault>()
                .unwrap()
                .help
                .as_ref()
                .unwrap()
                .contains("UTF-16")
        );
        let endless = &mut std::io::repeat(b'y');
        assert_eq!(
            crate::error::fault_of(&read(endless, "x").unwrap_err()).unwrap().kind.exit_code(),
            7
        );
    }
}
