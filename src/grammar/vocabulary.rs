//! A tokenizer as llguidance sees it: the bytes of every token, and how a text is cut into tokens.

use std::sync::Arc;

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::gemma::{Special, Tokenizer};
use crate::tensor::Token;

struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

/// `stops` is not empty and below the tokenizer's size.
pub fn environment(tokenizer: Arc<Tokenizer>, stops: &[Token]) -> TokEnv {
    let bytes = |token: Token| match tokenizer.token_bytes(token) {
        // A byte that no text has; llguidance marks its own names by it.
        bytes
            if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) || stops.contains(&token) =>
        {
            Vec::new()
        }
        bytes => bytes,
    };
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab() as Token).map(bytes).collect();
    let trie =
        TokTrie::from(&TokRxInfo::new(words.len() as u32, stops[0]), &words).with_eos_tokens(stops);
    Arc::new(Vocabulary { trie, tokenizer })
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<Token> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let tokens = self.tokenizer.encode(text, Special::AsText).unwrap_or_default();
            let spelled: Vec<u8> =
                tokens.iter().flat_map(|token| self.tokenizer.token_bytes(*token)).collect();
            // A tokenizer that changes a text, such as its spaces, must not change what a grammar
            // forces.
            if spelled == text.as_bytes() {
                tokens
            } else {
                self.trie.greedy_tokenize(text.as_bytes())
            }
        })
    }
}
