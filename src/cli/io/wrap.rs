//! Word wrap of text that streams to a terminal.

use unicode_width::UnicodeWidthChar;

/// Returns the current width of the terminal at standard output; 0 if it is unknown.
pub fn columns() -> usize {
    terminal_size::terminal_size_of(std::io::stdout()).map_or(0, |(width, _)| width.0.into())
}

/// Wraps streamed text between words.
///
/// A word is held until it ends, so that it can move to the next line as a whole. Lines between
/// code fences pass unchanged; the terminal breaks those that are too wide.
pub struct Wrap {
    /// Columns of the terminal; 0 if unknown, and then nothing is wrapped.
    width: usize,
    column: usize,
    word: String,
    word_columns: usize,
    in_code: bool,
    /// The first characters of the line, to detect a code fence.
    head: String,
}

/// Mark that begins and ends a code block.
const FENCE: &str = "```";

impl Wrap {
    pub fn new(width: usize) -> Wrap {
        let (word, head) = (String::new(), String::new());
        Wrap { width, column: 0, word, word_columns: 0, in_code: false, head }
    }

    /// Changes the width, from the next word on.
    pub fn resize(&mut self, width: usize) {
        self.width = width;
    }

    /// Adds a piece of text. Returns the text to print now.
    pub fn push(&mut self, piece: &str) -> String {
        let mut out = String::with_capacity(piece.len());
        for c in piece.chars() {
            if c == '\n' {
                out += &self.finish();
                out.push(c);
                self.column = 0;
                self.in_code ^= self.head.starts_with(FENCE);
                self.head.clear();
                continue;
            }
            if self.head.len() < FENCE.len() {
                self.head.push(c);
            }
            let columns = if c == '\t' { 8 - self.column % 8 } else { c.width().unwrap_or(0) };
            if self.in_code || self.width == 0 {
                out.push(c);
            } else if c.is_whitespace() {
                out += &self.finish();
                // A space after the last column would be on the next line.
                if self.column + columns <= self.width {
                    out.push(c);
                    self.column += columns;
                }
            } else {
                self.word.push(c);
                self.word_columns += columns;
                // Scripts with wide characters have no spaces, and may break anywhere.
                if columns == 2 || self.word_columns >= self.width {
                    out += &self.finish();
                }
            }
        }
        out
    }

    /// Returns the held word, after a line break if it does not fit.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        if self.column > 0 && self.column + self.word_columns > self.width {
            out.push('\n');
            self.column = 0;
        }
        self.column += self.word_columns;
        self.word_columns = 0;
        out + &std::mem::take(&mut self.word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines that a terminal shows if `text` is sent in pieces of `each` characters.
    fn shown(text: &str, width: usize, each: usize) -> Vec<String> {
        let mut wrap = Wrap::new(width);
        let chars: Vec<char> = text.chars().collect();
        let mut sent: String =
            chars.chunks(each).map(|piece| wrap.push(&piece.iter().collect::<String>())).collect();
        sent += &wrap.finish();
        sent.split('\n').map(str::to_owned).collect()
    }

    #[test]
    fn lines_end_between_words_however_the_text_arrives() {
        let text = "the quick brown fox jumps over\nthe lazy dog";
        let want = ["the quick ", "brown fox ", "jumps over", "the lazy dog"];
        for each in [1, 2, 3, 7, 100] {
            assert_eq!(shown(text, 12, each), want, "{each}");
        }
        assert_eq!(shown("one two three", 0, 5), ["one two three"]);
    }

    #[test]
    fn a_line_that_fills_the_width_is_followed_by_no_empty_line() {
        for each in [1, 2, 5, 100] {
            let want = ["quick brow", "nothing"];
            assert_eq!(shown("quick brow nothing", 10, each), want, "{each}");
            assert_eq!(shown("quick brow  \nnothing", 10, each), want, "{each}");
            assert_eq!(shown("quick brow\tnothing", 10, each), want, "{each}");
            assert_eq!(shown("quick bro nothing", 10, each), ["quick bro ", "nothing"], "{each}");
        }
    }

    #[test]
    fn long_words_and_wide_characters_break_anywhere() {
        assert_eq!(shown("aaaaaaaaaaaa bb", 10, 4), ["aaaaaaaaaa", "aa bb"]);
        assert_eq!(shown("ab 漢字 cd", 8, 1), ["ab 漢字 ", "cd"]);
        assert_eq!(shown("漢字漢字", 5, 1), ["漢字", "漢字"]);
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
