//! The vocabulary of a draft model that has rows for only some of its target's tokens.
//!
//! `draft_vocabulary.json`, next to the weights, lists the token of each row and a hash of the
//! target's tokenizer. A token without a row is read as several rows: its text is split into pieces
//! with rows, longest first. It is never drafted. `scripts/train/draft_vocab.py` splits the same
//! way, so the model was trained with these spellings.

use super::Tokenizer;
use crate::checkpoint::Checkpoint;
use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use gemma_base::util::hex;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};

/// Name of the file next to the weights.
pub const FILE: &str = "draft_vocabulary.json";

/// Limit of rows per spelled token.
const MOST_PARTS: usize = 16;

/// Marks a token without a row.
const NONE: u32 = u32::MAX;

/// Contents of the file.
#[derive(Debug, Deserialize)]
struct ReducedFile {
    tokenizer: Fingerprint,
    /// Most rows of one spelled token
    parts: usize,
    /// Token of each row, as the difference from the previous row's token.
    steps: Vec<u32>,
}

/// Identity of a tokenizer.
#[derive(Clone, Debug, Deserialize)]
struct Fingerprint {
    /// Tokens `first..end` are hashed. They are text in every model of the family.
    first: usize,
    end: usize,
    /// SHA-256 over length (u32, little-endian) and bytes of each piece.
    sha256: String,
    /// Spellings and ids of required tokens outside that range.
    control: BTreeMap<String, Token>,
}

/// The tokens of the draft model's rows.
#[derive(Clone, Debug)]
pub struct ReducedVocabulary {
    fingerprint: Fingerprint,
    parts: usize,
    /// Token of each row, ascending.
    tokens: Vec<Token>,
}

impl ReducedVocabulary {
    /// Reads the file next to a draft model's weights; `None` if the rows are the tokens
    /// themselves. `rows` is the size of its embedding.
    pub fn of(checkpoint: &Checkpoint, rows: usize) -> Result<Option<Self>> {
        let Some(bytes) = checkpoint.side_file(FILE)? else { return Ok(None) };
        Self::parse(&bytes, rows)
            .map(Some)
            .with_context(|| format!("reading {}", checkpoint.display(FILE)))
    }

    /// Reads the file's contents.
    pub fn parse(bytes: &[u8], rows: usize) -> Result<Self> {
        let bad = |what: String| {
            Fault::model(what).help("fetch the draft model again, or convert it again")
        };
        let stored: ReducedFile = serde_json::from_slice(bytes)
            .map_err(|e| bad(format!("this is not the vocabulary of a draft model: {e}")))?;
        let mut tokens = Vec::with_capacity(stored.steps.len());
        for (row, step) in stored.steps.iter().enumerate() {
            let before = tokens.last().copied().unwrap_or(0u32);
            match before.checked_add(*step) {
                Some(token) if (row == 0 || *step > 0) && token < 1 << 24 => tokens.push(token),
                _ => return Err(bad(format!("row {row} does not follow the one before")).into()),
            }
        }
        let print = &stored.tokenizer;
        if tokens.len() != rows {
            return Err(bad(format!("{} tokens are listed for {rows} rows", tokens.len())).into());
        }
        if !(1..=MOST_PARTS).contains(&stored.parts)
            || print.first >= print.end
            || print.end > 1 << 24
        {
            return Err(bad("its numbers are out of range".into()).into());
        }
        Ok(ReducedVocabulary { fingerprint: stored.tokenizer, parts: stored.parts, tokens })
    }

    /// Returns the number of rows of the model.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the most rows of one spelled token, see [`VocabMap::most_parts`].
    pub fn most_parts(&self) -> usize {
        self.parts
    }

    /// Returns how the target's tokens differ from those that this vocabulary was made for.
    pub fn mismatch(&self, tokenizer: &Tokenizer) -> Option<String> {
        let Fingerprint { first, end, sha256, control } = &self.fingerprint;
        if tokenizer.vocab() < *end {
            return Some(format!(
                "it was made for a tokenizer of {end} tokens or more, and the target's has {}",
                tokenizer.vocab()
            ));
        }
        if let Some((piece, token)) =
            control.iter().find(|(piece, token)| tokenizer.id(piece) != Some(**token))
        {
            return Some(format!("it was made for a tokenizer with {piece} as token {token}"));
        }
        let mut hash = Sha256::new();
        for token in *first..*end {
            let bytes = tokenizer.token_bytes(token as Token);
            hash.update((bytes.len() as u32).to_le_bytes());
            hash.update(&bytes);
        }
        (hex(hash.finalize()) != *sha256)
            .then(|| "it was made for another tokenizer: the pieces differ".to_owned())
    }

    /// Returns the spelling of each token in the model's rows, for a compatible target (see
    /// [`mismatch`](Self::mismatch)).
    pub fn spelling(&self, tokenizer: &Tokenizer) -> VocabMap {
        let text = self.fingerprint.first..self.fingerprint.end;
        let mut row_of = vec![NONE; tokenizer.vocab()];
        let mut known: HashMap<Box<[u8]>, u32> = HashMap::with_capacity(self.tokens.len());
        let mut pieces = Vec::new();
        for (row, &token) in self.tokens.iter().enumerate() {
            let Some(slot) = row_of.get_mut(token as usize) else { continue };
            *slot = row as u32;
            let bytes = tokenizer.token_bytes(token);
            if text.contains(&(token as usize)) && !bytes.is_empty() {
                // If two tokens have the same bytes, such as a newline and its byte token, the
                // lower one is used.
                known.entry(bytes.into()).or_insert(row as u32);
            }
        }
        for token in 0..tokenizer.vocab() as Token {
            let text = if row_of[token as usize] == NONE {
                tokenizer.token_bytes(token)
            } else {
                Vec::new()
            };
            pieces.push(text.into_boxed_slice());
        }
        let longest = known.keys().map(|k| k.len()).max().unwrap_or(0);
        let unknown = self.tokens.binary_search(&3).unwrap_or(0) as u32;
        VocabMap {
            tokens: self.tokens.clone(),
            row_of,
            known,
            pieces,
            longest,
            unknown,
            parts: self.parts,
        }
    }
}

/// Maps a target's tokens to rows of a draft model.
#[derive(Clone, Debug)]
pub struct VocabMap {
    tokens: Vec<Token>,
    /// `[tokens of the target]`
    row_of: Vec<u32>,
    /// Rows of pieces of text, by their bytes.
    known: HashMap<Box<[u8]>, u32>,
    /// Bytes of the tokens without a row. `[tokens of the target]`
    pieces: Vec<Box<[u8]>>,
    longest: usize,
    /// Row used for tokens without text.
    unknown: u32,
    parts: usize,
}

impl VocabMap {
    /// Returns the number of tokens of the target.
    pub fn vocab(&self) -> usize {
        self.row_of.len()
    }

    /// Returns the number of rows of the model.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the most rows of one spelled token.
    pub fn most_parts(&self) -> usize {
        self.parts
    }

    /// Returns the token of a row.
    pub fn token(&self, row: u32) -> Token {
        self.tokens[row as usize]
    }

    /// Returns the row of a token.
    pub fn row(&self, token: Token) -> Option<u32> {
        self.row_of.get(token as usize).copied().filter(|row| *row != NONE)
    }

    /// Appends the rows of a token to `out`, at least one. If there are more than the model was
    /// made for, appends the last ones.
    pub fn spell(&self, token: Token, out: &mut Vec<u32>) {
        if let Some(row) = self.row(token) {
            return out.push(row);
        }
        let (mut rest, start) = (self.pieces.get(token as usize).map_or(&[][..], |p| p), out.len());
        while !rest.is_empty() {
            let found = (1..=self.longest.min(rest.len()))
                .rev()
                .find_map(|n| self.known.get(&rest[..n]).map(|row| (n, *row)));
            // Every byte has a row in a vocabulary that matches its tokenizer. A piece that cannot
            // be spelled is truncated.
            let Some((n, row)) = found else { break };
            out.push(row);
            rest = &rest[n..];
        }
        let extra = (out.len() - start).saturating_sub(self.parts);
        out.drain(start..start + extra);
        if out.len() == start {
            out.push(self.unknown);
        }
    }
}
