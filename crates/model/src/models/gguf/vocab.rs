//! Converts the tokenizer of a GGUF file to `tokenizer.json` and back. GGUF stores SentencePiece's
//! pieces with their scores and types.
//!
//! Gemma 4's files (`gemma4`) list the merges. llama.cpp splits texts at line breaks before
//! merging. This changes no token, since no merge joins a line break with another character.
//!
//! SentencePiece merges the neighbours that form the piece with the highest score. `tokenizer.json`
//! lists all merges in that order. Merges of equal score are ordered by the lengths of their
//! halves, longer first, then by the id of the resulting piece.
//! Source: huggingface/transformers, convert_slow_tokenizer.py (`generate_merges`).

use super::Metadata;
use crate::models::tokenizer::{KNOWN_CONTROL, MergedPair};
use crate::models::{Dialect, gemma3, gemma4};
use anyhow::{Context, Result, bail};
use gemma_base::error::Fault;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::HashMap;

pub const MODEL: &str = "tokenizer.ggml.model";
pub const TOKENS: &str = "tokenizer.ggml.tokens";
pub const SCORES: &str = "tokenizer.ggml.scores";
pub const TYPES: &str = "tokenizer.ggml.token_type";
/// The merges of Gemma 4. This program also writes them for a Gemma 3 tokenizer if its scores alone
/// imply other merges; llama.cpp ignores them there.
pub const MERGES: &str = "tokenizer.ggml.merges";

/// Types of pieces.
pub const NORMAL: i64 = 1;
pub const UNKNOWN: i64 = 2;
pub const CONTROL: i64 = 3;
pub const USER_DEFINED: i64 = 4;
pub const UNUSED: i64 = 5;
pub const BYTE: i64 = 6;

/// Longest valid piece in bytes; Gemma's longest has 93.
const LONGEST: usize = 4096;

/// Limit on the sum of squared piece lengths. It bounds the time to find all merges and the length
/// of their list. Gemma's sum is a tenth of it.
const MOST_WORK: usize = 1 << 28;

/// Values of [`MODEL`].
const GEMMA_3: &str = gemma3::DIALECT.gguf;
const GEMMA_4: &str = gemma4::DIALECT.gguf;

/// Control tokens of Gemma 4 that llama.cpp's converter marks as text, so that its answer parsers
/// see them.
const VISIBLE: [&str; 7] = [
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
];

/// Ids of Gemma 3's control tokens in all vocabularies of its family.
const KNOWN_IDS: [usize; 8] = [0, 1, 2, 3, 105, 106, 255_999, 256_000];

/// Returns whether the file has a tokenizer.
pub fn is_there(metadata: &Metadata) -> bool {
    !matches!(metadata.text(MODEL), None | Some("none" | "no_vocab"))
}

/// Returns whether a converter treats this piece as a control token although `tokenizer.json` lists
/// it as text.
pub fn is_placeholder(piece: &str) -> bool {
    matches!(piece, "<mask>" | "<2mass>" | "[@BOS@]")
        || piece.starts_with("<unused") && piece.ends_with('>')
}

/// Returns a note about control tokens that the file marks as ordinary text.
pub fn repairs(metadata: &Metadata) -> Option<String> {
    let (tokens, types) = (metadata.texts(TOKENS)?, metadata.ints(TYPES)?);
    let wrong: Vec<&str> = KNOWN_IDS
        .into_iter()
        .filter(|id| is_mistyped(tokens, types, *id))
        .map(|id| tokens[id].as_str())
        .collect();
    (!wrong.is_empty()).then(|| {
        format!(
            "the file marks {} as ordinary text; \
            they are treated as the control tokens that they are",
            wrong.join(", ")
        )
    })
}

fn is_mistyped(tokens: &[String], types: &[i64], id: usize) -> bool {
    let named = tokens.get(id).is_some_and(|t| KNOWN_CONTROL.contains(&t.as_str()));
    named
        && KNOWN_IDS.contains(&id)
        && types.get(id).is_some_and(|t| ![CONTROL, UNKNOWN].contains(t))
}

fn damaged(what: impl std::fmt::Display) -> Fault {
    Fault::model(format!("the tokenizer of the GGUF file {what}"))
        .help("the file was made wrongly: fetch or convert the model again")
}

/// A vocabulary in the form of `tokenizer.json`.
struct VocabularyPieces {
    /// Text by id; `None` for padding.
    texts: Vec<Option<String>>,
    scores: Vec<f32>,
    types: Vec<i64>,
}

impl VocabularyPieces {
    fn read(metadata: &Metadata) -> Result<VocabularyPieces, Fault> {
        let missing = |key: &str| damaged(format!("lacks `{key}`"));
        let tokens = metadata.texts(TOKENS).ok_or_else(|| missing(TOKENS))?;
        let no_scores = vec![0.0; tokens.len()];
        let scores = match metadata.text(MODEL) {
            Some(GEMMA_3) => metadata.floats(SCORES).ok_or_else(|| missing(SCORES))?,
            Some(GEMMA_4) if metadata.texts(MERGES).is_none() => return Err(missing(MERGES)),
            Some(GEMMA_4) => &no_scores,
            other => {
                return Err(damaged(format!(
                    "is of the kind {other:?}; Gemma's are \"llama\" (SentencePiece) and \"gemma4\""
                )));
            }
        };
        let types = metadata.ints(TYPES).ok_or_else(|| missing(TYPES))?;
        if tokens.len() != scores.len() || tokens.len() != types.len() {
            return Err(damaged(format!(
                "has {} pieces, {} scores and {} types",
                tokens.len(),
                scores.len(),
                types.len()
            )));
        }
        if let Some((id, piece)) = tokens.iter().enumerate().find(|(_, t)| t.len() > LONGEST) {
            return Err(damaged(format!("has a piece of {} bytes (id {id})", piece.len())));
        }
        let work = tokens.iter().fold(0, |sum: usize, t| sum.saturating_add(t.len() * t.len()));
        if work > MOST_WORK {
            return Err(damaged("has too many long pieces"));
        }
        if let Some(id) = scores.iter().position(|s| s.is_nan()) {
            return Err(damaged(format!("has a score that is not a number, of id {id}")));
        }
        Ok(VocabularyPieces::new(tokens, scores, types))
    }

    /// Restores SentencePiece's pieces from a converter's output.
    fn new(tokens: &[String], scores: &[f32], types: &[i64]) -> VocabularyPieces {
        let mut pieces = VocabularyPieces {
            texts: Vec::with_capacity(tokens.len()),
            scores: scores.to_vec(),
            types: types.to_vec(),
        };
        for (id, token) in tokens.iter().enumerate() {
            if is_mistyped(tokens, types, id)
                || types[id] == USER_DEFINED && VISIBLE.contains(&token.as_str())
            {
                pieces.types[id] = if token == "<unk>" { UNKNOWN } else { CONTROL };
            }
            pieces.texts.push(match pieces.types[id] {
                UNUSED => None,
                // Converters write spaces here, because these pieces are matched in the original
                // text.
                USER_DEFINED => Some(token.replace(' ', "▁")),
                _ => Some(token.clone()),
            });
            if [CONTROL, USER_DEFINED].contains(&pieces.types[id]) {
                // They have no score in SentencePiece's own file.
                pieces.scores[id] = 0.0;
            }
        }
        pieces
    }

    /// Returns the ids by piece.
    fn ids(&self) -> Result<HashMap<&str, u32>, Fault> {
        let mut ids = HashMap::with_capacity(self.texts.len());
        for (id, text) in self.texts.iter().enumerate() {
            let Some(text) = text else { continue };
            if let Some(other) = ids.insert(text.as_str(), id as u32) {
                return Err(damaged(format!(
                    "has the piece {text:?} twice (ids {other} and {id})"
                )));
            }
        }
        Ok(ids)
    }

    /// Returns all merges of two pieces into a piece, in merge order.
    fn merges<'a>(&'a self, ids: &HashMap<&'a str, u32>) -> Vec<(&'a str, &'a str)> {
        // Score, characters of the two halves, id, bytes of the left half.
        let mut pairs: Vec<(f32, u32, u32, u32, u32)> = Vec::new();
        for (id, text) in self.texts.iter().enumerate() {
            let Some(text) =
                text.as_deref().filter(|_| [NORMAL, USER_DEFINED].contains(&self.types[id]))
            else {
                continue;
            };
            let chars = text.chars().count() as u32;
            for (left, (at, _)) in text.char_indices().enumerate().skip(1) {
                if ids.contains_key(&text[..at]) && ids.contains_key(&text[at..]) {
                    pairs.push((
                        self.scores[id],
                        left as u32,
                        chars - left as u32,
                        id as u32,
                        at as u32,
                    ));
                }
            }
        }
        pairs.sort_unstable_by(|a, b| {
            // -0 and 0 compare as equal scores.
            let score = (b.0 + 0.0).total_cmp(&(a.0 + 0.0));
            score.then_with(|| {
                (Reverse(a.1), Reverse(a.2), a.3).cmp(&(Reverse(b.1), Reverse(b.2), b.3))
            })
        });
        let halves = |&(.., id, at): &(f32, u32, u32, u32, u32)| {
            self.texts[id as usize].as_deref().map(|t| t.split_at(at as usize))
        };
        pairs.iter().filter_map(halves).collect()
    }

    /// Returns the entries of `added_tokens`. Gemma 3's placeholders are control tokens only in
    /// GGUF files.
    fn added(&self, kind: Option<&str>) -> Vec<Value> {
        let is_text = |text: &str| kind != Some(GEMMA_4) && is_placeholder(text);
        let added = |id: usize, special: bool| {
            json!({"id": id, "content": self.texts[id], "single_word": false, "lstrip": false,
                "rstrip": false,
                "normalized": false, "special": special})
        };
        let token = |(id, kind): (usize, &i64)| match *kind {
            CONTROL | UNKNOWN => Some(added(id, !self.texts[id].as_deref().is_some_and(is_text))),
            USER_DEFINED => Some(added(id, false)),
            _ => None,
        };
        self.types.iter().enumerate().filter_map(token).collect()
    }
}

#[derive(Serialize)]
struct TokenizerJson<'a> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<Value>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: BpeModel<'a>,
}

#[derive(Serialize)]
struct BpeModel<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Option<()>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<()>,
    end_of_word_suffix: Option<()>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    #[serde(serialize_with = "vocab")]
    vocab: &'a VocabularyPieces,
    merges: Vec<(&'a str, &'a str)>,
}

fn vocab<S: Serializer>(pieces: &VocabularyPieces, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(
        pieces.texts.iter().enumerate().filter_map(|(id, text)| Some((text.as_deref()?, id))),
    )
}

/// Builds `tokenizer.json` so that it returns the same ids as SentencePiece.
pub fn tokenizer_json(metadata: &Metadata) -> Result<Vec<u8>> {
    let pieces = VocabularyPieces::read(metadata)?;
    let ids = pieces.ids()?;
    let merges = match metadata.texts(MERGES) {
        None => pieces.merges(&ids),
        Some(list) => list
            .iter()
            .map(|m| {
                m.split_once(' ').ok_or_else(|| {
                    damaged(format!("has the merge {m:?}, which does not consist of two pieces"))
                })
            })
            .collect::<Result<_, _>>()?,
    };
    let named = |(key, default): (&str, u32)| {
        let id =
            metadata.int(key).and_then(|id| usize::try_from(id).ok()).unwrap_or(default as usize);
        pieces.texts.get(id).and_then(|t| t.as_deref()).map(|text| (id, text))
    };
    let post_processor = match named(super::BOS) {
        Some((id, bos)) => json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A",
                "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A",
                "type_id": 0}},
                {"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B",
                    "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
        }),
        None => Value::Null,
    };
    let file = TokenizerJson {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: pieces.added(metadata.text(MODEL)),
        normalizer: json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
        pre_tokenizer: json!({"type": "Split", "pattern": {"String": " "},
            "behavior": "MergedWithPrevious", "invert": false}),
        post_processor,
        decoder: json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]}),
        model: BpeModel {
            kind: "BPE",
            dropout: None,
            unk_token: named(super::UNK).map(|(_, unk)| unk),
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: true,
            byte_fallback: true,
            ignore_merges: false,
            vocab: &pieces,
            merges,
        },
    };
    Ok(serde_json::to_vec(&file)?)
}

/// A `tokenizer.json` in the form that converters write into GGUF files.
pub struct GgufVocabulary {
    pub dialect: &'static Dialect,
    pub tokens: Vec<String>,
    pub scores: Vec<f32>,
    pub types: Vec<i64>,
    /// Merges of Gemma 4, and of Gemma 3 if the scores alone would give other ids.
    pub merges: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct TokenizerSource {
    model: SourceModel,
    #[serde(default)]
    added_tokens: Vec<AddedPiece>,
}

#[derive(Deserialize)]
struct SourceModel {
    vocab: HashMap<String, usize>,
    merges: Vec<MergedPair>,
}

#[derive(Deserialize)]
struct AddedPiece {
    id: usize,
    content: String,
    special: bool,
}

/// Scores of pieces that are matched in the original text, of padding, and of pieces that no merge
/// forms.
const ADDED_SCORE: f32 = -1000.0;
const PADDING_SCORE: f32 = -10000.0;
const SINGLE_SCORE: f32 = -1e6;

impl GgufVocabulary {
    /// Converts a tokenizer to `size` pieces. Larger ids are left out, holes are padding. Scores
    /// are merge ranks.
    pub fn of(tokenizer_json: &[u8], size: usize) -> Result<GgufVocabulary> {
        let source: TokenizerSource = serde_json::from_slice(tokenizer_json)?;
        let dialect = Dialect::of_vocabulary(|token| {
            source.added_tokens.iter().any(|added| added.content == token)
        });
        let mut out = GgufVocabulary {
            dialect,
            tokens: (0..size).map(|id| format!("[PAD{id}]")).collect(),
            scores: vec![PADDING_SCORE; size],
            types: vec![UNUSED; size],
            merges: None,
        };
        for (piece, id) in source.model.vocab.iter().filter(|(_, id)| **id < size) {
            let byte = piece.len() == 6 && piece.starts_with("<0x") && piece.ends_with('>');
            out.tokens[*id].clone_from(piece);
            (out.scores[*id], out.types[*id]) = (SINGLE_SCORE, if byte { BYTE } else { NORMAL });
        }
        for added in source.added_tokens.iter().filter(|a| a.id < size) {
            let control = added.special
                || is_placeholder(&added.content)
                || KNOWN_CONTROL.contains(&added.content.as_str());
            let text = &added.content;
            out.tokens[added.id] = if control { text.clone() } else { text.replace('▁', " ") };
            out.types[added.id] = match control {
                true if text == "<unk>" => UNKNOWN,
                true if VISIBLE.contains(&text.as_str()) => USER_DEFINED,
                true => CONTROL,
                false => USER_DEFINED,
            };
            out.scores[added.id] = ADDED_SCORE;
        }
        let mut rank = 0f32;
        for MergedPair(a, b) in &source.model.merges {
            let made = source.model.vocab.get(&format!("{a}{b}")).copied();
            let id = made.with_context(|| format!("it merges {a:?} and {b:?} into no piece"))?;
            if out.scores.get(id) == Some(&SINGLE_SCORE) {
                out.scores[id] = rank;
                rank -= 1.0;
            }
        }
        let pieces = VocabularyPieces::new(&out.tokens, &out.scores, &out.types);
        let same = |(ours, theirs): (&(&str, &str), &MergedPair)| {
            *ours == (theirs.0.as_str(), theirs.1.as_str())
        };
        let derived = pieces.merges(&pieces.ids()?);
        if dialect.has_merges
            || derived.len() != source.model.merges.len()
            || !derived.iter().zip(&source.model.merges).all(same)
        {
            let spelled = |MergedPair(a, b): &MergedPair| match a.contains(' ') || b.contains(' ') {
                true => {
                    bail!(
                        "its merge of {a:?} and {b:?} has a space, \
                            which a GGUF file cannot tell from the one between them"
                    )
                }
                false => Ok(format!("{a} {b}")),
            };
            out.merges = Some(source.model.merges.iter().map(spelled).collect::<Result<_>>()?);
        }
        Ok(out)
    }

    pub fn id(&self, piece: &str) -> Option<u32> {
        self.tokens.iter().position(|t| t == piece).map(|id| id as u32)
    }
}
