//! Errors for clients: a status and an object in the form of the API.

use crate::error::{Kind, fault_of};
use serde_json::{Value, json};

/// APIs that have the same form of errors and streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiFamily {
    OpenAi,
    Anthropic,
    Ollama,
}

impl ApiFamily {
    /// Returns the API that a path belongs to.
    pub fn of(path: &str) -> ApiFamily {
        match path.strip_prefix("/v1").unwrap_or(path) {
            path if path.starts_with("/messages") => ApiFamily::Anthropic,
            path if path.starts_with("/api/") => ApiFamily::Ollama,
            _ => ApiFamily::OpenAi,
        }
    }
}

/// Limit of a message in bytes, also for the name of a field in it. A response may wait long for
/// its client, and a message may quote the client's text.
const LONGEST_MESSAGE: usize = 2000;
const LONGEST_PARAM: usize = 200;

/// Cuts the middle out of a text that is longer than `most` bytes.
fn shortened(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    // Keeps the end, which has the remedy.
    let is_boundary = |at: &usize| text.is_char_boundary(*at);
    let begin = (0..=most / 2).rev().find(is_boundary).unwrap_or(0);
    let end = (text.len() - most / 2..text.len()).find(is_boundary).unwrap_or(text.len());
    format!("{} ... {}", &text[..begin], &text[end..])
}

/// A refusal or a failure.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: u16,
    pub message: String,
    /// Name of the wrong field.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    pub fn new(status: u16, message: impl Into<String>) -> ApiError {
        let message = shortened(message.into(), LONGEST_MESSAGE);
        ApiError { status, message, param: None, code: None }
    }

    /// Makes the error of an invalid request.
    pub fn bad(message: impl Into<String>) -> ApiError {
        ApiError::new(400, message)
    }

    pub fn param(self, name: impl Into<String>) -> ApiError {
        ApiError { param: Some(shortened(name.into(), LONGEST_PARAM)), ..self }
    }

    pub fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// Makes the error of a request during a shutdown.
    pub fn ending() -> ApiError {
        ApiError::new(503, "the server is shutting down").code("shutting_down")
    }

    /// Makes the error of an option that this server does not have.
    pub fn unsupported(name: &str, remedy: &str) -> ApiError {
        ApiError::bad(format!("'{name}' is not supported by this server: {remedy}"))
            .param(name)
            .code("unsupported_parameter")
    }

    /// Converts a failure of the program.
    ///
    /// Remedies for the command line are dropped, since clients cannot use them.
    pub fn of(error: &anyhow::Error) -> ApiError {
        let fault = fault_of(error);
        let help = match fault {
            Some(fault) if fault.kind == Kind::Context => Some("shorten the prompt"),
            _ => fault.and_then(|f| f.help.as_deref()).filter(|help| !help.contains("--")),
        };
        let message = match help {
            Some(help) => format!("{error:#} ({help})"),
            None => format!("{error:#}"),
        };
        match fault.map(|f| f.kind) {
            Some(Kind::Context) => ApiError::bad(message).code("context_length_exceeded"),
            Some(Kind::Usage | Kind::Model | Kind::Incomplete) => ApiError::bad(message),
            _ => ApiError::new(500, message),
        }
    }

    /// Returns OpenAI's or Anthropic's name for this kind of error.
    fn kind(&self, anthropic: bool) -> &'static str {
        match (self.status, anthropic) {
            (401, _) => "authentication_error",
            (403, _) => "permission_error",
            (404, true) => "not_found_error",
            (413, true) => "request_too_large",
            (429, _) => "rate_limit_error",
            (503, true) => "overloaded_error",
            (500.., true) => "api_error",
            (500.., false) => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// Returns the error in the form of an API.
    pub fn json(&self, family: ApiFamily) -> Value {
        match family {
            ApiFamily::OpenAi => self.openai(),
            ApiFamily::Anthropic => self.anthropic(),
            ApiFamily::Ollama => json!({"error": self.message}),
        }
    }

    pub fn openai(&self) -> Value {
        let ApiError { message, param, code, .. } = self;
        let kind = self.kind(false);
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }

    pub fn anthropic(&self) -> Value {
        json!({"type": "error", "error": {"type": self.kind(true), "message": self.message}})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Fault;

    #[test]
    fn a_message_quotes_little_and_keeps_its_remedy() {
        let long = "\u{e4}".repeat(1_000_000);
        let error = ApiError::of(&Fault::usage(format!("no {long}")).help("use less").into());
        assert!(error.message.len() <= LONGEST_MESSAGE + 5, "{}", error.message.len());
        assert!(error.message.starts_with("no \u{e4}") && error.message.ends_with(" (use less)"));
        let error = ApiError::unsupported(&long, "leave it out");
        assert!(error.param.unwrap().len() <= LONGEST_PARAM + 5);
        assert!(error.message.ends_with(": leave it out"));
        assert_eq!(ApiError::bad("short").message, "short");
    }

    #[test]
    fn a_fault_becomes_a_status_with_its_remedy() {
        let error = Fault::new(Kind::Context, "too long").help("raise --ctx-size").into();
        let api = ApiError::of(&error);
        assert_eq!(api.message, "too long (shorten the prompt)");
        assert_eq!((api.status, api.openai()["error"]["code"].as_str()), (400, api.code));
        let says = |help: &str| ApiError::of(&Fault::usage("wrong").help(help).into()).message;
        assert_eq!([says("use less"), says("use --raw")], ["wrong (use less)", "wrong"]);
        assert_eq!(ApiError::of(&anyhow::anyhow!("x")).status, 500);
        assert_eq!(ApiError::new(503, "x").anthropic()["error"]["type"], "overloaded_error");
    }
}
