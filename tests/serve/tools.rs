//! Schemas of functions that public MCP servers and agents declare.
//!
//! `tools.jsonl` has a function on each line: {"server", "name", "schema"}. They come from
//! `tools/list` of servers on npm and PyPI and from requests of agents. Descriptions are cut, and
//! functions with a shape that is already in the list are left out.

use crate::server::Server;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn function(name: &str, schema: &Value, strict: bool) -> Value {
    let function = json!({"name": name, "parameters": schema, "strict": strict});
    json!({"type": "function", "function": function})
}

fn body(tools: &[Value]) -> Value {
    json!({"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 1})
}

/// A prompt is measured after its grammar is compiled under the limits of a server. A prompt that
/// is too long therefore shows that its functions are accepted, without a pass of the model.
#[test]
fn functions_of_public_servers_are_taken() {
    let server = Server::start(&["--ctx-size", "20"]);
    let lines: Vec<Value> = include_str!("tools.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (mut all, mut names) = (Vec::new(), Vec::new());
    for line in &lines {
        let name = format!("f{}", all.len());
        names.push(format!("{} {}", line["server"], line["name"]));
        all.push(function(&name, &line["schema"], false));
    }
    let by_server = lines.chunk_by(|a, b| a["server"] == b["server"]).map(<[Value]>::len);
    let mut begun = 0;
    let groups = by_server.map(|length| {
        begun += length;
        begun - length..begun
    });
    let groups = groups.chain((0..all.len()).map(|n| n..n + 1)).collect::<Vec<_>>();
    for group in groups {
        let reply = server.post(CHAT, &body(&all[group.clone()]));
        let code = reply.json()["error"]["code"].clone();
        assert_eq!(code, "context_length_exceeded", "{}: {reply:?}", names[group.start]);
    }
}

#[test]
fn a_function_that_cannot_be_taken_is_named() {
    let server = Server::start(&[]);
    let message = |tools: &[Value]| {
        let reply = server.post(CHAT, &body(tools));
        assert_eq!(reply.status, 400, "{reply:?}");
        reply.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let good = function("good", &json!({"type": "object"}), true);
    let map = json!({"type": "object", "propertyNames": {"pattern": "^a"}});
    let text = message(&[good.clone(), function("map", &map, true)]);
    assert!(text.contains("function \"map\": the keyword propertyNames cannot"), "{text}");
    let number = json!({"type": "object", "required": ["n"],
        "properties": {"n": {"type": "integer", "minimum": 2, "maximum": 1}}});
    let text = message(&[good.clone(), function("none", &number, true)]);
    assert!(text.contains("function \"none\": ") && !text.contains("arguments_"), "{text}");
    // Without `strict` the schema stays unless it cannot be enforced; then it becomes wider.
    for loose in [&map, &number] {
        server.post(CHAT, &body(&[good.clone(), function("loose", loose, false)])).ok();
    }
    let schema = json!({"type": "object", "properties": {"a": {"not": {"const": 1}}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let mut body = body(&[good]);
    body["response_format"] = format;
    for tools in [true, false] {
        if !tools {
            body.as_object_mut().unwrap().remove("tools");
        }
        let reply = server.post(CHAT, &body);
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.body.contains("the keyword not cannot be enforced"), "{reply:?}");
    }
}
