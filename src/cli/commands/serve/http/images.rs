//! Images of a request: their limits, which are checked before a pixel is decoded, and the turns in
//! which clients have them computed.

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

/// Limits of a picture: those of large photos.
pub const LIMITS: PictureLimits = PictureLimits { bytes: 20 << 20, pixels: 24_000_000 };
/// Most images of a request.
const MOST: usize = 16;
/// Bytes of memory that decoding takes for a pixel, at most: four values of 16 bits, and as many
/// while the picture is turned upright.
const DECODED: usize = 16;
/// Bytes of memory for pictures and soft tokens of running requests. A client has half of it.
const MEMORY: usize = 2 * (24_000_000 * DECODED + 128_000_000);
/// Images that are decoded or computed at once. A client has half of these.
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

/// Memory that the images of a request take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageMemory {
    /// The largest picture: pictures are decoded one after another.
    decoding: usize,
    /// The soft tokens of all images.
    soft: usize,
}

impl ImageMemory {
    /// Returns the memory for the images of a request, `None` where it has none. Reads no more of
    /// them than their headers.
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

/// Decodes the images of a request, has the tower compute them, and puts them into the prompts. The
/// client takes its turn for each image. Images after the client has gone are not decoded. `memory`
/// is the share of the request. Returns the request, its share, and the share that its soft tokens
/// keep.
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
        // The memory belongs to the work, which goes on if the client goes away.
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
    // The prompt has the places of its images now, and no files.
    memory.give_back(bytes.saturating_sub(size_of::<Token>() * served.context));
    Ok((request, memory, share))
}

/// Tells the operator of the work so far.
fn report(app: &App, loaded: &LoadedModel) {
    let Ok(viewer) = loaded.served.viewer() else { return };
    viewer.take_notes().into_iter().for_each(|note| app.notes.once(note));
    let (figures, metrics) = (viewer.figures(), &loaded.queue.metrics);
    metrics.images.set(figures.images as u64);
    metrics.computed_images.set(figures.encoded as u64);
}
