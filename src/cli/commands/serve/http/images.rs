//! Images of a request: their limits, which are checked before a pixel is decoded, and the turns in
//! which clients have them computed.

use super::super::pool::{Client, PoolShare, SharedPool};
use super::{App, in_worker};
use crate::cli::api::error::ApiError;
use crate::cli::api::request::ApiRequest;
use crate::cli::api::served::ServedModel;
use crate::vision::PictureLimits;
use std::sync::Arc;

/// Limits of a picture: those of large photos.
pub const LIMITS: PictureLimits = PictureLimits { bytes: 20 << 20, pixels: 24_000_000 };
/// Most images of a request.
const MOST: usize = 16;
/// Bytes of memory that decoding takes for a pixel, at most: four values of 16 bits.
const DECODED: usize = 8;
/// Bytes of memory for pictures and soft tokens of running requests. A client has half of it.
const MEMORY: usize = 2 * (24_000_000 * DECODED + 128_000_000);
/// Clients whose images are computed in turns. A client has half of these.
const TURNS: usize = 2;

/// Pools for images.
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

/// Encodes the prompts of a request with their images, after the client's turn has come. The work
/// ends before the next image once the client is gone. Returns the share of the memory that the
/// soft tokens keep.
pub async fn encoded(
    app: &Arc<App>,
    served: &Arc<ServedModel>,
    mut request: ApiRequest,
    memory: ImageMemory,
    client: Client,
) -> Result<(ApiRequest, PoolShare), ApiError> {
    let mut share = app.room.images.memory.take(client, memory.all()).await;
    let turn = app.room.images.turns.take(client, 1).await;
    let thread = app.room.threads.take(client, 1).await;
    // The future drops this when its client goes away.
    let here = Arc::new(());
    let (there, served, app) = (Arc::downgrade(&here), served.clone(), app.clone());
    let encode = move || {
        let is_wanted = || there.strong_count() > 0;
        let result = request.encode(&served, &is_wanted).map_err(|error| ApiError::of(&error));
        if let Ok(viewer) = &served.viewer {
            viewer.take_note().into_iter().for_each(|note| app.notes.once(note));
            let (figures, metrics) = (viewer.figures(), &app.queue.metrics);
            metrics.images.set(figures.images as u64);
            metrics.computed_images.set(figures.encoded as u64);
        }
        drop(turn);
        share.shrink(memory.soft);
        result.map(|()| (request, share))
    };
    let encoded = in_worker(thread, encode).await;
    drop(here);
    encoded
}
