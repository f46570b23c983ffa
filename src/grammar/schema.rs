//! Preparation of JSON schemas for llguidance: rules on white space, and the place of an error.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use crate::error::Fault;
use crate::util::json as tree;

/// Reads a schema. An error names line and column.
pub fn parse(text: &str, what: &str) -> Result<Value> {
    let fault = || Fault::usage(format!("{what} is not valid JSON"));
    let example = r#"{"type": "object", "properties": {"name": {"type": "string"}}}"#;
    let help = format!("a schema looks like {example}; @FILE reads it from a file");
    tree::parse(text.as_bytes()).with_context(|| fault().help(help))
}

/// Returns the remedy for an unusable schema, by llguidance's error.
pub fn remedy(why: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| why.contains(word));
    if says(&["Invalid type"]) {
        "the types are object, array, string, number, integer, boolean and null"
    } else if says(&["Reference segment", "$ref"]) {
        "a $ref names a part of the same schema, such as #/$defs/NAME"
    } else if says(&["Unknown format"]) {
        "leave the format out, or say it with a pattern; date, time, date-time, duration, email, \
            hostname, ipv4, ipv6, uri and uuid are known"
    } else if says(&["regex"]) {
        "Rust's regex crate cannot read this regular expression: look-around is not supported"
    } else if says(&["Unimplemented"]) {
        "leave out or rewrite what is not supported: not, if, uniqueItems and their like"
    } else {
        "correct the schema: https://json-schema.org describes the notation"
    }
}

/// Returns the schema with our defaults for settings. Its own `x-guidance` takes precedence.
pub fn strict(schema: &Value) -> Result<Value> {
    let mut object = match schema {
        Value::Object(object) => object.clone(),
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => bail!("`false` allows nothing"),
        other => bail!("a schema is an object, not {other}"),
    };
    let mut options =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    match object.get("x-guidance") {
        None => {}
        Some(Value::Object(own)) => {
            own.iter().for_each(|(key, value)| options[key] = value.clone())
        }
        Some(other) => bail!("`x-guidance` is an object, not {other}"),
    }
    object.insert("x-guidance".into(), options);
    Ok(Value::Object(object))
}

/// Keywords that hold one schema, a list of them, or schemas by name.
const ONE: [&str; 4] = ["items", "additionalProperties", "additionalItems", "not"];
const LISTS: [&str; 4] = ["anyOf", "allOf", "oneOf", "prefixItems"];
const NAMED: [&str; 4] = ["$defs", "definitions", "properties", "patternProperties"];

/// Returns the innermost part that is wrong by itself, such as ` at /properties/age`. The result is
/// empty if only the whole schema is wrong.
pub fn place(schema: &Value, is_wrong: &dyn Fn(Value) -> bool) -> String {
    let mut at = (schema, String::new());
    while let Some(next) =
        parts(at.0).into_iter().find(|(part, _)| is_wrong(with_definitions(part, schema)))
    {
        at = (next.0, at.1 + &next.1);
    }
    if at.1.is_empty() { String::new() } else { format!(" at {}", at.1) }
}

/// Returns the schemas directly inside a schema, with their pointers.
fn parts(schema: &Value) -> Vec<(&Value, String)> {
    let mut parts = Vec::new();
    let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
    for key in NAMED {
        let named = schema.get(key).and_then(Value::as_object).into_iter().flatten();
        parts.extend(named.map(|(name, part)| (part, format!("/{key}/{}", escaped(name)))));
    }
    for key in ONE {
        parts.extend(schema.get(key).map(|part| (part, format!("/{key}"))));
    }
    for key in LISTS {
        let list = schema.get(key).and_then(Value::as_array).into_iter().flatten();
        parts.extend(list.enumerate().map(|(i, part)| (part, format!("/{key}/{i}"))));
    }
    parts
}

/// Adds the whole schema's definitions to a part, which may refer to them.
fn with_definitions(part: &Value, schema: &Value) -> Value {
    let mut part = part.clone();
    if let Value::Object(object) = &mut part {
        for key in ["$defs", "definitions"] {
            if let (Some(definitions), false) = (schema.get(key), object.contains_key(key)) {
                object.insert(key.into(), definitions.clone());
            }
        }
    }
    part
}
