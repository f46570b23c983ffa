//! The fields of a request's body. Each is taken by name. Fields that are left over at the end are
//! refused by name, so no field is ignored silently.

use super::error::ApiError;
use crate::util::json;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Fields that were not taken yet.
pub struct Fields {
    left: Map<String, Value>,
}

impl Fields {
    pub fn parse(body: &[u8]) -> Result<Fields, ApiError> {
        match json::parse(body) {
            Ok(Value::Object(left)) => Ok(Fields { left }),
            Ok(_) => Err(ApiError::bad("the body is not a JSON object")),
            Err(error) => Err(ApiError::bad(format!("the body is not valid JSON: {error}"))),
        }
    }

    /// Takes a field. A null field counts as missing.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value).map(Some).map_err(|error| {
                ApiError::bad(format!("'{name}': {}", plain(&error.to_string()))).param(name)
            }),
        }
    }

    /// Takes a number for which some clients write -1 to mean no limit.
    pub fn take_limit<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        if self.left.get(name).and_then(Value::as_i64) == Some(-1) {
            self.left.remove(name);
        }
        self.take(name)
    }

    pub fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| ApiError::bad(format!("'{name}' is missing")).param(name))
    }

    /// Drops fields that do not affect the answer.
    pub fn pass_over(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.left.remove(*name)));
    }

    /// Takes a field that may only have one of the values that change nothing.
    pub fn only(&mut self, name: &str, plain: &[Value]) -> Result<(), ApiError> {
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if plain.contains(&value) => Ok(()),
            Some(_) => Err(ApiError::unsupported(name)),
        }
    }

    /// Refuses fields that were not taken.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.left.iter().find(|(_, value)| !value.is_null()) {
            Some((name, _)) => Err(ApiError::unsupported(name)),
            None => Ok(()),
        }
    }
}

/// Rewrites an error of serde without types of Rust.
fn plain(error: &str) -> String {
    let mut text = error.to_owned();
    for number in ["u16", "u32", "u64", "usize"] {
        text = text.replace(&format!("expected {number}"), "expected a whole number from 0 on");
    }
    for number in ["f32", "f64"] {
        text = text.replace(&format!("expected {number}"), "expected a number");
    }
    match text.split_once("data did not match any variant of untagged enum") {
        Some((before, _)) => format!("{before}the value has none of the forms that are known"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_named() {
        let parse = |text: &str| Fields::parse(text.as_bytes());
        assert!(parse("[1]").is_err() && parse("{").is_err() && parse("\u{0}").is_err());
        let mut fields = parse(r#"{"a": 1, "b": null, "c": "x", "n": 1.0, "d": 3}"#).unwrap();
        assert_eq!(fields.take::<u32>("a").unwrap(), Some(1));
        assert_eq!(fields.take::<u32>("b").unwrap(), None);
        let wrong = fields.take::<u32>("c").unwrap_err();
        assert_eq!((wrong.status, wrong.param.as_deref()), (400, Some("c")));
        assert!(fields.only("n", &[1.0.into()]).is_ok() && fields.need::<u32>("e").is_err());
        let mut limits = parse(r#"{"a": -1, "b": -2, "c": 5}"#).unwrap();
        assert_eq!(limits.take_limit::<usize>("a").unwrap(), None);
        assert_eq!(limits.take_limit::<usize>("c").unwrap(), Some(5));
        let wrong = limits.take_limit::<usize>("b").unwrap_err();
        let says = "'b': invalid value: integer `-2`, expected a whole number from 0 on";
        assert_eq!(wrong.message, says);
        let left = fields.finish().unwrap_err();
        assert_eq!((left.param.as_deref(), left.code), (Some("d"), Some("unsupported_parameter")));
    }
}
