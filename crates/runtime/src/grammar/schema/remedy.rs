//! Remedies for schemas that cannot be used.

pub const FORMAT: &str = "leave the format out, or say it with a pattern; date, time, date-time, \
    duration, email, hostname, ipv4, ipv6, uri and uuid are known";
pub const PATTERN: &str =
    "Rust's regex crate cannot read this regular expression: look-around is not supported";
pub const OTHER: &str = "correct the schema: https://json-schema.org describes the notation";
const REWRITE: &str =
    "leave out or rewrite what is not supported: not, if, uniqueItems and their like";

/// Returns the remedy for a keyword that cannot be enforced.
pub fn of_keyword(keyword: &str) -> &'static str {
    match keyword {
        "type" => "the types are object, array, string, number, integer, boolean and null",
        "$ref" => "a $ref names a part of the same schema, such as #/$defs/NAME",
        "format" => FORMAT,
        "pattern" => PATTERN,
        _ => REWRITE,
    }
}

/// Fragments of llguidance's error messages, each with the affected keyword and the reason.
const ABOUT: [(&str, &str, &str); 7] = [
    ("oneOf constraints are not supported", "oneOf", "two of its schemas may fit one value"),
    ("circular references with sibling keys", "$ref", "it leads to itself"),
    ("are not disjoint", "patternProperties", "a name may match two patterns"),
    ("Regex is empty", "pattern", "no text fits it and the lengths"),
    ("incompatible types", "allOf", "no value has the types of all its schemas"),
    ("is unsatisfiable", "required", "no value fits a property that it names"),
    ("can't determine if patternProperty", "patternProperties", "a name may match two patterns"),
];

/// Returns the affected keyword of a llguidance error, and the reason.
pub fn keyword_of(why: &str) -> Option<(&'static str, &'static str)> {
    let about = ABOUT.iter().find(|(words, ..)| why.contains(words));
    about.map(|(_, keyword, reason)| (*keyword, *reason))
}
