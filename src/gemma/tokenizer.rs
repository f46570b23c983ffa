//! Text to tokens and back: the model's own `tokenizer.json`, run by the `tokenizers` crate.

use crate::error::Fault;
use crate::tensor::Token;
use anyhow::{Context, Result, anyhow};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// What becomes of control tokens that stand in a text, such as `<end_of_turn>` in a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// They stay text.
    AsText,
    /// They become the control tokens they spell.
    Parse,
}

/// A tokenizer with every piece's bytes at hand.
pub struct Tokenizer {
    // The crate keeps "control tokens are text" as a switch of the tokenizer itself.
    inner: Mutex<tokenizers::Tokenizer>,
    pieces: Vec<Box<[u8]>>,           // [vocab]: empty for control tokens and holes
    control: BTreeMap<String, Token>, // by spelling
    control_starts: Vec<char>,
    sha256: [u8; 32],
}

/// Gemma's turn markers. Some exports mark them as ordinary text, which breaks chat silently.
const TURN_MARKERS: [&str; 2] = ["<start_of_turn>", "<end_of_turn>"];

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let broken =
            || Fault::model("tokenizer.json cannot be read").help("download the file again, or copy it from the original model");
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| anyhow!("{e}")).with_context(broken)?;
        let repaired: Vec<_> = TURN_MARKERS
            .iter()
            .filter(|m| inner.token_to_id(m).is_some())
            .filter(|m| !inner.get_added_tokens_decoder().values().any(|t| t.special && t.content == **m))
            .map(|m| tokenizers::AddedToken::from(m.to_string(), true))
            .collect();
        if !repaired.is_empty() {
            inner.add_special_tokens(repaired).map_err(|e| anyhow!("{e}")).with_context(broken)?;
        }
        let added = inner.get_added_tokens_decoder();
        let control: BTreeMap<_, _> = added.iter().filter(|(_, t)| t.special).map(|(id, t)| (t.content.clone(), *id)).collect();
        let vocab = inner.get_vocab(true);
        let size = vocab.values().max().map_or(0, |id| *id as usize + 1);
        if size > 1 << 24 {
            return Err(Fault::model(format!("tokenizer.json gives a token the id {}", size - 1))
                .help("the file is damaged")
                .into());
        }
        let mut pieces = vec![Box::default(); size];
        for (piece, id) in &vocab {
            if !control.contains_key(piece) {
                let verbatim = added.contains_key(id);
                pieces[*id as usize] = if verbatim { piece.as_bytes().into() } else { piece_bytes(piece) };
            }
        }
        let mut control_starts: Vec<char> = control.keys().filter_map(|name| name.chars().next()).collect();
        control_starts.dedup();
        Ok(Tokenizer { inner: Mutex::new(inner), pieces, control, control_starts, sha256: Sha256::digest(bytes).into() })
    }

    /// The tokens of a text; no BOS is added.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<Token>> {
        let mut inner = self.inner.lock().unwrap_or_else(|e| e.into_inner());
        inner.set_encode_special_tokens(special == Special::AsText);
        let encoding = inner.encode_fast(text, false).map_err(|e| anyhow!("{e}")).context("tokenising")?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, control tokens left out, broken UTF-8 replaced.
    pub fn decode(&self, tokens: &[Token]) -> String {
        let mut out = Detokenizer::new(self);
        let mut text: String = tokens.iter().map(|t| out.push(*t)).collect();
        text.push_str(&out.finish());
        text
    }

    /// The bytes that a token adds to the text; none for control tokens and unknown ids.
    pub fn token_bytes(&self, token: Token) -> Vec<u8> {
        self.bytes(token).to_vec()
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.pieces.get(token as usize).map_or(&[], |p| p)
    }

    /// How the file spells a token, for people to read.
    pub fn piece(&self, token: Token) -> Option<String> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner()).id_to_token(token)
    }

    /// One more than the largest id.
    pub fn vocab(&self) -> usize {
        self.pieces.len()
    }

    /// Control tokens by their spelling.
    pub fn control(&self) -> &BTreeMap<String, Token> {
        &self.control
    }

    /// Whether some control token begins with this character.
    pub fn begins_control(&self, c: char) -> bool {
        self.control_starts.contains(&c)
    }

    pub fn is_control(&self, token: Token) -> bool {
        self.control.values().any(|id| *id == token)
    }

    /// The id of a piece, control or not.
    pub fn id(&self, piece: &str) -> Option<Token> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner()).token_to_id(piece)
    }

    /// Hash of the file it was read from.
    pub fn sha256(&self) -> [u8; 32] {
        self.sha256
    }
}

/// `<0x0A>` is a byte; elsewhere `▁` stands for a space.
fn piece_bytes(piece: &str) -> Box<[u8]> {
    let byte = piece.strip_prefix("<0x").and_then(|p| p.strip_suffix('>')).filter(|hex| hex.len() == 2);
    match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => [byte].into(),
        None => piece.replace('▁', " ").into_bytes().into(),
    }
}

/// Tokens to text as they come: a character that is spread over several byte tokens is held back until it is whole.
pub struct Detokenizer<'a> {
    tokenizer: &'a Tokenizer,
    held: Vec<u8>,
}

impl<'a> Detokenizer<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Detokenizer { tokenizer, held: Vec::new() }
    }

    /// The text that is complete with this token. Bytes that can never become a character turn into U+FFFD.
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

    /// What is still held when no token follows: an unfinished character, as U+FFFD.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        String::from_utf8_lossy(&held).into_owned()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A byte-fallback BPE of single letters, with `\n`, spaces and Gemma's control tokens.
    pub(crate) fn letters() -> Tokenizer {
        let mut pieces = vec![
            "<pad>".to_string(),
            "<eos>".into(),
            "<bos>".into(),
            "<unk>".into(),
            "<start_of_turn>".into(),
            "<end_of_turn>".into(),
        ];
        pieces.extend((0..256).map(|b| format!("<0x{b:02X}>")));
        pieces.extend("▁\n".chars().chain(' '..='~').filter(|c| *c != ' ').map(String::from));
        pieces.push("▁a".into());
        let vocab: serde_json::Map<_, _> = pieces.iter().enumerate().map(|(i, p)| (p.clone(), i.into())).collect();
        let added: Vec<_> = (0..6)
            .map(|i| serde_json::json!({"id": i, "content": pieces[i], "special": i < 4, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}))
            .collect();
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": added,
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"]], "byte_fallback": true, "fuse_unk": true, "unk_token": "<unk>"},
        });
        Tokenizer::from_bytes(&serde_json::to_vec(&json).unwrap()).unwrap()
    }

    #[test]
    fn any_text_survives_and_control_tokens_stay_text_unless_parsed() {
        let t = letters();
        for text in
            ["", "a b  c\n\n\td", "naïve 😀 — ok", "<end_of_turn> is text", "▁ is a character too".trim_start_matches('▁')]
        {
            assert_eq!(t.decode(&t.encode(text, Special::AsText).unwrap()), text);
        }
        let marker = t.id("<end_of_turn>").unwrap();
        assert!(!t.encode("<end_of_turn>", Special::AsText).unwrap().contains(&marker));
        // The fixture marks it as ordinary text, as some exports do; it is repaired.
        assert_eq!(t.encode("<end_of_turn>", Special::Parse).unwrap(), [marker]);
        assert!(t.is_control(marker) && t.token_bytes(marker).is_empty());
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
    fn a_damaged_file_is_a_model_fault() {
        for bytes in [&b""[..], b"{", b"{}", b"{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\"}}"] {
            let error = Tokenizer::from_bytes(bytes).err().unwrap();
            assert_eq!(crate::error::fault_of(&error).unwrap().kind.exit_code(), 3);
        }
    }
}
