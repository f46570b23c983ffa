//! Adapter from a tokenizer to llguidance: the bytes of every token, and the encoding of texts.

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use std::sync::Arc;

use gemma_base::tensor::Token;

/// Encodes a text with the model's tokenizer.
pub type Encode = Arc<dyn Fn(&str) -> Vec<Token> + Send + Sync>;

/// Tokens of a tokenizer in the form that a machine needs.
pub struct GrammarVocabulary {
    /// Bytes of each token: `[vocab]`. Empty for tokens without text.
    words: Vec<Vec<u8>>,
    /// Tokens that end a text, at least one, all below `vocab`.
    stops: Vec<Token>,
    encode: Encode,
}

struct Environment {
    trie: TokTrie,
    encode: Encode,
}

impl GrammarVocabulary {
    /// Creates a vocabulary of `count` tokens. `bytes` returns the bytes of a token.
    pub fn new(
        count: usize,
        bytes: impl Fn(Token) -> Vec<u8>,
        stops: Vec<Token>,
        encode: Encode,
    ) -> GrammarVocabulary {
        // llguidance marks special names with a byte that does not occur in text.
        let is_text = |token: Token, bytes: &[u8]| {
            bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) && !stops.contains(&token)
        };
        let word = |token| Some(bytes(token)).filter(|bytes| is_text(token, bytes));
        let words = (0..count as Token).map(|token| word(token).unwrap_or_default()).collect();
        GrammarVocabulary { words, stops, encode }
    }

    /// Reads a vocabulary written by [`to_bytes`](Self::to_bytes).
    pub fn from_bytes(
        mut bytes: &[u8],
        stops: Vec<Token>,
        encode: Encode,
    ) -> Option<GrammarVocabulary> {
        let mut words = Vec::new();
        while let Some((length, rest)) = bytes.split_first_chunk() {
            let length = u32::from_le_bytes(*length) as usize;
            words.push(rest.get(..length)?.to_vec());
            bytes = &rest[length..];
        }
        Some(GrammarVocabulary { words, stops, encode })
    }

    /// Writes all words, each preceded by its length.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in &self.words {
            bytes.extend((word.len() as u32).to_le_bytes());
            bytes.extend(word);
        }
        bytes
    }

    pub fn count(&self) -> usize {
        self.words.len()
    }

    pub fn stops(&self) -> &[Token] {
        &self.stops
    }

    pub fn encode(&self, text: &str) -> Vec<Token> {
        (self.encode)(text)
    }

    /// Returns the vocabulary as llguidance's environment.
    pub fn environment(&self) -> TokEnv {
        let info = TokRxInfo::new(self.words.len() as u32, self.stops[0]);
        let trie = TokTrie::from(&info, &self.words).with_eos_tokens(&self.stops);
        Arc::new(Environment { trie, encode: self.encode.clone() })
    }
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<Token> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let tokens = (self.encode)(text);
            let spelled = tokens.iter().flat_map(|token| self.trie.token(*token));
            // If the tokenizer changes a text, such as its spaces, its tokens must not be used,
            // because they would change the forced text.
            if spelled.eq(text.as_bytes()) {
                tokens
            } else {
                self.trie.greedy_tokenize(text.as_bytes())
            }
        })
    }
}
