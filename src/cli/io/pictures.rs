//! Pictures in requests, in the forms of all APIs. They come as base64: a server that fetched
//! addresses for its clients would let them reach its network.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;
use std::sync::Arc;

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Remedy for a picture that is named and not sent.
const SEND: &str = "send its bytes as a data URL: data:image/png;base64,...";

/// Returns the file of a picture, or `None` for a part of another kind.
pub fn picture(part: &Value) -> Option<Result<Arc<[u8]>, String>> {
    let kind = part["type"].as_str()?;
    let source = &part["source"];
    Some(match kind {
        "image_url" => url(part["image_url"].get("url").unwrap_or(&part["image_url"])),
        "input_image" if part.get("image_url").is_some_and(Value::is_string) => {
            url(&part["image_url"])
        }
        "input_image" => Err(format!("input_image: files are not kept here, {SEND}")),
        "image" if source["type"] == "base64" => file(&source["data"]),
        "image" => Err("image: the source is not of type base64, and nothing else is taken".into()),
        _ => return None,
    })
}

/// Returns the file of a picture that is base64 by itself.
pub fn file(data: &Value) -> Result<Arc<[u8]>, String> {
    let text = data.as_str().ok_or("the data of an image is not a text")?;
    decoded(text)
}

fn url(url: &Value) -> Result<Arc<[u8]>, String> {
    let text = url.as_str().ok_or("the URL of an image is not a text")?;
    let Some(data) = text.strip_prefix("data:") else {
        return Err(format!("an image is fetched from nowhere: {SEND}"));
    };
    match data.split_once(";base64,") {
        Some((_, data)) => decoded(data),
        None => Err(format!("the data URL of an image is not base64: {SEND}")),
    }
}

fn decoded(text: &str) -> Result<Arc<[u8]>, String> {
    let bytes = BASE64.decode(text).map_err(|why| format!("an image is not base64: {why}"))?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pictures_of_all_forms_are_read_and_addresses_are_not() {
        let url = "data:image/png;base64,aGk=";
        for part in [
            json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}}),
            json!({"type": "image_url", "image_url": url}),
            json!({"type": "image_url", "image_url": {"url": "data:;base64,aGk"}}),
            json!({"type": "input_image", "image_url": url}),
            json!({"type": "image", "source": {"type": "base64", "data": "aGk="}}),
        ] {
            assert_eq!(&*picture(&part).unwrap().unwrap(), b"hi", "{part}");
        }
        for (part, word) in [
            (json!({"type": "image_url", "image_url": {"url": "http://a/b.png"}}), "nowhere"),
            (json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), "nowhere"),
            (json!({"type": "image_url", "image_url": {"url": "data:image/png,x"}}), "not base64"),
            (json!({"type": "image_url"}), "not a text"),
            (json!({"type": "input_image", "file_id": "f"}), "not kept"),
            (json!({"type": "image", "source": {"type": "url", "url": "x"}}), "type base64"),
            (json!({"type": "image", "source": {"type": "base64", "data": "?"}}), "not base64"),
        ] {
            let why = picture(&part).unwrap().unwrap_err();
            assert!(why.contains(word), "{why}");
        }
        assert!(picture(&json!({"type": "text", "text": "image"})).is_none());
    }
}
