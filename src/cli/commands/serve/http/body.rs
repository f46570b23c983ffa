//! Reading of request bodies, with limits of size, time and memory.

use super::super::api::error::ApiError;
use super::super::api::fields::Fields;
use super::super::log::Notes;
use super::super::pool::{Client, PoolShare, SharedPool};
use crate::util::json::MOST_VALUES;
use axum::extract::Request;
use http_body_util::BodyExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a body that are read without a share of the memory.
const SMALL: usize = 64_000;
/// Bytes of memory for each byte of a body, and for each value of its JSON.
const COPIES: usize = 3;
const VALUE: usize = 100;

/// Limits of bodies.
pub struct BodyLimits {
    /// Largest body in bytes.
    pub most: usize,
    /// Time in which a client must send a body.
    pub patience: Duration,
    /// Bytes of memory for the preparation of requests.
    pub memory: Arc<SharedPool>,
}

/// A body with its share of the memory.
pub struct ReadBody {
    pub bytes: Vec<u8>,
    memory: Option<PoolShare>,
}

impl ReadBody {
    /// Waits for `bytes` of memory for the work on the body.
    pub async fn needs(
        &mut self,
        bytes: usize,
        from: &BodyLimits,
        client: Client,
    ) -> Result<(), ApiError> {
        if bytes > from.memory.most() {
            let what = format!("{} bytes of text are too many: send fewer", self.bytes.len());
            return Err(ApiError::new(413, what));
        }
        if bytes > memory(self.bytes.len()) {
            self.memory = None;
            self.memory = Some(from.memory.take(client, bytes).await);
        }
        Ok(())
    }

    pub fn fields(&self, notes: &Arc<Notes>) -> Result<Fields, ApiError> {
        Fields::parse(&self.bytes, notes)
    }
}

/// Returns the bytes of memory that a body of this length may take.
pub fn memory(length: usize) -> usize {
    COPIES * length + VALUE * (length / 2).min(MOST_VALUES)
}

impl BodyLimits {
    pub async fn read(&self, request: Request, client: Client) -> Result<ReadBody, ApiError> {
        let length = request.headers().get("content-length");
        let length: Option<usize> = length.and_then(|length| length.to_str().ok()?.parse().ok());
        if length.is_some_and(|length| length > self.most) {
            return Err(self.too_large());
        }
        let (mut body, mut bytes, mut share) = (request.into_body(), Vec::new(), None);
        // The time of the client, without the time of waiting for memory.
        let mut left = self.patience;
        loop {
            let begun = Instant::now();
            let late = || ApiError::new(408, "the body took too long: send it faster");
            let frame = tokio::time::timeout(left, body.frame()).await.map_err(|_| late())?;
            left = left.saturating_sub(begun.elapsed());
            let Some(frame) = frame else { break };
            let frame = frame
                .map_err(|error| ApiError::bad(format!("the body cannot be read: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > self.most {
                return Err(self.too_large());
            }
            if share.is_none() && bytes.len() + data.len() > SMALL {
                let room = self.memory.take(client, memory(length.unwrap_or(self.most)));
                let room = tokio::time::timeout(self.patience, room).await;
                let busy = || ApiError::new(429, "other bodies fill the memory: try again later");
                share = Some(room.map_err(|_| busy().code("memory_full"))?);
            }
            bytes.extend_from_slice(&data);
        }
        Ok(ReadBody { bytes, memory: share })
    }

    fn too_large(&self) -> ApiError {
        let most = self.most / 1_000_000;
        ApiError::new(413, format!("the body is larger than {most} MB: send a smaller one"))
    }
}
