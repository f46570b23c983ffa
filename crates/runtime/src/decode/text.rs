//! Converts generated tokens to text that can be shown. It withholds incomplete characters and
//! possible beginnings of stop strings. Thoughts are separate from the answer, and stop strings do
//! not apply to them.

use gemma_base::tensor::Token;
use gemma_model::models::{Detokenizer, Tokenizer};

/// Stream of text that can no longer change.
pub struct TextStream<'a> {
    detokenizer: Detokenizer<'a>,
    stops: Vec<String>,
    /// Decoded text that is withheld because it may begin a stop string.
    held: String,
    shown: String,
    /// Index of the stop string that was found.
    stop: Option<usize>,
    /// Tokens around a thought.
    channel: Option<(Token, Token)>,
    part: TextSection,
    /// Whether a line break of a thought is withheld.
    held_break: bool,
    /// Control tokens to show, each with a character that replaces it.
    marks: Vec<(Token, char)>,
}

/// Kind of the current text.
#[derive(Clone, Copy, PartialEq)]
enum TextSection {
    Answer,
    /// The first line of a thought: the name of its channel.
    Name,
    Thought,
}

/// Text that is final.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TextPiece<'s> {
    Answer(&'s str),
    Thought(&'s str),
}

impl<'a> TextStream<'a> {
    pub fn new(tokenizer: &'a Tokenizer, stops: &[String]) -> Self {
        let (detokenizer, stops) = (Detokenizer::new(tokenizer), stops.to_vec());
        let (held, shown, channel) = (String::new(), String::new(), tokenizer.channel());
        let (stop, part, held_break, marks) = (None, TextSection::Answer, false, Vec::new());
        TextStream { detokenizer, stops, held, shown, stop, channel, part, held_break, marks }
    }

    /// Shows control tokens as these characters. If the text itself contains one of them, it
    /// becomes U+FFFD.
    pub fn showing(mut self, marks: Vec<(Token, char)>) -> Self {
        self.marks = marks;
        self
    }

    /// Returns the text that becomes final with this token.
    pub fn push(&mut self, token: Token) -> TextPiece<'_> {
        let part = self.part;
        let text = match self.channel {
            Some((begin, end)) if token == begin || token == end => {
                self.part = if token == begin { TextSection::Name } else { TextSection::Answer };
                self.detokenizer.finish()
            }
            _ => self.detokenizer.push(token),
        };
        match part {
            TextSection::Answer if self.marks.is_empty() => TextPiece::Answer(self.take(&text)),
            TextSection::Answer => {
                let is_mark = |c: char| self.marks.iter().any(|(_, mark)| *mark == c);
                let mut text = text.replace(is_mark, "\u{fffd}");
                let mark = self.marks.iter().find(|(shown, _)| *shown == token);
                text.extend(mark.map(|(_, mark)| mark));
                TextPiece::Answer(self.take(&text))
            }
            TextSection::Thought => TextPiece::Thought(self.thought(&text)),
            TextSection::Name => match text.split_once('\n') {
                Some((_, thought)) => {
                    if self.part == TextSection::Name {
                        self.part = TextSection::Thought;
                        self.held_break = false;
                    }
                    TextPiece::Thought(self.thought(thought))
                }
                None => TextPiece::Thought(""),
            },
        }
    }

    /// Returns the final text of a thought. Withholds a line break, since the last one before the
    /// thought's end is not part of it.
    fn thought(&mut self, text: &str) -> &str {
        self.shown.clear();
        if !text.is_empty() {
            if std::mem::take(&mut self.held_break) {
                self.shown.push('\n');
            }
            self.shown.push_str(text);
            if self.shown.ends_with('\n') {
                self.shown.pop();
                self.held_break = true;
            }
        }
        &self.shown
    }

    /// Returns whether a stop string was found. It is not part of the text.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_some()
    }

    /// Returns the stop string that was found.
    pub fn stop_string(&self) -> Option<&str> {
        self.stop.map(|stop| self.stops[stop].as_str())
    }

    /// Returns the withheld text of the answer at the end.
    pub fn finish(&mut self) -> &str {
        let rest = self.detokenizer.finish();
        self.take(if self.part == TextSection::Answer { &rest } else { "" });
        if !self.is_stopped() {
            self.shown.push_str(&std::mem::take(&mut self.held));
        }
        &self.shown
    }

    fn take(&mut self, text: &str) -> &str {
        self.shown.clear();
        if self.is_stopped() {
            return &self.shown;
        }
        self.held.push_str(text);
        let stops = self.stops.iter().enumerate();
        let stop = stops.filter_map(|(i, s)| Some((self.held.find(s.as_str())?, i))).min();
        let certain = match stop {
            Some((at, which)) => {
                self.stop = Some(which);
                at
            }
            None => {
                self.held.len()
                    - self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0)
            }
        };
        self.shown.push_str(&self.held[..certain]);
        self.held.drain(..certain);
        &self.shown
    }
}

/// Returns the length in bytes of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    (1..=longest)
        .rev()
        .find(|n| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_model::models::tokenizer::samples::thinking_letters;
    use gemma_model::models::{Special, gemma3::bundled};

    fn run(text: &str, stops: &[&str]) -> (String, bool) {
        let file = bundled::target().unwrap();
        let tokenizer =
            Tokenizer::from_bytes(&file.side_file("tokenizer.json").unwrap().unwrap()).unwrap();
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut stream = TextStream::new(&tokenizer, &stops);
        let mut out = String::new();
        for token in tokenizer.encode(text, Special::AsText).unwrap() {
            let TextPiece::Answer(piece) = stream.push(token) else { panic!("a thought") };
            out.push_str(piece);
            assert!(text.starts_with(&out));
        }
        out.push_str(stream.finish());
        (out, stream.is_stopped())
    }

    #[test]
    fn stop_strings_cut_wherever_tokens_end() {
        assert_eq!(run("one two three", &["two"]), ("one ".into(), true));
        assert_eq!(run("one two three", &["ee!", "e tw"]), ("on".into(), true));
        assert_eq!(run("a\n\nb\n", &["\n\n\n"]), ("a\n\nb\n".into(), false));
        assert_eq!(run("😀😀é", &["é"]), ("😀😀".into(), true));
        assert_eq!(run("ends with sto", &["stop"]), ("ends with sto".into(), false));
        assert_eq!(run("first and second", &["second", "first"]), ("".into(), true));
    }

    #[test]
    fn a_thought_is_apart_wherever_it_stands() {
        let tokenizer = thinking_letters();
        let split = |text: &str, stops: &[&str]| {
            let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
            let mut stream = TextStream::new(&tokenizer, &stops);
            let (mut answer, mut thought) = (String::new(), String::new());
            for token in tokenizer.encode(text, Special::Parse).unwrap() {
                match stream.push(token) {
                    TextPiece::Answer(piece) => answer += piece,
                    TextPiece::Thought(piece) => thought += piece,
                }
            }
            (answer + stream.finish(), thought)
        };
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let whole = "<|channel>thought\nHm, stop.\n<channel|>Yes, stop";
        assert_eq!(split(whole, &[]), pair("Yes, stop", "Hm, stop."));
        assert_eq!(split(whole, &["stop"]), pair("Yes, ", "Hm, stop."));
        assert_eq!(split("<|channel>thought\n<channel|>a", &[]), pair("a", ""));
        assert_eq!(split("a<|channel>thought<channel|>b", &[]), pair("ab", ""));
        assert_eq!(split("<|channel>x\n\ny\n\n<channel|>b", &[]), pair("b", "\ny\n"));
        assert_eq!(split("a<|channel>x\ny\u{e9}", &[]), pair("a", "y\u{e9}"));
        assert_eq!(split("a<channel|>b", &[]), pair("ab", ""));
        let two = "<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d";
        assert_eq!(split(two, &["bd"]), pair("", "ac"));
    }

    #[test]
    fn an_overlap_respects_characters() {
        assert_eq!(overlap("xé", "éa"), 2);
        assert_eq!(overlap("ab", "ab"), 0);
        assert_eq!(overlap("aab", "abc"), 2);
    }
}
