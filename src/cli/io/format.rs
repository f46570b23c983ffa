//! Fields for the form of an answer, in batch records and server requests: this program's own, and
//! OpenAI's `response_format`.

use crate::error::Fault;
use crate::grammar::GrammarSource;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

/// The fields. At most one may be given.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct AnswerFormatFields {
    pub response_format: Option<Value>,
    pub json_schema: Option<Value>,
    pub grammar: Option<String>,
    pub regex: Option<String>,
}

/// The form of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerFormat {
    /// Any text. Overrides a grammar of the command line.
    Text,
    Grammar(GrammarSource),
}

const EXAMPLE: &str = concat!(
    r#"expected: {"type": "json_schema", "json_schema": {"name": "x", "#,
    r#""schema": {"type": "object"}}}, {"type": "json_object"} or {"type": "text"}"#,
);

impl AnswerFormatFields {
    /// Returns the name of the first given field.
    pub fn name(&self) -> &'static str {
        match self {
            AnswerFormatFields { response_format: Some(_), .. } => "response_format",
            AnswerFormatFields { json_schema: Some(_), .. } => "json_schema",
            AnswerFormatFields { grammar: Some(_), .. } => "grammar",
            _ => "regex",
        }
    }

    /// Returns the given form. Refuses more than one.
    pub fn one(self) -> Result<Option<AnswerFormat>> {
        let mut given: Vec<AnswerFormat> = Vec::new();
        given.extend(self.response_format.map(|format| response_format(&format)).transpose()?);
        given.extend(self.json_schema.map(GrammarSource::JsonSchema).map(AnswerFormat::Grammar));
        given.extend(self.grammar.map(GrammarSource::Lark).map(AnswerFormat::Grammar));
        given.extend(self.regex.map(GrammarSource::Regex).map(AnswerFormat::Grammar));
        ensure!(
            given.len() < 2,
            Fault::model("an answer can have only one form, but several are given")
        );
        Ok(given.pop())
    }
}

/// Parses OpenAI's `response_format`.
///
/// Also accepts a schema next to its name, without an enclosing `json_schema`.
pub fn response_format(format: &Value) -> Result<AnswerFormat> {
    let schema = format.pointer("/json_schema/schema").or(format.get("schema"));
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(AnswerFormat::Text),
        Some("json_object") if schema.is_none() => {
            Ok(AnswerFormat::Grammar(GrammarSource::json_object()))
        }
        Some("json_schema" | "json_object") => {
            let missing =
                || Fault::model("`response_format` has no json_schema.schema").help(EXAMPLE);
            let schema = schema.with_context(missing)?;
            Ok(AnswerFormat::Grammar(GrammarSource::JsonSchema(schema.clone())))
        }
        _ => bail!(Fault::model(format!("`response_format` is unknown: {format}")).help(EXAMPLE)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn one(fields: Value) -> Result<Option<AnswerFormat>> {
        serde_json::from_value::<AnswerFormatFields>(fields).unwrap().one()
    }

    #[test]
    fn an_answer_has_one_form() {
        let schema = json!({"type": "integer"});
        let grammar = |source| Some(AnswerFormat::Grammar(source));
        assert_eq!(one(json!({})).unwrap(), None);
        assert_eq!(one(json!({"response_format": null})).unwrap(), None);
        assert_eq!(
            one(json!({"response_format": {"type": "text"}})).unwrap(),
            Some(AnswerFormat::Text)
        );
        let theirs = json!({"response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": true, "schema": schema},
        }});
        assert_eq!(one(theirs).unwrap(), grammar(GrammarSource::JsonSchema(schema.clone())));
        for kind in ["json_schema", "json_object"] {
            let flat = json!({"response_format": {"type": kind, "schema": schema}});
            assert_eq!(one(flat).unwrap(), grammar(GrammarSource::JsonSchema(schema.clone())));
        }
        assert_eq!(
            one(json!({"json_schema": schema})).unwrap(),
            grammar(GrammarSource::JsonSchema(schema.clone()))
        );
        assert_eq!(
            one(json!({"response_format": {"type": "json_object"}})).unwrap(),
            grammar(GrammarSource::json_object())
        );
        assert_eq!(
            one(json!({"regex": "a+"})).unwrap(),
            grammar(GrammarSource::Regex("a+".into()))
        );
        for bad in [
            json!({"response_format": {"type": "xml"}}),
            json!({"response_format": "json_object"}),
            json!({"response_format": {"type": "json_schema"}}),
            json!({"regex": "a", "json_schema": {}}),
        ] {
            assert!(one(bad.clone()).is_err(), "{bad}");
        }
    }
}
