//! Images in messages: their mark in a template, and their placeholders among the tokens.

use super::super::tokenizer::Tokenizer;
use anyhow::{Result, ensure};
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::Arc;

/// An image in a message.
#[derive(Clone, PartialEq, Eq)]
pub struct MessageImage {
    /// Byte offset in the message's content before which the image is inserted.
    pub at: usize,
    /// Bytes of an image file.
    pub file: Arc<[u8]>,
}

impl std::fmt::Debug for MessageImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MessageImage({} bytes at {})", self.file.len(), self.at)
    }
}

/// Returns the content of a message for templates: text, or a list of texts and images.
pub fn content(text: &str, images: &[MessageImage]) -> Value {
    if images.is_empty() {
        return json!(text);
    }
    let mut parts = Vec::with_capacity(2 * images.len() + 1);
    let mut from = 0;
    let push = |parts: &mut Vec<Value>, range: Range<usize>| {
        let text = &text[range];
        if !text.trim().is_empty() {
            parts.push(json!({"type": "text", "text": text}));
        }
    };
    for image in images {
        push(&mut parts, from..image.at);
        parts.push(json!({"type": "image"}));
        from = image.at;
    }
    push(&mut parts, from..text.len());
    parts.into()
}

/// Text of an image: the mark that a template writes, and the text that replaces it for the model.
#[derive(Clone, Debug, Default)]
pub struct ImageText {
    mark: String,
    text: String,
    begin: Token,
    end: Token,
}

impl ImageText {
    /// Creates the text of an image.
    ///
    /// Templates write the token `mark`. The model reads `around`, `begin`, the image's
    /// placeholders, `end` and `around`.
    ///
    /// # Errors
    /// A [`Fault`] if the tokenizer lacks one of the tokens.
    pub fn new(
        tokenizer: &Tokenizer,
        mark: Token,
        [begin, end]: [Token; 2],
        around: &str,
    ) -> Result<ImageText, Fault> {
        let name = |id: Token| {
            let control = tokenizer.control().iter().find(|(_, known)| **known == id);
            control.map(|(name, _)| name.clone()).ok_or_else(|| {
                let what = format!("the model's tokenizer lacks token {id}, which marks images");
                Fault::model(what).help("use the tokenizer of the model that sees")
            })
        };
        let text = [around, &name(begin)?, &name(end)?, around].concat();
        Ok(ImageText { mark: name(mark)?, text, begin, end })
    }

    /// Replaces each mark by the model's text of an image.
    pub(super) fn expand(&self, prompt: &str) -> String {
        prompt.replace(&self.mark, &self.text)
    }

    /// Inserts the placeholders of images between their begin and end tokens.
    ///
    /// # Errors
    /// A [`Fault`] if the prompt contains a different number of images.
    pub fn place(&self, tokens: &[Token], places: &[Range<Token>]) -> Result<Vec<Token>> {
        let is_image = |i: &usize| tokens[*i..].starts_with(&[self.begin, self.end]);
        let shown: Vec<usize> = (0..tokens.len()).filter(is_image).collect();
        ensure!(
            shown.len() == places.len(),
            Fault::usage(format!(
                "the prompt shows {} images, and {} are given",
                shown.len(),
                places.len()
            ))
            .help("the model's chat template may know no images: take the one of its page")
        );
        let mut out =
            Vec::with_capacity(tokens.len() + places.iter().map(Range::len).sum::<usize>());
        let mut from = 0;
        for (at, places) in shown.into_iter().zip(places) {
            out.extend_from_slice(&tokens[from..=at]);
            out.extend(places.clone());
            from = at + 1;
        }
        out.extend_from_slice(&tokens[from..]);
        Ok(out)
    }
}
