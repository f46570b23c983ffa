//! Converts text to tokens and back with the model's `tokenizer.json` and the `tokenizers` crate.

mod encoders;
mod file;
#[cfg(any(test, feature = "testing"))]
pub mod samples;

pub(super) use file::{KNOWN_CONTROL, MergedPair};

use super::Dialect;
use anyhow::{Context, Result, anyhow};
use encoders::Encoders;
use gemma_base::error::{Fault, fault_of};
use gemma_base::tensor::Token;
use gemma_base::util::threads;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Treatment of control tokens spelled out in a text, such as `<end_of_turn>` in a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// They stay text.
    AsText,
    /// They become control tokens.
    Parse,
}

/// A tokenizer with a table of every piece's bytes.
pub struct Tokenizer {
    encoders: Encoders,
    pieces: Vec<Box<[u8]>>, // [vocab]: empty for control tokens and holes
    control: BTreeMap<String, Token>, // by spelling
    control_starts: Vec<char>,
    longest: usize,
    sha256: [u8; 32],
    notes: Vec<String>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json` without a model configuration.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::with_roles(bytes, &[])
    }

    /// Reads a `tokenizer.json`. `named` are the tokens that begin, end or pad texts according to
    /// the model's configuration. They are control tokens, even if the file marks them as text.
    pub fn with_roles(bytes: &[u8], named: &[Token]) -> Result<Self> {
        // Hashing 33 MB takes a while, so it runs in parallel.
        let (parts, sha256) = std::thread::scope(|scope| {
            let sha256 = threads::spawn(scope, || <[u8; 32]>::from(Sha256::digest(bytes)));
            (file::read(bytes, named), sha256.join())
        });
        let file::Parts { tokenizer: inner, mut pieces, repaired } =
            parts.map_err(|why| match fault_of(&why) {
                Some(_) => why,
                None => why.context(
                    Fault::model("tokenizer.json cannot be read")
                        .help("download the file again, or copy it from the original model"),
                ),
            })?;
        let control: BTreeMap<_, _> = inner
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, t)| t.special)
            .map(|(id, t)| (t.content.clone(), *id))
            .collect();
        for id in control.values() {
            pieces[*id as usize] = Box::default();
        }
        let mut control_starts: Vec<char> =
            control.keys().filter_map(|name| name.chars().next()).collect();
        control_starts.dedup();
        let notes = match repaired.is_empty() {
            true => Vec::new(),
            false => vec![format!(
                "the tokenizer marks {} as ordinary text; \
                    they are treated as the control tokens that they are",
                repaired.join(", ")
            )],
        };
        let lengths = pieces.iter().map(|piece| piece.len()).chain(control.keys().map(String::len));
        let longest = lengths.max().unwrap_or(0).max(1);
        let encoders = Encoders::new(inner);
        Ok(Tokenizer { encoders, pieces, control, control_starts, longest, sha256, notes })
    }

    /// Returns notes about repairs, one line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the tokens of a text, without BOS.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<Token>> {
        let encoding = self.encoders.of(special).encode_fast(text, false);
        let encoding = encoding.map_err(|e| anyhow!("{e}")).context("tokenising")?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the number of bytes of the longest token.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Returns the tokens of a text without a template, after exactly one BOS. Also returns whether
    /// the text already began with BOS.
    pub fn encode_behind_bos(
        &self,
        text: &str,
        special: Special,
        bos: Token,
    ) -> Result<(Vec<Token>, bool)> {
        let spelled =
            self.control.iter().find(|(_, id)| **id == bos).map(|(name, _)| name.as_str());
        let rest = spelled.map_or(text, |name| text.trim_start_matches(name));
        let mut tokens = vec![bos];
        tokens.extend(self.encode(rest, special)?);
        Ok((tokens, rest.len() < text.len()))
    }

    /// Returns the text of tokens, without control tokens. Replaces invalid UTF-8.
    pub fn decode(&self, tokens: &[Token]) -> String {
        let mut out = Detokenizer::new(self);
        let mut text: String = tokens.iter().map(|t| out.push(*t)).collect();
        text.push_str(&out.finish());
        text
    }

    /// Returns the bytes that a token adds to the text; empty for control tokens and unknown ids.
    pub fn token_bytes(&self, token: Token) -> Vec<u8> {
        self.bytes(token).to_vec()
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.pieces.get(token as usize).map_or(&[], |p| p)
    }

    /// Returns the file's spelling of a token, for display.
    pub fn piece(&self, token: Token) -> Option<String> {
        self.encoders.of(Special::Parse).id_to_token(token)
    }

    /// Returns the largest id plus one.
    pub fn vocab(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the control tokens by their spelling.
    pub fn control(&self) -> &BTreeMap<String, Token> {
        &self.control
    }

    /// Returns whether any control token begins with this character.
    pub fn begins_control(&self, c: char) -> bool {
        self.control_starts.contains(&c)
    }

    /// Returns the dialect of models with this vocabulary.
    pub fn dialect(&self) -> &'static Dialect {
        Dialect::of_vocabulary(|token| self.control.contains_key(token))
    }

    /// Returns the tokens around a thought, if the model can think.
    pub fn channel(&self) -> Option<(Token, Token)> {
        let id = |name| self.control.get(name).copied();
        let marks = self.dialect().thought.as_ref()?;
        id(marks.wish).and(Some((id(marks.begin)?, id(marks.end)?)))
    }

    /// Returns the index in `prompt` of the mark that begins a thought, if the prompt ends inside
    /// one; otherwise the length of the prompt.
    pub fn open_thought(&self, prompt: &[Token]) -> usize {
        let open = self.channel().and_then(|(begin, end)| {
            let last = prompt.iter().rposition(|token| *token == begin || *token == end)?;
            (prompt[last] == begin).then_some(last)
        });
        open.unwrap_or(prompt.len())
    }

    pub fn is_control(&self, token: Token) -> bool {
        self.control.values().any(|id| *id == token)
    }

    /// Returns the id of a piece, including control tokens.
    pub fn id(&self, piece: &str) -> Option<Token> {
        self.encoders.of(Special::Parse).token_to_id(piece)
    }

    /// Returns whether both tokenizers have the same ids, so that one model can read the other's
    /// tokens.
    ///
    /// Files of one family may differ at the end, where one may list padding or image tokens, and
    /// in how they list the rest.
    pub fn agrees_with(&self, other: &Tokenizer) -> bool {
        const AT_THE_END: usize = 64;
        let n = self.pieces.len().min(other.pieces.len());
        let control = |t: &Tokenizer| {
            t.control.clone().into_iter().filter(|(_, id)| (*id as usize) < n).collect::<Vec<_>>()
        };
        self.sha256 == other.sha256
            || self.pieces.len().abs_diff(other.pieces.len()) <= AT_THE_END
                && self.pieces[..n] == other.pieces[..n]
                && control(self) == control(other)
    }

    /// Returns the SHA-256 of the file.
    pub fn sha256(&self) -> [u8; 32] {
        self.sha256
    }
}

/// Returns the bytes of a piece: `<0x0A>` is a byte; in other pieces `▁` is a space.
fn piece_bytes(piece: &str) -> Box<[u8]> {
    let byte = piece
        .strip_prefix("<0x")
        .and_then(|p| p.strip_suffix('>'))
        .filter(|hex| hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
    match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => [byte].into(),
        None => piece.replace('▁', " ").into_bytes().into(),
    }
}

/// Incremental decoder of tokens. Withholds a character that spans several byte tokens until it is
/// complete.
pub struct Detokenizer<'a> {
    tokenizer: &'a Tokenizer,
    held: Vec<u8>,
}

impl<'a> Detokenizer<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Detokenizer { tokenizer, held: Vec::new() }
    }

    /// Returns the text that this token completes. Bytes that can never form a character become
    /// U+FFFD.
    pub fn push(&mut self, token: Token) -> String {
        self.held.extend_from_slice(self.tokenizer.bytes(token));
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(rest) => {
                    text.push_str(rest);
                    self.held.clear();
                    return text;
                }
                Err(e) => {
                    let (whole, rest) = self.held.split_at(e.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(whole));
                    let Some(bad) = e.error_len() else {
                        self.held = rest.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.held = rest[bad..].to_vec();
                }
            }
        }
    }

    /// Returns the rest at the end: an incomplete character, as U+FFFD.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        String::from_utf8_lossy(&held).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::samples::letters;
    use super::*;

    #[test]
    fn tokens_with_a_role_are_control_tokens() {
        let added = |id: u32, content: &str| {
            serde_json::json!({"id": id, "content": content, "special": false,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        };
        let json = serde_json::json!({
            "added_tokens": [added(3, "<|im_end|>"), added(4, "<|im_start|>"), added(5, "\n\n")],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "[END]": 2}, "merges": []},
        });
        let bytes = serde_json::to_vec(&json).unwrap();
        let control = |named: &[Token]| {
            let tokenizer = Tokenizer::with_roles(&bytes, named).unwrap();
            let control: Vec<Token> = tokenizer.control().values().copied().collect();
            for (text, id) in [("<|im_end|>", 3), ("<|im_start|>", 4)] {
                let as_text = tokenizer.encode(text, Special::AsText).unwrap();
                assert_eq!(as_text == [id], !named.contains(&id), "{text}");
                assert_eq!(tokenizer.encode(text, Special::Parse).unwrap(), [id]);
            }
            control
        };
        assert!(control(&[]).is_empty());
        assert_eq!(control(&[3]), [3]);
        // A word and a line break stay text.
        assert!(control(&[0, 5, 99]).is_empty());
        assert_eq!(control(&[4, 3, 2]), [3, 4, 2]);
    }

    #[test]
    fn any_text_survives_and_control_tokens_stay_text_unless_parsed() {
        let t = letters();
        for text in [
            "",
            "a b  c\n\n\td",
            "naïve 😀 — ok",
            "<end_of_turn> is text",
            "▁ is a character too".trim_start_matches('▁'),
        ] {
            assert_eq!(t.decode(&t.encode(text, Special::AsText).unwrap()), text);
        }
        let marker = t.id("<end_of_turn>").unwrap();
        assert!(!t.encode("<end_of_turn>", Special::AsText).unwrap().contains(&marker));
        // The fixture marks it as ordinary text, as some exports do; the reader repairs this.
        assert_eq!(t.encode("<end_of_turn>", Special::Parse).unwrap(), [marker]);
        assert!(t.is_control(marker) && t.token_bytes(marker).is_empty());
        assert!(
            t.notes()[0].contains("<start_of_turn>, <end_of_turn> as ordinary text"),
            "{:?}",
            t.notes()
        );
    }

    #[test]
    fn characters_come_whole_and_broken_bytes_are_replaced() {
        let t = letters();
        let byte = |b: u8| t.id(&format!("<0x{b:02X}>")).unwrap();
        let mut out = Detokenizer::new(&t);
        let emoji = "😀".as_bytes();
        assert!(emoji[..3].iter().all(|b| out.push(byte(*b)).is_empty()));
        assert_eq!(out.push(byte(emoji[3])), "😀");
        assert_eq!(out.push(byte(0xf0)), "");
        assert_eq!(out.push(t.id("a").unwrap()), "\u{fffd}a");
        assert_eq!(out.push(byte(0xff)), "\u{fffd}");
        out.push(byte(0xe2));
        assert_eq!(out.finish(), "\u{fffd}");
    }

    #[test]
    fn one_bos_stands_in_front_whoever_wrote_it() {
        let t = letters();
        let plain = t.encode("<a", Special::AsText).unwrap();
        for special in [Special::AsText, Special::Parse] {
            for (text, brought) in [("<a", false), ("<bos><a", true), ("<bos><bos><a", true)] {
                let (tokens, found) = t.encode_behind_bos(text, special, 2).unwrap();
                assert_eq!((tokens[0], &tokens[1..], found), (2, &plain[..], brought));
            }
        }
    }

    #[test]
    fn spaces_in_added_tokens_are_spaces() {
        // Gemma has tokens for runs of the replacement character for a space.
        assert_eq!(&*piece_bytes("▁▁▁"), b"   ");
        assert_eq!(&*piece_bytes("<0xe2>"), [0xe2]);
        assert_eq!(&*piece_bytes("<0x+2>"), b"<0x+2>");
    }

    #[test]
    fn a_damaged_file_is_a_model_fault() {
        let model = |rest: &str| {
            format!(r#"{{"model": {{"type": "BPE", "vocab": {{"a": 0, "b": 1}}, {rest}}}}}"#)
        };
        let normalizer = |step: &str| {
            format!(r#"{{"model": {{"vocab": {{"a": 0}}, "merges": []}}, "normalizer": {step}}}"#)
        };
        for text in [
            "".to_string(),
            "{".into(),
            "{}".into(),
            r#"{"model": {"type": "BPE"}}"#.into(),
            r#"{"model": {"type": "Unigram", "vocab": [["a", 0.5]]}}"#.into(),
            r#"{"model": {"vocab": {"a": 4294967295}, "merges": []}}"#.into(),
            r#"{"model": {"vocab": {"a": 0}, "merges": []}, "decoder": {"type": "ByteLevel"}}"#
                .into(),
            r#"{"model": {"vocab": {"a": 0}, "merges": []}, "normalizer": 5}"#.into(),
            // Steps of other families: some of them panic, others expand one letter into any text.
            normalizer(r#"{"type": "Precompiled", "precompiled_charsmap": "AAAA"}"#),
            normalizer(r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}"#),
            normalizer(r#"{"type": "Replace", "pattern": {"Regex": " "}, "content": "x"}"#),
            normalizer(r#"{"type": "Sequence", "normalizers": []}"#),
            normalizer(&format!(
                r#"{{"type": "Replace", "pattern": {{"String": " "}}, "content": "{}"}}"#,
                "x".repeat(40)
            )),
            r#"{"model": {"vocab": {"a": 0}, "merges": []},
                "pre_tokenizer": {"type": "FixedLength", "length": 0}}"#
                .into(),
            model(r#""merges": [["a", "b"]]"#),
            model(r#""merges": [["a", "c"]]"#),
            model(r#""merges": [["a"]]"#),
            model(r#""merges": ["ab"]"#),
            model(r###""merges": [], "continuing_subword_prefix": "##""###),
        ] {
            let error = Tokenizer::from_bytes(text.as_bytes()).err().expect(&text);
            assert_eq!(gemma_base::error::fault_of(&error).unwrap().kind.exit_code(), 3);
        }
    }
}
