//! Image support of a session: finds the tower of a model, and caches soft tokens of pictures.

use crate::decode::PageDirectory;
use crate::decode::prompt_cache::PageId;
use crate::decode::prompt_cache::files::{HEAD, StoredPage};
use crate::runtime::devices::backends;
use crate::runtime::devices::lock::DeviceLock;
use crate::runtime::listener::Silence;
use crate::runtime::model::Model;
use crate::runtime::options::Device;
use anyhow::{Context, Result};
use gemma_base::compute::{Choice, DenseDevice};
use gemma_base::error::{Fault, Kind, fault_of};
use gemma_base::util::sync::{Mutex, MutexGuard};
use gemma_model::models::{Image, ImageDigest, Images};
use gemma_model::vision::{self, Fit, PictureLimits, PreparedImage, Vision, picture};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most bytes of soft tokens that are kept for images without a running text.
const KEPT: usize = 256 << 20;

/// Location of the tower, and options for pictures.
#[derive(Clone, Debug, Default)]
pub struct SightOptions {
    /// The mmproj file or directory. By default the model's own directory, or an mmproj file next
    /// to it.
    pub mmproj: Option<PathBuf>,
    /// Most soft tokens per image; `None` for the model's default.
    pub tokens: Option<usize>,
    pub limits: PictureLimits,
    /// Directory that caches soft tokens for later runs, if any.
    pub directory: Option<PageDirectory>,
}

/// Counts and times of image processing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ImageFigures {
    pub images: usize,
    pub tokens: usize,
    /// Images with computed soft tokens; the others were cached.
    pub encoded: usize,
    /// Time to decode and resize.
    pub preparing: Duration,
    pub encoding: Duration,
}

/// Device that runs towers.
#[derive(Debug)]
enum TowerDevice {
    Processor,
    /// A device that is opened for the first image.
    Unopened(Device, DeviceLock),
    Open(Arc<dyn DenseDevice>),
}

/// The tower of a model, and the images of its texts.
pub struct Viewer {
    vision: Vision,
    images: Arc<Images>,
    options: SightOptions,
    threads: usize,
    figures: Mutex<ImageFigures>,
    /// Only one image is encoded at a time, since it uses all threads.
    encoding: Mutex<TowerDevice>,
    notes: Mutex<Vec<String>>,
}

impl Viewer {
    /// Opens the tower of a model.
    ///
    /// # Errors
    /// A [`Fault`] if there is none (it names the file to get), or if it belongs to another model.
    pub fn open(model: &Model, options: &SightOptions, threads: usize) -> Result<Viewer> {
        let vision = tower(Some(model), options)?;
        let (own, dim) = (vision.width(), model.config().dim);
        if own != dim {
            let what = format!(
                "the tower makes soft tokens of {own} values, but {} needs {dim}",
                model.name
            );
            return Err(Fault::model(what).help("give the mmproj file of this model").into());
        }
        let images = Images::new(dim, vision.most_tokens(options.tokens)?, KEPT);
        let (images, options) = (Arc::new(images), options.clone());
        let (figures, notes) = Default::default();
        let encoding = Mutex::new(TowerDevice::Processor);
        Ok(Viewer { vision, images, options, threads, figures, encoding, notes })
    }

    /// Sets the GPU that runs the tower. The first image opens it and loads the tower there. The
    /// processor is the fallback.
    pub fn on(self, device: Device, how: DeviceLock) -> Viewer {
        *lock(&self.encoding) = match device {
            Device::Cpu => TowerDevice::Processor,
            device => TowerDevice::Unopened(device, how),
        };
        self
    }

    /// Loads the tower on its GPU before the first image.
    pub fn load(&self) {
        let mut device = lock(&self.encoding);
        self.open_device(&mut device);
        if let TowerDevice::Open(open) = &*device
            && let Err(error) = self.vision.load_on(&**open)
        {
            *device = self.fall_back(&error);
        }
    }

    /// Returns notes for the user about images since the last call.
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.notes))
    }

    pub fn vision(&self) -> &Vision {
        &self.vision
    }

    /// Returns the images of texts.
    pub fn images(&self) -> &Arc<Images> {
        &self.images
    }

    /// Returns the counts and times so far.
    pub fn figures(&self) -> ImageFigures {
        *lock(&self.figures)
    }

    /// Returns the size and the soft tokens of a picture. Reads only its header.
    ///
    /// # Errors
    /// A [`Fault`] for a file that is not a picture or exceeds the limits.
    pub fn measure(&self, file: &[u8]) -> Result<Fit> {
        let (width, height) = self.size(file)?;
        Ok(self.vision.fit(width, height, self.options.tokens)?)
    }

    /// Returns width and height of a picture. Reads only its header.
    ///
    /// # Errors
    /// As [`Viewer::measure`].
    pub fn size(&self, file: &[u8]) -> Result<(usize, usize)> {
        picture::measure(file, self.options.limits)
    }

    /// Returns the soft tokens of an image, from disk or computed.
    fn soft_tokens(&self, image: &PreparedImage, device: &mut TowerDevice) -> Result<Vec<f32>> {
        self.open_device(device);
        let Some(directory) = &self.options.directory else {
            return self.computed(image, device);
        };
        let bytes = 4 * image.tokens() * self.vision.width();
        let wanted = name(&image.digest, device);
        if let Ok(StoredPage::Whole(file)) = directory.read(&wanted, bytes) {
            directory.touch(&wanted);
            return Ok(bytemuck::pod_collect_to_vec(&file[HEAD..]));
        }
        let soft = self.computed(image, device)?;
        directory.make_room((HEAD + bytes) as u64);
        let mut file = vec![0; HEAD];
        file.extend_from_slice(bytemuck::cast_slice(&soft));
        // If the write fails, the next run computes the soft tokens again.
        let _ = directory.write(&name(&image.digest, device), &mut file);
        Ok(soft)
    }

    /// Returns the image of a picture. Computes its soft tokens unless they are cached.
    ///
    /// # Errors
    /// A [`Fault`] for a file that is not a picture or exceeds the limits, or for a damaged tower.
    pub fn see(&self, file: &[u8]) -> Result<Arc<Image>> {
        let begun = Instant::now();
        let prepared = self.vision.prepare(file, self.options.tokens, self.options.limits)?;
        if prepared.flattened {
            self.note("an image is transparent: it is shown on white".into());
        }
        let preparing = begun.elapsed();
        let begun = Instant::now();
        let (image, is_kept) = match self.images.find(&prepared.digest) {
            Some(image) => (image, true),
            None => self.encoded(&prepared)?,
        };
        let mut figures = lock(&self.figures);
        figures.images += 1;
        figures.tokens += image.rows();
        figures.encoded += usize::from(!is_kept);
        figures.preparing += preparing;
        figures.encoding += begun.elapsed();
        Ok(image)
    }

    /// Computes an image unless another thread already did. Returns whether another thread did.
    fn encoded(&self, prepared: &PreparedImage) -> Result<(Arc<Image>, bool)> {
        let mut device = lock(&self.encoding);
        match self.images.find(&prepared.digest) {
            Some(image) => Ok((image, true)),
            None => {
                let soft = self.soft_tokens(prepared, &mut device)?;
                Ok((self.images.insert(prepared.digest, soft)?, false))
            }
        }
    }

    /// Computes soft tokens on the device, and on the processor if that fails.
    fn computed(&self, image: &PreparedImage, device: &mut TowerDevice) -> Result<Vec<f32>> {
        if let TowerDevice::Open(open) = &*device {
            match self.vision.encode_on(image, &**open) {
                Ok(soft) => return Ok(soft),
                Err(error) => *device = self.fall_back(&error),
            }
        }
        self.vision.encode(image, self.threads)
    }

    /// Opens the device if it is still unopened.
    fn open_device(&self, device: &mut TowerDevice) {
        if let TowerDevice::Unopened(wanted, how) = *device {
            *device = match device_for(wanted, how) {
                Ok(open) => TowerDevice::Open(open),
                // Without a GPU, a note is only needed if one was requested.
                Err(_) if wanted == Device::Auto => TowerDevice::Processor,
                Err(error) => self.fall_back(&error),
            };
        }
    }

    fn fall_back(&self, error: &anyhow::Error) -> TowerDevice {
        self.note(format!("images are computed on the processor: {error:#}"));
        TowerDevice::Processor
    }

    /// Adds a note for the user, unless the same note is pending.
    fn note(&self, note: String) {
        let mut notes = lock(&self.notes);
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
}

/// Opens the GPU that runs towers for a model on `device`, which must not be the processor.
///
/// # Errors
/// A [`Fault`] if there is none, or if it is in use.
pub fn device_for(device: Device, how: DeviceLock) -> Result<Arc<dyn DenseDevice>> {
    let choice = match device {
        Device::Vulkan(choice) => choice,
        Device::Auto | Device::Cpu => Choice::Best,
    };
    backends::dense_device(choice, how, &Silence)
}

/// Returns the id under which an image's soft tokens are stored among the pages of prompts. It
/// includes the source digest, since programs may compute them differently, and whether a GPU was
/// used, since it may round differently.
fn name(digest: &ImageDigest, device: &TowerDevice) -> PageId {
    let on_gpu = matches!(device, TowerDevice::Open(_));
    let hash = Sha256::new().chain_update("soft tokens").chain_update(env!("SOURCE_DIGEST"));
    let hash = hash.chain_update([u8::from(on_gpu)]);
    PageId { key: hash.chain_update(digest).finalize().into(), layers: 0, nth: 0 }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Opens the tower named in the options, else the mmproj file next to the model, else the model's
/// own.
///
/// # Errors
/// A [`Fault`] if there is none (it names the file to get), or if it is damaged.
pub fn tower(model: Option<&Model>, options: &SightOptions) -> Result<Vision> {
    if let Some(path) = &options.mmproj {
        return Vision::open(path)
            .with_context(|| format!("cannot read images with {}", path.display()));
    }
    let Some(place) = model.and_then(|model| model.place.as_ref()) else {
        let fault = Fault::model("the bundled demo model reads no images");
        return Err(fault.help("give a model that does: -m google/gemma-3-4b-it").into());
    };
    tower_of(&place.path)
}

/// Opens the tower of the model at `path`: in the mmproj file next to it, or in its directory.
///
/// # Errors
/// As [`tower`].
pub fn tower_of(path: &Path) -> Result<Vision> {
    match vision::beside(path)? {
        Some(path) => Vision::open(&path)
            .with_context(|| format!("cannot read images with {}", path.display())),
        None => Vision::open(path),
    }
}

/// Converts an error to a fault with its full message.
pub fn fault(error: &anyhow::Error) -> Fault {
    let found = fault_of(error);
    let (kind, help) = found.map_or((Kind::Model, None), |f| (f.kind, f.help.clone()));
    Fault { kind, what: format!("{error:#}"), help }
}
