//! Rules for an object's property names: patterns and counts.

use anyhow::{Result, ensure};
use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

use super::{Refusal, remedy};
use std::collections::HashSet;

/// Most pairs of pattern and name that are compared.
const MOST_PAIRS: usize = 1000;
/// Most work to decide whether a regular expression matches any text.
const FUEL: u64 = 10_000;

/// Returns an expression for texts that contain a match of a JSON Schema pattern.
fn found(pattern: &str) -> RegexAst {
    RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))
}

/// Returns whether no text matches an expression. Returns false if that is too hard to decide.
fn is_empty(expression: RegexAst) -> bool {
    let mut builder = RegexBuilder::new();
    let Ok(expression) = builder.mk(&expression) else { return false };
    builder.to_regex_limited(expression, FUEL).is_ok_and(|mut regex| regex.always_empty())
}

fn matches(pattern: &str, name: &str) -> bool {
    !is_empty(RegexAst::And(vec![found(pattern), RegexAst::Literal(name.into())]))
}

/// Returns whether `names` are all texts that match a pattern.
fn are_used_up(pattern: &str, names: &[String]) -> bool {
    let names = names.iter().map(|name| RegexAst::Literal(name.clone())).collect();
    let others = RegexAst::Not(Box::new(RegexAst::Or(names)));
    is_empty(RegexAst::And(vec![others, found(pattern)]))
}

/// Fails for a pattern that cannot be compiled.
pub fn check_pattern(keyword: &str, pattern: &str) -> Result<()> {
    let fits = RegexBuilder::new().mk(&found(pattern)).is_ok();
    let why = format!("cannot be enforced: the regular expression {pattern:?} cannot be read");
    ensure!(fits, Refusal::new(keyword, &why, remedy::PATTERN));
    Ok(())
}

/// Rewrites an object's rules for names so that its grammar never gets stuck, and drops bounds
/// without effect. `is_confined` permits compiling patterns.
pub fn settle(fields: &mut Map<String, Value>, is_confined: bool) {
    name_required(fields, is_confined);
    let named = fields.get("properties").and_then(Value::as_object).map_or(0, Map::len);
    let required = required(fields).len() as u64;
    let size = |key: &str| fields.get(key).and_then(Value::as_u64);
    let least_is_void = size("minProperties").is_some_and(|least| least <= required);
    let most_is_void =
        is_closed(fields) && size("maxProperties").is_some_and(|n| n >= named as u64);
    if least_is_void {
        fields.shift_remove("minProperties");
    }
    if most_is_void {
        fields.shift_remove("maxProperties");
    }
}

/// Returns the only name that a pattern matches, if it is a literal name.
fn only_name(pattern: &str) -> Option<&str> {
    let name = pattern.strip_prefix('^')?.strip_suffix('$')?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_- ".contains(c);
    name.chars().all(is_plain).then_some(name)
}

/// Turns required names that match a pattern into properties, and drops patterns that match only
/// names of properties. `is_confined` permits compiling the patterns.
fn name_required(fields: &mut Map<String, Value>, is_confined: bool) {
    let Some(Value::Object(patterns)) = fields.get("patternProperties") else { return };
    let mut patterns = patterns.clone();
    let none = || Value::Object(Map::new());
    let mut properties = fields.get("properties").cloned().unwrap_or_else(none);
    let Some(named) = properties.as_object_mut() else { return };
    let required = required(fields);
    let is_confined = is_confined && patterns.len() * (named.len() + required.len()) <= MOST_PAIRS;
    let only: HashSet<&str> = patterns.keys().filter_map(|pattern| only_name(pattern)).collect();
    let is_match = |name: &str| patterns.keys().any(|pattern| matches(pattern, name));
    for name in required {
        let fits = only.contains(&name[..]) || is_confined && is_match(&name);
        if !named.contains_key(&name) && fits {
            named.insert(name, none());
        }
    }
    let names: Vec<String> = named.keys().cloned().collect();
    patterns.retain(|pattern, schema| {
        let used: Vec<&str> = match only_name(pattern) {
            Some(name) => named.contains_key(name).then_some(name).into_iter().collect(),
            None if is_confined && are_used_up(pattern, &names) => {
                names.iter().map(String::as_str).filter(|name| matches(pattern, name)).collect()
            }
            None => Vec::new(),
        };
        for name in &used {
            let own = named[*name].take();
            let is_any = own == none();
            named[*name] = if is_any { schema.clone() } else { json!({"allOf": [own, schema]}) };
        }
        used.is_empty()
    });
    if !named.is_empty() {
        fields.insert("properties".into(), properties);
    }
    match patterns.is_empty() {
        true => drop(fields.shift_remove("patternProperties")),
        false => fields["patternProperties"] = patterns.into(),
    }
}

/// Returns the required names without duplicates.
fn required(fields: &Map<String, Value>) -> Vec<String> {
    let names = fields.get("required").and_then(Value::as_array).into_iter().flatten();
    let mut known = HashSet::new();
    let names = names.filter_map(Value::as_str).filter(|name| known.insert(*name));
    names.map(String::from).collect()
}

/// Returns whether an object only allows the properties named in the schema.
fn is_closed(fields: &Map<String, Value>) -> bool {
    fields.get("additionalProperties") == Some(&json!(false))
        && !fields.contains_key("patternProperties")
}

/// Fails for bounds on the number of properties that the grammar cannot enforce. The grammar counts
/// free names, which may be repeated, and does not count optional properties.
pub fn check_sizes(fields: &Map<String, Value>) -> Result<()> {
    let size = |key: &str| fields.get(key).and_then(Value::as_u64);
    let (least, most) = (size("minProperties"), size("maxProperties"));
    let required: HashSet<String> = required(fields).into_iter().collect();
    let properties = fields.get("properties").and_then(Value::as_object).into_iter().flatten();
    let optional = properties.filter(|(name, _)| !required.contains(*name)).count();
    let count = required.len() as u64;
    let (more, room) = (least.map_or(0, |least| least.saturating_sub(count)), most);
    let room = room.map(|most| most.saturating_sub(count));
    let keyword = if least.is_some() { "minProperties" } else { "maxProperties" };
    let help = "name the properties in `required`, or leave the bound out";
    let is_simple = more <= 1 && room.is_none_or(|room| room == 1) && is_closed(fields);
    let why = "cannot be enforced: optional properties are not counted";
    ensure!(
        optional == 0 || least.or(most).is_none() || is_simple,
        Refusal::new(keyword, why, help)
    );
    let why = "cannot be enforced: a name that is not in `properties` may come twice";
    ensure!(more <= 1 || is_closed(fields), Refusal::new("minProperties", why, help));
    Ok(())
}
