//! Reading of request bodies, with limits of size, time and memory.

use super::super::pool::{Client, PoolShare, SharedPool};
use crate::cli::api::error::ApiError;
use crate::util::json;
use axum::extract::Request;
use axum::http::header::{CONTENT_ENCODING, HeaderValue};
use http_body_util::BodyExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a body that are read without a share of the memory.
const SMALL: usize = 64_000;

/// Limits of bodies.
pub struct BodyLimits {
    /// Limit of a body in bytes.
    pub most: usize,
    /// Time that a client has to send a body.
    pub patience: Duration,
    /// Memory for preparing requests, in bytes.
    pub memory: Arc<SharedPool>,
}

/// A body with the request's share of the memory.
pub struct ReadBody {
    pub bytes: Vec<u8>,
    pub memory: PoolShare,
    /// Memory that the work after parsing needs, in bytes.
    pub needed: usize,
}

impl BodyLimits {
    /// Reads a body.
    ///
    /// Before it reads more than [`SMALL`] bytes, it waits for the memory that the request needs
    /// until its prompts are tokens. `needs` returns the bytes of memory for the work after
    /// parsing, given the length of the body.
    pub async fn read(
        &self,
        request: Request,
        client: Client,
        needs: &impl Fn(usize) -> usize,
    ) -> Result<ReadBody, ApiError> {
        let coding = request.headers().get(CONTENT_ENCODING).map(HeaderValue::as_bytes);
        if coding.is_some_and(|coding| !coding.eq_ignore_ascii_case(b"identity")) {
            let what = "a compressed body is not read: send plain JSON without Content-Encoding";
            return Err(ApiError::new(415, what));
        }
        let length = request.headers().get("content-length");
        let length: Option<usize> = length.and_then(|length| length.to_str().ok()?.parse().ok());
        if length.is_some_and(|length| length > self.most) {
            return Err(self.too_large());
        }
        let (mut body, mut bytes, mut share) = (request.into_body(), Vec::new(), None);
        // Only the time that the client takes is counted, not the wait for memory.
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
                share = Some(self.share(length.unwrap_or(self.most), client, needs).await?);
            }
            bytes.extend_from_slice(&data);
        }
        let memory = match share {
            Some(share) => share,
            None => self.share(bytes.len(), client, needs).await?,
        };
        let needed = json::COPIES * bytes.len() + needs(bytes.len());
        Ok(ReadBody { bytes, memory, needed })
    }

    /// Waits for the share of a request with a body of `length` bytes.
    async fn share(
        &self,
        length: usize,
        client: Client,
        needs: &impl Fn(usize) -> usize,
    ) -> Result<PoolShare, ApiError> {
        let units = json::memory(length).max(json::COPIES * length + needs(length));
        let share = tokio::time::timeout(self.patience, self.memory.take(client, units)).await;
        let what = "other requests fill the memory: try again later";
        share.map_err(|_| ApiError::new(429, what).code("memory_full"))
    }

    fn too_large(&self) -> ApiError {
        let most = self.most / 1_000_000;
        ApiError::new(413, format!("the body is larger than {most} MB: send a smaller one"))
    }
}
