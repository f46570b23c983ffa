//! Images in requests, in the forms of all APIs.
//!
//! They must be sent as base64. Fetching addresses would give clients access to the server's
//! network.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;
use std::sync::Arc;

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Remedy for an image that is given by address or id.
const SEND: &str = "send its bytes as a data URL: data:image/png;base64,...";

/// Returns the image file of a part; `None` for a part of another kind.
pub fn picture(part: &Value) -> Option<Result<Arc<[u8]>, String>> {
    let kind = part["type"].as_str()?;
    let source = &part["source"];
    Some(match kind {
        "input_image" if part["image_url"].is_null() => {
            Err(format!("input_image: files are not kept here, {SEND}"))
        }
        "image_url" | "input_image" => {
            url(part["image_url"].get("url").unwrap_or(&part["image_url"]))
        }
        "image" if source["type"] == "base64" => file(&source["data"]),
        "image" => {
            Err("image: the source is not of type base64: send the file in that form".into())
        }
        _ => return None,
    })
}

/// Decodes an image file from plain base64 or a data URL.
pub fn file(data: &Value) -> Result<Arc<[u8]>, String> {
    match data.as_str().ok_or("the data of an image is not a text")? {
        // Base64 has no colons.
        text if text.contains(':') => url(data),
        text => decoded(text),
    }
}

fn url(url: &Value) -> Result<Arc<[u8]>, String> {
    let text = url.as_str().ok_or("the URL of an image is not a text")?;
    let is_data = text.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"));
    if !is_data {
        return Err(format!("images are not fetched from addresses or paths: {SEND}"));
    }
    let (head, data) = text.split_once(',').unwrap_or((text, ""));
    match head.rsplit(';').next().is_some_and(|end| end.eq_ignore_ascii_case("base64")) {
        true => decoded(data),
        false => Err(format!("the data URL of an image is not base64: {SEND}")),
    }
}

fn decoded(text: &str) -> Result<Arc<[u8]>, String> {
    let wrong = |why| format!("an image is not base64 ({why}): send the bytes of its file");
    Ok(BASE64.decode(text).map_err(wrong)?.into())
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
            json!({"type": "image_url", "image_url": "DATA:image/png;x=y;BASE64,aGk="}),
            json!({"type": "input_image", "image_url": url}),
            json!({"type": "input_image", "image_url": {"url": url}}),
            json!({"type": "image", "source": {"type": "base64", "data": "aGk="}}),
        ] {
            assert_eq!(&*picture(&part).unwrap().unwrap(), b"hi", "{part}");
        }
        for (part, word) in [
            (json!({"type": "image_url", "image_url": {"url": "http://a/b.png"}}), "fetched"),
            (json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), "fetched"),
            (json!({"type": "image_url", "image_url": "/etc/passwd"}), "fetched"),
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
        assert_eq!([&*file(&json!("aGk")).unwrap(), &*file(&json!(url)).unwrap()], [b"hi"; 2]);
        assert!(file(&json!("http://a/b.png")).unwrap_err().contains("fetched"));
    }
}
