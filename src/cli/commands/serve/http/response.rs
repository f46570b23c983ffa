//! Responses that are not streamed: JSON, and errors in the form of the API.

use crate::cli::api::error::{ApiError, ApiFamily};
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::response::Response;
use std::convert::Infallible;

/// Seconds after which a client may retry if the queue was full.
const RETRY: &str = "1";

/// Size of a piece of a long answer in bytes. A connection gets the next piece after it has sent
/// the last one.
const PIECE: usize = 64 << 10;

/// Extension of a response: the reason of an error, for the log.
#[derive(Clone)]
pub struct RefusalReason(pub String);

/// Makes a response with a complete body.
pub fn respond(status: u16, kind: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub fn answer_json(text: String) -> Response {
    respond(200, "application/json", text)
}

/// Makes a JSON response that holds `memory` until all but its last pieces are sent.
pub fn answer_held(text: String, memory: impl Send + 'static) -> Response {
    let length = HeaderValue::from(text.len());
    let pieces = futures_util::stream::unfold((text, 0, memory), |(text, at, memory)| async move {
        let end = text.len().min(at + PIECE);
        // A copy, because a slice would keep the whole text in memory.
        let piece = Bytes::copy_from_slice(&text.as_bytes()[at..end]);
        (at < end).then(|| (Ok::<_, Infallible>(piece), (text, end, memory)))
    });
    let mut response = respond(200, "application/json", Body::from_stream(pieces));
    response.headers_mut().insert(CONTENT_LENGTH, length);
    response
}

pub fn refusal(error: &ApiError, family: ApiFamily) -> Response {
    let body = error.json(family).to_string();
    let mut response = respond(error.status, "application/json", body);
    response.extensions_mut().insert(RefusalReason(error.message.clone()));
    if matches!(error.status, 429 | 503) {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(RETRY));
    }
    response
}
