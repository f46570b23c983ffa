//! Two tokenizers of the `tokenizers` crate with a shared vocabulary. The crate makes the treatment
//! of control tokens a property of the tokenizer, and texts of both kinds are encoded concurrently.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::{
    DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Result,
    Token, TokenizerImpl,
};

use super::Special;

/// Vocabulary and merges, shared by clones.
#[derive(Clone)]
pub struct SharedBpe(pub Arc<BPE>);

pub type SharedTokenizer = TokenizerImpl<
    SharedBpe,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

impl Model for SharedBpe {
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        self.0.tokenize(text)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        self.0.save(folder, prefix)
    }

    fn get_trainer(&self) -> BpeTrainer {
        self.0.get_trainer()
    }
}

/// One tokenizer per treatment of control tokens.
pub struct Encoders {
    parsing: SharedTokenizer,
    as_text: SharedTokenizer,
}

impl Encoders {
    pub fn new(mut tokenizer: SharedTokenizer) -> Encoders {
        tokenizer.set_encode_special_tokens(false);
        let mut as_text = tokenizer.clone();
        as_text.set_encode_special_tokens(true);
        Encoders { parsing: tokenizer, as_text }
    }

    /// Returns the tokenizer for this treatment. Both have the same ids and pieces.
    pub fn of(&self, special: Special) -> &SharedTokenizer {
        match special {
            Special::AsText => &self.as_text,
            Special::Parse => &self.parsing,
        }
    }
}
