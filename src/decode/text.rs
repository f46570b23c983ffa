//! Generated tokens to text that may be shown: whole characters, and nothing that could still
//! become a stop string.

use crate::models::{Detokenizer, Tokenizer};
use crate::tensor::Token;

/// Text as it becomes certain.
pub struct TextStream<'a> {
    detokenizer: Detokenizer<'a>,
    stops: Vec<String>,
    /// Decoded, not yet shown: it begins like a stop string.
    held: String,
    shown: String,
    /// Index of the stop string that has come.
    stop: Option<usize>,
}

impl<'a> TextStream<'a> {
    pub fn new(tokenizer: &'a Tokenizer, stops: &[String]) -> Self {
        let (detokenizer, stops) = (Detokenizer::new(tokenizer), stops.to_vec());
        TextStream { detokenizer, stops, held: String::new(), shown: String::new(), stop: None }
    }

    /// Returns the text that this token makes certain.
    pub fn push(&mut self, token: Token) -> &str {
        let text = self.detokenizer.push(token);
        self.take(&text)
    }

    /// Returns whether a stop string has come. It is not part of the text.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_some()
    }

    /// Returns the stop string that has come.
    pub fn stop_string(&self) -> Option<&str> {
        self.stop.map(|stop| self.stops[stop].as_str())
    }

    /// Returns the held text when no token follows.
    pub fn finish(&mut self) -> &str {
        let rest = self.detokenizer.finish();
        self.take(&rest);
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

/// Returns the number of bytes of the longest end of `text` that begins `stop`.
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
    use crate::models::{Special, gemma3::bundled};

    fn run(text: &str, stops: &[&str]) -> (String, bool) {
        let file = bundled::target().unwrap();
        let tokenizer =
            Tokenizer::from_bytes(&file.side_file("tokenizer.json").unwrap().unwrap()).unwrap();
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut stream = TextStream::new(&tokenizer, &stops);
        let mut out = String::new();
        for token in tokenizer.encode(text, Special::AsText).unwrap() {
            out.push_str(stream.push(token));
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
    fn an_overlap_respects_characters() {
        assert_eq!(overlap("xé", "éa"), 2);
        assert_eq!(overlap("ab", "ab"), 0);
        assert_eq!(overlap("aab", "abc"), 2);
    }
}
