//! The part of a session that reads images: finds the tower of a model, and keeps what it made of
//! pictures.

use crate::decode::PageDirectory;
use crate::decode::prompt_cache::PageId;
use crate::decode::prompt_cache::files::{HEAD, StoredPage};
use crate::runtime::model::Model;
use anyhow::{Context, Result};
use gemma_base::error::{Fault, fault_of};
use gemma_base::util::sync::{Mutex, MutexGuard};
use gemma_model::models::{Image, ImageDigest, Images};
use gemma_model::vision::{self, Fit, PictureLimits, PreparedImage, Vision, picture};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most bytes of soft tokens that are kept for images of no running text.
const KEPT: usize = 256 << 20;

/// Where a tower is, and how pictures are read.
#[derive(Clone, Debug, Default)]
pub struct SightOptions {
    /// The mmproj file or directory; else the model's own directory, or an mmproj file beside it.
    pub mmproj: Option<PathBuf>,
    /// Most soft tokens of an image; the model's own number where nobody says.
    pub tokens: Option<usize>,
    pub limits: PictureLimits,
    /// Where soft tokens are kept for later runs, if they are.
    pub directory: Option<PageDirectory>,
}

/// Work on images so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ImageFigures {
    pub images: usize,
    pub tokens: usize,
    /// Images whose soft tokens were computed; the others' were kept.
    pub encoded: usize,
    /// Decoding and resizing.
    pub preparing: Duration,
    pub encoding: Duration,
}

/// The tower of a model and the images that its texts name.
pub struct Viewer {
    vision: Vision,
    images: Arc<Images>,
    options: SightOptions,
    threads: usize,
    figures: Mutex<ImageFigures>,
    /// One image is encoded at a time: the threads of one are all that there are.
    encoding: Mutex<()>,
}

impl Viewer {
    /// Opens the tower of a model.
    ///
    /// # Errors
    /// A [`Fault`] if there is none (it names the file to get), or if it is another model's.
    pub fn open(model: &Model, options: &SightOptions, threads: usize) -> Result<Viewer> {
        let vision = tower(Some(model), options)?;
        let (own, dim) = (vision.width(), model.config().dim);
        if own != dim {
            let what = format!(
                "the tower makes soft tokens of {own} values, and {} has {dim}",
                model.name
            );
            return Err(Fault::model(what).help("give the mmproj file of this model").into());
        }
        let images = Images::new(dim, vision.most_tokens(options.tokens)?, KEPT);
        let (images, options) = (Arc::new(images), options.clone());
        let (figures, encoding) = Default::default();
        Ok(Viewer { vision, images, options, threads, figures, encoding })
    }

    pub fn vision(&self) -> &Vision {
        &self.vision
    }

    /// Returns the images that texts may name.
    pub fn images(&self) -> &Arc<Images> {
        &self.images
    }

    /// Returns the work so far.
    pub fn figures(&self) -> ImageFigures {
        *lock(&self.figures)
    }

    /// Returns the size and the soft tokens of a picture, from its header alone.
    ///
    /// # Errors
    /// A [`Fault`] for a file that is no picture or beyond the limits.
    pub fn measure(&self, file: &[u8]) -> Result<Fit> {
        let (width, height) = self.size(file)?;
        Ok(self.vision.fit(width, height, self.options.tokens)?)
    }

    /// Returns width and height of a picture, from its header alone.
    ///
    /// # Errors
    /// As [`Viewer::measure`].
    pub fn size(&self, file: &[u8]) -> Result<(usize, usize)> {
        picture::measure(file, self.options.limits)
    }

    /// Returns the soft tokens of an image: those on disk, or what the tower computes.
    fn soft_tokens(&self, image: &PreparedImage) -> Result<Vec<f32>> {
        let Some(directory) = &self.options.directory else {
            return self.vision.encode(image, self.threads);
        };
        let (name, bytes) = (name(&image.digest), 4 * image.tokens() * self.vision.width());
        if let Ok(StoredPage::Whole(file)) = directory.read(&name, bytes) {
            directory.touch(&name);
            return Ok(bytemuck::pod_collect_to_vec(&file[HEAD..]));
        }
        let soft = self.vision.encode(image, self.threads)?;
        directory.make_room((HEAD + bytes) as u64);
        let mut file = vec![0; HEAD];
        file.extend_from_slice(bytemuck::cast_slice(&soft));
        // The next run computes what could not be written.
        let _ = directory.write(&name, &mut file);
        Ok(soft)
    }

    /// Returns the image of a picture. Its soft tokens are computed unless they are kept.
    ///
    /// # Errors
    /// A [`Fault`] for a file that is no picture or beyond the limits, or a damaged tower.
    pub fn see(&self, file: &[u8]) -> Result<Arc<Image>> {
        let begun = Instant::now();
        let prepared = self.vision.prepare(file, self.options.tokens, self.options.limits)?;
        let preparing = begun.elapsed();
        let _one = lock(&self.encoding);
        let begun = Instant::now();
        let kept = self.images.find(&prepared.digest);
        let is_kept = kept.is_some();
        let image = match kept {
            Some(image) => image,
            None => self.images.insert(prepared.digest, self.soft_tokens(&prepared)?)?,
        };
        let mut figures = lock(&self.figures);
        figures.images += 1;
        figures.tokens += image.rows();
        figures.encoded += usize::from(!is_kept);
        figures.preparing += preparing;
        figures.encoding += begun.elapsed();
        Ok(image)
    }
}

/// Returns the name of an image's soft tokens among the pages of prompts. The digest of the source
/// stands for the program that computes them.
fn name(digest: &ImageDigest) -> PageId {
    let hash = Sha256::new().chain_update("soft tokens").chain_update(env!("SOURCE_DIGEST"));
    PageId { key: hash.chain_update(digest).finalize().into(), layers: 0, nth: 0 }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Opens the tower that the options name, the mmproj file beside the model, or the model's own.
///
/// # Errors
/// A [`Fault`] if there is none, which names the file to get, or if one is damaged.
pub fn tower(model: Option<&Model>, options: &SightOptions) -> Result<Vision> {
    if let Some(path) = &options.mmproj {
        return Vision::open(path)
            .with_context(|| format!("cannot read images with {}", path.display()));
    }
    let Some(place) = model.and_then(|model| model.place.as_ref()) else {
        let fault = Fault::model("the bundled demo model reads no images");
        return Err(fault.help("give a model that does: -m google/gemma-3-4b-it").into());
    };
    match vision::beside(&place.path)? {
        Some(path) => Vision::open(&path)
            .with_context(|| format!("cannot read images with {}", path.display())),
        None => Vision::open(&place.path),
    }
}

/// Returns an error as the fault that it is, with all that it says.
pub fn fault(error: &anyhow::Error) -> Fault {
    let found = fault_of(error);
    let (kind, help) = found.map_or((Fault::model("").kind, None), |f| (f.kind, f.help.clone()));
    Fault { kind, what: format!("{error:#}"), help }
}
