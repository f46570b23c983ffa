//! Preparation of JSON schemas for llguidance.
//!
//! [`enforced`] rewrites a schema to the keywords that a grammar enforces. [`prepared`] adds rules
//! for white space, and converts numbers that llguidance would change. A [`Refusal`] names a
//! keyword that cannot be enforced, and its location.

#[cfg(test)]
mod cases;
mod exact;
mod keywords;
mod merge;
mod number;
mod object;
mod reference;
mod remedy;

pub use exact::{is_needed as has_large_numbers, number as exact_number};
pub use keywords::{Enforcement, NUMERIC, enforced};
pub use merge::conjoin;

use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use gemma_base::error::Fault;
use gemma_base::util::json as tree;
use reference::escaped;

/// Parses a schema. The error names line and column.
pub fn parse(text: &str, what: &str) -> Result<Value> {
    let fault = || Fault::usage(format!("{what} is not valid JSON"));
    let example = r#"{"type": "object", "properties": {"name": {"type": "string"}}}"#;
    let help = format!("a schema looks like {example}; @FILE reads it from a file");
    tree::parse(text.as_bytes()).with_context(|| fault().help(help))
}

/// Reason why a schema cannot be used, with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// JSON pointer; empty for the whole schema.
    pub place: String,
    pub what: String,
    pub help: String,
}

impl Refusal {
    fn new(keyword: &str, why: &str, help: &str) -> Refusal {
        Refusal { help: help.into(), ..Refusal::form(format!("the keyword {keyword} {why}")) }
    }

    fn form(what: impl Into<String>) -> Refusal {
        Refusal { place: String::new(), what: what.into(), help: remedy::OTHER.into() }
    }

    /// Creates a refusal from an error of llguidance.
    pub fn of_library(place: String, why: &str) -> Refusal {
        match remedy::keyword_of(why) {
            Some((keyword, reason)) => {
                let why = format!("cannot be enforced: {reason}");
                Refusal { place, ..Refusal::new(keyword, &why, remedy::of_keyword(keyword)) }
            }
            None => Refusal { place, ..Refusal::form(why) },
        }
    }

    /// Prepends a location.
    fn within(self, place: &str) -> Refusal {
        Refusal { place: format!("{place}{}", self.place), ..self }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "at {}: ", self.place)?;
        }
        f.write_str(&self.what)
    }
}

impl std::error::Error for Refusal {}

/// Returns this program's llguidance settings for a schema. A lenient compiler drops unknown
/// formats, and treats `oneOf` as `anyOf`.
pub fn settings(schema: &Value, lenient: bool) -> Value {
    let mut settings = json!({"whitespace_flexible": false, "item_separator": ", ",
        "key_separator": ": ", "lenient": lenient});
    // With `\u`, a used name could be repeated in another spelling.
    if !has_control_character(schema) {
        settings["json_allowed_escapes"] = json!("nrbtf\\\"");
    }
    settings
}

/// Returns whether a string in a schema has a character that JSON can only write with `\u`.
fn has_control_character(value: &Value) -> bool {
    let is_odd = |c: char| c.is_control() && !"\n\r\t\u{8}\u{c}".contains(c);
    match value {
        Value::String(text) => text.contains(is_odd),
        Value::Array(list) => list.iter().any(has_control_character),
        Value::Object(fields) => fields.values().any(has_control_character),
        _ => false,
    }
}

/// Returns a Lark expression for a schema from [`enforced`], and the rules that it uses. Names of
/// rules begin with `prefix`.
pub fn expression(schema: &Value, lenient: bool, prefix: &str) -> Result<(String, String)> {
    exact::expression(schema, &settings(schema, lenient), prefix)
}

/// A schema in a form that llguidance compiles.
pub enum Prepared {
    Json(Value),
    Lark(String),
}

/// Prepares a schema for llguidance. Its own `x-guidance` overrides this program's settings. Must
/// run in a confined process, since patterns may use any amount of time and memory.
pub fn prepared(schema: &Value) -> Result<Prepared> {
    let (whole, options) = whole(schema, true)?;
    if !exact::is_needed(&whole) {
        let mut fields = match whole {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        fields.insert("x-guidance".into(), options);
        return Ok(Prepared::Json(fields.into()));
    }
    ensure!(
        schema.get("x-guidance").is_none(),
        Refusal::new("x-guidance", "has no effect on numbers beyond 2^53", "leave it out")
    );
    let (start, rules) = exact::expression(&whole, &options, "s")?;
    Ok(Prepared::Lark(format!("start: {start}\n{rules}")))
}

/// Returns the expression and the rules of a schema with keywords that must all be enforced.
pub fn strict(schema: &Value, prefix: &str) -> Result<(String, String)> {
    let (whole, options) = whole(schema, false)?;
    exact::expression(&whole, &options, prefix)
}

fn whole(schema: &Value, is_confined: bool) -> Result<(Value, Value)> {
    ensure!(*schema != json!(false), Refusal::form("`false` allows nothing"));
    let whole = keywords::rewritten(schema, Enforcement::Whole, &[], is_confined)?;
    let mut options = settings(&whole, false);
    match schema.get("x-guidance") {
        None => {}
        Some(Value::Object(own)) => {
            own.iter().for_each(|(key, value)| options[key] = value.clone())
        }
        Some(other) => bail!(Refusal::form(format!("`x-guidance` is an object, not {other}"))),
    }
    Ok((whole, options))
}

/// Keywords that hold one schema, a list of schemas, or schemas by name.
const ONE: [&str; 4] = ["items", "additionalProperties", "additionalItems", "not"];
const LISTS: [&str; 4] = ["anyOf", "allOf", "oneOf", "prefixItems"];
const NAMED: [&str; 4] = ["$defs", "definitions", "properties", "patternProperties"];

/// Returns the JSON pointer of the innermost part that is invalid on its own, such as
/// `/properties/age`. Empty if only the whole schema is invalid.
pub fn place(schema: &Value, is_wrong: &dyn Fn(Value) -> bool) -> String {
    let mut at = (schema, String::new());
    while let Some(next) = parts(at.0).into_iter().find(|(part, _)| {
        // `false` is a valid subschema: it forbids further properties or items.
        part.is_object() && is_wrong(with_definitions(part, schema))
    }) {
        at = (next.0, at.1 + &next.1);
    }
    at.1
}

/// Returns the direct subschemas of a schema with their pointers.
fn parts(schema: &Value) -> Vec<(&Value, String)> {
    let mut parts = Vec::new();
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

/// Adds the root's definitions to a part, which may refer to them.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Nested parts are written once per reference, within limits.
    #[test]
    fn parts_in_each_other_are_bounded() {
        let nested = |bytes: usize| {
            let depth = 100;
            let mut part = json!({"const": "x".repeat(bytes)});
            for _ in 0..depth {
                part = json!({"items": part});
            }
            let at = |n: usize| json!({"$ref": format!("#/$defs/a{}", "/items".repeat(n))});
            let references: Vec<Value> = (0..depth).map(at).collect();
            json!({"anyOf": references, "$defs": {"a": part}})
        };
        assert!(enforced(&nested(10_000), Enforcement::Expressible, &[]).is_ok());
        let error = enforced(&nested(100_000), Enforcement::Expressible, &[]).unwrap_err();
        assert_eq!(error.to_string(), "its references lead to too much");
    }

    /// References to different parts, and a long chain of them.
    #[test]
    fn references_are_numbered_in_order() {
        let n = 20_000;
        let references: Vec<Value> =
            (0..n).map(|i| json!({"$ref": format!("#/$defs/{i}")})).collect();
        let parts: Map<String, Value> =
            (0..n).map(|i| (i.to_string(), json!({"const": i}))).collect();
        let schema = json!({"anyOf": references, "$defs": parts});
        assert_eq!(enforced(&schema, Enforcement::Expressible, &[]).unwrap(), schema);
        let link = |i: usize| json!({"items": {"$ref": format!("#/$defs/{}", i + 1)}});
        let mut parts: Map<String, Value> = (0..n).map(|i| (i.to_string(), link(i))).collect();
        parts.insert(n.to_string(), json!({"type": "null"}));
        let schema = json!({"$ref": "#/$defs/0", "$defs": parts});
        assert_eq!(enforced(&schema, Enforcement::Expressible, &[]).unwrap(), schema);
    }

    #[test]
    fn a_dropped_keyword_forbids_nothing_else() {
        let loose = |schema: Value| enforced(&schema, Enforcement::Expressible, &[]).unwrap();
        for (schema, want) in [
            (
                json!({"type": "object", "title": "T", "propertyNames": {"type": "string"},
                    "properties": {"a": {"type": "string", "default": "x"}}}),
                json!({"type": "object", "properties": {"a": {"type": "string"}}}),
            ),
            (
                json!({"properties": [], "additionalProperties": false, "required": ["a"]}),
                json!({"required": ["a"]}),
            ),
            (json!({"prefixItems": {}, "items": false}), json!({})),
            (json!({"const": {"not": 1}, "not": {}}), json!({"const": {"not": 1}})),
            (
                json!({"items": {"$ref": "#/parts/a~1b"}, "parts": {"a/b": {"type": "null"}}}),
                json!({"items": {"$ref": "#/$defs/0"}, "$defs": {"0": {"type": "null"}}}),
            ),
            (
                json!({"properties": {"a": {"$ref": "#", "type": "object"}}}),
                json!({"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {"0":
                    {"properties": {"a": {"$ref": "#/$defs/0"}}}}}),
            ),
            (
                json!({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}}),
                json!({"items": {}}),
            ),
        ] {
            assert_eq!(loose(schema.clone()), want, "{schema}");
        }
        let patterns = json!({"type": "object", "patternProperties": {"^a": {}},
            "additionalProperties": false, "minProperties": 1});
        assert_eq!(loose(patterns.clone()), patterns);
        let structure = enforced(&patterns, Enforcement::Structure, &[]).unwrap();
        assert_eq!(structure, json!({"type": "object"}));
        let whole = |schema: Value| enforced(&schema, Enforcement::Whole, &[]);
        let error = whole(json!({"anyOf": [{"uniqueItems": true}]})).unwrap_err().to_string();
        assert_eq!(error, "at /anyOf/0: the keyword uniqueItems cannot be enforced");
        for void in [json!({"uniqueItems": false}), json!({"propertyNames": {"type": "string"}})] {
            assert_eq!(whole(void).unwrap(), json!({}));
        }
    }
}
