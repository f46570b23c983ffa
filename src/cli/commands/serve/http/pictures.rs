//! Images of requests: their soft tokens are computed before a request waits for the engine.
//!
//! Images are read one at a time for each client, in worker threads of low priority. Their sizes
//! were checked from their headers before. If the client goes away, its further images are not read.

use super::super::pool::{Client, PoolShare};
use super::{App, in_worker};
use crate::cli::api::error::ApiError;
use crate::cli::api::request::ApiRequest;
use crate::cli::api::served::ServedModel;
use crate::tensor::Token;
use std::sync::Arc;

/// Reads the images of a request and puts them into its prompts. `memory` is the share of the
/// request, and `needed` are the bytes of its soft tokens. Returns the request, its share, and a
/// share for the soft tokens if it has images.
pub async fn seen(
    app: &App,
    served: &Arc<ServedModel>,
    mut parsed: ApiRequest,
    mut memory: PoolShare,
    needed: usize,
    client: Client,
) -> Result<(ApiRequest, PoolShare, Option<PoolShare>), ApiError> {
    let files = parsed.unseen();
    if files.is_empty() {
        return Ok((parsed, memory, None));
    }
    let mut room = Some(room(app, needed, client).await?);
    let bytes: usize = files.iter().map(|file| file.len()).sum();
    let mut images = Vec::with_capacity(files.len());
    for file in files {
        let thread = app.room.viewers.take(client, 1).await;
        let (served, own) = (served.clone(), room.take());
        // The memory belongs to the work, which goes on if the client goes away.
        let see = move || {
            let image = served.viewer().and_then(|viewer| viewer.see(&file));
            let image = image.map_err(|error| ApiError::of(&error))?;
            Ok((image, memory, own))
        };
        let image;
        (image, memory, room) = in_worker(thread, see).await?;
        images.push(image);
    }
    parsed.show(images, served).map_err(|error| ApiError::of(&error))?;
    // The prompt has the places of the images now, and no files.
    memory.give_back(bytes.saturating_sub(size_of::<Token>() * served.context));
    Ok((parsed, memory, room))
}

/// Waits for the memory of a request's soft tokens.
async fn room(app: &App, needed: usize, client: Client) -> Result<PoolShare, ApiError> {
    let most = app.room.images.most();
    if needed > most {
        let what = format!(
            "the images take {} MB of memory, and a client has {} MB: send fewer or smaller ones",
            needed / 1_000_000,
            most / 1_000_000
        );
        return Err(ApiError::new(413, what).code("memory_full"));
    }
    let share = app.room.images.take(client, needed);
    let share = tokio::time::timeout(app.bodies.patience, share).await;
    let what = "images of other requests fill the memory: try again later";
    share.map_err(|_| ApiError::new(429, what).code("memory_full"))
}
