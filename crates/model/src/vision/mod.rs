//! Images: converts the bytes of a picture to soft tokens, which replace embeddings in a text.
//!
//! [`Vision::prepare`] decodes and resizes, which is cheap and needs no weights. [`Vision::encode`]
//! runs the tower. The digest of a [`PreparedImage`] identifies its soft tokens. The towers are in
//! `merged` (Gemma 4 12B), `siglip` (Gemma 3) and `gemma4` (31B).

mod file;
mod gemma4;
pub mod made_up;
mod merged;
mod mmproj;
mod ops;
pub mod picture;
mod pixels;
mod program;
pub mod resize;
mod siglip;
#[cfg(test)]
mod tests;
mod tower;

pub use mmproj::beside;
pub use picture::{Picture, PictureLimits};
pub use pixels::BUDGETS;
pub use tower::{Fit, Marks};

use crate::checkpoint::Checkpoint;
use crate::models::{ImageText, Tokenizer};
use anyhow::Result;
use file::TowerFile;
use gemma_base::compute::DenseDevice;
use gemma_base::error::Fault;
use program::Program;
use sha2::{Digest, Sha256};
use std::path::Path;
use tower::Tower;

/// The part of a model that encodes images.
#[derive(Debug)]
pub struct Vision {
    file: TowerFile,
    tower: Box<dyn Tower>,
    identity: [u8; 32],
}

/// An image in the size that a tower needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedImage {
    fit: Fit,
    rgb: Vec<u8>, // [fit.height, fit.width, 3]
    /// SHA-256 of all inputs of the soft tokens: the pixels, their size, the budget and the tower.
    pub digest: [u8; 32],
    /// Width and height of the original picture, in upright orientation.
    pub original: (usize, usize),
    /// Whether the picture had transparent parts, which were composed over white.
    pub flattened: bool,
}

impl PreparedImage {
    /// Returns the number of soft tokens.
    pub fn tokens(&self) -> usize {
        self.fit.tokens()
    }

    /// Returns the size after resizing.
    pub fn fit(&self) -> Fit {
        self.fit
    }

    /// Returns the resized pixels, `[fit.height, fit.width, 3]`.
    pub fn pixels(&self) -> &[u8] {
        &self.rgb
    }
}

impl Vision {
    /// Opens the tower of a Hugging Face directory or of an mmproj GGUF file. Tensors are
    /// memory-mapped; norms and biases are read.
    ///
    /// # Errors
    /// A [`Fault`] if files cannot be read, if they hold no tower (the message names the file to
    /// get), or if the tower is not supported.
    pub fn open(path: &Path) -> Result<Vision> {
        let checkpoint = mmproj::present(Checkpoint::open(path)?)?;
        let identity = checkpoint.fingerprint()?;
        let kind = checkpoint.config().get("model_type").and_then(|v| v.as_str());
        let kind = kind.unwrap_or_default().to_owned();
        let (file, tower): (TowerFile, Box<dyn Tower>) = match kind.as_str() {
            "gemma3" => boxed(siglip::SigLip::open(checkpoint)?),
            "gemma4" => boxed(gemma4::Gemma4Tower::open(checkpoint)?),
            "gemma4_unified" => boxed(merged::Merged::open(checkpoint)?),
            _ => return Err(file::no_tower(&checkpoint).into()),
        };
        let identity = Sha256::new().chain_update(kind).chain_update(identity).finalize().into();
        Ok(Vision { file, tower, identity })
    }

    /// Decodes a picture and resizes it.
    ///
    /// `budget` is the largest number of soft tokens, one of [`BUDGETS`]; `None` uses the model's
    /// default. Uses the threads of the current pool.
    ///
    /// # Errors
    /// A [`Fault`] for a picture that cannot be read or exceeds `limits`, and for a budget that the
    /// model does not support.
    pub fn prepare(
        &self,
        bytes: &[u8],
        budget: Option<usize>,
        limits: PictureLimits,
    ) -> Result<PreparedImage> {
        let (width, height) = picture::measure(bytes, limits)?;
        // Checks the budget before the picture is decoded.
        self.tower.fit(width, height, budget)?;
        self.prepare_picture(&picture::decode(bytes, limits)?, budget)
    }

    /// Resizes a picture, see [`Vision::prepare`].
    ///
    /// # Errors
    /// A [`Fault`] for a budget that the model does not support.
    pub fn prepare_picture(
        &self,
        picture: &Picture,
        budget: Option<usize>,
    ) -> Result<PreparedImage> {
        let original = (picture.width, picture.height);
        let fit = self.tower.fit(picture.width, picture.height, budget)?;
        let filter = self.tower.processor().filter;
        let rgb = resize::resize(&picture.rgb, original, (fit.width, fit.height), filter);
        let mut hash = Sha256::new().chain_update(self.identity);
        for number in [fit.width, fit.height, fit.budget] {
            hash.update((number as u64).to_le_bytes());
        }
        hash.update(&rgb);
        let digest = hash.finalize().into();
        Ok(PreparedImage { fit, rgb, digest, original, flattened: picture.flattened })
    }

    /// Computes soft tokens, f32 `[tokens, width]`.
    ///
    /// They replace embeddings without Gemma's embedding factor. The result is independent of the
    /// number of threads.
    ///
    /// # Errors
    /// A [`Fault`] if threads cannot be started, if the file cannot be read, or if results are not
    /// finite.
    pub fn encode(&self, image: &PreparedImage, threads: usize) -> Result<Vec<f32>> {
        self.finite(ops::on_threads(threads, || self.program(image)?.run())?)
    }

    /// Computes soft tokens on a device, see [`Vision::encode`]. The first image loads the tower
    /// there.
    ///
    /// # Errors
    /// Like `encode`, and if the device fails.
    pub fn encode_on(&self, image: &PreparedImage, device: &dyn DenseDevice) -> Result<Vec<f32>> {
        let program = self.program(image)?;
        self.finite(device.run(&program.network, &program)?)
    }

    /// Loads the tower on a device before its first image. Returns its bytes there.
    ///
    /// # Errors
    /// If the file cannot be read, or if the device fails.
    pub fn load_on(&self, device: &dyn DenseDevice) -> Result<u64> {
        let fit = self.tower.fit(1, 1, None)?;
        let rgb = vec![0; fit.width * fit.height * resize::CHANNELS];
        let image = PreparedImage { fit, rgb, digest: [0; 32], original: (1, 1), flattened: false };
        let program = self.program(&image)?;
        device.load(&program.network, &program)
    }

    fn program(&self, image: &PreparedImage) -> Result<Program<'_>> {
        let mut program = self.tower.program(&self.file, &image.rgb, image.fit)?;
        program.network.identity = self.identity;
        Ok(program)
    }

    fn finite(&self, soft: Vec<f32>) -> Result<Vec<f32>> {
        match soft.iter().all(|v| v.is_finite()) {
            true => Ok(soft),
            false => {
                let name = self.file.checkpoint().name();
                Err(Fault::damaged(format!("{name} computed soft tokens that are not finite"))
                    .into())
            }
        }
    }

    /// Returns the resized size and the tokens of a picture of this size in pixels.
    ///
    /// # Errors
    /// As [`Vision::prepare_picture`].
    pub fn fit(&self, width: usize, height: usize, budget: Option<usize>) -> Result<Fit, Fault> {
        self.tower.fit(width, height, budget)
    }

    /// Returns the most soft tokens of an image, given a budget.
    ///
    /// # Errors
    /// A [`Fault`] for a budget that the model does not support.
    pub fn most_tokens(&self, budget: Option<usize>) -> Result<usize, Fault> {
        Ok(self.tower.fit(1, 1, budget)?.budget)
    }

    /// Returns the multiply-adds of encoding an image of this size.
    pub fn work(&self, fit: Fit) -> u64 {
        self.tower.work(fit)
    }

    /// Returns the bytes of the tower's weights, which are memory-mapped.
    pub fn weight_bytes(&self) -> u64 {
        self.file.bytes()
    }

    /// Returns the most bytes that encoding one image needs, without the weights.
    ///
    /// Attention scores need up to 512 bytes per patch and thread in addition.
    pub fn scratch_bytes(&self) -> u64 {
        self.tower.scratch()
    }

    /// Returns the channels of a soft token, which must equal those of the model's embeddings.
    pub fn width(&self) -> usize {
        self.tower.width()
    }

    /// Returns the name of the tower's file or directory.
    pub fn name(&self) -> &str {
        self.file.checkpoint().name()
    }

    /// Returns the tokens around an image in a text.
    pub fn marks(&self) -> Marks {
        self.tower.marks()
    }

    /// Returns the text of an image in a prompt.
    ///
    /// # Errors
    /// A [`Fault`] if the tokenizer lacks one of the marks.
    pub fn image_text(&self, tokenizer: &Tokenizer) -> Result<ImageText, Fault> {
        let Marks { begin, soft, end, is_begin_shown, around } = self.marks();
        let mark = if is_begin_shown { begin } else { soft };
        ImageText::new(tokenizer, mark, [begin, end], around)
    }
}

fn boxed<T: Tower + 'static>((file, tower): (TowerFile, T)) -> (TowerFile, Box<dyn Tower>) {
    (file, Box::new(tower))
}
