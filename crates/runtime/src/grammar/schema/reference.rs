//! Resolves `$ref` in a schema: JSON pointers, anchors and `$id` addresses.

use std::collections::HashMap;

use serde_json::Value;

/// Most addresses of a schema, and most bytes per address.
const MOST_ADDRESSES: usize = 1000;
const LONGEST_ADDRESS: usize = 2000;

/// Number of a part with its own address. The whole schema has number 0.
pub type Resource = usize;

/// The parts of a schema that references can name.
pub struct References<'a> {
    /// Parts with an address.
    resources: Vec<(String, &'a Value)>,
    by_address: HashMap<String, Resource>,
    by_node: HashMap<*const Value, Resource>,
    anchors: HashMap<(Resource, &'a str), (&'a Value, Resource)>,
    /// Name of the keyword `$id`, which is `id` in draft 4.
    id: &'static str,
}

impl<'a> References<'a> {
    pub fn new(root: &'a Value) -> References<'a> {
        let draft = root.get("$schema").and_then(Value::as_str).unwrap_or_default();
        let id = if draft.contains("draft-04") { "id" } else { "$id" };
        let (by_node, anchors) = (HashMap::from([(root as *const Value, 0)]), HashMap::new());
        let address = root.get(id).and_then(Value::as_str).unwrap_or_default();
        let address = address.split('#').next().unwrap_or_default().to_owned();
        let by_address = HashMap::from([(address.clone(), 0)]);
        let resources = vec![(address, root)];
        let mut references = References { resources, by_address, by_node, anchors, id };
        references.index(root, 0);
        references
    }

    fn index(&mut self, part: &'a Value, within: Resource) {
        let mut within = within;
        let text = |key: &str| part.get(key).and_then(Value::as_str);
        if let Some((address, anchor)) = text(self.id).map(split) {
            if !address.is_empty() && !self.by_node.contains_key(&(part as *const Value)) {
                let address = joined(&self.resources[within].0, address);
                let fits = address.len() <= LONGEST_ADDRESS;
                if fits && self.resources.len() < MOST_ADDRESSES {
                    within = self.resources.len();
                    self.by_address.insert(address.clone(), within);
                    self.resources.push((address, part));
                    self.by_node.insert(part, within);
                }
            }
            // Up to draft 7 an anchor is an `$id` with only a fragment.
            if !anchor.is_empty() {
                self.anchors.insert((within, anchor), (part, within));
            }
        }
        for key in ["$anchor", "$dynamicAnchor"] {
            if let Some(anchor) = text(key) {
                self.anchors.insert((within, anchor), (part, within));
            }
        }
        match part {
            Value::Object(fields) => {
                let values = ["const", "enum", "default", "examples", "example"];
                for (_, inner) in fields.iter().filter(|(key, _)| !values.contains(&key.as_str())) {
                    self.index(inner, within);
                }
            }
            Value::Array(list) => list.iter().for_each(|inner| self.index(inner, within)),
            _ => {}
        }
    }

    /// Returns the resource of a part that is inside the resource `within`.
    pub fn resource(&self, part: &Value, within: Resource) -> Resource {
        self.by_node.get(&(part as *const Value)).copied().unwrap_or(within)
    }

    /// Returns the target part of a reference in the resource `within`, and the target's resource.
    pub fn target(&self, reference: &str, within: Resource) -> Option<(&'a Value, Resource)> {
        let (address, fragment) = split(reference);
        let resource = match address {
            "" => within,
            address if reference.len() <= LONGEST_ADDRESS => {
                let address = joined(&self.resources[within].0, address);
                *self.by_address.get(&address)?
            }
            _ => return None,
        };
        let decoded = percent_decoded(fragment);
        let at = |pointer: &str| self.pointer(pointer, resource);
        match decoded.as_deref() {
            Some(fragment) if fragment.is_empty() || fragment.starts_with('/') => at(fragment),
            Some(anchor) => return self.anchors.get(&(resource, anchor)).copied(),
            None => None,
        }
        // A name may contain a percent sign that is not an escape.
        .or_else(|| at(fragment))
    }

    fn pointer(&self, pointer: &str, resource: Resource) -> Option<(&'a Value, Resource)> {
        let (mut part, mut within) = (self.resources[resource].1, resource);
        if pointer.is_empty() {
            return Some((part, within));
        }
        for segment in pointer.strip_prefix('/')?.split('/') {
            let name = segment.replace("~1", "/").replace("~0", "~");
            part = match part {
                Value::Object(fields) => fields.get(&name)?,
                Value::Array(list) => list.get(name.parse::<usize>().ok()?)?,
                _ => return None,
            };
            within = self.resource(part, within);
        }
        Some((part, within))
    }

    /// Returns the JSON pointer of a part.
    pub fn place(&self, part: &Value) -> String {
        pointer_to(self.resources[0].1, part).unwrap_or_default()
    }
}

fn pointer_to(tree: &Value, part: &Value) -> Option<String> {
    if std::ptr::eq(tree, part) {
        return Some(String::new());
    }
    match tree {
        Value::Object(fields) => fields.iter().find_map(|(name, inner)| {
            Some(format!("/{}{}", escaped(name), pointer_to(inner, part)?))
        }),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .find_map(|(i, inner)| Some(format!("/{i}{}", pointer_to(inner, part)?))),
        _ => None,
    }
}

/// Escapes a name as a segment of a JSON pointer.
pub fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// Splits a reference into address and fragment.
fn split(reference: &str) -> (&str, &str) {
    reference.split_once('#').unwrap_or((reference, ""))
}

/// Resolves an address relative to the address of the enclosing part.
fn joined(base: &str, address: &str) -> String {
    let scheme = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_alphanumeric() && !"+-.".contains(c))?;
        (end > 0 && text[end..].starts_with(':')).then_some(end + 1)
    };
    let Some(begin) = scheme(base).filter(|_| scheme(address).is_none()) else {
        return address.to_owned();
    };
    let rest = &base[begin..];
    let host = rest.strip_prefix("//").map_or(0, |host| 2 + host.find('/').unwrap_or(host.len()));
    match (address.starts_with('/'), rest.rfind('/').filter(|at| *at >= host)) {
        (true, _) => format!("{}{address}", &base[..begin + host]),
        (false, Some(folder)) => format!("{}{address}", &base[..=begin + folder]),
        (false, None) if host > 0 => format!("{base}/{address}"),
        (false, None) => format!("{}{address}", &base[..begin]),
    }
}

/// Decodes the percent escapes of a fragment; `None` if one is invalid.
fn percent_decoded(fragment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((byte, more)) = rest.split_first() {
        rest = more;
        bytes.push(match byte {
            b'%' => {
                let digits = rest.get(..2).filter(|two| two.iter().all(u8::is_ascii_hexdigit))?;
                rest = &rest[2..];
                u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?
            }
            plain => *plain,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_lead_to_the_parts_that_they_name() {
        let schema = json!({"$id": "https://a.example/dir/root.json", "$defs": {
            "a b/c": {"n": 1}, "50%": {"n": 2},
            "x": {"$anchor": "here", "n": 3},
            "y": {"$id": "y.json", "n": 4, "$defs": {"z": {"$anchor": "here", "n": 5}}},
            "w": {"$id": "/w", "n": 6}, "u": {"$id": "urn:x:1", "n": 7},
            "old": {"$id": "#old", "n": 8},
        }});
        let references = References::new(&schema);
        let y = references.target("y.json", 0).unwrap().1;
        let n = |reference: &str, within| {
            references.target(reference, within).and_then(|(part, _)| part["n"].as_u64())
        };
        for (reference, within, want) in [
            ("#/$defs/a%20b~1c", 0, Some(1)),
            ("#/$defs/a b~1c", 0, Some(1)),
            ("#/$defs/50%25", 0, Some(2)),
            ("#here", 0, Some(3)),
            ("root.json#here", y, Some(3)),
            ("https://a.example/dir/root.json#/$defs/x", y, Some(3)),
            ("#", y, Some(4)),
            ("https://a.example/dir/y.json", 0, Some(4)),
            ("#here", y, Some(5)),
            ("#/$defs/z", y, Some(5)),
            ("#/$defs/y/$defs/z", 0, Some(5)),
            ("https://a.example/w", y, Some(6)),
            ("urn:x:1", 0, Some(7)),
            ("#old", 0, Some(8)),
            ("#/$defs/z", 0, None),
            ("#none", 0, None),
            ("other.json#here", 0, None),
            ("https://b.example/dir/y.json", 0, None),
        ] {
            assert_eq!(n(reference, within), want, "{reference} in {within}");
        }
        let z = references.target("#here", y).unwrap().0;
        assert_eq!(references.place(z), "/$defs/y/$defs/z");
        assert_eq!(references.place(references.target("#/$defs/50%", 0).unwrap().0), "/$defs/50%");
    }
}
