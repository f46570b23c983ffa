//! The part of a session that reads images: finds the tower of a model, and keeps what it made of
//! pictures.

use crate::runtime::devices::backends;
use crate::runtime::devices::lock::DeviceLock;
use crate::runtime::listener::Silence;
use crate::runtime::model::Model;
use crate::runtime::options::Device;
use anyhow::{Context, Result};
use gemma_base::compute::{Choice, DenseDevice};
use gemma_base::error::{Fault, fault_of};
use gemma_base::tensor::Token;
use gemma_base::util::sync::{Mutex, MutexGuard};
use gemma_model::models::{Image, ImageText, Images, Tokenizer};
use gemma_model::vision::{self, Fit, PictureLimits, PreparedImage, Vision, picture};
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
    /// Images that a GPU encoded.
    pub on_device: usize,
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
    text: ImageText,
    options: SightOptions,
    threads: usize,
    figures: Mutex<ImageFigures>,
    /// One image is encoded at a time: the threads of one are all that there are.
    encoding: Mutex<TowerDevice>,
    note: Mutex<Option<String>>,
}

impl Viewer {
    /// Opens the tower of a model.
    ///
    /// # Errors
    /// A [`Fault`] if there is none (it names the file to get), or if it is another model's.
    pub fn open(
        model: &Model,
        tokenizer: &Tokenizer,
        options: &SightOptions,
        threads: usize,
    ) -> Result<Viewer> {
        let vision = tower(model, options)?;
        let (own, dim) = (vision.width(), model.config().dim);
        if own != dim {
            let what = format!(
                "the tower makes soft tokens of {own} values, and {} has {dim}",
                model.name
            );
            return Err(Fault::model(what).help("give the mmproj file of this model").into());
        }
        let images = Images::new(dim, vision.most_tokens(options.tokens)?, KEPT);
        let (text, options) = (vision.image_text(tokenizer)?, options.clone());
        let (images, figures) = (Arc::new(images), Mutex::default());
        let (encoding, note) = (Mutex::new(TowerDevice::Processor), Mutex::default());
        Ok(Viewer { vision, images, text, options, threads, figures, encoding, note })
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

    /// Returns what the user should know about the GPU, once.
    pub fn take_note(&self) -> Option<String> {
        lock(&self.note).take()
    }

    pub fn vision(&self) -> &Vision {
        &self.vision
    }

    /// Returns the images that texts may name.
    pub fn images(&self) -> &Arc<Images> {
        &self.images
    }

    /// Returns the text of an image in a prompt.
    pub fn text(&self) -> &ImageText {
        &self.text
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
        let (width, height) = picture::measure(file, self.options.limits)?;
        Ok(self.vision.fit(width, height, self.options.tokens)?)
    }

    /// Returns the image of a picture. Its soft tokens are computed unless they are kept.
    ///
    /// # Errors
    /// A [`Fault`] for a file that is no picture or beyond the limits, or a damaged tower.
    pub fn see(&self, file: &[u8]) -> Result<Arc<Image>> {
        let begun = Instant::now();
        let prepared = self.vision.prepare(file, self.options.tokens, self.options.limits)?;
        let preparing = begun.elapsed();
        let mut device = lock(&self.encoding);
        let begun = Instant::now();
        let kept = self.images.find(&prepared.digest);
        let (is_kept, mut is_on_device) = (kept.is_some(), false);
        let image = match kept {
            Some(image) => image,
            None => {
                let soft = self.encode_on(&prepared, &mut device);
                is_on_device = soft.is_some();
                let soft = match soft {
                    Some(soft) => soft,
                    None => self.vision.encode(&prepared, self.threads)?,
                };
                self.images.insert(prepared.digest, soft)?
            }
        };
        let mut figures = lock(&self.figures);
        figures.images += 1;
        figures.tokens += image.rows();
        figures.encoded += usize::from(!is_kept);
        figures.on_device += usize::from(is_on_device);
        figures.preparing += preparing;
        figures.encoding += begun.elapsed();
        Ok(image)
    }

    /// Computes soft tokens on the device; `None` if the processor has to.
    fn encode_on(&self, image: &PreparedImage, device: &mut TowerDevice) -> Option<Vec<f32>> {
        if let TowerDevice::Unopened(wanted, how) = *device {
            let choice = match wanted {
                Device::Vulkan(choice) => choice,
                Device::Auto | Device::Cpu => Choice::Best,
            };
            *device = match backends::dense_device(choice, how, &Silence) {
                Ok(open) => TowerDevice::Open(open),
                // A machine without a GPU needs no note unless one was asked for.
                Err(_) if wanted == Device::Auto => TowerDevice::Processor,
                Err(error) => self.fall_back(&error),
            };
        }
        let TowerDevice::Open(open) = &*device else { return None };
        match self.vision.encode_on(image, &**open) {
            Ok(soft) => Some(soft),
            Err(error) => {
                *device = self.fall_back(&error);
                None
            }
        }
    }

    fn fall_back(&self, error: &anyhow::Error) -> TowerDevice {
        let note = format!("images are computed on the processor: {error:#}");
        *lock(&self.note) = Some(note);
        TowerDevice::Processor
    }

    /// Puts the places of images into a prompt that shows them.
    ///
    /// # Errors
    /// A [`Fault`] if it shows another number of images.
    pub fn place(&self, prompt: &[Token], images: &[Arc<Image>]) -> Result<Vec<Token>> {
        let places: Vec<_> = images.iter().map(|image| image.places()).collect();
        self.text.place(prompt, &places)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Opens the tower that the options name, the model's own, or the mmproj file beside it.
fn tower(model: &Model, options: &SightOptions) -> Result<Vision> {
    if let Some(path) = &options.mmproj {
        return Vision::open(path)
            .with_context(|| format!("cannot read images with {}", path.display()));
    }
    let Some(place) = &model.place else {
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
