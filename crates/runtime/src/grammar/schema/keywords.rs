//! The keywords that a grammar enforces, and rewriting of schemas to them.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

use super::reference::{References, Resource, escaped};
use super::{Refusal, merge, number, object, remedy};
use gemma_base::util::json as tree;

/// How completely a grammar enforces a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// Completely. A keyword that no grammar can express is an error.
    Whole,
    /// As far as a grammar can express it. Other keywords are dropped.
    Expressible,
    /// Only types, names and choices, for a schema that is otherwise too complex.
    Structure,
}

/// Form of a keyword's value.
enum ValueForm {
    Plain(fn(&Value) -> bool),
    /// A non-negative integer that bounds a size from below or above.
    Size(Extreme),
    Reference,
    Schema,
    Schemas,
    /// A schema, or a list of schemas for the first items.
    SchemaOrList,
    /// Schemas by name.
    SchemaMap,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Extreme {
    Least,
    Most,
}

use Extreme::{Least, Most};
use ValueForm::{Plain, Reference, SchemaMap, SchemaOrList, Schemas, Size};

/// A size that no answer reaches. An upper bound from here on has no effect.
const UNREACHED: u64 = 1 << 26;

/// Keywords that a grammar enforces, and whether [`Enforcement::Structure`] keeps them.
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
    ("minProperties", Size(Least), false),
    ("maxProperties", Size(Most), false),
    ("items", SchemaOrList, true),
    ("prefixItems", Schemas, true),
    ("additionalItems", ValueForm::Schema, true),
    ("minItems", Size(Least), false),
    ("maxItems", Size(Most), false),
    ("minLength", Size(Least), false),
    ("maxLength", Size(Most), false),
    ("pattern", Plain(is_pattern), false),
    ("format", Plain(Value::is_string), false),
    ("minimum", Plain(Value::is_number), false),
    ("maximum", Plain(Value::is_number), false),
    ("exclusiveMinimum", Plain(is_bound), false),
    ("exclusiveMaximum", Plain(is_bound), false),
    ("multipleOf", Plain(Value::is_number), false),
    ("$schema", Plain(Value::is_string), true),
];

/// Keywords that no grammar enforces, each with the values that have no effect.
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

/// Numeric keywords, which can be too large for exact grammars.
pub const NUMERIC: [&str; 7] =
    ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

/// Pairs: if the first keyword is dropped, the second one would forbid more.
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

/// Rewrites a schema to the keywords that a grammar enforces, without annotations.
///
/// The result allows everything that `schema` allows. References point to `$defs` of the root.
/// `beyond` lists further keywords that the grammar does not enforce. Errors are [`Refusal`]s.
pub fn enforced(schema: &Value, enforcement: Enforcement, beyond: &[&str]) -> Result<Value> {
    rewritten(schema, enforcement, beyond, false)
}

/// Like [`enforced`]. `is_confined` permits compiling patterns, which may use any amount of time
/// and memory.
pub fn rewritten(
    schema: &Value,
    enforcement: Enforcement,
    beyond: &[&str],
    is_confined: bool,
) -> Result<Value> {
    let draft = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
    let is_old = ["draft-04", "draft-06", "draft-07"].iter().any(|old| draft.contains(old));
    let (targets, numbers) = (Vec::new(), HashMap::new());
    let references = References::new(schema);
    let mut rewriter =
        Rewriter { references, enforcement, beyond, is_old, is_confined, targets, numbers };
    let mut whole = rewriter.part(schema, 0)?;
    let mut definitions = Map::new();
    let mut bytes = 0;
    while let Some((target, within)) = rewriter.targets.get(definitions.len()).copied() {
        // A part may be nested in several referenced parts; each of them has a copy of it.
        bytes += tree::bytes(target);
        ensure!(bytes <= MOST_BYTES, Refusal::form("its references lead to too much"));
        let name = definitions.len().to_string();
        let part = rewriter.part(target, within);
        let part = part.map_err(|error| at(error, &rewriter.references.place(target)))?;
        definitions.insert(name, part);
    }
    if let (false, Value::Object(fields)) = (definitions.is_empty(), &mut whole) {
        fields.insert("$defs".into(), definitions.into());
    }
    Ok(whole)
}

/// Prepends a location to a refusal.
pub fn at(error: anyhow::Error, place: &str) -> anyhow::Error {
    match error.downcast::<Refusal>() {
        Ok(refusal) => refusal.within(place).into(),
        Err(error) => error,
    }
}

struct Rewriter<'a> {
    references: References<'a>,
    enforcement: Enforcement,
    beyond: &'a [&'a str],
    /// Whether references ignore other keywords next to them, as up to draft 7.
    is_old: bool,
    is_confined: bool,
    /// Targets of references by definition number, and their numbers.
    targets: Vec<(&'a Value, Resource)>,
    numbers: HashMap<*const Value, usize>,
}

impl<'a> Rewriter<'a> {
    fn part(&mut self, schema: &'a Value, within: Resource) -> Result<Value> {
        let is_whole = self.enforcement == Enforcement::Whole;
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Bool(_) => return Ok(schema.clone()),
            other if is_whole => {
                return Err(Refusal::form(format!("a schema is an object, not {other}")).into());
            }
            _ => return Ok(json!(true)),
        };
        let within = self.references.resource(schema, within);
        let (mut kept, mut dropped) = (Map::new(), Vec::new());
        let is_alone = self.is_old && fields.get("$ref").is_some_and(Value::is_string);
        for (key, value) in fields.iter().filter(|(key, _)| !is_alone || *key == "$ref") {
            match self.keyword(key, value, within)? {
                Some(value) => drop(kept.insert(key.clone(), value)),
                None => dropped.push(key.as_str()),
            }
        }
        for (key, dependent) in DEPENDENT {
            if dropped.contains(&key) {
                kept.shift_remove(dependent);
            }
        }
        // Keeping other keywords next to a reference would make a cycle of references an error.
        if let (Some(reference), false) = (kept.get("$ref"), is_whole) {
            return Ok(json!({"$ref": reference}));
        }
        number::settle(&mut kept);
        object::settle(&mut kept, self.is_confined);
        if is_whole {
            self.check(&kept)?;
        }
        Ok(kept.into())
    }

    /// Returns the new value of a keyword; `None` if it is dropped.
    fn keyword(&mut self, key: &str, value: &'a Value, within: Resource) -> Result<Option<Value>> {
        let is_void = |void: &[&str]| void.contains(&value.to_string().as_str());
        let new = match ENFORCED.iter().find(|(name, ..)| *name == key) {
            Some(_) if self.beyond.contains(&key) => None,
            Some((_, Size(Most), _)) if size(value).is_some_and(|most| most >= UNREACHED) => {
                return Ok(None);
            }
            Some((_, form, is_structure)) => match self.enforcement {
                Enforcement::Structure if !is_structure => None,
                _ => self.value(form, key, value, within)?,
            },
            None => match UNENFORCED.iter().find(|(name, _)| *name == key) {
                Some((_, void)) if !is_void(void) => None,
                _ => return Ok(None),
            },
        };
        ensure!(
            new.is_some() || self.enforcement != Enforcement::Whole,
            Refusal::new(key, "cannot be enforced", remedy::of_keyword(key))
        );
        Ok(new)
    }

    /// Returns a keyword's rewritten value, or `None` if the value has the wrong form.
    fn value(
        &mut self,
        form: &ValueForm,
        key: &str,
        value: &'a Value,
        within: Resource,
    ) -> Result<Option<Value>> {
        let mut part = |schema: &'a Value, inner: &str| {
            self.part(schema, within).map_err(|error| at(error, &format!("/{key}{inner}")))
        };
        Ok(match (form, value) {
            (Plain(fits), value) => fits(value).then(|| value.clone()),
            (Size(_), value) => size(value).filter(|size| *size < UNREACHED).map(Value::from),
            (Reference, Value::String(reference)) => {
                let number = self.target(reference, within);
                number.map(|number| format!("#/$defs/{number}").into())
            }
            (ValueForm::Schema, schema) => Some(part(schema, "")?),
            (Schemas | SchemaOrList, Value::Array(list)) if !list.is_empty() => {
                let parts = list.iter().enumerate();
                let parts = parts.map(|(i, schema)| part(schema, &format!("/{i}")));
                Some(parts.collect::<Result<_>>()?)
            }
            (SchemaOrList, schema) if !schema.is_array() => Some(part(schema, "")?),
            (SchemaMap, Value::Object(named)) => {
                let part = |(name, schema): (&'a String, &'a Value)| {
                    Ok((name.clone(), part(schema, &format!("/{}", escaped(name)))?))
                };
                Some(Value::Object(named.iter().map(part).collect::<Result<_>>()?))
            }
            _ => None,
        })
    }

    /// Returns the definition number of a reference's target.
    fn target(&mut self, reference: &str, within: Resource) -> Option<usize> {
        let (mut target, mut within) = self.references.target(reference, within)?;
        let is_reference = |target: &Value| {
            let parts = target.as_object().map_or(0, Map::len);
            parts == 1 || self.is_old || self.enforcement != Enforcement::Whole
        };
        let mut hops = 0;
        while let Some(next) = target.get("$ref").filter(|_| is_reference(target)) {
            hops += 1;
            let next = next.as_str().filter(|_| hops < MOST_HOPS)?;
            (target, within) = self.references.target(next, within)?;
        }
        let number = *self.numbers.entry(target).or_insert(self.targets.len());
        if number == self.targets.len() {
            self.targets.push((target, within));
        }
        Some(number)
    }

    /// Fails for keywords of one part that the grammar would enforce differently from their
    /// meaning.
    fn check(&self, fields: &Map<String, Value>) -> Result<()> {
        let types = fields.get("type").map(merge::types);
        let allows =
            |kind: &str| types.as_ref().is_none_or(|types| types.iter().any(|name| name == kind));
        let text = |key: &str| fields.get(key).and_then(Value::as_str);
        if let Some(format) = text("format").filter(|_| allows("string")) {
            let why = format!("cannot be enforced: the format {format:?} is not known");
            ensure!(FORMATS.contains(&format), Refusal::new("format", &why, remedy::FORMAT));
        }
        if self.is_confined {
            let names = fields.get("patternProperties").and_then(Value::as_object);
            let names =
                names.into_iter().flatten().map(|(name, _)| ("patternProperties", &name[..]));
            for (keyword, pattern) in
                text("pattern").map(|text| ("pattern", text)).into_iter().chain(names)
            {
                object::check_pattern(keyword, pattern)?;
            }
        }
        if allows("object") { object::check_sizes(fields) } else { Ok(()) }
    }
}

/// Most total bytes of referenced parts.
const MOST_BYTES: usize = 4 << 20;

/// Longest chain of references.
const MOST_HOPS: usize = 100;

/// Returns a size. JSON Schema allows 5.0 for 5.
fn size(value: &Value) -> Option<u64> {
    let whole = |float: &f64| *float >= 0.0 && float.fract() == 0.0;
    value.as_u64().or_else(|| value.as_f64().filter(whole).map(|float| float as u64))
}

/// Formats of strings that llguidance knows.
const FORMATS: [&str; 10] =
    ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"];
