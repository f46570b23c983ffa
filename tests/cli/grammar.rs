//! Answers under a grammar, from the command line: they fit, drafts do not change them, and
//! keywords that cannot be enforced are reported.

use crate::shell;
use serde::Deserialize;
use serde_json::{Value, json};
use shell::{Run, gemma, gemma_in};
use std::fs;
use std::path::Path;

/// The schemas below as types that refuse all other values.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Person {
    name: String,
    age: u8,
    tags: Vec<String>,
    pet: Option<Pet>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pet {
    kind: Kind,
    weight: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Cat,
    Dog,
}

/// Returns a schema of bounded answers. A number without `multipleOf` could have any length.
fn person() -> Value {
    json!({
        "$defs": {"pet": {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]},
            "weight": {"type": "number", "minimum": 0, "maximum": 90, "multipleOf": 0.5}},
            "required": ["kind", "weight"], "additionalProperties": false}},
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1,
                "maxItems": 3},
            "pet": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]}},
        "required": ["name", "age", "tags", "pet"], "additionalProperties": false,
    })
}

/// Parses an answer and checks it against the schema's bounds and the only allowed spelling.
#[track_caller]
fn check(text: &str) {
    let p: Person = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    let short = |s: &String, most: usize| s.chars().count() <= most;
    assert!(
        !p.name.is_empty() && short(&p.name, 20) && p.age <= 130 && (1..=3).contains(&p.tags.len()),
        "{text:?}"
    );
    assert!(p.tags.iter().all(|tag| short(tag, 8)), "{text:?}");
    assert!(
        p.pet
            .is_none_or(|pet| matches!(pet.kind, Kind::Cat | Kind::Dog)
                && (0.0..=90.0).contains(&pet.weight)),
        "{text:?}"
    );
    // Outside of strings, the only spaces are those after `,` and `:`.
    let mut outside = String::new();
    let (mut inside, mut escaped) = (false, false);
    for c in text.chars() {
        let quote = c == '"' && !escaped;
        escaped = inside && c == '\\' && !escaped;
        inside ^= quote;
        if !inside {
            outside.push(c);
        }
    }
    assert!(!outside.replace(", ", "").replace(": ", "").contains(char::is_whitespace), "{text:?}");
}

fn batch(dir: &Path, records: &[Value], more: &[&str]) -> Vec<Value> {
    let input: String = records.iter().map(|record| format!("{record}\n")).collect();
    let run = gemma_in(
        dir,
        &[&["generate", "--batch", "-q", "--seed", "3"], more].concat(),
        input.as_bytes(),
    )
    .ok();
    run.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns records of this program's form and of OpenAI's in turn.
fn records(count: usize) -> Vec<Value> {
    let prompts = [
        "Describe a person.",
        "Who lives next door?",
        "Invent somebody who likes rain.",
        "Why is the sky blue?",
    ];
    let record = |n: usize| {
        let prompt = format!("{} ({n})", prompts[n % 4]);
        let format = json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true,
            "schema": person()}});
        match n % 2 {
            0 => json!({"id": n, "prompt": prompt, "json_schema": person(), "temperature": 1}),
            _ => {
                json!({"custom_id": n.to_string(), "url": "/v1/chat/completions",
                    "body": {"messages": [{"role": "user", "content": prompt}],
                "temperature": 1, "response_format": format}})
            }
        }
    };
    (0..count).map(record).collect()
}

fn text(reply: &Value) -> &str {
    let theirs = reply.pointer("/response/body/choices/0/message/content");
    theirs.unwrap_or(&reply["text"]).as_str().unwrap_or_else(|| panic!("{reply}"))
}

#[test]
fn answers_fit_their_schema_and_drafts_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let records = records(12);
    let plain = batch(dir.path(), &records, &["--draft", "off"]);
    assert_eq!(plain.len(), records.len());
    for reply in &plain {
        assert!(reply["error"].is_null(), "{reply}");
        check(text(reply));
    }
    for draft in [
        &[][..],
        &["--draft-tree", "12"],
        &["--draft", "ngram", "-t", "1"],
        &["--draft-tree", "chain", "--draft-tokens", "4"],
    ] {
        assert!(batch(dir.path(), &records, draft) == plain, "{draft:?}");
    }
    let rules = [
        (json!({"id": 1, "prompt": "A number?", "regex": "[1-9][0-9]{3}"}), r"4"),
        (
            json!({"id": 2, "prompt": "A sum?",
                "grammar": "start: n \" + \" n \" = \" n\nn: /[0-9]{1,3}/"}),
            " + ",
        ),
        (
            json!({"id": 3, "prompt": "Data?", "response_format": {"type": "json_object"},
                "max_tokens": 2000}),
            "{",
        ),
    ];
    for (record, holds) in rules {
        let [plain, drafted] = ["off", "auto"].map(|draft| {
            batch(dir.path(), std::slice::from_ref(&record), &["--draft", draft]).remove(0)
        });
        assert_eq!(plain, drafted);
        match record["id"].as_u64() {
            Some(1) => {
                assert!((1000..10000).contains(&text(&plain).parse::<u32>().unwrap()), "{plain}")
            }
            Some(3) if plain["error"].is_null() => {
                assert!(serde_json::from_str::<Value>(text(&plain)).unwrap().is_object())
            }
            Some(3) => assert_eq!(plain["error"]["code"], 8),
            _ => assert!(text(&plain).contains(holds) && plain["error"].is_null(), "{plain}"),
        }
    }
}

/// Forced parts of a text need fewer passes, with and without drafts.
#[test]
fn what_a_schema_fixes_is_drafted_for_nothing() {
    let schema = json!({"const": {"kind": "photosynthesis", "needs": ["light", "water", 
        "carbon dioxide"], "gives": ["sugar", "oxygen"]}});
    let run = |draft: &[&str]| {
        let schema = schema.to_string();
        let args =
            [&["generate", "Hi.", "--format", "json", "-q", "--json-schema", &schema], draft]
                .concat();
        gemma(&args, b"").ok().json()
    };
    let (plain, drafted) =
        (run(&["--draft", "off"]), run(&["--draft", "ngram", "--draft-tree", "16"]));
    assert_eq!(plain["text"], drafted["text"]);
    assert_eq!(
        serde_json::from_str::<Value>(plain["text"].as_str().unwrap()).unwrap(),
        schema["const"]
    );
    let passes = |result: &Value| result["draft"]["passes"].as_u64().unwrap();
    assert!(
        passes(&drafted) * 3 < passes(&plain),
        "{} passes and {}",
        passes(&drafted),
        passes(&plain)
    );
    let source = &drafted["draft"]["sources"][0];
    assert_eq!(
        (&source["name"], &source["drafted"]),
        (&json!("grammar"), &source["accepted"]),
        "{drafted}"
    );
}

/// Grammars that allow endless white space elsewhere end here, or the answer is reported as cut
/// off.
#[test]
fn schemas_that_loop_elsewhere_end() {
    let text = json!({"type": "string"});
    let schemas = [
        json!({"type": "array", "items": text}),
        json!({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
        json!({"type": "object", "additionalProperties": {"type": "number"}}),
        json!({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": text},
            "required": ["b"]}}, "required": ["a"]}),
    ];
    let prompt = "Write long, pretty-printed JSON.";
    let record = |(n, schema): (usize, &Value)| {
        json!({"id": n, "prompt": prompt,
        "json_schema": schema, "max_tokens": 3000, "temperature": 1})
    };
    let records: Vec<Value> = schemas.iter().enumerate().map(record).collect();
    let dir = tempfile::tempdir().unwrap();
    for reply in batch(dir.path(), &records, &[]) {
        assert_eq!(reply["finish_reason"], "stop", "{reply}");
        serde_json::from_str::<Value>(reply["text"].as_str().unwrap()).unwrap();
    }
}

#[test]
fn an_answer_that_is_cut_short_is_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let schema = person().to_string();
    let run = |more: &[&str]| {
        gemma_in(
            dir.path(),
            &[&["generate", "Hi.", "--seed", "1", "--json-schema", &schema], more].concat(),
            b"",
        )
    };
    let cut = |run: &Run| {
        assert_eq!(run.code, 8, "{run:?}");
        assert!(
            run.err.contains("cut off after 5 tokens")
                && run.err.contains("help: raise --max-tokens"),
            "{}",
            run.err
        );
    };
    let plain = run(&["-n", "5", "--draft", "off"]);
    cut(&plain);
    assert!(plain.text().starts_with(r#"{"name""#), "the text so far stays: {plain:?}");
    let drafted = run(&["-n", "5", "--draft-tree", "9"]);
    cut(&drafted);
    assert_eq!(plain.text(), drafted.text());
    let result = run(&["-n", "5", "--format", "json"]);
    cut(&result);
    let result = result.json();
    assert_eq!(result["finish_reason"], "length");
    assert!(result["error"].as_str().unwrap().contains("cut off"), "{result}");
    cut(&run(&["-n", "5", "-o", "out.json"]));
    assert!(!dir.path().join("out.json").exists(), "a file appears complete or not at all");
    let stopped = run(&["--stop", "name", "-n", "50"]);
    assert_eq!((stopped.code, stopped.text()), (8, r#"{""#), "{}", stopped.err);
    let replies = batch(
        dir.path(),
        &[
            json!({"id": 1, "prompt": "Hi.", "json_schema": person(), "max_tokens": 5}),
            json!({"prompt": "Hi.", "max_tokens": 3}),
        ],
        &[],
    );
    assert_eq!(
        (&replies[0]["error"]["code"], &replies[0]["finish_reason"], &replies[1]["error"]),
        (&json!(8), &json!("error"), &Value::Null)
    );
}

/// Grammars that would need unlimited memory, time or stack. Each is refused within the limits, and
/// the other records are answered.
#[cfg(unix)]
#[test]
fn grammars_that_take_too_much_are_refused_alone() {
    let dir = tempfile::tempdir().unwrap();
    let terms: Vec<String> = (0..150).map(|n| format!("/.*{n}.*/")).collect();
    let intersection = format!("start: A\nA: {}\n", terms.join(" & "));
    let rules: String = (0..10_000).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    let rules = format!("start: r0\n{rules}r10000: \"x\"\n");
    let deep = format!("{}a{}", "(".repeat(100_000), ")".repeat(100_000));
    let refs: serde_json::Map<String, Value> = (0..5_000)
        .map(|n| (format!("a{n}"), json!({"$ref": format!("#/$defs/a{}", n + 1)})))
        .chain([("a5000".to_owned(), json!({"type": "boolean"}))])
        .collect();
    let constraints = [
        json!({"regex": "a?".repeat(60_000)}),
        json!({"regex": "(a|b)?".repeat(40_000)}),
        json!({"regex": deep}),
        json!({"json_schema": {"type": "string", "pattern": "a?".repeat(20_000)}}),
        json!({"json_schema": {"$defs": refs, "$ref": "#/$defs/a0"}}),
        json!({"grammar": intersection}),
        json!({"grammar": rules}),
        json!({"grammar": "start: \"a\"{1000000000}"}),
        json!({"regex": "a".repeat(300_000)}),
        json!({"regex": "a|b"}),
    ];
    let records: Vec<Value> = constraints
        .iter()
        .map(|constraint| {
            let mut record = json!({"prompt": "Hi.", "max_tokens": 4});
            record.as_object_mut().unwrap().extend(constraint.as_object().unwrap().clone());
            record
        })
        .collect();
    fs::write(
        dir.path().join("in.jsonl"),
        records.iter().map(|record| format!("{record}\n")).collect::<String>(),
    )
    .unwrap();
    // Less memory than any of the grammars would need.
    let script = "ulimit -v 1500000; \"$G\" generate --batch in.jsonl --draft off -o out.jsonl";
    let run = shell::bash(dir.path(), script);
    assert_eq!(run.code, 0, "{run:?}");
    let replies = fs::read_to_string(dir.path().join("out.jsonl")).unwrap();
    let replies: Vec<Value> =
        replies.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(replies.len(), records.len());
    let (last, refused) = replies.split_last().unwrap();
    for reply in refused {
        let shown: String = reply.to_string().chars().take(300).collect();
        // A grammar that compiles may still allow too long an answer.
        assert!(matches!(reply["error"]["code"].as_u64(), None | Some(2)), "{shown}");
    }
    let errors = refused.iter().filter(|reply| !reply["error"].is_null());
    assert!(errors.count() >= 7, "{replies:?}");
    assert!(["a", "b"].contains(&text(last)), "{last}");
}

#[test]
fn what_cannot_be_kept_is_refused_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let fails = |args: &[&str], code: i32, words: &[&str]| {
        gemma_in(dir.path(), &[&["generate", "Hi."], args].concat(), b"").fails(code, words);
    };
    let bad = json!({"properties": {"a": {"items": {"type": "string", "not": {"const": "x"}}}}})
        .to_string();
    fails(&["--json-schema", &bad], 2, &["at /properties/a/items", "not", "help:"]);
    fails(
        &["--json-schema", "{\"type\": }"],
        2,
        &["--json-schema is not valid JSON", "line 1 column 10"],
    );
    fails(&["--json-schema", "@absent.json"], 3, &["absent.json"]);
    fs::write(dir.path().join("s.json"), "{\n  \"type\": strin\n}").unwrap();
    fails(&["--json-schema", "@s.json"], 2, &["s.json", "line 2"]);
    fs::write(dir.path().join("g.lark"), "start: \"a\"\n  | other\n").unwrap();
    fails(&["--grammar", "g.lark"], 2, &["other", "help:"]);
    fails(&["--regex", "(a"], 2, &["regular expression"]);
    fails(&["--regex", "a", "--json-schema", "{}"], 2, &["--regex", "--json-schema"]);
    fails(&["--regex", "a", "--ignore-eos"], 2, &["--ignore-eos"]);
    gemma_in(
        dir.path(),
        &["generate", "--batch", "-", "--regex", "(a"],
        b"{\"prompt\": \"Hi.\"}\n",
    )
    .fails(2, &["regular expression"]);
    let records = [
        json!({"id": 1, "prompt": "Hi.", "json_schema": {"type": "strin"}}),
        json!({"id": 2, "prompt": "Hi.", "response_format": {"type": "xml"}}),
        json!({"id": 3, "prompt": "Hi.", "regex": "a|b"}),
        json!({"id": 4, "prompt": "Hi.", "response_format": {"type": "text"}, "max_tokens": 4}),
        json!({"id": 5, "prompt": "Hi."}),
    ];
    let replies = batch(dir.path(), &records, &["--regex", "c|d"]);
    let codes: Vec<_> = replies.iter().map(|reply| reply["error"]["code"].as_u64()).collect();
    assert_eq!(codes, [Some(2), Some(3), None, None, None]);
    assert!(
        ["a", "b"].contains(&text(&replies[2])) && ["c", "d"].contains(&text(&replies[4])),
        "{replies:?}"
    );
    assert!(!["c", "d"].contains(&text(&replies[3])), "{replies:?}");
}
