//! Lark rules for schemas with numbers that llguidance does not represent exactly.
//!
//! llguidance compiles schemas itself, but reads all numbers as `f64`. A part with larger integers
//! becomes rules here; all other parts stay schemas. Start at [`expression`].

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::number::{self, Range};
use super::reference::escaped;
use super::{Refusal, keywords, merge, remedy};
use crate::grammar::LONGEST;

/// Most parts of a schema that are converted to rules.
const MOST_PARTS: usize = 20_000;

/// Returns an expression for the texts that a rewritten schema allows, and the rules that the
/// expression uses. Names of rules begin with `prefix`. `options` are settings for llguidance.
pub fn expression(schema: &Value, options: &Value, prefix: &str) -> Result<(String, String)> {
    let exact = exact_definitions(schema);
    let mut writer = GrammarWriter {
        root: schema,
        options,
        prefix,
        exact,
        rules: String::new(),
        next: 0,
        parts: 0,
        known: HashMap::new(),
        open: Vec::new(),
    };
    let start = writer.value(schema)?;
    while let Some((name, target)) = writer.open.pop() {
        let reference = || format!("/$defs/{target}");
        let schema = schema.pointer(&reference()).context("a definition is missing")?;
        let value = writer.value(schema).map_err(|error| keywords::at(error, &reference()))?;
        writer.rules += &format!("{name}: {value}\n");
    }
    Ok((start, writer.rules))
}

/// Returns whether a schema from [`keywords::enforced`] has numbers that llguidance would change.
pub fn is_needed(schema: &Value) -> bool {
    is_exact(schema, &exact_definitions(schema))
}

/// Returns a terminal for numbers with these bounds, or `None` if llguidance enforces the bounds
/// itself. Fails if there is no number between the bounds.
pub fn number(fields: &Map<String, Value>, is_integer: bool) -> Result<Option<String>> {
    let range = Range::new(fields);
    if range.is_plain() {
        return Ok(None);
    }
    let bound = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"];
    let bound = bound.into_iter().find(|key| fields.contains_key(*key)).unwrap_or("minimum");
    let why = "cannot be enforced together with these bounds";
    ensure!(
        !fields.contains_key("multipleOf"),
        Refusal::new("multipleOf", why, "leave multipleOf or the bounds out")
    );
    let terminal = range.terminal(is_integer);
    let why = "contradicts the other bounds: no number is between them";
    Ok(Some(terminal.with_context(|| Refusal::new(bound, why, remedy::OTHER))?))
}

/// Returns the direct subschemas of a schema.
fn parts(schema: &Value) -> impl Iterator<Item = &Value> {
    let one = ["items", "additionalProperties", "additionalItems"];
    let many = ["anyOf", "allOf", "oneOf", "prefixItems", "items"];
    let named = ["properties", "patternProperties"];
    let one = one.into_iter().filter_map(|key| schema.get(key)).filter(|part| part.is_object());
    let many = many.into_iter().filter_map(|key| schema.get(key)?.as_array()).flatten();
    let named = named.into_iter().filter_map(|key| schema.get(key)?.as_object());
    one.chain(many).chain(named.flat_map(Map::values))
}

fn definition(schema: &Value) -> Option<&str> {
    schema.get("$ref")?.as_str()?.strip_prefix("#/$defs/")
}

/// Returns whether a part or its subschemas have numbers that llguidance would change.
fn is_exact(schema: &Value, exact: &HashSet<String>) -> bool {
    let Value::Object(fields) = schema else { return false };
    has_exact_numbers(fields)
        || definition(schema).is_some_and(|name| exact.contains(name))
        || parts(schema).any(|part| is_exact(part, exact))
}

fn has_exact_numbers(fields: &Map<String, Value>) -> bool {
    let types = fields.get("type").map(merge::types);
    let has_numbers = types.is_none_or(|types| {
        types.iter().any(|name| ["number", "integer"].contains(&name.as_str()))
    });
    has_numbers && !Range::new(fields).is_plain()
        || ["const", "enum"].iter().any(|key| fields.get(*key).is_some_and(has_large_number))
}

fn has_large_number(value: &Value) -> bool {
    match value {
        Value::Number(number) => !number::is_plain(number),
        Value::Array(list) => list.iter().any(has_large_number),
        Value::Object(fields) => fields.values().any(has_large_number),
        _ => false,
    }
}

/// Returns the names of the definitions with such numbers, including by reference.
fn exact_definitions(root: &Value) -> HashSet<String> {
    let none = Map::new();
    let definitions = root.get("$defs").and_then(Value::as_object).unwrap_or(&none);
    let mut users: HashMap<&str, Vec<&str>> = HashMap::new();
    let (mut exact, mut open) = (HashSet::new(), Vec::new());
    for (name, schema) in definitions {
        let mut inside = vec![schema];
        while let Some(part) = inside.pop() {
            if let Some(target) = definition(part) {
                users.entry(target).or_default().push(name);
            }
            if part.as_object().is_some_and(has_exact_numbers) {
                open.push(&name[..]);
            }
            inside.extend(parts(part));
        }
    }
    while let Some(name) = open.pop() {
        if exact.insert(name.to_owned()) {
            open.extend(users.get(name).into_iter().flatten());
        }
    }
    exact
}

struct GrammarWriter<'a> {
    root: &'a Value,
    options: &'a Value,
    prefix: &'a str,
    /// Names of definitions that become rules.
    exact: HashSet<String>,
    rules: String,
    /// Number of the next rule.
    next: usize,
    parts: usize,
    /// Rule names of definitions.
    known: HashMap<String, String>,
    /// Definitions that still need a rule.
    open: Vec<(String, String)>,
}

impl GrammarWriter<'_> {
    fn add(&mut self, name: String, body: &str) -> String {
        self.next += 1;
        self.rules += &format!("{name}: {body}\n");
        name
    }

    fn rule(&mut self, body: &str) -> String {
        self.add(format!("{}_{}", self.prefix, self.next), body)
    }

    fn terminal(&mut self, body: &str) -> String {
        self.add(format!("{}_{}", self.prefix.to_uppercase(), self.next), body)
    }

    /// Returns a rule for a schema that llguidance enforces.
    fn plain(&mut self, mut schema: Value) -> String {
        if let Value::Bool(_) = schema {
            schema = json!({});
        }
        let needs_definitions = has_reference(&schema);
        if let Value::Object(fields) = &mut schema {
            if let (true, Some(definitions)) = (needs_definitions, self.root.get("$defs")) {
                fields.insert("$defs".into(), definitions.clone());
            }
            fields.insert("x-guidance".into(), self.options.clone());
        }
        self.rule(&format!("%json {schema}"))
    }

    fn value(&mut self, schema: &Value) -> Result<String> {
        self.parts += 1;
        let is_short = self.parts <= MOST_PARTS && self.rules.len() <= LONGEST;
        ensure!(is_short, Refusal::form("it is too complex for exact numbers"));
        let Value::Object(fields) = schema else {
            ensure!(*schema != json!(false), Refusal::form("`false` allows nothing"));
            return Ok(self.plain(schema.clone()));
        };
        if !is_exact(schema, &self.exact) {
            return Ok(self.plain(schema.clone()));
        }
        let fields = self.with_all(fields)?;
        if let Some(name) = definition(schema).filter(|_| fields.contains_key("$ref")) {
            ensure!(
                fields.len() == 1 || fields.len() == 2 && fields.contains_key("$defs"),
                combined("$ref")
            );
            return Ok(self.definition(name));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(options)) = fields.get(key) {
                return self.any(key, options, &fields);
            }
        }
        if fields.contains_key("const") || fields.contains_key("enum") {
            return self.constants(&fields);
        }
        let all = ["null", "boolean", "number", "string", "array", "object"].map(String::from);
        let types = fields.get("type").map_or(all.to_vec(), merge::types);
        let values = types.iter().map(|kind| self.typed(kind, &fields));
        let values: Vec<String> = values.collect::<Result<_>>()?;
        Ok(self.rule(&values.join(" | ")))
    }

    fn definition(&mut self, name: &str) -> String {
        if let Some(rule) = self.known.get(name) {
            return rule.clone();
        }
        let rule = format!("{}_d{}", self.prefix, self.known.len());
        self.known.insert(name.into(), rule.clone());
        self.open.push((rule.clone(), name.into()));
        rule
    }

    /// Returns the keywords of a schema, merged with those of its `allOf`.
    fn with_all(&mut self, fields: &Map<String, Value>) -> Result<Map<String, Value>> {
        let mut all = fields.clone();
        let mut hops = 0;
        while let Some(Value::Array(parts)) = all.shift_remove("allOf") {
            for part in &parts {
                hops += 1;
                ensure!(hops <= MOST_MERGED, combined("allOf"));
                let place = || self.root.pointer(&format!("/$defs/{}", definition(part)?));
                let part = match part.as_object().is_some_and(|part| part.len() == 1) {
                    true => place().unwrap_or(part),
                    false => part,
                };
                merged(&mut all, part)?;
            }
        }
        Ok(all)
    }

    /// Returns a rule for alternatives that share the other keywords.
    fn any(&mut self, key: &str, options: &[Value], fields: &Map<String, Value>) -> Result<String> {
        let mut shared = fields.clone();
        for other in [key, "$defs"] {
            shared.shift_remove(other);
        }
        if key == "oneOf" {
            let pairs = options.iter().enumerate();
            let mut pairs = pairs.flat_map(|(i, a)| options[..i].iter().map(move |b| (a, b)));
            let why = "cannot be enforced: two of its schemas may fit one value";
            let is_known = options.len() <= MOST_OPTIONS && pairs.all(|(a, b)| are_disjoint(a, b));
            ensure!(is_known, Refusal::new(key, why, remedy::of_keyword(key)));
        }
        let mut values = Vec::new();
        for (i, option) in options.iter().enumerate().filter(|(_, option)| **option != json!(false))
        {
            let mut all = shared.clone();
            let value = match shared.is_empty() {
                true => self.value(option),
                false => merged(&mut all, option).and_then(|()| self.value(&all.into())),
            };
            values.push(value.map_err(|error| keywords::at(error, &format!("/{key}/{i}")))?);
        }
        ensure!(!values.is_empty(), Refusal::new(key, "allows nothing", remedy::OTHER));
        Ok(self.rule(&values.join(" | ")))
    }

    /// Returns a terminal for the values of `const` or `enum` that the other keywords allow.
    fn constants(&mut self, fields: &Map<String, Value>) -> Result<String> {
        let types = fields.get("type").map(merge::types);
        let range = Range::new(fields);
        let known = ["const", "enum", "type", "nullable", "$schema", "$defs"];
        let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
        for key in fields.keys() {
            ensure!(known.contains(&key.as_str()) || bounds.contains(&key.as_str()), combined(key));
        }
        let fits = |value: &&Value| {
            types.as_ref().is_none_or(|types| types.iter().any(|kind| is_of(value, kind)))
                && value.as_number().is_none_or(|number| range.contains(number))
        };
        let values = match (fields.get("const"), fields.get("enum").and_then(Value::as_array)) {
            (Some(value), None) => vec![value],
            (Some(value), Some(values)) if values.contains(value) => vec![value],
            (Some(_), Some(_)) => Vec::new(),
            (None, values) => values.into_iter().flatten().collect(),
        };
        let keyword = if fields.contains_key("const") { "const" } else { "enum" };
        // One terminal for all scalar values. Values with parts use the parts of %json.
        let (mut texts, mut options) = (Vec::new(), Vec::new());
        for value in values.into_iter().filter(fits) {
            let text = literal(value);
            let why = "cannot be enforced: it has a number beyond 64 bits";
            let help = "write the number as a string";
            let text = text.with_context(|| Refusal::new(keyword, why, help))?;
            let has_parts = value.is_array() || value.is_object();
            if has_parts { &mut options } else { &mut texts }.push(text);
        }
        let why = "contradicts the other keywords: they allow none of its values";
        let is_empty = texts.is_empty() && options.is_empty();
        ensure!(!is_empty, Refusal::new(keyword, why, remedy::OTHER));
        if !texts.is_empty() {
            options.push(self.terminal(&texts.join(" | ")));
        }
        Ok(self.rule(&options.join(" | ")))
    }

    fn typed(&mut self, kind: &str, fields: &Map<String, Value>) -> Result<String> {
        match kind {
            "integer" | "number" => {
                if let Some(terminal) = number(fields, kind == "integer")? {
                    return Ok(self.terminal(&terminal));
                }
            }
            "object" => return self.object(fields),
            "array" => return self.array(fields),
            _ => {}
        }
        let mut fields = fields.clone();
        for key in ["$ref", "$defs", "nullable"].into_iter().chain(CONTAINERS) {
            fields.shift_remove(key);
        }
        fields.insert("type".into(), json!(kind));
        Ok(self.plain(fields.into()))
    }

    fn object(&mut self, fields: &Map<String, Value>) -> Result<String> {
        for key in ["patternProperties", "minProperties", "maxProperties"] {
            ensure!(!fields.contains_key(key), combined(key));
        }
        let none = Map::new();
        let properties = fields.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let additional = fields.get("additionalProperties").unwrap_or(&Value::Bool(true));
        let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
        let required: Vec<&str> = required.filter_map(Value::as_str).collect();
        let is_required: HashSet<&str> = required.iter().copied().collect();
        let mut taken: HashSet<&str> = properties.keys().map(String::as_str).collect();
        let mut members: Vec<(String, bool)> = Vec::new();
        let mut named: Vec<(&str, &Value)> =
            properties.iter().map(|(name, schema)| (&name[..], schema)).collect();
        named.extend(
            required.into_iter().filter(|name| taken.insert(name)).map(|n| (n, additional)),
        );
        for (name, schema) in named {
            let is_required = is_required.contains(name);
            if *schema == json!(false) && !is_required {
                continue;
            }
            let place = || format!("/properties/{}", escaped(name));
            let value = self.value(schema).map_err(|error| keywords::at(error, &place()))?;
            members.push((self.rule(&format!("{} {value}", key(name))), is_required));
        }
        let more = match additional {
            Value::Bool(false) => None,
            schema => {
                let place = |error| keywords::at(error, "/additionalProperties");
                let value = self.value(schema).map_err(place)?;
                let key = self.free_name(&taken);
                Some(self.rule(&format!("{key} \": \" {value}")))
            }
        };
        // `rest` matches the part after a member. The loop runs from the last member to the first.
        // A member may come first if no member before it is required.
        let mut rest = more.as_ref().map_or("\"\"".into(), |more| format!("(\", \" {more})*"));
        let mut firsts: Vec<String> = more.iter().map(|more| format!("{more} {rest}")).collect();
        for (member, is_required) in members.iter().rev() {
            if *is_required {
                firsts.clear();
            }
            firsts.push(format!("{member} {rest}"));
            let optional = if *is_required { "" } else { "?" };
            rest = self.rule(&format!("(\", \" {member}){optional} {rest}"));
        }
        if !members.iter().any(|(_, is_required)| *is_required) {
            firsts.push("\"\"".into());
        }
        Ok(self.rule(&format!("\"{{\" ({}) \"}}\"", firsts.join(" | "))))
    }

    /// Returns a terminal for unused names. A name has only one spelling.
    fn free_name(&mut self, taken: &HashSet<&str>) -> String {
        let any = r#"/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/"#;
        if taken.is_empty() {
            return self.terminal(any);
        }
        let mut names: Vec<String> = taken.iter().map(|name| json!(name).to_string()).collect();
        names.sort();
        let names: Vec<String> = names.iter().map(|name| quoted(name)).collect();
        self.terminal(&format!("{any} & ~({})", names.join(" | ")))
    }

    fn array(&mut self, fields: &Map<String, Value>) -> Result<String> {
        let size = |key: &str| fields.get(key).and_then(Value::as_u64).map(|n| n as usize);
        let (least, most) = (size("minItems").unwrap_or(0), size("maxItems"));
        let yes = Value::Bool(true);
        let (first, rest, key) = match (fields.get("items"), fields.get("prefixItems")) {
            (Some(Value::Array(first)), _) => (&first[..], fields.get("additionalItems"), "items"),
            (items, Some(Value::Array(first))) => (&first[..], items, "prefixItems"),
            (items, _) => (&[][..], items, "items"),
        };
        let end = first.iter().position(|item| *item == json!(false)).unwrap_or(first.len());
        let rest = rest.unwrap_or(&yes);
        let is_closed = end < first.len() || *rest == json!(false);
        let most = match is_closed {
            true => Some(most.map_or(end, |most| most.min(end))),
            false => most,
        };
        let why = "contradicts the other keywords: no array has that many items";
        ensure!(
            most.is_none_or(|most| least <= most),
            Refusal::new("minItems", why, remedy::OTHER)
        );
        let first = &first[..end.min(most.unwrap_or(end))];
        let mut items = Vec::new();
        for (i, item) in first.iter().enumerate() {
            let value = self.value(item);
            items.push(value.map_err(|error| keywords::at(error, &format!("/{key}/{i}")))?);
        }
        let (low, high) =
            (least.saturating_sub(items.len()), most.map(|most| most.saturating_sub(items.len())));
        let times = |low: usize, high: Option<usize>| {
            format!("{{{low},{}}}", high.map(|high| high.to_string()).unwrap_or_default())
        };
        let mut tail = "\"\"".to_owned();
        if high != Some(0) {
            let item = self.value(rest).map_err(|error| keywords::at(error, "/items"))?;
            let more = |low, high| format!("(\", \" {item}){}", times(low, high));
            tail = match items.is_empty() {
                false => more(low, high),
                true => {
                    let all = format!("{item} {}", more(low.max(1) - 1, high.map(|n| n - 1)));
                    if low == 0 { format!("({all})?") } else { all }
                }
            };
        }
        for (i, item) in items.iter().enumerate().rev() {
            let comma = if i == 0 { "" } else { "\", \" " };
            let all = format!("{comma}{item} {tail}");
            tail = if i < least { self.rule(&all) } else { self.rule(&format!("({all})?")) };
        }
        Ok(self.rule(&format!("\"[\" {tail} \"]\"")))
    }
}

/// Returns an expression for a name and its colon, split like those of %json, because the lexer
/// takes the longest match.
fn key(name: &str) -> String {
    format!("{} \": \"", quoted(&json!(name).to_string()))
}

fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// Returns an expression for a value, or `None` if it contains a number that is not known exactly.
fn literal(value: &Value) -> Option<String> {
    let separator = " \", \" ";
    Some(match value {
        Value::Number(number) => quoted(&number::exact_text(number)?),
        Value::Array(list) => {
            let items: Option<Vec<_>> = list.iter().map(literal).collect();
            format!("\"[\" {} \"]\"", items?.join(separator))
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| {
                Some(format!("{} {}", key(name), literal(value)?))
            };
            let fields: Option<Vec<_>> = fields.iter().map(field).collect();
            format!("\"{{\" {} \"}}\"", fields?.join(separator))
        }
        other => quoted(&other.to_string()),
    })
}

/// Keywords of objects and arrays.
const CONTAINERS: [&str; 11] = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
];

/// Most parts of `allOf` for one value, and most alternatives that are compared pairwise.
const MOST_MERGED: usize = 1000;
const MOST_OPTIONS: usize = 100;

fn combined(keyword: &str) -> Refusal {
    let why = "cannot be enforced in a part with numbers beyond 2^53";
    Refusal::new(keyword, why, "write such numbers as strings, or leave the keyword out")
}

fn has_reference(schema: &Value) -> bool {
    schema.get("$ref").is_some() || parts(schema).any(has_reference)
}

/// Merges the keywords of another schema for the same value.
fn merged(all: &mut Map<String, Value>, part: &Value) -> Result<()> {
    let fields = match part {
        Value::Object(fields) => fields,
        Value::Bool(true) => return Ok(()),
        _ => bail!(Refusal::form("`false` allows nothing")),
    };
    // These keywords refer to the names in their own schema.
    for key in ["additionalProperties", "patternProperties", "prefixItems", "additionalItems"] {
        let is_shared = fields.contains_key(key) || all.contains_key(key);
        let others = if key.ends_with("Properties") { "properties" } else { "items" };
        let is_both = fields.contains_key(others) || all.contains_key(others);
        ensure!(!(is_shared && is_both), combined(key));
    }
    for (key, value) in fields.iter().filter(|(key, _)| *key != "$defs") {
        match all.get_mut(key) {
            Some(own) => ensure!(merge::conjoin(key, own, value), combined(key)),
            None => drop(all.insert(key.clone(), value.clone())),
        }
    }
    Ok(())
}

fn is_of(value: &Value, kind: &str) -> bool {
    match (value, kind) {
        (Value::Number(number), "integer") => {
            number.as_f64().is_some_and(|number| number.fract() == 0.0)
        }
        _ => kind_of(value) == kind,
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Returns whether the schemas certainly have no common value.
fn are_disjoint(a: &Value, b: &Value) -> bool {
    let kinds = |schema: &Value| match (values(schema), schema.get("type").map(merge::types)) {
        (Some(values), _) => Some(values.into_iter().map(kind_of).map(String::from).collect()),
        (None, types) => types.map(|types| {
            let plain = |kind: String| if kind == "integer" { "number".into() } else { kind };
            types.into_iter().map(plain).collect::<Vec<String>>()
        }),
    };
    let (Some(first), Some(second)) = (kinds(a), kinds(b)) else { return false };
    if first.iter().all(|kind| !second.contains(kind)) {
        return true;
    }
    if let (Some(first), Some(second)) = (values(a), values(b)) {
        return first.iter().all(|value| second.iter().all(|other| !are_equal(value, other)));
    }
    let is_object = |kinds: &[String]| kinds == ["object"];
    let requires = |schema: &Value, name: &str| {
        let names = schema.get("required").and_then(Value::as_array);
        names.is_some_and(|names| names.iter().any(|other| other == name))
    };
    let property = |schema: &'_ Value, name: &str| schema.get("properties")?.get(name).cloned();
    let named = a.get("properties").and_then(Value::as_object).into_iter().flatten();
    is_object(&first)
        && is_object(&second)
        && named.into_iter().any(|(name, own)| {
            (requires(a, name) || requires(b, name))
                && property(b, name).is_some_and(|other| are_disjoint(own, &other))
        })
}

/// Returns the values of a `const` or an `enum`.
fn values(schema: &Value) -> Option<Vec<&Value>> {
    let one = schema.get("const").map(|value| vec![value]);
    one.or_else(|| Some(schema.get("enum")?.as_array()?.iter().collect()))
}

fn are_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => number::Decimal::new(a) == number::Decimal::new(b),
        // Objects and arrays may differ only in the spelling of numbers.
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => true,
        _ => a == b,
    }
}
