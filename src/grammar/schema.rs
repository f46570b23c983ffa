//! Preparation of JSON schemas for llguidance: the keywords that a grammar enforces, rules on white
//! space, and the place of an error.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use crate::error::Fault;
use crate::util::json as tree;
use std::collections::HashMap;

/// Reads a schema. An error names line and column.
pub fn parse(text: &str, what: &str) -> Result<Value> {
    let fault = || Fault::usage(format!("{what} is not valid JSON"));
    let example = r#"{"type": "object", "properties": {"name": {"type": "string"}}}"#;
    let help = format!("a schema looks like {example}; @FILE reads it from a file");
    tree::parse(text.as_bytes()).with_context(|| fault().help(help))
}

/// Returns the remedy for an unusable schema, by the error.
pub fn remedy(why: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| why.contains(word));
    if says(&["keyword type"]) {
        "the types are object, array, string, number, integer, boolean and null"
    } else if says(&["keyword $ref"]) {
        "a $ref names a part of the same schema, such as #/$defs/NAME"
    } else if says(&["Unknown format"]) {
        "leave the format out, or say it with a pattern; date, time, date-time, duration, email, \
            hostname, ipv4, ipv6, uri and uuid are known"
    } else if says(&["regex", "keyword pattern"]) {
        "Rust's regex crate cannot read this regular expression: look-around is not supported"
    } else if says(&["cannot be enforced", "oneOf constraints"]) {
        "leave out or rewrite what is not supported: not, if, uniqueItems and their like"
    } else {
        "correct the schema: https://json-schema.org describes the notation"
    }
}

/// How much of a schema a grammar enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// All of it. A keyword that no grammar expresses is an error.
    Whole,
    /// All that a grammar expresses. Other keywords are dropped.
    Expressible,
    /// Types, names and choices, for a schema that is too complex otherwise.
    Structure,
}

/// Form of a keyword's value.
enum ValueForm {
    Plain(fn(&Value) -> bool),
    Reference,
    Schema,
    Schemas,
    /// A schema, or a list of them for the first items.
    SchemaOrList,
    /// Schemas by name.
    SchemaMap,
}

use ValueForm::{Plain, Reference, SchemaMap, SchemaOrList, Schemas};

/// Keywords that a grammar enforces, and whether [`Enforcement::Structure`] has them.
const ENFORCED: [(&str, ValueForm, bool); 29] = [
    ("$ref", Reference, true),
    ("type", Plain(is_type), true),
    ("nullable", Plain(Value::is_boolean), true),
    ("const", Plain(|_| true), true),
    ("enum", Plain(is_list), true),
    ("anyOf", Schemas, true),
    ("oneOf", Schemas, true),
    ("allOf", Schemas, true),
    ("properties", SchemaMap, true),
    ("patternProperties", SchemaMap, false),
    ("additionalProperties", ValueForm::Schema, true),
    ("required", Plain(is_names), true),
    ("minProperties", Plain(Value::is_u64), false),
    ("maxProperties", Plain(Value::is_u64), false),
    ("items", SchemaOrList, true),
    ("prefixItems", Schemas, true),
    ("additionalItems", ValueForm::Schema, true),
    ("minItems", Plain(Value::is_u64), false),
    ("maxItems", Plain(Value::is_u64), false),
    ("minLength", Plain(Value::is_u64), false),
    ("maxLength", Plain(Value::is_u64), false),
    ("pattern", Plain(is_pattern), false),
    ("format", Plain(Value::is_string), false),
    ("minimum", Plain(Value::is_number), false),
    ("maximum", Plain(Value::is_number), false),
    ("exclusiveMinimum", Plain(is_bound), false),
    ("exclusiveMaximum", Plain(is_bound), false),
    ("multipleOf", Plain(Value::is_number), false),
    ("$schema", Plain(Value::is_string), true),
];

/// Keywords that no grammar enforces, each with the values that are true of everything.
const UNENFORCED: [(&str, &[&str]); 12] = [
    ("not", &["false"]),
    ("if", &[]),
    ("contains", &[]),
    ("uniqueItems", &["false"]),
    ("propertyNames", &["true", "{}", r#"{"type":"string"}"#]),
    ("dependencies", &["{}"]),
    ("dependentRequired", &["{}"]),
    ("dependentSchemas", &["{}"]),
    ("unevaluatedItems", &["true", "{}"]),
    ("unevaluatedProperties", &["true", "{}"]),
    ("$dynamicRef", &[]),
    ("$recursiveRef", &[]),
];

/// Keywords that would forbid more once the keyword before them is dropped.
const DEPENDENT: [(&str, &str); 3] = [
    ("properties", "additionalProperties"),
    ("patternProperties", "additionalProperties"),
    ("prefixItems", "items"),
];

const TYPES: [&str; 7] = ["object", "array", "string", "number", "integer", "boolean", "null"];

fn is_type(value: &Value) -> bool {
    let is_known = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    is_known(value) || is_list(value) && value.as_array().is_some_and(|t| t.iter().all(is_known))
}

fn is_list(value: &Value) -> bool {
    value.as_array().is_some_and(|values| !values.is_empty())
}

fn is_names(value: &Value) -> bool {
    value.as_array().is_some_and(|names| names.iter().all(Value::is_string))
}

fn is_bound(value: &Value) -> bool {
    value.is_number() || value.is_boolean()
}

/// Returns whether a regular expression has no look-around and no word boundary.
fn is_pattern(value: &Value) -> bool {
    let around = ["(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B"];
    value.as_str().is_some_and(|text| !around.iter().any(|part| text.contains(part)))
}

/// Returns a schema of the keywords that a grammar enforces, without annotations. It allows all
/// that `schema` allows. References lead to `$defs` of the root. `beyond` are further keywords that
/// the grammar does not enforce.
pub fn enforced(schema: &Value, enforcement: Enforcement, beyond: &[&str]) -> Result<Value> {
    let (references, numbers) = (Vec::new(), HashMap::new());
    let mut rewriter = Rewriter { root: schema, enforcement, beyond, references, numbers };
    let mut whole = rewriter.part(schema)?;
    let mut definitions = Map::new();
    let mut bytes = 0;
    while let Some(target) = rewriter.references.get(definitions.len()).copied() {
        // A part may lie in others that references lead to: each of them has a copy of it.
        bytes += tree::bytes(target);
        ensure!(bytes <= MOST_BYTES, "its references lead to too much");
        let name = definitions.len().to_string();
        definitions.insert(name, rewriter.part(target)?);
    }
    if let (false, Value::Object(fields)) = (definitions.is_empty(), &mut whole) {
        fields.insert("$defs".into(), definitions.into());
    }
    Ok(whole)
}

struct Rewriter<'a> {
    root: &'a Value,
    enforcement: Enforcement,
    beyond: &'a [&'a str],
    /// Targets of references, by the number of their definition, and the numbers of the targets.
    references: Vec<&'a Value>,
    numbers: HashMap<*const Value, usize>,
}

impl<'a> Rewriter<'a> {
    fn part(&mut self, schema: &'a Value) -> Result<Value> {
        let is_whole = self.enforcement == Enforcement::Whole;
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Bool(_) => return Ok(schema.clone()),
            other if is_whole => bail!("a schema is an object, not {other}"),
            _ => return Ok(json!(true)),
        };
        let (mut kept, mut dropped) = (Map::new(), Vec::new());
        for (key, value) in fields {
            match self.keyword(key, value)? {
                Some(value) => drop(kept.insert(key.clone(), value)),
                None => dropped.push(key.as_str()),
            }
        }
        for (key, dependent) in DEPENDENT {
            if dropped.contains(&key) {
                kept.shift_remove(dependent);
            }
        }
        // Other keywords beside a reference would make a cycle of references an error.
        if let (Some(reference), false) = (kept.get("$ref"), is_whole) {
            return Ok(json!({"$ref": reference}));
        }
        Ok(kept.into())
    }

    /// Returns the new value of a keyword; `None` for one that is dropped.
    fn keyword(&mut self, key: &str, value: &'a Value) -> Result<Option<Value>> {
        let is_void = |void: &[&str]| void.contains(&value.to_string().as_str());
        let new = match ENFORCED.iter().find(|(name, ..)| *name == key) {
            Some(_) if self.beyond.contains(&key) => None,
            Some((_, form, is_structure)) => match self.enforcement {
                Enforcement::Structure if !is_structure => None,
                _ => self.value(form, value)?,
            },
            None => match UNENFORCED.iter().find(|(name, _)| *name == key) {
                Some((_, void)) if !is_void(void) => None,
                _ => return Ok(None),
            },
        };
        ensure!(
            new.is_some() || self.enforcement != Enforcement::Whole,
            "the keyword {key} cannot be enforced"
        );
        Ok(new)
    }

    /// Returns a keyword's value, or `None` if it has not the form that the keyword asks for.
    fn value(&mut self, form: &ValueForm, value: &'a Value) -> Result<Option<Value>> {
        Ok(match (form, value) {
            (Plain(fits), value) => fits(value).then(|| value.clone()),
            (Reference, Value::String(reference)) => {
                self.target(reference).map(|number| format!("#/$defs/{number}").into())
            }
            (ValueForm::Schema, schema) => Some(self.part(schema)?),
            (Schemas | SchemaOrList, Value::Array(list)) if !list.is_empty() => {
                Some(list.iter().map(|part| self.part(part)).collect::<Result<_>>()?)
            }
            (SchemaOrList, schema) if !schema.is_array() => Some(self.part(schema)?),
            (SchemaMap, Value::Object(named)) => {
                let part = |(name, part)| Ok((String::clone(name), self.part(part)?));
                Some(Value::Object(named.iter().map(part).collect::<Result<_>>()?))
            }
            _ => None,
        })
    }

    /// Returns the number of the definition that a reference leads to.
    fn target(&mut self, reference: &str) -> Option<usize> {
        let at = |reference: &str| self.root.pointer(reference.strip_prefix('#')?);
        let mut target = at(reference)?;
        let is_reference = |target: &Value| {
            let parts = target.as_object().map_or(0, Map::len);
            parts == 1 || self.enforcement != Enforcement::Whole
        };
        let mut hops = 0;
        while let Some(next) = target.get("$ref").filter(|_| is_reference(target)) {
            hops += 1;
            target = at(next.as_str()?).filter(|_| hops < MOST_HOPS)?;
        }
        let number = *self.numbers.entry(target).or_insert(self.references.len());
        if number == self.references.len() {
            self.references.push(target);
        }
        Some(number)
    }
}

/// Most bytes of all parts that references lead to.
const MOST_BYTES: usize = 4 << 20;

/// References that may follow each other.
const MOST_HOPS: usize = 100;

/// Returns our settings of llguidance. A lenient compiler drops formats that it does not know, and
/// takes `oneOf` for `anyOf`.
pub fn settings(lenient: bool) -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ",
        "lenient": lenient})
}

/// Returns the schema as llguidance compiles it. Its own `x-guidance` takes precedence over our
/// settings.
pub fn strict(schema: &Value) -> Result<Value> {
    ensure!(*schema != json!(false), "`false` allows nothing");
    let mut object = match enforced(schema, Enforcement::Whole, &[])? {
        Value::Object(object) => object,
        _ => Map::new(),
    };
    let mut options = settings(false);
    match schema.get("x-guidance") {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts that lie in each other are written once for each reference to them, within bounds.
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
        assert_eq!(error, "the keyword uniqueItems cannot be enforced");
        for void in [json!({"uniqueItems": false}), json!({"propertyNames": {"type": "string"}})] {
            assert_eq!(whole(void).unwrap(), json!({}));
        }
    }
}
