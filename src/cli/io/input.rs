//! The prompt: files, piped standard input and PROMPT, joined by blank lines.

use crate::cli::io::text_file::{read, read_file};
use crate::cli::options::{InputOptions, Origin};
use crate::cli::settings::Typed;
use crate::error::Fault;
use crate::util::shell::quoted;
use anyhow::Result;
use std::io::{IsTerminal, Read};
use std::path::PathBuf;

/// A part of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptPart {
    Text(String),
    File(PathBuf),
    Stdin,
}

/// Refuses PROMPT together with `--prompt` on the command line.
///
/// PROMPT overrides a `--prompt` from the environment or a file.
pub fn check_once(options: &InputOptions, typed: &Typed) -> Result<()> {
    if !options.words.is_empty()
        && options.prompt.is_some()
        && typed.source("prompt") == Origin::Flag
    {
        let both: Vec<&str> =
            options.prompt.iter().chain(&options.words).map(String::as_str).collect();
        let fault = Fault::usage("the prompt is given twice: as an argument and with --prompt");
        return Err(fault
            .help(format!("if it is one text, put it in quotes: -p {}", quoted(&both.join(" "))))
            .into());
    }
    Ok(())
}

/// Returns the parts of the prompt in order.
///
/// Standard input comes between files and PROMPT if it is piped, or at the place of a `-`.
pub fn parts(options: &InputOptions, piped: bool) -> Result<Vec<PromptPart>> {
    let stdin = PathBuf::from("-");
    let mut parts: Vec<PromptPart> = options
        .file
        .iter()
        .map(|f| if *f == stdin { PromptPart::Stdin } else { PromptPart::File(f.clone()) })
        .collect();
    let files = parts.len();
    let words = if options.words.is_empty() { options.prompt.as_slice() } else { &options.words };
    parts.extend(
        words
            .iter()
            .map(|w| if w == "-" { PromptPart::Stdin } else { PromptPart::Text(w.clone()) }),
    );
    match parts.iter().filter(|p| **p == PromptPart::Stdin).count() {
        0 if words.len() > 1 => {
            let what = format!("there are {} arguments where one PROMPT is expected", words.len());
            let help =
                format!("put the prompt in quotes: gemma generate {}", quoted(&words.join(" ")));
            return Err(Fault::usage(what).help(help).into());
        }
        0 if piped => parts.insert(files, PromptPart::Stdin),
        0 => {}
        1 if piped => {}
        1 => {
            let help = "redirect a file or a pipe to it: gemma generate - <FILE";
            return Err(Fault::usage("`-` means standard input, which is a terminal here")
                .help(help)
                .into());
        }
        _ => return Err(Fault::usage("`-` (standard input) can be given only once").into()),
    }
    Ok(parts)
}

/// Returns whether standard input is not a terminal.
pub fn stdin_is_piped() -> bool {
    !std::io::stdin().is_terminal()
}

/// Reads and joins the parts. Returns `None` if there is no text.
pub fn assemble(parts: &[PromptPart], stdin: &mut dyn Read) -> Result<Option<String>> {
    let mut texts = Vec::new();
    for part in parts {
        let text = match part {
            PromptPart::Text(text) => text.clone(),
            PromptPart::File(path) => read_file(path)?,
            PromptPart::Stdin => read(stdin, "standard input")?,
        };
        if !text.is_empty() {
            texts.push(text);
        }
    }
    Ok((!texts.is_empty()).then(|| texts.join("\n\n")))
}

/// Returns the error of a command line without a prompt.
pub fn no_prompt() -> Fault {
    Fault::usage("there is no prompt").help(
        "give one as an argument, a file or a pipe:\n  gemma generate 'What is photosynthesis?'\n  \
            echo 'Who are you?' | gemma generate",
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
        let text = |t: &str| PromptPart::Text(t.into());
        assert_eq!(
            parts(&options(&["a"], &["p"]), true).unwrap(),
            [PromptPart::File("a".into()), PromptPart::Stdin, text("p")]
        );
        assert_eq!(
            parts(&options(&["a"], &["p"]), false).unwrap(),
            [PromptPart::File("a".into()), text("p")]
        );
        assert_eq!(
            parts(&options(&["-", "a"], &["p"]), true).unwrap(),
            [PromptPart::Stdin, PromptPart::File("a".into()), text("p")]
        );
        assert_eq!(
            parts(&options(&[], &["p", "-", "q"]), true).unwrap(),
            [text("p"), PromptPart::Stdin, text("q")]
        );
        assert!(parts(&options(&["-"], &["-"]), true).is_err());
        assert!(parts(&options(&[], &["-"]), false).is_err());
        assert!(parts(&options(&[], &["two", "words"]), true).is_err());
    }

    #[test]
    fn parts_are_joined_by_a_blank_line_and_empty_ones_left_out() {
        let parts = [PromptPart::Text("a".into()), PromptPart::Stdin, PromptPart::Text("b".into())];
        let joined = |stdin: &[u8]| assemble(&parts, &mut &*stdin).unwrap().unwrap();
        assert_eq!(joined(b"in\n"), "a\n\nin\n\nb");
        assert_eq!(joined(b""), "a\n\nb");
        assert_eq!(assemble(&[PromptPart::Stdin], &mut &b"\n"[..]).unwrap(), None);
    }
}
