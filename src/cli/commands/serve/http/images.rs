//! Images of requests: limits that are checked before decoding, and the turns of clients.

use super::super::models::LoadedModel;
use super::super::pool::{Client, PoolShare, SharedPool};
use super::App;
use super::worker::in_worker;
use crate::cli::api::error::ApiError;
use crate::cli::api::request::ApiRequest;
use crate::cli::api::served::ServedModel;
use crate::tensor::Token;
use crate::vision::PictureLimits;
use std::sync::Arc;

/// Limits of an image: those of large photos.
pub const LIMITS: PictureLimits = PictureLimits { bytes: 20 << 20, pixels: 24_000_000 };
/// Limit of images per request.
const MOST: usize = 16;
/// Memory for decoding a pixel in bytes: four values of 16 bits, and as many again while the image
/// is turned upright.
const DECODED: usize = 16;
/// Memory for images and soft tokens of running requests, in bytes. A client gets at most half.
const MEMORY: usize = 2 * (24_000_000 * DECODED + 128_000_000);
/// Images decoded or computed at once. A client gets at most half.
const TURNS: usize = 2;

/// Pools for images.
#[derive(Clone)]
pub struct ImagePools {
    memory: Arc<SharedPool>,
    turns: Arc<SharedPool>,
}

impl Default for ImagePools {
    fn default() -> ImagePools {
        ImagePools { memory: SharedPool::new(MEMORY), turns: SharedPool::new(TURNS) }
    }
}

/// Memory for the images of a request, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageMemory {
    /// For decoding the largest image, since images are decoded one after another.
    decoding: usize,
    /// For the soft tokens of all images.
    soft: usize,
}

impl ImageMemory {
    /// Returns the memory for the images of a request; `None` if it has none.
    ///
    /// Reads only their headers.
    pub fn of(
        request: &ApiRequest,
        served: &ServedModel,
        pools: &ImagePools,
    ) -> Result<Option<ImageMemory>, ApiError> {
        let images: Vec<_> = request.images().collect();
        if images.is_empty() {
            return Ok(None);
        }
        if images.len() > MOST {
            let what = format!("a request has at most {MOST} images, not {}", images.len());
            return Err(ApiError::bad(what));
        }
        let viewer = served.viewer.as_ref().map_err(|why| ApiError::of(&why.clone().into()))?;
        let mut memory = ImageMemory { decoding: 0, soft: 0 };
        for image in images {
            let wrong = |error: anyhow::Error| ApiError::of(&error);
            let fit = viewer.measure(&image.file).map_err(wrong)?;
            let (width, height) = viewer.size(&image.file).map_err(wrong)?;
            memory.decoding = memory.decoding.max(DECODED * width * height);
            memory.soft += 4 * fit.tokens() * viewer.vision().width();
        }
        if memory.all() > pools.memory.most() {
            let what = "the images of the request take too much memory: send fewer or smaller ones";
            return Err(ApiError::new(413, what));
        }
        Ok(Some(memory))
    }

    fn all(self) -> usize {
        self.decoding + self.soft
    }
}

/// Decodes the images of a request, computes their soft tokens, and puts them into the prompts.
///
/// The client takes a turn for each image. Images are not decoded after the client has
/// disconnected. `memory` is the share of the request. Returns the request, its share, and the
/// share for its soft tokens.
pub async fn seen(
    app: &App,
    loaded: &LoadedModel,
    mut request: ApiRequest,
    mut memory: PoolShare,
    needed: ImageMemory,
    client: Client,
) -> Result<(ApiRequest, PoolShare, PoolShare), ApiError> {
    let served = &loaded.served;
    let mut share = app.room.images.memory.take(client, needed.all()).await;
    let files = request.unseen();
    let bytes: usize = files.iter().map(|file| file.len()).sum();
    let mut images = Vec::with_capacity(files.len());
    for file in files {
        let turn = app.room.images.turns.take(client, 1).await;
        let thread = app.room.threads.take(client, 1).await;
        let viewer = served.viewer.clone();
        // The work owns the memory, because it continues if the client disconnects.
        let see = move || {
            let image = viewer.map_err(anyhow::Error::from).and_then(|viewer| viewer.see(&file));
            let image = image.map_err(|error| ApiError::of(&error))?;
            drop(turn);
            Ok((image, memory, share))
        };
        let outcome = in_worker(thread, see).await;
        report(app, loaded);
        let image;
        (image, memory, share) = outcome?;
        images.push(image);
    }
    request.show(images, served).map_err(|error| ApiError::of(&error))?;
    share.shrink(needed.soft);
    // The prompts now have tokens for the images, and no files.
    memory.give_back(bytes.saturating_sub(size_of::<Token>() * served.context));
    Ok((request, memory, share))
}

/// Adds the figures of the tower to the metrics, and its notes to the log.
fn report(app: &App, loaded: &LoadedModel) {
    let Ok(viewer) = loaded.served.viewer() else { return };
    viewer.take_notes().into_iter().for_each(|note| app.notes.once(note));
    let (figures, metrics) = (viewer.figures(), &loaded.queue.metrics);
    metrics.images.set(figures.images as u64);
    metrics.computed_images.set(figures.encoded as u64);
}
