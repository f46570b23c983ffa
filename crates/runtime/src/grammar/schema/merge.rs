//! The conjunction of two schemas for one value.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::number::Decimal;

/// Merges a keyword's value with that of another schema, so that both rules hold. Returns false and
/// keeps the first value if no single value expresses both.
pub fn conjoin(key: &str, own: &mut Value, more: &Value) -> bool {
    if own == more {
        return true;
    }
    match (key, &mut *own, more) {
        ("minimum" | "exclusiveMinimum", Value::Number(_), Value::Number(_))
        | ("minLength" | "minItems" | "minProperties", _, _) => stricter(own, more, true),
        ("maximum" | "exclusiveMaximum", Value::Number(_), Value::Number(_))
        | ("maxLength" | "maxItems" | "maxProperties", _, _) => stricter(own, more, false),
        ("required" | "allOf", Value::Array(own), Value::Array(more)) => {
            own.extend_from_slice(more);
            true
        }
        ("properties", Value::Object(own), Value::Object(more)) => {
            for (name, schema) in more {
                match own.get_mut(name) {
                    Some(own) => join(own, schema),
                    None => drop(own.insert(name.clone(), schema.clone())),
                }
            }
            true
        }
        ("items", own @ Value::Object(_), Value::Object(_)) => {
            join(own, more);
            true
        }
        ("additionalProperties", Value::Bool(true), more) => {
            *own = more.clone();
            true
        }
        ("additionalProperties", own, Value::Bool(more)) => {
            if !more {
                *own = json!(false);
            }
            true
        }
        ("nullable", Value::Bool(own), Value::Bool(more)) => {
            *own &= more;
            true
        }
        ("enum", Value::Array(own), Value::Array(more)) => {
            let more: HashSet<String> = more.iter().map(Value::to_string).collect();
            let kept = |value: &&Value| more.contains(&value.to_string());
            let both: Vec<Value> = own.iter().filter(kept).cloned().collect();
            let is_possible = !both.is_empty();
            if is_possible {
                *own = both;
            }
            is_possible
        }
        ("type", own, more) => {
            let both = types_of_both(&types(own), &types(more));
            let is_possible = !both.is_empty();
            if is_possible {
                *own = if both.len() == 1 { json!(both[0]) } else { json!(both) };
            }
            is_possible
        }
        _ => false,
    }
}

/// Replaces a schema by the `allOf` of itself and another one.
fn join(own: &mut Value, more: &Value) {
    let parts = own.as_object_mut().filter(|fields| fields.len() == 1);
    match parts.and_then(|fields| fields.get_mut("allOf")?.as_array_mut()) {
        Some(parts) => parts.push(more.clone()),
        None => *own = json!({"allOf": [own.take(), more]}),
    }
}

/// Keeps the larger or the smaller of two numbers.
fn stricter(own: &mut Value, more: &Value, is_larger: bool) -> bool {
    let (Some(first), Some(second)) = (own.as_number(), more.as_number()) else { return false };
    let (first, second) = (Decimal::new(first), Decimal::new(second));
    if (second > first) == is_larger && second != first {
        *own = more.clone();
    }
    true
}

/// Returns the names in the value of a `type`.
pub fn types(value: &Value) -> Vec<String> {
    match value {
        Value::Array(names) => names.iter().filter_map(Value::as_str).map(String::from).collect(),
        one => one.as_str().map(String::from).into_iter().collect(),
    }
}

fn types_of_both(own: &[String], more: &[String]) -> Vec<String> {
    let is_in = |name: &String, types: &[String]| {
        types.contains(name) || name == "integer" && types.iter().any(|other| other == "number")
    };
    let mut both: Vec<String> = own.iter().filter(|name| is_in(name, more)).cloned().collect();
    for name in more.iter().filter(|name| is_in(name, own)) {
        if !both.contains(name) {
            both.push(name.clone());
        }
    }
    both
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stricter_rule_stays() {
        for (key, own, more, want) in [
            ("minimum", json!(2), json!(3.5), Some(json!(3.5))),
            ("minimum", json!(3), json!(-1), Some(json!(3))),
            (
                "minimum",
                json!(9_007_199_254_740_993u64),
                json!(9_007_199_254_740_992u64),
                Some(json!(9_007_199_254_740_993u64)),
            ),
            ("maximum", json!(2), json!(1e-9), Some(json!(1e-9))),
            ("exclusiveMaximum", json!(9), json!(10), Some(json!(9))),
            ("exclusiveMaximum", json!(9), json!(true), None),
            ("maxLength", json!(9), json!(3), Some(json!(3))),
            ("minItems", json!(1), json!(2), Some(json!(2))),
            ("required", json!(["a"]), json!(["b"]), Some(json!(["a", "b"]))),
            ("enum", json!([1, "x", null]), json!(["x", 1, 2]), Some(json!([1, "x"]))),
            ("enum", json!([1]), json!([2]), None),
            ("type", json!(["number", "null"]), json!("integer"), Some(json!("integer"))),
            ("type", json!("string"), json!(["string", "null"]), Some(json!("string"))),
            ("type", json!("string"), json!("null"), None),
            ("additionalProperties", json!(true), json!({}), Some(json!({}))),
            ("additionalProperties", json!({}), json!(false), Some(json!(false))),
            ("pattern", json!("a"), json!("b"), None),
            ("pattern", json!("a"), json!("a"), Some(json!("a"))),
            ("const", json!(1), json!(2), None),
            (
                "properties",
                json!({"a": true, "b": {"minimum": 1}}),
                json!({"b": {"maximum": 2}, "c": false}),
                Some(json!({"a": true, "b": {"allOf": [{"minimum": 1}, {"maximum": 2}]},
                    "c": false})),
            ),
        ] {
            let mut all = own.clone();
            let is_both = conjoin(key, &mut all, &more);
            assert_eq!(is_both, want.is_some(), "{key} {own} {more}");
            assert_eq!(all, want.unwrap_or(own), "{key} {more}");
        }
    }
}
