//! Calls between control tokens: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.
//!
//! Keys have no quotes. The token `<|"|>` encloses a string, in which nothing is escaped. The
//! fields of an object are in alphabetical order, as Google's template writes them. An object with
//! named properties has no others, unless the schema describes them. Some schema keywords are not
//! enforced ([`BEYOND`]).

use super::{CallPolicy, Tool};
use crate::grammar::{Enforcement, GrammarSource, LONGEST, schema};
use anyhow::{Context, Result, bail, ensure};
use gemma_base::error::Fault;
use gemma_base::tensor::Token;
use gemma_base::util::json::bytes as json_bytes;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Rules for values without a schema.
const ANY: &str = "\
any: string | any_number | \"true\" | \"false\" | \"null\" | any_object | any_array
any_number: %json {\"type\": \"number\"}
any_object: \"{\" (any_field (\",\" any_field)*)? \"}\"
any_field: KEY \":\" any
any_array: \"[\" (any (\",\" any)*)? \"]\"
KEY: /[^\\x00-\\x20:,{}\\[\\]\"]+/
TEXT: /(?s:.)+/
";

/// Characters that are not allowed in a key, because they begin the next part.
const NO_KEY: &str = ":,{}[]\"";

/// Keywords that this form of calls does not enforce.
const BEYOND: [&str; 6] =
    ["pattern", "format", "multipleOf", "minProperties", "maxProperties", "patternProperties"];

/// Limits of merged schemas per function: their number and their bytes.
const MOST_MERGES: usize = 1000;
const MOST_MERGED: usize = 4 * LONGEST;

/// Nesting depth below which schemas are not merged. A reference to an enclosing schema would
/// otherwise add depth forever.
const MOST_DEPTH: usize = 64;

/// Longest expression that is written inline. A longer one gets its own rule.
const SHORT: usize = 200;

/// Returns the grammar. `marks` are the tokens before and after a call, and around a string.
pub fn source(
    tools: &[Tool],
    calls: CallPolicy,
    many: bool,
    marks: [Token; 3],
    answer: Option<&str>,
    enforcement: Enforcement,
) -> Result<GrammarSource> {
    let [begin, end, quote] = marks;
    let more = if many { " call*" } else { "" };
    let start = match (calls, answer) {
        (CallPolicy::Optional, None) => "TEXT | TEXT? calls |".into(),
        (CallPolicy::Optional, Some(schema)) => format!("answer | calls\n{schema}"),
        (CallPolicy::Required, _) => "calls".to_owned(),
    };
    let any: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let mut text = format!("start: {start}\ncalls: call{more}\ncall: {}\n{ANY}", any.join(" | "));
    writeln!(text, "string: <[{quote}]> TEXT? <[{quote}]>")?;
    for (i, tool) in tools.iter().enumerate() {
        let root = &tool.arguments(enforcement, &BEYOND)?;
        let mut rules = Rules {
            root,
            quote,
            prefix: i,
            text: String::new(),
            next: 0,
            known: HashMap::new(),
            open: Vec::new(),
            merges: 0,
            merged: 0,
            depth: 0,
        };
        let arguments = rules.all().map_err(|why| tool.fault(&format!("{why:#}")))?;
        ensure!(text.len() + rules.text.len() <= LONGEST, too_complex());
        let name = &tool.name;
        let head = Value::from(format!("call:{name}"));
        writeln!(text, "call_{i}: <[{begin}]> {head} {arguments} <[{end}]>\n{}", rules.text)?;
    }
    Ok(GrammarSource::Lark(text))
}

/// Rules of one function.
struct Rules<'a> {
    root: &'a Value,
    quote: Token,
    /// Index of the function.
    prefix: usize,
    text: String,
    /// Number of the next rule.
    next: usize,
    /// Rule names of definitions, by their references.
    known: HashMap<String, String>,
    /// Definitions that still need a rule.
    open: Vec<(String, &'a Value)>,
    /// Number and bytes of merged schemas.
    merges: usize,
    merged: usize,
    /// Nesting depth of the current schema. It may be wrong after an error, which ends the
    /// function.
    depth: usize,
}

fn too_complex() -> Fault {
    Fault::usage("the functions are too complex together").help("send fewer functions")
}

impl<'a> Rules<'a> {
    /// Writes all rules, and returns the expression of the arguments.
    fn all(&mut self) -> Result<String> {
        let arguments = self.value(self.root)?;
        // A worklist, since definitions may form a reference chain of any length.
        while let Some((name, schema)) = self.open.pop() {
            let value = self.value(schema)?;
            self.text += &format!("{name}: {value}\n");
        }
        Ok(arguments)
    }

    /// Adds a rule and returns its name.
    fn rule(&mut self, body: &str) -> String {
        self.add("v", body)
    }

    fn add(&mut self, kind: &str, body: &str) -> String {
        let name = format!("{kind}_{}_{}", self.prefix, self.next);
        self.next += 1;
        self.text += &format!("{name}: {body}\n");
        name
    }

    /// Returns a short expression for values that match a schema.
    fn value(&mut self, schema: &Value) -> Result<String> {
        self.depth += 1;
        let expression = self.expression(schema)?;
        self.depth -= 1;
        Ok(if expression.len() > SHORT { self.rule(&expression) } else { expression })
    }

    fn expression(&mut self, schema: &Value) -> Result<String> {
        ensure!(self.text.len() <= LONGEST, "its parameters are too complex");
        let Value::Object(fields) = schema else {
            ensure!(*schema == json!(true), "`false` allows nothing");
            return Ok("any".into());
        };
        if let Some(reference) = fields.get("$ref") {
            return self.definition(reference.as_str().unwrap_or_default());
        }
        if let Some(value) = fields.get("const") {
            return Ok(self.literal(value));
        }
        if let Some(values) = fields.get("enum").and_then(Value::as_array) {
            ensure!(!values.is_empty(), "an enum allows nothing");
            let values: Vec<String> = values.iter().map(|value| self.literal(value)).collect();
            return Ok(format!("({})", values.join(" | ")));
        }
        if fields.get("allOf").is_some_and(Value::is_array) {
            return match self.conjunction(fields) {
                Some(all) => self.expression(&all.into()),
                None => Ok("any".into()),
            };
        }
        for key in ["anyOf", "oneOf"] {
            let Some(Value::Array(options)) = fields.get(key) else { continue };
            let mut others = fields.clone();
            others.shift_remove(key);
            let mut values = Vec::with_capacity(options.len());
            let size = json_bytes(&others.clone().into());
            for option in options.iter().filter(|option| **option != json!(false)) {
                values.push(match others.is_empty() {
                    true => self.value(option)?,
                    false => match self.merged_with(&others, size, option) {
                        Some(all) => self.value(&all.into())?,
                        None => self.value(option)?,
                    },
                });
            }
            ensure!(!values.is_empty(), "{key} allows nothing");
            return Ok(format!("({})", values.join(" | ")));
        }
        let types: Vec<&str> = match fields.get("type") {
            None if fields.contains_key("properties") => vec!["object"],
            None => return Ok("any".into()),
            Some(Value::Array(types)) => types.iter().filter_map(Value::as_str).collect(),
            Some(one) => one.as_str().into_iter().collect(),
        };
        let mut values: Vec<String> =
            types.iter().map(|kind| self.typed(kind, fields)).collect::<Result<_>>()?;
        if fields.get("nullable") == Some(&json!(true)) {
            values.push("\"null\"".into());
        }
        Ok(if values.len() == 1 { values.remove(0) } else { format!("({})", values.join(" | ")) })
    }

    fn typed(&mut self, kind: &str, fields: &Map<String, Value>) -> Result<String> {
        let size = |key: &str| fields.get(key).and_then(Value::as_u64);
        Ok(match kind {
            "null" => "\"null\"".into(),
            "boolean" => "(\"true\" | \"false\")".into(),
            "integer" | "number" => {
                let keys = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
                let bounds = fields.iter().filter(|(key, _)| keys.contains(&key.as_str()));
                let mut bounds: Map<String, Value> =
                    bounds.map(|(key, bound)| (key.clone(), bound.clone())).collect();
                match schema::exact_number(&bounds, kind == "integer")? {
                    Some(terminal) => self.add("N", &terminal),
                    None => {
                        bounds.insert("type".into(), json!(kind));
                        self.rule(&format!("%json {}", Value::from(bounds)))
                    }
                }
            }
            "string" => match (size("minLength").unwrap_or(0), size("maxLength")) {
                (0, None) => "string".into(),
                (least, most) => {
                    let most = most.map(|most| most.to_string()).unwrap_or_default();
                    let quote = self.quote;
                    let text = self.add("T", &format!("/(?s:.){{{},{most}}}/", least.max(1)));
                    let optional = if least == 0 { "?" } else { "" };
                    self.rule(&format!("<[{quote}]> {text}{optional} <[{quote}]>"))
                }
            },
            "array" => {
                let item = match fields.get("items") {
                    Some(items) if items.is_object() && !fields.contains_key("prefixItems") => {
                        self.value(items)?
                    }
                    _ => "any".into(),
                };
                let item = self.rule(&item);
                let least = size("minItems").unwrap_or(0);
                let more = least.saturating_sub(1);
                let items = match size("maxItems") {
                    Some(0) => String::new(),
                    None if more == 0 => format!("{item} (\",\" {item})*"),
                    None => format!("{item} (\",\" {item}){{{more},}}"),
                    Some(most) => format!("{item} (\",\" {item}){{{more},{}}}", most.max(1) - 1),
                };
                let optional = if least == 0 && !items.is_empty() { "?" } else { "" };
                let items = if items.is_empty() { items } else { format!("({items}){optional}") };
                self.rule(&format!("\"[\" {items} \"]\""))
            }
            "object" => self.object(fields)?,
            other => bail!("{other:?} is not a type"),
        })
    }

    /// Returns a rule for an object with these properties, or for any object if none are named.
    fn object(&mut self, fields: &Map<String, Value>) -> Result<String> {
        let (none, additional) = (Map::new(), fields.get("additionalProperties"));
        let properties = fields.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let more = match additional {
            Some(Value::Bool(false)) => None,
            Some(Value::Object(schema)) if !schema.is_empty() => {
                let value = self.value(&additional.cloned().unwrap_or_default())?;
                Some(self.rule(&format!("KEY \":\" {value}")))
            }
            None if !properties.is_empty() => None,
            _ => Some("any_field".to_owned()),
        };
        let required: HashSet<&str> = fields
            .get("required")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let mut names: Vec<&String> = properties.keys().collect();
        names.sort_by_key(|name| name.to_lowercase());
        let mut parts: Vec<(String, bool)> = Vec::new();
        for name in names {
            let is_required = required.contains(&name.as_str());
            let wrong =
                name.is_empty() || name.contains(|c: char| c.is_control() || NO_KEY.contains(c));
            if !is_required && (wrong || properties[name] == json!(false)) {
                continue;
            }
            ensure!(!wrong, "the name {name:?} of a property cannot be written in a call");
            let value = self.value(&properties[name])?;
            let key = Value::from(format!("{name}:"));
            parts.push((self.rule(&format!("{key} {value}")), is_required));
        }
        // `rest` matches the part after a field. The loop runs from the last field to the first. A
        // field may come first if no field before it is required.
        let mut rest = more.as_ref().map_or("\"\"".into(), |more| format!("(\",\" {more})*"));
        let mut firsts: Vec<String> = more.iter().map(|more| format!("{more} {rest}")).collect();
        for (field, is_required) in parts.iter().rev() {
            if *is_required {
                firsts.clear();
            }
            firsts.push(format!("{field} {rest}"));
            let optional = if *is_required { "" } else { "?" };
            rest = self.rule(&format!("(\",\" {field}){optional} {rest}"));
        }
        if !parts.iter().any(|(_, is_required)| *is_required) {
            firsts.push("\"\"".into());
        }
        Ok(self.rule(&format!("\"{{\" ({}) \"}}\"", firsts.join(" | "))))
    }

    /// Returns a schema with the keywords of all parts of its `allOf`, recursively. Returns `None`
    /// like [`merge`](Self::merge).
    fn conjunction(&mut self, fields: &Map<String, Value>) -> Option<Map<String, Value>> {
        let mut all = fields.clone();
        // One schema collects all parts, regardless of their number.
        while let Some(Value::Array(parts)) = all.shift_remove("allOf") {
            parts.iter().try_for_each(|part| self.merge(&mut all, part))?;
        }
        Some(all)
    }

    /// Returns a schema of `size` bytes merged with the keywords of another one. Returns `None`
    /// like [`merge`](Self::merge).
    fn merged_with(
        &mut self,
        schema: &Map<String, Value>,
        size: usize,
        part: &Value,
    ) -> Option<Map<String, Value>> {
        self.merged += size;
        (self.merged <= MOST_MERGED && self.depth <= MOST_DEPTH).then_some(())?;
        let mut all = schema.clone();
        self.merge(&mut all, part)?;
        Some(all)
    }

    /// Merges the keywords of another schema for the same value.
    ///
    /// Keeps the stricter of two bounds, and the first of two rules that no keyword can express
    /// together. Returns `None` if too much is merged, as in a cycle.
    fn merge(&mut self, all: &mut Map<String, Value>, part: &Value) -> Option<()> {
        let target = part.get("$ref").and_then(|to| self.root.pointer(&to.as_str()?[1..]));
        let part = target.unwrap_or(part);
        self.merges += 1;
        self.merged += json_bytes(part);
        (self.merges <= MOST_MERGES && self.merged <= MOST_MERGED).then_some(())?;
        let fields = part.as_object().into_iter().flatten();
        for (key, value) in fields {
            match all.get_mut(key) {
                None => drop(all.insert(key.clone(), value.clone())),
                Some(own) => drop(schema::conjoin(key, own, value)),
            }
        }
        Some(())
    }

    /// Returns the rule of a definition, which may refer to itself.
    fn definition(&mut self, reference: &str) -> Result<String> {
        if let Some(name) = self.known.get(reference) {
            return Ok(name.clone());
        }
        let schema = reference.strip_prefix('#').and_then(|at| self.root.pointer(at));
        let schema = schema
            .with_context(|| format!("$ref {reference:?} does not name a part of the schema"))?;
        let name = format!("d_{}_{}", self.prefix, self.known.len());
        self.known.insert(reference.into(), name.clone());
        self.open.push((name.clone(), schema));
        Ok(name)
    }

    /// Returns an expression for one value.
    fn literal(&self, value: &Value) -> String {
        let quote = self.quote;
        let list = |items: Vec<String>| items.join(" \",\" ");
        match value {
            Value::String(text) if text.is_empty() => format!("<[{quote}]> <[{quote}]>"),
            Value::String(_) => format!("<[{quote}]> {value} <[{quote}]>"),
            Value::Array(items) => {
                format!("\"[\" {} \"]\"", list(items.iter().map(|v| self.literal(v)).collect()))
            }
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                fields.sort_by_key(|(name, _)| name.to_lowercase());
                let field = |(k, v): (&String, &Value)| {
                    format!("{} {}", Value::from(format!("{k}:")), self.literal(v))
                };
                format!("\"{{\" {} \"}}\"", list(fields.into_iter().map(field).collect()))
            }
            plain => Value::from(plain.to_string()).to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{self as tools, call_marks};
    use super::*;
    use crate::grammar::Grammars;
    use gemma_model::models::Special;
    use gemma_model::models::tokenizer::samples::thinking_letters;
    use std::sync::Arc;

    /// Returns whether each text is allowed, and whether the answer may end after it.
    fn follows(
        parameters: &[Value],
        (calls, many): (CallPolicy, bool),
        texts: &[&str],
    ) -> Vec<(bool, bool)> {
        let tool = |(i, parameters): (usize, &Value)| Tool {
            name: format!("f{i}"),
            description: None,
            parameters: parameters.clone(),
            strict: false,
        };
        let tools: Vec<Tool> = parameters.iter().enumerate().map(tool).collect();
        let tokenizer = Arc::new(thinking_letters());
        let grammars = Grammars::new(tokenizer.clone(), &[1], 1).unwrap();
        let (marks, level) = (call_marks(&tokenizer), Enforcement::Expressible);
        let source = tools::source(&tools, calls, many, &marks, None, level).unwrap();
        let rule = grammars.compile(&source, &|| true).unwrap().follow(0);
        let one = |text: &&str| {
            let text = text.replace('\'', "<|\"|>");
            let tokens = tokenizer.encode(&text, Special::Parse).unwrap();
            let fits =
                (0..tokens.len()).all(|n| rule.mask(&tokens[..n]).unwrap().allows(tokens[n]));
            (fits, fits && rule.is_complete(&tokens))
        };
        texts.iter().map(one).collect()
    }

    #[test]
    fn calls_cannot_be_malformed() {
        let city = json!({"type": "object", "properties": {"city": {"type": "string"}},
            "required": ["city"]});
        let tools = [city, Value::Null];
        let (rome, now) = (
            "<|tool_call>call:f0{city:'Ro \"}me'}<tool_call|>",
            "<|tool_call>call:f1{}<tool_call|>",
        );
        let empty = "<|tool_call>call:f0{city:''}<tool_call|>";
        let both = format!("{now}{rome}");
        let whole = [rome, now, empty];
        for calls in [CallPolicy::Optional, CallPolicy::Required] {
            assert_eq!(follows(&tools, (calls, true), &whole), [(true, true); 3]);
            let wrong = [
                "<|tool_call>call:f2",
                "<|tool_call>call:f0{}",
                "<|tool_call>call:f0{city:Rome",
                "<|tool_call>call:f1{a:1",
                "<|tool_call>f0",
            ];
            assert!(follows(&tools, (calls, true), &wrong).iter().all(|(fits, _)| !fits));
            let open = ["<|tool_call>call:f0{city:'Ro", "<|tool_call>call:f1{}"];
            assert_eq!(follows(&tools, (calls, true), &open), [(true, false); 2]);
            assert_eq!(follows(&tools, (calls, true), &[&both]), [(true, true)]);
            assert!(!follows(&tools, (calls, false), &[&both])[0].0);
        }
        let free = (CallPolicy::Optional, true);
        let said = format!("Let me {{see}}.\n{rome}");
        assert_eq!(follows(&tools, free, &["It is {late}", &said]), [(true, true); 2]);
        let required = (CallPolicy::Required, true);
        assert!(!follows(&tools, required, &["It"])[0].0);
    }

    #[test]
    fn values_follow_their_schemas() {
        let schemas = [json!({"type": "object", "required": ["b", "E"],
        "$defs": {"tree": {"type": "object", "properties": {
            "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}, "n": {"type": "null"}}}},
        "properties": {
            "E": {"enum": ["x", 1, null, ["y"], ""]},
            "a": {"type": "integer", "minimum": 3, "maximum": 20},
            "b": {"type": ["boolean", "null"]},
            "c": {"type": "string", "minLength": 1, "maxLength": 3},
            "d": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
            "f": {"$ref": "#/$defs/tree"},
            "g": {},
            "h": {"anyOf": [{"const": true}, {"type": "string"}], "description": "x"},
        }})];
        let fits = |arguments: &str| {
            let text = format!("<|tool_call>call:f0{{{arguments}}}<tool_call|>");
            follows(&schemas, (CallPolicy::Required, false), &[&text])[0] == (true, true)
        };
        for good in [
            "b:true,E:'x'",
            "a:3,b:null,E:1",
            "a:20,b:false,c:'abc',d:[1,-2.5],E:null,f:{kids:[{},{n:null}],n:null},\
                g:{x:['y',1.5]},h:'z'",
            "b:true,d:[1e3],E:['y'],g:'any',h:true",
            "b:true,E:'',f:{}",
        ] {
            assert!(fits(good), "{good}");
        }
        for bad in [
            "",
            "b:true",
            "E:'x',b:true",
            "a:2,b:true,E:1",
            "a:21,b:true,E:1",
            "b:1,E:1",
            "b:true,c:'',E:1",
            "b:true,c:'abcd',E:1",
            "b:true,d:[],E:1",
            "b:true,d:[1,2,3],E:1",
            "b:true,E:'y'",
            "b:true,E:1,f:{n:1}",
            "b:true,E:1,h:false",
            "b:true,E:1,z:1",
            "b:true,E:1,",
        ] {
            assert!(!fits(bad), "{bad}");
        }
    }

    #[test]
    fn schemas_that_cannot_be_written_are_refused() {
        for (strict, parameters) in [
            (false, json!([])),
            (false, json!({"type": "string"})),
            (false, json!({"properties": {"a:b": {}}, "required": ["a:b"]})),
            (true, json!({"properties": {"a": {"$ref": "#/x"}}})),
            (true, json!({"properties": {"a": {"type": "text"}}})),
            (true, json!({"properties": {"a": {"not": {}}}})),
            (true, json!({"properties": {"a": {"type": "string", "pattern": "x"}}})),
        ] {
            let tool = Tool { name: "f".into(), description: None, parameters, strict };
            let (marks, level) = ([1, 2, 3], Enforcement::Structure);
            let error = source(&[tool], CallPolicy::Required, true, marks, None, level);
            let error = error.unwrap_err();
            assert_eq!(gemma_base::error::fault_of(&error).unwrap().kind.exit_code(), 2);
            assert!(error.to_string().starts_with("function \"f\": "), "{error}");
        }
    }

    #[test]
    fn parts_of_a_schema_become_one() {
        let base = json!({"type": "object", "properties": {"a": {"type": "null"}}});
        let schemas = [json!({"$defs": {"base": base}, "properties": {
            "x": {"allOf": [{"$ref": "#/$defs/base"}, {"required": ["b"],
                "properties": {"b": {"type": "boolean"}}}]},
            "y": {"type": "object", "properties": {"c": {"type": "boolean"},
                "d": {"type": "boolean"}}, "anyOf": [{"required": ["c"]}, {"required": ["d"]}]},
            "w": {"allOf": [{"type": "integer", "minimum": 3, "maximum": 9},
                {"minimum": 5, "maximum": 20}]},
            "v": {"allOf": [{"type": "object", "properties": {"n": {"type": "integer"}}},
                {"properties": {"n": {"maximum": 4}}, "required": ["n"]}]},
            "z": {"properties": {"e": {"type": "null"}, "f[0]": {}}, "not": {"required": ["e"]},
                "additionalProperties": {"type": "string"}},
        }})];
        let fits = |arguments: &str| {
            let text = format!("<|tool_call>call:f0{{{arguments}}}<tool_call|>");
            follows(&schemas, (CallPolicy::Required, false), &[&text])[0] == (true, true)
        };
        for good in [
            "x:{a:null,b:true}",
            "x:{b:true}",
            "y:{c:true}",
            "y:{d:true}",
            "z:{e:null,g:'1'}",
            "z:{g:'1'}",
            "x:{b:true},y:{c:true,d:false},z:{}",
            "w:5",
            "w:9",
            "v:{n:4}",
        ] {
            assert!(fits(good), "{good}");
        }
        let mut bad = vec!["x:{}", "x:{a:null}", "y:{}", "y:{e:1}", "z:{e:1}", "z:{g:1}"];
        bad.extend(["w:4", "w:10", "v:{n:5}", "v:{}"]);
        for bad in bad {
            assert!(!fits(bad), "{bad}");
        }
    }
}
