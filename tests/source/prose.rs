//! Holds comments, help texts and line lengths to the rules of prose that a program can check.
//!
//! `GEMMA_PROSE=all cargo test --release --test source prose -- --nocapture` prints each finding;
//! a path in place of `all`, such as `crates/quant/src`, prints the findings below it.

use super::lexer::{Comment, Literal, lex_python, lex_rust};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// First words that leave the subject of a sentence unnamed.
const PRONOUNS: &[&str] = &[
    "What",
    "Who",
    "Whoever",
    "Whatever",
    "Whichever",
    "Whose",
    "Whom",
    "Of",
    "Those",
    "Nobody",
    "None",
];

/// Words and phrases that make a reader read twice. Each has a plainer one: "after" or "past",
/// "next to" or "in addition to", the name of the number, "again", "while X runs", two sentences.
const BENT: &[&str] = &[
    "behind",
    "beside",
    "so many",
    "so much",
    "anew",
    "meanwhile",
    "of which",
    "whose",
    "such a",
    "goes by",
    "stands in",
];

/// Bent words in the whole tree. They are for places where the word is exact. The number may only
/// be lowered.
const MAX_BENT_WORDS: usize = 20;

const MAX_WORDS: usize = 40;
const MAX_COLUMNS: usize = 100;

/// Options of clap that set help texts.
const HELP: &[&str] = &["help = ", "long_help = ", "about = ", "long_about = ", "help_heading = "];

struct Finding {
    file: String,
    line: usize,
    rule: String,
}

/// Splits a paragraph into sentences. Abbreviations and numbers end none.
fn sentences(paragraph: &str) -> Vec<String> {
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    let mut found = Vec::new();
    let mut sentence: Vec<&str> = Vec::new();
    for (at, word) in words.iter().enumerate() {
        sentence.push(word);
        let bare = word.trim_end_matches(['"', ')', '*', '`', '\'']);
        let is_short = ["e.g.", "i.e.", "etc.", "cf.", "vs."].contains(&bare);
        let begins = |next: &&str| {
            next.trim_start_matches(['(', '"', '*'])
                .starts_with(|c: char| c.is_uppercase() || ['`', '['].contains(&c))
        };
        let is_end = bare.ends_with(['.', '?', '!']) && !is_short;
        if is_end && words.get(at + 1).is_none_or(begins) {
            found.push(sentence.join(" "));
            sentence.clear();
        }
    }
    if !sentence.is_empty() {
        found.push(sentence.join(" "));
    }
    found
}

/// Returns the pronoun with which a sentence begins.
fn pronoun(sentence: &str) -> Option<&'static str> {
    let start = sentence.trim_start_matches(['(', '"', '*']);
    let end = start.find(|c: char| !c.is_alphabetic()).unwrap_or(start.len());
    PRONOUNS.iter().copied().find(|word| *word == &start[..end])
}

/// Takes a comment apart into paragraphs, each with the line of its beginning. An item of a list is
/// a paragraph; tables, headings and code are left out.
fn paragraphs(comment: &Comment) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let (mut is_code, mut is_open) = (false, false);
    for (offset, line) in comment.lines.iter().enumerate() {
        let text = line.trim();
        if text.starts_with("```") {
            is_code = !is_code;
            is_open = false;
            continue;
        }
        let is_other = text.is_empty() || text.starts_with(['|', '#']) || text.starts_with("---");
        if is_code || is_other || line.starts_with("     ") && !is_open {
            is_open = false;
            continue;
        }
        let number = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let item = ["- ", "* "].iter().find_map(|mark| text.strip_prefix(mark));
        let item = item.or_else(|| number.strip_prefix(". ").filter(|_| number.len() < text.len()));
        match item {
            Some(item) => found.push((comment.line + offset, item.to_owned())),
            None if is_open => {
                let last = &mut found.last_mut().expect("an open paragraph").1;
                last.push(' ');
                last.push_str(text);
            }
            None => found.push((comment.line + offset, text.to_owned())),
        }
        is_open = true;
    }
    found
}

/// Findings in the comments of a file.
fn check_comments(file: &str, comments: &[Comment], findings: &mut Vec<Finding>) {
    for comment in comments {
        for (line, paragraph) in paragraphs(comment) {
            for sentence in sentences(&paragraph) {
                if let Some(word) = pronoun(&sentence) {
                    let start: String = sentence.chars().take(50).collect();
                    let rule = format!("a sentence begins with {word}: {start}");
                    findings.push(Finding { file: file.to_owned(), line, rule });
                }
                let is_word = |word: &&str| word.contains(|c: char| c.is_alphanumeric());
                let words = sentence.split_whitespace().filter(is_word).count();
                if words > MAX_WORDS && (file.starts_with("src/") || file.starts_with("crates/")) {
                    let start: String = sentence.chars().take(50).collect();
                    let rule = format!("a sentence has {words} words: {start}");
                    findings.push(Finding { file: file.to_owned(), line, rule });
                }
            }
        }
    }
}

/// Returns the lines of a literal that end in the middle of a phrase, counted from its beginning. A
/// line may end with a line break, after a mark of punctuation, or at the quotation mark.
fn cut_lines(literal: &Literal) -> Vec<usize> {
    let mut lines: Vec<&str> = literal.text.lines().collect();
    lines.pop();
    let is_cut = |line: &&str| {
        let Some(before) = line.strip_suffix('\\') else { return false };
        let phrase = before.trim_end();
        let is_break = phrase.ends_with("\\n") || phrase.ends_with("\\t") || phrase.is_empty();
        !literal.is_raw && !is_break && !phrase.ends_with(['.', ':', ';', ',', '?', '!', '}'])
    };
    lines.iter().enumerate().filter(|(_, line)| is_cut(line)).map(|(at, _)| at).collect()
}

fn check_literals(file: &str, code: &str, literals: &[Literal], findings: &mut Vec<Finding>) {
    for literal in literals {
        for at in cut_lines(literal) {
            let rule = "a literal is cut in the middle of a phrase".to_owned();
            findings.push(Finding { file: file.to_owned(), line: literal.line + at, rule });
        }
        let before = &code[..literal.start];
        if HELP.iter().any(|option| before.ends_with(option)) {
            for word in sentences(&literal.text).iter().filter_map(|s| pronoun(s)) {
                let rule = format!("a help text begins with {word}");
                findings.push(Finding { file: file.to_owned(), line: literal.line, rule });
            }
        }
    }
}

/// Returns the bent words of a text in order, each with the index of the line where it begins.
fn bent_words<'a>(lines: impl IntoIterator<Item = &'a str>) -> Vec<(usize, &'static str)> {
    let (mut text, mut starts) = (String::new(), Vec::new());
    for line in lines {
        starts.push(text.len());
        text += &line.trim().to_lowercase();
        text.push(' ');
    }
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let is_whole = |at: usize, word: &str| {
        !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part)
    };
    let line_of = |at: usize| starts.partition_point(|start| *start <= at) - 1;
    let mut found = Vec::new();
    for word in BENT {
        let places = text.match_indices(word).filter(|(at, _)| is_whole(*at, word));
        found.extend(places.map(|(at, _)| (line_of(at), *word)));
    }
    found.sort();
    found
}

/// Bent words in the comments and help texts of a file.
fn check_words(
    file: &str,
    code: &str,
    comments: &[Comment],
    literals: &[Literal],
    findings: &mut Vec<Finding>,
) {
    let is_help = |l: &&Literal| HELP.iter().any(|option| code[..l.start].ends_with(option));
    let helps = literals.iter().filter(is_help).map(|l| (l.line, bent_words(l.text.lines())));
    let texts = comments.iter().map(|c| (c.line, bent_words(c.lines.iter().map(String::as_str))));
    for (first, words) in texts.chain(helps) {
        for (at, word) in words {
            let rule = format!("a plainer word than \"{word}\" is needed");
            findings.push(Finding { file: file.to_owned(), line: first + at, rule });
        }
    }
}

fn check_columns(file: &str, text: &str, findings: &mut Vec<Finding>) {
    for (at, line) in text.lines().enumerate() {
        let columns = line.chars().count();
        if columns > MAX_COLUMNS {
            let rule = format!("a line has {columns} columns");
            findings.push(Finding { file: file.to_owned(), line: at + 1, rule });
        }
    }
}

fn files(dir: &Path, list: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files(&path, list),
            false => list.push(path),
        }
    }
}

/// The findings of the tree, each list in the order of files and lines.
#[derive(Default)]
struct Findings {
    /// Broken rules without exception.
    wrong: Vec<Finding>,
    /// Bent words, up to [`MAX_BENT_WORDS`].
    bent: Vec<Finding>,
}

fn findings() -> Findings {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut list = vec![root.join("README.md")];
    for room in [
        "src",
        "crates",
        "tests",
        "benches",
        "examples",
        "shaders",
        "npu-kernels",
        "scripts",
        "docs",
    ] {
        files(&root.join(room), &mut list);
    }
    list.sort();
    assert!(list.len() > 200, "the walk found only {} files", list.len());
    let mut findings = Findings::default();
    for path in list {
        let file = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        let ending = path.extension().map(|e| e.to_string_lossy().into_owned());
        let is_page = file == "README.md" || file.starts_with("docs/");
        let kind = match ending.as_deref() {
            Some("md") if is_page => "md",
            Some(kind @ ("rs" | "comp" | "glsl" | "py")) => kind,
            _ => continue,
        };
        let text = fs::read_to_string(&path).unwrap();
        let (comments, literals) = match kind {
            "md" => {
                let lines = text.lines().map(str::to_owned).collect();
                (vec![Comment { line: 1, lines }], Vec::new())
            }
            "py" => (lex_python(&text), Vec::new()),
            _ => lex_rust(&text),
        };
        if !file.starts_with("scripts/train/") {
            check_words(&file, &text, &comments, &literals, &mut findings.bent);
        }
        if kind != "md" {
            check_columns(&file, &text, &mut findings.wrong);
            check_comments(&file, &comments, &mut findings.wrong);
            check_literals(&file, &text, &literals, &mut findings.wrong);
        }
    }
    for list in [&mut findings.wrong, &mut findings.bent] {
        list.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
    }
    findings
}

/// The room of a file: its folder of two levels, of four for the commands.
fn room(file: &str) -> String {
    let parts: Vec<&str> = file.split('/').collect();
    let depth = match parts.get(1) {
        Some(&"cli") if parts.get(2) == Some(&"commands") => 4,
        Some(&"cli") => 3,
        _ => 2,
    };
    match parts.len() > depth {
        true => parts[..depth].join("/"),
        false => parts[..parts.len() - 1].join("/"),
    }
}

/// Prints the places that `GEMMA_PROSE` asks for, and the number of findings per room. Returns all
/// places, a line each.
fn report(title: &str, findings: &[Finding]) -> Vec<String> {
    let show = std::env::var("GEMMA_PROSE").unwrap_or_default();
    let mut rooms: BTreeMap<String, usize> = BTreeMap::new();
    let mut lines = Vec::new();
    for Finding { file, line, rule } in findings {
        *rooms.entry(room(file)).or_default() += 1;
        lines.push(format!("{file}:{line}: {rule}"));
        if show == "all" || !show.is_empty() && file.starts_with(&show) {
            println!("{file}:{line}: {rule}");
        }
    }
    for (room, count) in &rooms {
        println!("{count:5} {room}");
    }
    println!("{:5} {title} in all", findings.len());
    lines
}

#[test]
fn prose() {
    let findings = findings();
    let wrong = report("broken rules", &findings.wrong);
    let bent = report("bent words", &findings.bent);
    assert!(wrong.is_empty(), "{wrong:#?}");
    let count = bent.len();
    assert!(count <= MAX_BENT_WORDS, "{count} bent words, at most {MAX_BENT_WORDS}: {bent:#?}");
}

#[test]
fn the_check_sees_each_rule() {
    let long = "word ".repeat(MAX_WORDS + 1);
    let code = format!(
        "//! Reads. What is read is\n//! kept.\n\n/// {long}\n// `None` of it. (None of it.)\n\
         let a = \"cut in\\\n  the middle, but\\n\\\n not here.\";\n// \"{}\"\n",
        "x".repeat(MAX_COLUMNS)
    );
    let (comments, literals) = lex_rust(&code);
    let mut findings = Vec::new();
    check_columns("src/a.rs", &code, &mut findings);
    check_comments("src/a.rs", &comments, &mut findings);
    check_literals("src/a.rs", &code, &literals, &mut findings);
    let mut found: Vec<(usize, &str)> =
        findings.iter().map(|f| (f.line, f.rule.split(':').next().unwrap())).collect();
    found.sort();
    let want = [
        (1, "a sentence begins with What"),
        (4, "a line has 209 columns"),
        (4, "a sentence has 41 words"),
        (5, "a sentence begins with None"),
        (6, "a literal is cut in the middle of a phrase"),
        (9, "a line has 105 columns"),
    ];
    assert_eq!(found, want);
}

#[test]
fn the_check_sees_bent_words() {
    for bent in BENT {
        let (first, rest) = bent.split_once(' ').unwrap_or((bent, ""));
        let code = format!(
            "/// A {first}\n/// {rest} b, an un{bent}ed one, `{bent}_b`.\n\
             #[arg(help = \"A\n{}.\")]\nlet a = \"{bent}\";\n",
            bent.to_uppercase()
        );
        let (comments, literals) = lex_rust(&code);
        let mut findings = Vec::new();
        check_words("src/a.rs", &code, &comments, &literals, &mut findings);
        let mut found: Vec<(usize, &str)> =
            findings.iter().map(|f| (f.line, f.rule.split('"').nth(1).unwrap())).collect();
        found.sort();
        assert_eq!(found, [(1, *bent), (4, *bent)]);
    }
}
