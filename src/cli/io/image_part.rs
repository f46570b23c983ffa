//! Images in the JSON of messages: their bytes as base64, in the forms of all APIs.
//!
//! Nothing is fetched, and no file is read: an address of a client could be one inside the
//! network of the server.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_PAD_INDIFFERENT;
use serde_json::Value;
use std::sync::Arc;

/// Most images of a request.
pub const MOST_IMAGES: usize = 32;

/// The remedy for an image that is given by an address.
const REMEDY: &str = "send its bytes as a data URL, such as data:image/png;base64,...";

/// Returns whether a part of a message is an image.
pub fn is_image(part: &Value) -> bool {
    matches!(part["type"].as_str(), Some("image_url" | "input_image" | "image"))
}

/// Returns the file of an image part; `None` for a part of another type.
///
/// # Errors
/// A sentence if the part has no bytes, or no valid base64.
pub fn image_of(part: &Value) -> Option<Result<Arc<[u8]>, String>> {
    is_image(part).then(|| match part["type"] == "image" {
        true => of_source(&part["source"]),
        false => of_address(part),
    })
}

/// Reads `image_url` of OpenAI's two forms: an address, or an object with one.
fn of_address(part: &Value) -> Result<Arc<[u8]>, String> {
    let given = &part["image_url"];
    match given.as_str().or(given["url"].as_str()) {
        Some(address) => of_data_url(address),
        None if !part["file_id"].is_null() => {
            Err(format!("no files are stored here, so an image has no 'file_id': {REMEDY}"))
        }
        None => Err(format!("an image has no 'image_url': {REMEDY}")),
    }
}

/// Reads `source` of Anthropic's form.
fn of_source(source: &Value) -> Result<Arc<[u8]>, String> {
    match (source["type"].as_str(), source["data"].as_str()) {
        (Some("base64"), Some(data)) => of_base64(data),
        (Some("url" | "file"), _) => Err(
            "images are not fetched: send the bytes in a 'source' of type base64, or as a data URL"
                .into(),
        ),
        _ => Err("an image has no 'source' of type base64 with 'data'".into()),
    }
}

/// Returns the bytes of a data URL.
fn of_data_url(address: &str) -> Result<Arc<[u8]>, String> {
    let is_data = address.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"));
    if !is_data {
        return Err(format!("images are not fetched from addresses or paths: {REMEDY}"));
    }
    let (head, data) = address.split_once(',').unwrap_or((address, ""));
    let is_base64 = head.rsplit(';').next().is_some_and(|end| end.eq_ignore_ascii_case("base64"));
    if !is_base64 {
        return Err(format!("the data URL of an image is not in base64: {REMEDY}"));
    }
    of_base64(data)
}

/// Returns the bytes of an image in Ollama's form: base64, or a data URL.
pub fn of_text(text: &str) -> Result<Arc<[u8]>, String> {
    // No base64 has a colon.
    if text.contains(':') { of_data_url(text) } else { of_base64(text) }
}

fn of_base64(text: &str) -> Result<Arc<[u8]>, String> {
    let bytes = STANDARD_PAD_INDIFFERENT
        .decode(text)
        .map_err(|error| format!("the base64 of an image is not valid: {error}"))?;
    match bytes.is_empty() {
        true => Err(format!("an image is empty: {REMEDY}")),
        false => Ok(bytes.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_forms_give_the_bytes() {
        for part in [
            json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AQIDBA=="}}),
            json!({"type": "image_url", "image_url": "DATA:image/png;x=y;BASE64,AQIDBA"}),
            json!({"type": "input_image", "image_url": "data:;base64,AQIDBA==", "detail": "low"}),
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png",
                "data": "AQIDBA="}}),
        ] {
            assert_eq!(&*image_of(&part).unwrap().unwrap(), [1, 2, 3, 4], "{part}");
        }
        assert_eq!(&*of_text("AQIDBA").unwrap(), [1, 2, 3, 4]);
        assert_eq!(&*of_text("data:image/png;base64,AQIDBA==").unwrap(), [1, 2, 3, 4]);
        assert_eq!(image_of(&json!({"type": "text", "text": "a"})), None);
        assert_eq!(image_of(&json!("a")), None);
    }

    #[test]
    fn nothing_is_fetched_and_damage_is_named() {
        for (part, word) in [
            (json!({"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}), "fetched"),
            (json!({"type": "image_url", "image_url": "file:///etc/passwd"}), "fetched"),
            (json!({"type": "image_url", "image_url": "/etc/passwd"}), "fetched"),
            (json!({"type": "image_url", "image_url": {"url": 5}}), "no 'image_url'"),
            (json!({"type": "image_url", "image_url": "data:image/png,abc"}), "not in base64"),
            (json!({"type": "image_url", "image_url": "data:;base64,"}), "empty"),
            (json!({"type": "image_url", "image_url": "data:;base64,A B="}), "not valid"),
            (json!({"type": "input_image", "file_id": "file-1"}), "file_id"),
            (json!({"type": "image", "source": {"type": "url", "url": "http://x"}}), "fetched"),
            (json!({"type": "image", "source": {"type": "file", "file_id": "x"}}), "fetched"),
            (json!({"type": "image", "source": {"type": "base64"}}), "no 'source'"),
            (json!({"type": "image", "source": {"type": "base64", "data": "AQ*="}}), "not valid"),
            (json!({"type": "image"}), "no 'source'"),
        ] {
            let why = image_of(&part).unwrap().unwrap_err();
            assert!(why.contains(word), "{part}: {why}");
        }
        assert!(of_text("http://x/y.png").unwrap_err().contains("fetched"));
    }
}
