//! Text that streams to a terminal, broken between words.

use unicode_width::UnicodeWidthChar;

/// Where a stream of text stands on its line.
pub struct Wrap {
    /// Columns of the terminal; 0 where they are unknown, and nothing is broken.
    width: usize,
    column: usize,
    /// The word that the line ends with, and its columns: it moves to the next line if it does not
    /// fit.
    word: String,
    columns: usize,
    line: Line,
}

/// What a line is, as far as it is known.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    /// So many back quotes from its start on.
    Begun(usize),
    Text,
    /// Between fences: code stays as it is. So many back quotes from the start of the line on;
    /// `None` behind anything else.
    Code(Option<usize>),
}

impl Wrap {
    pub fn new(width: usize) -> Wrap {
        Wrap { width, column: 0, word: String::new(), columns: 0, line: Line::Begun(0) }
    }

    /// The window has this many columns from here on. What it makes of the line that was begun is
    /// its own affair: the next word is placed as if the terminal had broken that line at its new
    /// width.
    pub fn resize(&mut self, width: usize) {
        if width == self.width {
            return;
        }
        self.width = width;
        if width > 0 && self.column > width {
            self.column %= width;
            self.columns = 0;
            self.word.clear();
        }
    }

    /// What to send for the next piece of text: the piece with line breaks in it, and a word that
    /// was already sent taken back. Blanks at the end of a full line are left out: they would stand
    /// on a line of their own.
    pub fn push(&mut self, piece: &str) -> String {
        let mut out = String::with_capacity(piece.len());
        for c in piece.chars() {
            if c == '\n' {
                self.end_line();
                out.push(c);
            } else if self.place(c, &mut out) {
                out.push(c);
            }
        }
        out
    }

    fn end_line(&mut self) {
        (self.column, self.columns) = (0, 0);
        self.word.clear();
        self.line = match self.line {
            Line::Code(Some(3..)) => Line::Begun(0),
            Line::Begun(3..) | Line::Code(_) => Line::Code(Some(0)),
            _ => Line::Begun(0),
        };
    }

    /// Makes room for `c`, which is not a line break; `false` where it is not to be sent.
    fn place(&mut self, c: char, out: &mut String) -> bool {
        self.line = match (self.line, c) {
            (Line::Begun(n), '`') => Line::Begun(n + 1),
            // What stands behind an opening fence names a language.
            (Line::Begun(n), _) if n >= 3 => Line::Begun(n),
            (Line::Begun(_) | Line::Text, _) => Line::Text,
            (Line::Code(Some(n)), '`') => Line::Code(Some(n + 1)),
            (Line::Code(_), _) => Line::Code(None),
        };
        let columns = if c == '\t' { 8 - self.column % 8 } else { c.width().unwrap_or(0) };
        if c.is_whitespace() {
            self.word.clear();
            self.columns = 0;
            if self.width > 0 && self.line == Line::Text && self.column + columns > self.width {
                self.column = self.width;
                return false;
            }
            self.column += columns;
            return true;
        }
        let fits = self.column + columns <= self.width;
        if !fits && self.width > 0 {
            if self.line == Line::Text && self.columns + columns <= self.width {
                if self.columns > 0 {
                    out.push_str(&format!("\x1b[{}D\x1b[K", self.columns));
                }
                out.push('\n');
                out.push_str(&self.word);
                self.column = self.columns;
            } else {
                // Code, and a word as long as the line, are the terminal's to break.
                (self.column, self.columns) = (0, 0);
                self.word.clear();
            }
        }
        self.word.push(c);
        self.columns += columns;
        self.column += columns;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a terminal shows of `text`, sent in pieces of `each` characters.
    fn shown(text: &str, width: usize, each: usize) -> Vec<String> {
        let mut wrap = Wrap::new(width);
        let chars: Vec<char> = text.chars().collect();
        let mut lines = vec![String::new()];
        for piece in chars.chunks(each) {
            let sent = wrap.push(&piece.iter().collect::<String>());
            let mut rest = sent.as_str();
            while let Some(c) = rest.chars().next() {
                if let Some(code) = rest.strip_prefix("\x1b[") {
                    let (back, after) = code.split_once("D\x1b[K").unwrap();
                    let line = lines.last_mut().unwrap();
                    let mut columns: usize = back.parse().unwrap();
                    while columns > 0 {
                        columns -= line.pop().unwrap().width().unwrap();
                    }
                    rest = after;
                    continue;
                }
                rest = &rest[c.len_utf8()..];
                if c == '\n' {
                    lines.push(String::new())
                } else {
                    lines.last_mut().unwrap().push(c)
                }
            }
        }
        lines
    }

    #[test]
    fn lines_end_between_words_however_the_text_arrives() {
        let text = "the quick brown fox jumps over\nthe lazy dog";
        for each in [1, 2, 3, 7, 100] {
            assert_eq!(
                shown(text, 12, each),
                ["the quick ", "brown fox ", "jumps over", "the lazy dog"],
                "{each}"
            );
        }
    }

    /// A blank behind the last column would be shown on the next line, and the break before the
    /// next word would leave an empty line.
    #[test]
    fn a_line_that_fills_the_width_is_followed_by_no_empty_line() {
        for each in [1, 2, 5, 100] {
            assert_eq!(shown("quick brow nothing", 10, each), ["quick brow", "nothing"], "{each}");
            assert_eq!(
                shown("quick brow  \nnothing", 10, each),
                ["quick brow", "nothing"],
                "{each}"
            );
            assert_eq!(shown("quick bro nothing", 10, each), ["quick bro ", "nothing"], "{each}");
            assert_eq!(shown("quick brow\nnothing", 10, each), ["quick brow", "nothing"], "{each}");
            assert_eq!(shown("quick brow\tnothing", 10, each), ["quick brow", "nothing"], "{each}");
        }
    }

    #[test]
    fn a_new_width_counts_from_the_next_word_on() {
        let mut wrap = Wrap::new(20);
        assert_eq!(wrap.push("one two three "), "one two three ");
        wrap.resize(10);
        // The terminal shows "one two th" and "ree " by now.
        assert_eq!(wrap.push("four fives"), "four f\x1b[1D\x1b[K\nfives");
        wrap.resize(40);
        assert_eq!(wrap.push(" and all that follows"), " and all that follows");
    }

    #[test]
    fn what_has_no_end_is_left_to_the_terminal() {
        assert_eq!(
            shown("aaaaaaaaaaaaaaa bb cc", 10, 4),
            ["aaaaaaaaaaaaaaa bb ", "cc"],
            "the terminal has broken it after ten"
        );
        assert_eq!(shown("one two three", 0, 5), ["one two three"]);
    }

    #[test]
    fn wide_characters_take_two_columns() {
        assert_eq!(shown("ab 漢字 cd", 8, 1), ["ab 漢字 ", "cd"]);
        assert_eq!(shown("ab 漢字 cd", 10, 1), ["ab 漢字 cd"]);
    }

    #[test]
    fn code_stays_as_it_is() {
        let text = "```rust\nlet a_long_name = 1 + 2;\n```\nand the words go on";
        let want = ["```rust", "let a_long_name = 1 + 2;", "```", "and the ", "words go on"];
        for each in [1, 5, 100] {
            assert_eq!(shown(text, 11, each), want, "{each}");
        }
    }
}
