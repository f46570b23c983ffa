//! The prompt: files, piped standard input and PROMPT, joined by blank lines.

use super::settings::{Source, Typed};
use crate::cli::options::InputOptions;
use crate::error::{Fault, Kind};
use crate::util::shell::quoted;
use anyhow::{Context, Result};
use std::io::{IsTerminal, Read};
use std::path::PathBuf;

/// More text than any context holds: 64 MiB.
pub const MAX_BYTES: usize = 64 << 20;

/// One part of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Text(String),
    File(PathBuf),
    Stdin,
}

/// PROMPT is stronger than a `--prompt` from environment or file; both typed is one too many.
pub fn check_once(options: &InputOptions, typed: &Typed) -> Result<()> {
    if !options.words.is_empty() && options.prompt.is_some() && typed.source("prompt") == Source::Flag {
        let both: Vec<&str> = options.prompt.iter().chain(&options.words).map(String::as_str).collect();
        let fault = Fault::usage("the prompt is given twice: as an argument and with --prompt");
        return Err(fault.help(format!("if it is one text, put it in quotes: -p {}", quoted(&both.join(" ")))).into());
    }
    Ok(())
}

/// The parts of the prompt in their order. Standard input stands between files and PROMPT if it is piped, or where a `-` is.
pub fn parts(options: &InputOptions, piped: bool) -> Result<Vec<Part>> {
    let stdin = PathBuf::from("-");
    let mut parts: Vec<Part> =
        options.file.iter().map(|f| if *f == stdin { Part::Stdin } else { Part::File(f.clone()) }).collect();
    let files = parts.len();
    let words = if options.words.is_empty() { options.prompt.as_slice() } else { &options.words };
    parts.extend(words.iter().map(|w| if w == "-" { Part::Stdin } else { Part::Text(w.clone()) }));
    match parts.iter().filter(|p| **p == Part::Stdin).count() {
        0 if words.len() > 1 => {
            let what = format!("there are {} arguments where one PROMPT is expected", words.len());
            let help = format!("put the prompt in quotes: gemma generate {}", quoted(&words.join(" ")));
            return Err(Fault::usage(what).help(help).into());
        }
        0 if piped => parts.insert(files, Part::Stdin),
        0 => {}
        1 if piped => {}
        1 => {
            let help = "pipe something in: gemma generate - <FILE";
            return Err(Fault::usage("`-` stands for standard input, and that is a terminal").help(help).into());
        }
        _ => return Err(Fault::usage("`-` (standard input) can be given only once").into()),
    }
    Ok(parts)
}

/// Whether standard input is something to read.
pub fn stdin_is_piped() -> bool {
    !std::io::stdin().is_terminal()
}

/// Reads and joins the parts; `None` if there is no text at all.
pub fn assemble(parts: &[Part], stdin: &mut dyn Read) -> Result<Option<String>> {
    let mut texts = Vec::new();
    for part in parts {
        let text = match part {
            Part::Text(text) => text.clone(),
            Part::File(path) => read_file(path)?,
            Part::Stdin => read(stdin, "standard input")?,
        };
        if !text.is_empty() {
            texts.push(text);
        }
    }
    Ok((!texts.is_empty()).then(|| texts.join("\n\n")))
}

/// A whole text file.
pub fn read_file(path: &std::path::Path) -> Result<String> {
    let name = path.display().to_string();
    if path.is_dir() {
        let help = "give its files one by one, each with -f, or join them: cat DIR/* | gemma generate";
        return Err(Fault::model(format!("{name} is a directory, and a file is wanted")).help(help).into());
    }
    let mut file = std::fs::File::open(path).with_context(|| {
        let fault = Fault::model(format!("cannot read {name}"));
        match std::env::current_dir() {
            Ok(here) if path.is_relative() && !path.exists() => {
                fault.help(format!("check the path: it is looked for in {}", here.display()))
            }
            _ => fault.help("check the path, and that the file may be read"),
        }
    })?;
    read(&mut file, &name)
}

/// Reads text to its end, drops a byte order mark and one final line break.
pub fn read(from: &mut dyn Read, name: &str) -> Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).with_context(|| Fault::model(format!("cannot read {name}")))?;
    if bytes.len() > MAX_BYTES {
        let what = format!("{name} is longer than {} MiB, more than any model's context", MAX_BYTES >> 20);
        return Err(Fault::new(Kind::Context, what).help("give only the part that matters").into());
    }
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let utf16 = bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]);
        if !utf16 && bytes[..bytes.len().min(8192)].contains(&0) {
            let fault = Fault::model(format!("{name} is a binary file, not text"));
            return fault.help("give text: of a document, what a converter such as pdftotext or pandoc makes of it");
        }
        let fault = Fault::model(format!("{name} is not UTF-8 text: byte {:#04x} at offset {at}", bytes[at]));
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

/// What to say when there is no prompt.
pub fn no_prompt() -> Fault {
    Fault::usage("there is no prompt").help(
        "give one as an argument, a file or a pipe:\n  gemma generate 'What is photosynthesis?'\n  echo 'Who are you?' | gemma generate",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(files: &[&str], words: &[&str]) -> InputOptions {
        InputOptions {
            words: words.iter().map(|w| w.to_string()).collect(),
            prompt: None,
            file: files.iter().map(PathBuf::from).collect(),
        }
    }

    #[test]
    fn stdin_stands_between_files_and_prompt_or_at_the_dash() {
        let text = |t: &str| Part::Text(t.into());
        assert_eq!(parts(&options(&["a"], &["p"]), true).unwrap(), [Part::File("a".into()), Part::Stdin, text("p")]);
        assert_eq!(parts(&options(&["a"], &["p"]), false).unwrap(), [Part::File("a".into()), text("p")]);
        assert_eq!(parts(&options(&["-", "a"], &["p"]), true).unwrap(), [Part::Stdin, Part::File("a".into()), text("p")]);
        assert_eq!(parts(&options(&[], &["p", "-", "q"]), true).unwrap(), [text("p"), Part::Stdin, text("q")]);
        assert!(parts(&options(&["-"], &["-"]), true).is_err());
        assert!(parts(&options(&[], &["-"]), false).is_err());
        assert!(parts(&options(&[], &["two", "words"]), true).is_err());
    }

    #[test]
    fn parts_are_joined_by_a_blank_line_and_empty_ones_left_out() {
        let parts = [Part::Text("a".into()), Part::Stdin, Part::Text("b".into())];
        let joined = |stdin: &[u8]| assemble(&parts, &mut &*stdin).unwrap().unwrap();
        assert_eq!(joined(b"in\n"), "a\n\nin\n\nb");
        assert_eq!(joined(b""), "a\n\nb");
        assert_eq!(assemble(&[Part::Stdin], &mut &b"\n"[..]).unwrap(), None);
    }

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
        assert_eq!(crate::error::fault_of(&read(endless, "x").unwrap_err()).unwrap().kind.exit_code(), 7);
    }
}
