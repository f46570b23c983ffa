//! Worker threads that prepare requests and compute images.

use super::super::pool::PoolShare;
use crate::cli::api::error::ApiError;
use crate::os::process::give_way;

/// Runs `work` on a worker thread with low priority. `held` is its share of a pool.
pub async fn in_worker<T: Send + 'static>(
    held: PoolShare,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let work = move || {
        // At normal priority, each wait of the engine's thread for a processor would last as long
        // as the time slices of all workers.
        give_way();
        let result = work();
        drop(held);
        result
    };
    let failed = |_| Err(ApiError::new(500, "the request could not be handled"));
    tokio::task::spawn_blocking(work).await.unwrap_or_else(failed)
}
