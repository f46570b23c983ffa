//! Whole responses: JSON, and refusals in the form of the API.

use super::super::api::error::{ApiError, ApiFamily};
use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::response::Response;

/// Seconds after which a client may try again if the queue was full.
const RETRY: &str = "1";

/// Extension of a response: the reason of the refusal.
#[derive(Clone)]
pub struct RefusalReason(pub String);

/// Makes a whole response.
pub fn respond(status: u16, kind: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub fn answer_json(text: String) -> Response {
    respond(200, "application/json", text)
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
