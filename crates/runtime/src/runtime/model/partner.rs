//! Selects a draft model that fits a target: by its tokenizer, or by the vocabulary file of a
//! reduced draft model.

use crate::runtime::model::find::{ModelSource, find};
use crate::runtime::model::{no_tokenizer, own_tokenizer};
use crate::runtime::options::{DraftFrom, Kv};
use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use gemma_model::checkpoint::Checkpoint;
use gemma_model::engine::{Engine, VocabAdapter};
use gemma_model::models::gemma3::bundled::{self, DraftSize};
use gemma_model::models::{ReducedVocabulary, Tokenizer, VocabMap, Weights};

/// Target pass time in seconds above which the larger bundled draft model is used.
pub const SLOW_PASS: f32 = 0.05;

/// Largest difference between the rows of a table and the tokens of its tokenizer.
const PADDING: usize = 64;

/// The padding token, which a draft model reads for each image placeholder.
const IN_PLACE_OF_IMAGES: Token = 0;

/// A draft model with the target's tokens.
pub struct Partner {
    pub weights: Weights,
    /// Present if the model has rows for only some of the target's tokens.
    spelling: Option<VocabMap>,
}

impl Partner {
    /// Returns the model in `checkpoint`, or the reason why it cannot draft for this tokenizer.
    ///
    /// A draft model without a tokenizer is accepted if its number of rows equals the target's, or
    /// that of this project's models. A wrong guess only costs speed, and never changes a text.
    pub fn new(checkpoint: Checkpoint, tokenizer: &Tokenizer) -> Result<Result<Partner, String>> {
        let rows = gemma_model::models::Config::from_json(checkpoint.config())?.vocab;
        let mut vocabulary = ReducedVocabulary::of(&checkpoint, rows)?;
        if vocabulary.is_none() {
            match own_tokenizer(&checkpoint)?.map(|own| mismatch(tokenizer, &own)) {
                Some(Some(why)) => return Ok(Err(why)),
                None if rows.abs_diff(tokenizer.vocab()) > PADDING => {
                    let known = bundled::gemma_vocabulary(rows);
                    vocabulary = Some(known.ok_or_else(|| no_tokenizer(&checkpoint))?);
                }
                _ => {}
            }
        }
        if let Some(why) = vocabulary.as_ref().and_then(|v| v.mismatch(tokenizer)) {
            return Ok(Err(why));
        }
        let spelling = vocabulary.map(|vocabulary| vocabulary.spelling(tokenizer));
        let weights = Weights::open(checkpoint)?.blind(IN_PLACE_OF_IMAGES);
        Ok(Ok(Partner { weights, spelling }))
    }

    /// Returns an engine to use as the target in measurements. A reduced draft model is adapted for
    /// this; other models' engines are unchanged.
    pub fn stand_in(
        checkpoint: &Checkpoint,
        tokenizer: &Tokenizer,
        inner: Box<dyn Engine>,
    ) -> Result<Box<dyn Engine>> {
        let Some(vocabulary) = ReducedVocabulary::of(checkpoint, inner.info().vocab)? else {
            return Ok(inner);
        };
        if let Some(why) = vocabulary.mismatch(tokenizer) {
            return Err(Fault::model(format!("{}: {why}", checkpoint.name()))
                .help("name its tokenizer with --tokenizer DIR")
                .into());
        }
        Ok(Box::new(VocabAdapter::new(inner, vocabulary.spelling(tokenizer))?.whole()))
    }

    /// Returns the model of `--draft PATH`.
    pub fn at(path: &str, tokenizer: &Tokenizer) -> Result<Result<Partner, String>> {
        let shown = || format!("cannot draft with {path}");
        let ModelSource::Directory(directory) = find(Some(path)).with_context(shown)? else {
            unreachable!("a name was given")
        };
        let checkpoint = Checkpoint::open(&directory)
            .and_then(gemma_model::models::gguf::present)
            .with_context(shown)?;
        Self::new(checkpoint, tokenizer)
    }

    /// Returns the model that a draft source names, for a target with passes of `pass` seconds;
    /// `None` for sources without a model.
    pub fn named(
        source: &DraftFrom,
        tokenizer: &Tokenizer,
        pass: f32,
    ) -> Result<Option<Result<Partner, String>>> {
        match source {
            DraftFrom::Off | DraftFrom::Ngram => Ok(None),
            DraftFrom::Auto | DraftFrom::Bundled => Self::bundled(tokenizer, pass).map(Some),
            DraftFrom::Model(path) => Self::at(path, tokenizer).map(Some),
        }
    }

    /// Returns the bundled draft model for this tokenizer, with a size suited to a target with
    /// passes of `pass` seconds.
    pub fn bundled(tokenizer: &Tokenizer, pass: f32) -> Result<Result<Partner, String>> {
        if !cfg!(feature = "bundled") {
            return Ok(Err("this build of gemma carries no models".into()));
        }
        let demo = match Self::new(bundled::draft()?, tokenizer)? {
            Ok(partner) => return Ok(Ok(partner)),
            Err(why) => why,
        };
        let size = if pass >= SLOW_PASS { DraftSize::Medium } else { DraftSize::Small };
        let gemma = Self::new(bundled::gemma_draft(size)?, tokenizer)?;
        Ok(gemma.map_err(|why| {
            format!("the one for Gemma 3 does not fit, {why}; nor does the demo's, {demo}")
        }))
    }

    /// Returns the name of its files.
    pub fn name(&self) -> String {
        self.weights.checkpoint().map_or_else(String::new, |c| c.name().to_owned())
    }

    /// Returns the hash of its files, see [`Checkpoint::fingerprint`].
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        self.weights.checkpoint().map_or(Ok([0; 32]), Checkpoint::fingerprint)
    }

    /// Returns the number of positions for a target with a context of `context`.
    pub fn context(&self, context: usize) -> usize {
        let config = self.weights.config();
        let Some(spelling) = &self.spelling else { return context.min(config.max_position) };
        // Some tokens need several positions. Layers with a window need no more memory for this,
        // and have no position limit.
        let needed = context.saturating_mul(spelling.most_parts());
        if config.layers.iter().any(|layer| layer.is_global()) {
            needed.min(config.max_position)
        } else {
            needed
        }
    }

    /// Returns the precision of its KV cache. The bundled draft models keep theirs in the
    /// processor's cache, where attention takes most of a pass.
    pub fn kv(&self, option: Kv) -> Kv {
        if option == Kv::Auto && self.spelling.is_some() { Kv::Q8 } else { option }
    }

    /// Returns the model's engine, adapted to the target's tokens.
    pub fn engine(self, inner: Box<dyn Engine>) -> Result<Box<dyn Engine>> {
        Ok(match self.spelling {
            Some(spelling) => Box::new(VocabAdapter::new(inner, spelling)?),
            None => inner,
        })
    }
}

/// Returns why the models' tokens are incompatible.
fn mismatch(target: &Tokenizer, draft: &Tokenizer) -> Option<String> {
    (!target.agrees_with(draft)).then(|| {
        let (a, b) = (target.vocab(), draft.vocab());
        if a == b {
            "its tokenizer differs".into()
        } else {
            format!("its tokenizer has {b} tokens, the target's {a}")
        }
    })
}
