//! The part of a session that reads images: finds the tower of a model, and keeps what it made of
//! pictures.

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

/// Where towers are computed.
#[derive(Debug)]
enum TowerDevice {
    Processor,
    /// A device that the first image opens.
    Unopened(Device, DeviceLock),
    Open(Arc<dyn DenseDevice>),
}

/// The tower of a model and the images that its texts name.
pub struct Viewer {
    vision: Vision,
    images: Arc<Images>,
    options: SightOptions,
    threads: usize,
    figures: Mutex<ImageFigures>,
    /// One image is encoded at a time: the threads of one are all that there are.
    encoding: Mutex<TowerDevice>,
    notes: Mutex<Vec<String>>,
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
        let (figures, notes) = Default::default();
        let encoding = Mutex::new(TowerDevice::Processor);
        Ok(Viewer { vision, images, options, threads, figures, encoding, notes })
    }

    /// Has the tower computed on the GPU that `device` stands for. The first image opens it and
    /// loads the tower there. The processor computes what the GPU cannot.
    pub fn on(self, device: Device, how: DeviceLock) -> Viewer {
        *lock(&self.encoding) = match device {
            Device::Cpu => TowerDevice::Processor,
            device => TowerDevice::Unopened(device, how),
        };
        self
    }

    /// Puts the tower on its GPU, so that the first image finds it there.
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

    /// Returns the soft tokens of an image, from the disk or from the tower.
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

    /// Returns the image of a picture. Its soft tokens are computed unless they are kept.
    ///
    /// # Errors
    /// A [`Fault`] for a file that is no picture or beyond the limits, or a damaged tower.
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

    /// Computes an image unless another thread did so first, and returns whether one did.
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

    /// Computes soft tokens on the device. The processor takes its place if it fails.
    fn computed(&self, image: &PreparedImage, device: &mut TowerDevice) -> Result<Vec<f32>> {
        if let TowerDevice::Open(open) = &*device {
            match self.vision.encode_on(image, &**open) {
                Ok(soft) => return Ok(soft),
                Err(error) => *device = self.fall_back(&error),
            }
        }
        self.vision.encode(image, self.threads)
    }

    /// Opens the device if an image needs it first.
    fn open_device(&self, device: &mut TowerDevice) {
        if let TowerDevice::Unopened(wanted, how) = *device {
            *device = match device_for(wanted, how) {
                Ok(open) => TowerDevice::Open(open),
                // A machine without a GPU needs no note unless one was asked for.
                Err(_) if wanted == Device::Auto => TowerDevice::Processor,
                Err(error) => self.fall_back(&error),
            };
        }
    }

    fn fall_back(&self, error: &anyhow::Error) -> TowerDevice {
        self.note(format!("images are computed on the processor: {error:#}"));
        TowerDevice::Processor
    }

    /// Keeps a note for the user, unless the same one waits.
    fn note(&self, note: String) {
        let mut notes = lock(&self.notes);
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
}

/// Opens the GPU that computes towers for a model on `device`, which is not the processor.
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

/// Returns the name of an image's soft tokens among the pages of prompts. The digest of the source
/// stands for the program that computes them. A GPU may round otherwise than the processor.
fn name(digest: &ImageDigest, device: &TowerDevice) -> PageId {
    let on_gpu = matches!(device, TowerDevice::Open(_));
    let hash = Sha256::new().chain_update("soft tokens").chain_update(env!("SOURCE_DIGEST"));
    let hash = hash.chain_update([u8::from(on_gpu)]);
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
    tower_of(&place.path)
}

/// Opens the tower of the model at `path`: in the mmproj file beside it, or in its directory.
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

/// Returns an error as the fault that it is, with all that it says.
pub fn fault(error: &anyhow::Error) -> Fault {
    let found = fault_of(error);
    let (kind, help) = found.map_or((Kind::Model, None), |f| (f.kind, f.help.clone()));
    Fault { kind, what: format!("{error:#}"), help }
}
