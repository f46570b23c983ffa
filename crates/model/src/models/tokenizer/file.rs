//! Reads `tokenizer.json` directly into the parts of the `tokenizers` crate that Gemma needs.
//!
//! The crate's own reader buffers every value before it knows its type, which doubles the time for
//! Gemma's 33 MB. It also panics on some damaged files. This reader stores each part at once, and
//! fails for parts that Gemma does not have.

use super::encoders::{SharedBpe, SharedTokenizer};
use super::piece_bytes;
use anyhow::{Result, anyhow, bail, ensure};
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

/// Largest valid id.
const MAX_ID: u32 = 1 << 24;

/// Most bytes of the replacement for a space; Gemma's `▁` has 3.
const LONGEST_REPLACEMENT: usize = 32;

/// Gemma's control tokens, followed by those of Gemma 4. Some exports mark them as ordinary text,
/// which silently breaks chat.
pub const KNOWN_CONTROL: [&str; 27] = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
    "<|think|>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<|audio>",
    "<|image|>",
    "<|audio|>",
    "<image|>",
    "<audio|>",
    "<|video|>",
];

/// Contents of a file.
pub struct Parts {
    /// Has no decoder and no post-processor: the caller joins the bytes of pieces and adds a BOS.
    pub tokenizer: SharedTokenizer,
    /// Bytes of each piece, including control tokens; `[vocab]`, empty for holes.
    pub pieces: Vec<Box<[u8]>>,
    /// Control tokens that the file marks as text.
    pub repaired: Vec<String>,
}

#[derive(Deserialize)]
struct TokenizerFile {
    model: ModelSection,
    #[serde(default)]
    added_tokens: Vec<AddedEntry>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    decoder: Option<Value>,
}

#[derive(Deserialize)]
struct AddedEntry {
    id: Option<Token>,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
struct ModelSection {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: PieceIds,
    merges: Vec<MergedPair>,
    unk_token: Option<String>,
    byte_fallback: Option<bool>,
    fuse_unk: Option<bool>,
    ignore_merges: Option<bool>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

struct PieceIds(Vocab);

impl<'de> Deserialize<'de> for PieceIds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = PieceIds;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("pieces and their ids")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PieceIds, A::Error> {
                let mut vocab = Vocab::new();
                while let Some((piece, id)) = map.next_entry::<String, u32>()? {
                    if id >= MAX_ID {
                        return Err(A::Error::custom(format_args!(
                            "piece {piece:?} has the id {id}"
                        )));
                    }
                    vocab.insert(piece, id);
                }
                Ok(PieceIds(vocab))
            }
        }
        from.deserialize_map(Entries)
    }
}

/// Two pieces that are merged: `["a", "b"]`, or `"a b"` in older files.
pub struct MergedPair(pub String, pub String);

impl<'de> Deserialize<'de> for MergedPair {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Pair;
        impl<'de> Visitor<'de> for Pair {
            type Value = MergedPair;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two pieces")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<MergedPair, E> {
                let (a, b) = text
                    .split_once(' ')
                    .ok_or_else(|| E::custom(format_args!("merge {text:?} has no space")))?;
                Ok(MergedPair(a.into(), b.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<MergedPair, A::Error> {
                let two =
                    (list.next_element()?, list.next_element()?, list.next_element::<String>()?);
                let (Some(a), Some(b), None) = two else {
                    return Err(A::Error::custom("a merge is of two pieces"));
                };
                Ok(MergedPair(a, b))
            }
        }
        from.deserialize_any(Pair)
    }
}

/// Reads and checks a file. `named` are the tokens with a role in the model's configuration.
pub fn read(bytes: &[u8], named: &[Token]) -> Result<Parts> {
    let mut file: TokenizerFile = serde_json::from_slice(bytes)?;
    let kind = file.model.kind.as_deref().unwrap_or("BPE");
    ensure!(kind == "BPE", foreign(format!("its model is {kind}, and Gemma's is BPE")));
    for (option, value) in [
        ("continuing_subword_prefix", &file.model.continuing_subword_prefix),
        ("end_of_word_suffix", &file.model.end_of_word_suffix),
    ] {
        ensure!(
            value.as_ref().is_none_or(String::is_empty),
            foreign(format!("it has a {option}, which Gemma's has not"))
        );
    }
    check_decoder(file.decoder.as_ref())?;
    check_text(file.normalizer.as_ref(), "normalizer", "Replace", "content")?;
    check_text(file.pre_tokenizer.as_ref(), "pre_tokenizer", "Split", "behavior")?;
    let repaired = repair(&mut file.added_tokens, &file.model.vocab.0, named);

    let mut pieces: Vec<Box<[u8]>> = Vec::new();
    for (piece, id) in &file.model.vocab.0 {
        set(&mut pieces, *id, piece);
    }
    let mut tokenizer = SharedTokenizer::new(SharedBpe(Arc::new(model(file.model)?)));
    if let Some(value) = file.normalizer {
        let normalizer: NormalizerWrapper = serde_json::from_value(value)?;
        tokenizer.with_normalizer(Some(normalizer)).map_err(|e| anyhow!("{e}"))?;
    }
    if let Some(value) = file.pre_tokenizer {
        tokenizer.with_pre_tokenizer(Some(serde_json::from_value::<PreTokenizerWrapper>(value)?));
    }
    let added = file.added_tokens.into_iter().map(|entry| entry.token);
    tokenizer.add_tokens(added.collect::<Vec<_>>()).map_err(|e| anyhow!("{e}"))?;
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        set(&mut pieces, id, &token.content);
    }
    Ok(Parts { tokenizer, pieces, repaired })
}

/// Returns the error for a tokenizer of another family.
fn foreign(what: String) -> Fault {
    Fault::model(format!("tokenizer.json is not a tokenizer of Gemma: {what}")).help(
        "this is another model, or its tokenizer.json was replaced: \
            copy it from the page of the Gemma that the weights are of",
    )
}

fn set(pieces: &mut Vec<Box<[u8]>>, id: u32, piece: &str) {
    if pieces.len() <= id as usize {
        pieces.resize(id as usize + 1, Box::default());
    }
    pieces[id as usize] = piece_bytes(piece);
}

fn model(model: ModelSection) -> Result<BPE> {
    let longest = model.vocab.0.keys().map(String::len).max().unwrap_or(0);
    for MergedPair(a, b) in &model.merges {
        // The crate's buffer has the length of the longest piece.
        ensure!(a.len() + b.len() <= longest, "it merges {a:?} and {b:?} into no piece");
    }
    let merges = model.merges.into_iter().map(|MergedPair(a, b)| (a, b)).collect();
    let mut builder = BPE::builder()
        .vocab_and_merges(model.vocab.0, merges)
        // The crate's cache belongs to each thread, which keeps it when the model is unloaded.
        .cache_capacity(0)
        .byte_fallback(model.byte_fallback.unwrap_or(false))
        .fuse_unk(model.fuse_unk.unwrap_or(false))
        .ignore_merges(model.ignore_merges.unwrap_or(false));
    if let Some(unk) = model.unk_token {
        builder = builder.unk_token(unk);
    }
    builder.build().map_err(|e| anyhow!("{e}"))
}

/// Marks Gemma's control tokens and those with a role as control tokens. Returns those that were
/// not marked.
fn repair(added: &mut Vec<AddedEntry>, vocab: &Vocab, named: &[Token]) -> Vec<String> {
    let known = KNOWN_CONTROL.into_iter().map(str::to_owned);
    let in_vocab = vocab.iter().filter(|(_, id)| named.contains(id)).map(|(text, _)| text.clone());
    let is_named = |entry: &&AddedEntry| entry.id.is_some_and(|id| named.contains(&id));
    let in_added = added.iter().filter(is_named).map(|entry| entry.token.content.clone());
    // A token with a role may be a line break, which stays text.
    let named: BTreeSet<String> = in_vocab.chain(in_added).filter(|text| is_mark(text)).collect();
    let mut repaired = Vec::new();
    for name in known.chain(named) {
        match added.iter_mut().find(|entry| entry.token.content == name) {
            Some(entry) if entry.token.special => continue,
            Some(entry) => entry.token.special = true,
            None if vocab.contains_key(&name) => {
                added.push(AddedEntry { id: None, token: AddedToken::from(&*name, true) })
            }
            None => continue,
        }
        repaired.push(name);
    }
    repaired
}

/// Returns whether a piece looks like a mark such as `<|im_end|>`, rather than a word.
fn is_mark(piece: &str) -> bool {
    let ends = [('<', '>'), ('[', ']')];
    piece.len() > 2 && ends.iter().any(|(a, b)| piece.starts_with(*a) && piece.ends_with(*b))
}

/// Checks the decoder. Gemma's replaces `▁` by spaces and `<0x..>` by bytes; another decoder
/// implies another kind of pieces.
fn check_decoder(decoder: Option<&Value>) -> Result<()> {
    let Some(decoder) = decoder else { return Ok(()) };
    let steps = decoder["decoders"].as_array().map_or(std::slice::from_ref(decoder), Vec::as_slice);
    for step in steps {
        match step["type"].as_str() {
            Some("Replace") if step["pattern"]["String"] == "▁" && step["content"] == " " => {}
            Some("ByteFallback" | "Fuse") => {}
            _ => bail!(foreign(format!("its decoder has the step {step}, which Gemma's has not"))),
        }
    }
    Ok(())
}

/// Checks a normalizer or pre-tokenizer.
///
/// Gemma's normalizer replaces spaces by `▁`, and its pre-tokenizer splits at spaces. Other kinds
/// belong to other families. The library panics on some of their files, and a few steps in sequence
/// can expand one letter into a text of any length.
fn check_text(step: Option<&Value>, name: &str, kind: &str, key: &str) -> Result<()> {
    let Some(step) = step.filter(|step| !step.is_null()) else { return Ok(()) };
    let fits = step["type"] == kind && step["pattern"]["String"] == " " && step[key].is_string();
    let short = step[key].as_str().is_some_and(|text| text.len() <= LONGEST_REPLACEMENT);
    ensure!(fits && short, foreign(format!("its {name} is {step}, which Gemma's is not")));
    Ok(())
}
