//! Answers of the bundled model to everyday prompts with default options. For each prompt,
//! `newcomer.jsonl` and `newcomer-talks.jsonl` list words; an answer must contain one of them.

use crate::shell;
use serde::Deserialize;
use serde_json::{Value, json};
use shell::gemma;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

#[derive(Deserialize)]
struct Everyday {
    prompt: String,
    /// Whether the model was trained on the answer. The other prompts are held out.
    taught: bool,
    any: Vec<String>,
}

impl Everyday {
    fn is_answered_by(&self, answer: &str) -> bool {
        let right = self.any.iter().any(|word| says(answer, word));
        if !right {
            eprintln!("{}\n  {}", self.prompt, answer.replace('\n', "\n  "));
        }
        right
    }
}

/// Returns the number of prompts that are answered with an expected word.
fn count_answered<'a>(list: impl IntoIterator<Item = &'a Everyday>) -> usize {
    count_answered_behind(&[], list)
}

/// The same with these messages (role, content) before each prompt. One batch answers all.
fn count_answered_behind<'a>(
    before: &[(&str, &str)],
    list: impl IntoIterator<Item = &'a Everyday>,
) -> usize {
    let list: Vec<&Everyday> = list.into_iter().collect();
    let record = |e: &&Everyday| {
        let turns = before.iter().copied().chain([("user", e.prompt.as_str())]);
        let messages: Vec<Value> =
            turns.map(|(role, content)| json!({"role": role, "content": content})).collect();
        json!({"messages": messages, "max_tokens": 160}).to_string() + "\n"
    };
    let records: String = list.iter().map(record).collect();
    let args = ["generate", "-q", "--batch", "-", "--parallel", "4"];
    let run = gemma(&args, records.as_bytes()).ok();
    let answers: Vec<Value> =
        run.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), list.len());
    let is_right = |(e, answer): &(&Everyday, Value)| {
        e.is_answered_by(answer["text"].as_str().expect("a text"))
    };
    list.into_iter().zip(answers).filter(is_right).count()
}

/// Returns whether a word of the answer begins with `word`, ignoring case: "wheat" does not contain
/// "heat".
fn says(answer: &str, word: &str) -> bool {
    let (answer, word) = (answer.to_lowercase(), word.to_lowercase());
    let in_a_word = |at: usize| answer[..at].ends_with(char::is_alphanumeric);
    let whole = !word.starts_with(char::is_alphanumeric);
    answer.match_indices(&word).any(|(at, _)| whole || !in_a_word(at))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn everyday(file: &str) -> Vec<Everyday> {
    let text = fs::read_to_string(root().join("tests").join(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the prompts that a page shows for the bundled model: the last quoted text after `gemma
/// generate` or `echo`, in lines that name no other model.
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
                let (quoted, after) = rest[start + 1..].split_once(quote)?;
                (last, rest) = (Some(quoted.to_owned()), after);
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
    let known = everyday("newcomer.jsonl");
    let shown = prompts.iter().map(|prompt| {
        let found = known.iter().find(|e| e.prompt == *prompt);
        let found = found.unwrap_or_else(|| panic!("{prompt:?} is not in newcomer.jsonl"));
        assert!(found.taught, "{prompt}");
        found
    });
    assert_eq!(count_answered(shown), prompts.len());
}

/// The figures of the model card: all prompts that the model was trained on, and the number of
/// others that it answered after training.
#[test]
fn everyday_prompts_are_answered() {
    let (taught, others): (Vec<_>, Vec<_>) =
        everyday("newcomer.jsonl").into_iter().partition(|e| e.taught);
    assert_eq!((taught.len(), others.len()), (12, 12));
    let (taught, others) = (count_answered(&taught), count_answered(&others));
    println!("{taught} of 12 that were taught, {others} of 12 others");
    assert!(taught == 12 && others >= 7, "{taught} of 12 that were taught, {others} of 12 others");
}

/// 24 other prompts as second messages and after a system prompt. The demo's template leaves out
/// earlier messages, so they may not change an answer. An expected word is weaker evidence than a
/// reader's judgement: the model card has both counts.
#[test]
fn second_messages_are_answered() {
    let settings: [(&str, &[(&str, &str)]); 3] = [
        ("a greeting", &[("user", "Hello"), ("assistant", "Hello! How can I help you today?")]),
        (
            "another question",
            &[
                ("user", "What is the capital of France?"),
                ("assistant", "The capital of France is Paris."),
            ],
        ),
        ("a system prompt", &[("system", "You are a helpful assistant.")]),
    ];
    let prompts = everyday("newcomer-talks.jsonl");
    assert_eq!(prompts.len(), 24);
    for (name, before) in settings {
        let answered = count_answered_behind(before, &prompts);
        println!("after {name}: {answered} of 24");
        assert!(answered >= 17, "after {name}: {answered} of 24");
    }
}
