//! Comments and string literals of Rust, GLSL and Python, each with its line.

/// Consecutive comment lines with the same mark, without their marks.
#[derive(Debug, PartialEq)]
pub struct Comment {
    pub line: usize,
    pub lines: Vec<String>,
}

/// A string literal as it is in the code, without its quotation marks.
#[derive(Debug, PartialEq)]
pub struct Literal {
    /// Offset of the opening quotation mark or prefix in the code.
    pub start: usize,
    pub line: usize,
    pub text: String,
    pub is_raw: bool,
}

const MARKS: [&str; 4] = ["///", "//!", "//", "#"];

/// Collects comments, and joins lines into blocks.
#[derive(Default)]
struct Comments {
    found: Vec<Comment>,
    /// Mark and line of the last line comment without code on its line.
    last: Option<(&'static str, usize)>,
}

impl Comments {
    /// Adds a line comment from its mark to the end of its line.
    fn push_line(&mut self, line: usize, text: &str, is_alone: bool) {
        let mark = MARKS.into_iter().find(|mark| text.starts_with(mark)).expect("a mark");
        let text = text[mark.len()..].trim_end().to_owned();
        let is_joined = is_alone && self.last == Some((mark, line.wrapping_sub(1)));
        match self.found.last_mut().filter(|_| is_joined) {
            Some(comment) => comment.lines.push(text),
            None => self.found.push(Comment { line, lines: vec![text] }),
        }
        self.last = is_alone.then_some((mark, line));
    }

    /// Adds the text of a block comment or of a docstring.
    fn push_block(&mut self, line: usize, text: &str) {
        let clean = |line: &str| line.trim().trim_start_matches('*').to_owned();
        self.found.push(Comment { line, lines: text.lines().map(clean).collect() });
        self.last = None;
    }
}

fn line_of(code: &str, at: usize) -> usize {
    code[..at].matches('\n').count() + 1
}

/// Returns whether only white space comes before `at` on its line.
fn is_first(code: &str, at: usize) -> bool {
    code[..at].rsplit('\n').next().is_some_and(|before| before.trim().is_empty())
}

/// Returns the offset after a literal. It starts before `from` and ends with `quote`; escapes are
/// skipped.
fn end_of_escaped(code: &str, from: usize, quote: &str) -> usize {
    let mut at = from;
    while at < code.len() {
        if code[at..].starts_with('\\') {
            at += 1 + code[at + 1..].chars().next().map_or(0, char::len_utf8);
        } else if code[at..].starts_with(quote) {
            return at + quote.len();
        } else {
            at += code[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    code.len()
}

/// Returns the length of a character literal that begins with `'`, or of a lifetime's mark.
fn quoted_char(rest: &str) -> usize {
    let mut chars = rest[1..].char_indices();
    match chars.next() {
        Some((_, '\\')) => end_of_escaped(rest, 1, "'"),
        Some(_) => match chars.next() {
            Some((at, '\'')) => 1 + at + 1,
            _ => 1,
        },
        None => 1,
    }
}

/// Returns the comments and string literals of Rust code. GLSL has the same comments.
pub fn lex_rust(code: &str) -> (Vec<Comment>, Vec<Literal>) {
    let mut comments = Comments::default();
    let mut literals = Vec::new();
    let mut at = 0;
    while at < code.len() {
        let rest = &code[at..];
        let is_word =
            code[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_');
        let raw = rest.trim_start_matches('b');
        let hashes = raw.strip_prefix('r').map(|r| r.len() - r.trim_start_matches('#').len());
        if rest.starts_with("//") {
            let length = rest.find('\n').unwrap_or(rest.len());
            comments.push_line(line_of(code, at), &rest[..length], is_first(code, at));
            at += length;
        } else if rest.starts_with("/*") {
            let length = rest.find("*/").map_or(rest.len(), |end| end + 2);
            comments.push_block(line_of(code, at), rest[2..length].trim_end_matches("*/"));
            at += length;
        } else if let Some(n) = hashes.filter(|n| !is_word && raw[1 + n..].starts_with('"')) {
            let from = at + (rest.len() - raw.len()) + 1 + n + 1;
            let close = format!("\"{}", "#".repeat(n));
            let end = code[from..].find(&close).map_or(code.len(), |end| from + end);
            let text = code[from..end].to_owned();
            literals.push(Literal { start: at, line: line_of(code, at), text, is_raw: true });
            at = (end + close.len()).min(code.len());
        } else if rest.starts_with('"') {
            let end = end_of_escaped(code, at + 1, "\"");
            let text = code[at + 1..(end - 1).max(at + 1)].to_owned();
            literals.push(Literal { start: at, line: line_of(code, at), text, is_raw: false });
            at = end;
        } else if rest.starts_with('\'') {
            at += quoted_char(rest);
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    (comments.found, literals)
}

/// Returns the comments and docstrings of Python code.
pub fn lex_python(code: &str) -> Vec<Comment> {
    let mut comments = Comments::default();
    let mut at = 0;
    while at < code.len() {
        let rest = &code[at..];
        if rest.starts_with('#') {
            let length = rest.find('\n').unwrap_or(rest.len());
            comments.push_line(line_of(code, at), &rest[..length], is_first(code, at));
            at += length;
        } else if let Some(quote) =
            ["\"\"\"", "'''", "\"", "'"].into_iter().find(|quote| rest.starts_with(quote))
        {
            let end = end_of_escaped(code, at + quote.len(), quote);
            if quote.len() == 3 && is_first(code, at) {
                let text = &code[at + 3..(end - 3).max(at + 3)];
                comments.push_block(line_of(code, at), text);
            }
            at = end;
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    comments.found
}

#[test]
fn comments_and_literals_are_told_apart() {
    let code = "/// a\n/// b\nfn f<'a>() { '\"'; \"// c\" } // d\n// e\n/* f */ r#\"\"g\"#";
    let (comments, literals) = lex_rust(code);
    let lines: Vec<(usize, &[String])> =
        comments.iter().map(|c| (c.line, c.lines.as_slice())).collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert_eq!(lines[0], (1, &[" a".to_owned(), " b".to_owned()][..]));
    assert_eq!((lines[1].0, lines[2].0, lines[3].0), (3, 4, 5));
    let texts: Vec<(&str, bool)> = literals.iter().map(|l| (l.text.as_str(), l.is_raw)).collect();
    assert_eq!(texts, [("// c", false), ("\"g", true)]);
}

#[test]
fn docstrings_are_comments() {
    let code = "\"\"\"A script.\n\nReads.\"\"\"\nx = \"# no\"  # a\n# b\n# c\n";
    let found: Vec<(usize, usize)> =
        lex_python(code).iter().map(|c| (c.line, c.lines.len())).collect();
    assert_eq!(found, [(1, 3), (4, 1), (5, 2)]);
}
