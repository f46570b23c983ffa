//! The functions that an answer may call, from `tools` and `tool_choice` of all forms, or from
//! OpenAI's older `functions` and `function_call`.

use super::error::ApiError;
use super::fields::Fields;
use crate::grammar::tools::{self, CallPolicy, Tool};
use serde_json::Value;
use std::collections::HashSet;

/// Functions that an answer may call.
#[derive(Clone, Debug)]
pub struct ToolOptions {
    pub tools: Vec<Tool>,
    pub calls: CallPolicy,
    /// Whether one answer may have several calls.
    pub many: bool,
}

/// Refuses lists of functions, and choices among them, that are too long to process.
pub fn check(fields: &Fields) -> Result<(), ApiError> {
    let given = |name, older| fields.get(name).or(fields.get(older));
    let items =
        given("tools", "functions").and_then(Value::as_array).map_or(&[][..], |items| items);
    let choice = given("tool_choice", "function_call").unwrap_or(&Value::Null);
    tools::check_lists(items, choice).map_err(|error| ApiError::of(&error).param("tools"))
}

/// Takes the functions.
///
/// Tools that a server would have to run itself are left out; a request that requires one of them
/// is refused.
pub fn take(fields: &mut Fields) -> Result<Option<ToolOptions>, ApiError> {
    check(fields)?;
    let old: Option<Vec<Value>> = fields.take("functions")?;
    let old_choice: Option<Value> = fields.take("function_call")?;
    let parallel: Option<bool> = fields.take("parallel_tool_calls")?;
    // A client of the older form reads only one call.
    let parallel = parallel.unwrap_or(true) && old.is_none();
    let items: Vec<Value> = fields.take("tools")?.or(old).unwrap_or_default();
    let choice: Value = fields.take("tool_choice")?.or(old_choice).unwrap_or_default();
    let many = parallel && choice["disable_parallel_tool_use"] != true;
    let (mut tools, mut hosted) = (Vec::new(), Vec::new());
    for item in &items {
        match function(item)? {
            Some(tool) => tools.push(tool),
            None => hosted.push(item),
        }
    }
    for kind in hosted.iter().filter_map(|item| item["type"].as_str()) {
        fields.note(format!("tools of type {kind:?} are left out: this server runs none"));
    }
    let hosted: Vec<&str> = hosted.into_iter().flat_map(names).collect();
    choose(tools, &hosted, &choice, many).map_err(|what| ApiError::bad(what).param("tool_choice"))
}

/// Reads a function. Returns `None` for other tools, which a server would have to run.
fn function(item: &Value) -> Result<Option<Tool>, ApiError> {
    let function = match (item["type"].as_str(), item.get("function")) {
        (None | Some("function"), Some(function)) => function,
        (None | Some("function"), None) => item,
        (Some("custom"), _) if item.get("input_schema").is_some() => item,
        _ => return Ok(None),
    };
    let unnamed = || ApiError::bad("a function in 'tools' has no name: send one").param("tools");
    let name = function["name"].as_str().ok_or_else(unnamed)?.to_owned();
    let description = function["description"].as_str().map(str::to_owned);
    let given = |name: &str| function.get(name).filter(|schema| !schema.is_null()).cloned();
    let parameters = given("parameters").or_else(|| given("input_schema")).unwrap_or_default();
    let strict = function["strict"] == true;
    Ok(Some(Tool { name, description, parameters, strict }))
}

/// Returns a tool's type and name.
fn names(item: &Value) -> impl Iterator<Item = &str> {
    ["type", "name"].into_iter().filter_map(|key| item[key].as_str())
}

/// Returns the functions that the choice allows, and whether one has to be called.
fn choose(
    mut tools: Vec<Tool>,
    hosted: &[&str],
    choice: &Value,
    many: bool,
) -> Result<Option<ToolOptions>, String> {
    let kind = choice.as_str().or(choice["type"].as_str());
    let allowed = choice.get("allowed_tools").unwrap_or(choice);
    let mut mode = kind;
    if kind == Some("allowed_tools") {
        mode = allowed["mode"].as_str().or(Some("auto"));
        let list = allowed["tools"].as_array().map_or(&[][..], |list| list);
        let allowed: HashSet<&str> = list.iter().filter_map(chosen).collect();
        tools.retain(|tool| allowed.contains(&*tool.name));
    }
    let calls = match mode {
        None if choice.is_null() => CallPolicy::Optional,
        Some("auto") => CallPolicy::Optional,
        Some("none") => return Ok(None),
        Some("required" | "any") if !tools.is_empty() => CallPolicy::Required,
        Some("required" | "any") => {
            let what = "'tool_choice' requires a call, but no tool is a function";
            return Err(format!("{what}: send one or leave 'tool_choice' out"));
        }
        _ => {
            let Some(name) = chosen(choice).or(kind) else {
                return Err("'tool_choice' names no function: send \"auto\" or a name".into());
            };
            if hosted.contains(&name) {
                let what = "which this server does not run: name a function";
                return Err(format!("'tool_choice' names {name:?}, {what}"));
            }
            tools.retain(|tool| tool.name == name);
            if tools.is_empty() {
                let what = format!("there is no function {name:?} among the tools");
                return Err(format!("'tool_choice': {what}: name one of them"));
            }
            return Ok(Some(ToolOptions { tools, calls: CallPolicy::Required, many: false }));
        }
    };
    Ok((!tools.is_empty()).then_some(ToolOptions { tools, calls, many }))
}

/// Returns the name of the function in a choice.
fn chosen(choice: &Value) -> Option<&str> {
    choice.pointer("/function/name").or(choice.get("name")).and_then(Value::as_str)
}
