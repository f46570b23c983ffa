//! Answers of the bundled model to everyday prompts with default options. `newcomer.jsonl` lists
//! words of which an answer must have one.

use crate::shell;
use serde::Deserialize;
use shell::gemma;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

#[derive(Deserialize)]
struct Everyday {
    prompt: String,
    /// Whether the model was taught the answer; the others are held back from its training.
    taught: bool,
    any: Vec<String>,
}

impl Everyday {
    fn is_answered(&self) -> bool {
        let run = gemma(&["generate", "-q", "--max-tokens", "160", &self.prompt], b"").ok();
        let right = self.any.iter().any(|word| says(run.text(), word));
        if !right {
            eprintln!("{}\n  {}", self.prompt, run.text().replace('\n', "\n  "));
        }
        right
    }
}

/// Whether a word of the answer begins with `word`, in capitals or not: wheat is no heat.
fn says(answer: &str, word: &str) -> bool {
    let (answer, word) = (answer.to_lowercase(), word.to_lowercase());
    let in_a_word = |at: usize| answer[..at].ends_with(char::is_alphanumeric);
    let whole = !word.starts_with(char::is_alphanumeric);
    answer.match_indices(&word).any(|(at, _)| whole || !in_a_word(at))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn everyday() -> Vec<Everyday> {
    let text = fs::read_to_string(root().join("tests/newcomer.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The prompts that a page shows for the bundled model: what is quoted last behind `gemma generate`
/// or `echo`, in lines that name no other model.
fn shown(page: &str) -> BTreeSet<String> {
    let lines = page.lines().filter(|line| !line.contains(" -m ") && !line.contains("--model"));
    let commands = lines.flat_map(|line| line.split(" | "));
    commands
        .filter_map(|command| {
            ["gemma generate ", "echo "]
                .iter()
                .find_map(|before| Some(command.split_once(before)?.1))
        })
        .filter_map(|words| {
            let mut last = None;
            let mut rest = words;
            while let Some((start, quote)) = rest.char_indices().find(|(_, c)| "'\"".contains(*c)) {
                let (quoted, behind) = rest[start + 1..].split_once(quote)?;
                (last, rest) = (Some(quoted.to_owned()), behind);
            }
            last
        })
        .collect()
}

#[test]
fn the_prompts_that_readme_and_help_show_are_answered() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let help = [&["--help"][..], &["generate", "-h"], &["generate", "--help"]]
        .map(|args| gemma(args, b"").ok().text().to_owned());
    let no_prompt = gemma(&["generate"], b"").fails(2, &["there is no prompt"]).err;
    let bare = gemma(&[], b"").err;
    let pages = [readme, no_prompt, bare].into_iter().chain(help);
    let prompts: BTreeSet<String> = pages.flat_map(|page| shown(&page)).collect();
    assert!(prompts.len() >= 3, "{prompts:?}");
    let known = everyday();
    for prompt in prompts {
        let found = known
            .iter()
            .find(|e| e.prompt == prompt)
            .unwrap_or_else(|| panic!("{prompt:?} is not in newcomer.jsonl"));
        assert!(found.taught && found.is_answered(), "{prompt}");
    }
}

/// The figures of the model card: all prompts that the model was taught, and as many others as it
/// answered after training.
#[test]
fn everyday_prompts_are_answered() {
    let (taught, others): (Vec<_>, Vec<_>) = everyday().into_iter().partition(|e| e.taught);
    assert_eq!((taught.len(), others.len()), (12, 12));
    let right = |list: &[Everyday]| list.iter().filter(|e| e.is_answered()).count();
    let (taught, others) = (right(&taught), right(&others));
    println!("{taught} of 12 that were taught, {others} of 12 others");
    assert!(taught == 12 && others >= 7, "{taught} of 12 that were taught, {others} of 12 others");
}
