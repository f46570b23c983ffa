//! The models in the binary, from `draft/` with their model cards: a small chat model with Gemma
//! 3's architecture, its drafter, and a drafter with the most common tokens of Gemma 3's tokenizer.
//! They are not Gemma.

use crate::checkpoint::Checkpoint;
use crate::models::ReducedVocabulary;
use anyhow::Result;
use gemma_base::error::Fault;

/// Name of the bundled target.
pub const NAME: &str = "gemma-demo";

#[cfg(feature = "bundled")]
macro_rules! file {
    ($path:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../draft/", $path)).as_slice()
    };
}

#[cfg(not(feature = "bundled"))]
macro_rules! file {
    ($path:literal) => {
        [].as_slice()
    };
}

/// Tokenizer of both models.
const TOKENIZER: (&str, &[u8]) = ("tokenizer.json", file!("demo-target/tokenizer.json"));

const GEMMA_VOCABULARY: &[u8] = file!("gemma3-draft/draft_vocabulary.json");

/// Returns the model that is used if the user names none.
pub fn target() -> Result<Checkpoint> {
    check_present()?;
    let files = vec![
        ("config.json", file!("demo-target/config.json")),
        ("generation_config.json", file!("demo-target/generation_config.json")),
        ("model.safetensors", file!("demo-target/model.safetensors")),
        ("tokenizer_config.json", file!("demo-target/tokenizer_config.json")),
        TOKENIZER,
    ];
    Checkpoint::from_memory(NAME, files)
}

/// Returns the drafter of the bundled target.
pub fn draft() -> Result<Checkpoint> {
    check_present()?;
    let files = vec![
        ("config.json", file!("demo-draft/config.json")),
        ("model.safetensors", file!("demo-draft/model.safetensors")),
        TOKENIZER,
    ];
    Checkpoint::from_memory("bundled draft", files)
}

/// Sizes of the drafter for targets with Gemma 3's tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftSize {
    /// Fits in a processor's cache next to the target.
    Small,
    /// Drafts more accurately, for slower targets.
    Medium,
}

/// Returns a drafter for targets with Gemma 3's tokenizer. It knows the tokenizer only by a hash.
pub fn gemma_draft(size: DraftSize) -> Result<Checkpoint> {
    check_present()?;
    let vocabulary = (crate::models::reduced::FILE, GEMMA_VOCABULARY);
    let files = match size {
        DraftSize::Small => vec![
            ("config.json", file!("gemma3-draft/small/config.json")),
            ("model.safetensors", file!("gemma3-draft/small/model.safetensors")),
            vocabulary,
        ],
        DraftSize::Medium => vec![
            ("config.json", file!("gemma3-draft/medium/config.json")),
            ("model.safetensors", file!("gemma3-draft/medium/model.safetensors")),
            vocabulary,
        ],
    };
    Checkpoint::from_memory("bundled draft for Gemma 3", files)
}

/// Returns the tokens of a drafter for Gemma 3 with `rows` rows; `None` for another number of rows.
pub fn gemma_vocabulary(rows: usize) -> Option<ReducedVocabulary> {
    ReducedVocabulary::parse(GEMMA_VOCABULARY, rows).ok()
}

/// Returns the error of builds without the feature `bundled`.
fn check_present() -> Result<()> {
    if cfg!(feature = "bundled") {
        return Ok(());
    }
    Err(Fault::model("this build carries no models")
        .help("name one with --model; --draft auto then drafts from n-grams of the text")
        .into())
}

#[cfg(all(test, feature = "bundled"))]
mod tests {
    use super::*;
    use crate::models::{ChatTemplate, Message, Special, Tokenizer, Weights};

    #[test]
    fn the_pair_opens_and_shares_its_vocabulary() {
        let (target, draft) =
            (Weights::open(target().unwrap()).unwrap(), Weights::open(draft().unwrap()).unwrap());
        assert_eq!(target.config().vocab, draft.config().vocab);
        let tokenizer = Tokenizer::from_bytes(TOKENIZER.1).unwrap();
        assert!(tokenizer.vocab() <= target.config().vocab);
        assert_eq!([tokenizer.id("<bos>"), tokenizer.id("<end_of_turn>")], [Some(2), Some(106)]);
    }

    #[test]
    fn its_tokenizer_round_trips_text_and_its_template_is_gemmas() {
        let tokenizer = Tokenizer::from_bytes(TOKENIZER.1).unwrap();
        for text in [
            "def f(x):\n\tif x:\n        return  1\r\n",
            "naïve — 😀 𝒳 ▁ \u{0}",
            "   ",
            "a\n\n\n\nb <end_of_turn>",
        ] {
            // The replacement character for a space decodes to a space; everything else is
            // unchanged.
            assert_eq!(
                tokenizer.decode(&tokenizer.encode(text, Special::AsText).unwrap()),
                text.replace('▁', " ")
            );
        }
        let template =
            ChatTemplate::from_checkpoint(&target().unwrap(), &crate::models::gemma3::DIALECT)
                .unwrap();
        let message = |role: &str, content: &str| Message::new(role, content);
        let messages = [
            message("system", " Be brief. "),
            message("user", "hi "),
            message("assistant", "hello"),
            message("user", "bye"),
        ];
        let last = [messages[0].clone(), messages[3].clone()];
        assert_eq!(
            template.render(&messages, true).unwrap(),
            ChatTemplate::built_in(&crate::models::gemma3::DIALECT).render(&last, true).unwrap()
        );
        for special in [Special::AsText, Special::Parse] {
            let tokens =
                template.encode(&tokenizer, &messages, None, special, Some("Good")).unwrap();
            assert_eq!(tokens.iter().filter(|t| **t == 2).count(), 1);
            assert_eq!(
                tokens,
                template.encode(&tokenizer, &messages, None, Special::Parse, Some("Good")).unwrap()
            );
        }
    }
}
