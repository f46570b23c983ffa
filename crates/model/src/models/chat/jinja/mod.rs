//! Jinja as configured by transformers: jinja2 with Python's values, `tojson` and more.
//!
//! minijinja renders. Filters, methods and printing that differ in Python are replaced here.
//! [`syntax::adapted`] rewrites the operators and the tag for which minijinja has no hook. Macros
//! with `varargs` and `kwargs`, and numbers above 128 bits, are errors.

mod clock;
mod filters;
mod json;
mod methods;
mod repr;
mod syntax;
mod text;

pub use clock::{LocalTime, now};

use gemma_base::error::Fault;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};

/// Number of steps after which a template is assumed to run forever.
const FUEL: u64 = 5_000_000;

/// Name of the function with which a template rejects its messages.
const RAISE: &str = "raise_exception";

/// Last remedy of every template error.
pub const NO_TEMPLATE: &str = "--raw uses no template";

/// Renders a template with these variables, at this local time.
pub fn render(source: &str, variables: Value, now: LocalTime) -> Result<String, Fault> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _, value| {
        out.write_str(&repr::str_of(value)).map_err(minijinja::Error::from)
    });
    filters::add(&mut env);
    env.add_function(RAISE, |message: &Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, RAISE)
            .with_source(TemplateRefusal(repr::str_of(message))))
    });
    env.add_function("strftime_now", move |format: &str| clock::strftime(now, format));
    let source = syntax::adapted(source);
    let template = env.template_from_str(&source).map_err(|error| fault(&error))?;
    template.render(variables).map_err(|error| fault(&error))
}

/// Message of a template that rejects its messages.
#[derive(Debug)]
struct TemplateRefusal(String);

impl std::fmt::Display for TemplateRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TemplateRefusal {}

/// Returns the error of a template or its messages, with a remedy.
fn fault(error: &Error) -> Fault {
    // An error in a macro or a block is the source of another error.
    let mut source = Some(error as &(dyn std::error::Error + 'static));
    let mut inner = error;
    while let Some(next) = source {
        if let Some(TemplateRefusal(message)) = next.downcast_ref() {
            let what = format!("the chat template refuses these messages: {message}");
            let help = format!("change the messages as the template asks; {NO_TEMPLATE}");
            return Fault::model(what).help(help);
        }
        inner = next.downcast_ref().unwrap_or(inner);
        source = next.source();
    }
    let line = inner.line().map_or_else(String::new, |line| format!(", line {line}"));
    let why = inner.detail().map_or_else(|| inner.kind().to_string(), str::to_owned);
    let (what, remedy) = match inner.kind() {
        ErrorKind::SyntaxError | ErrorKind::BadEscape => (
            format!("the model's chat template cannot be read{line}: {why}"),
            "download the model's files again if they are damaged",
        ),
        ErrorKind::UnknownFilter
        | ErrorKind::UnknownTest
        | ErrorKind::UnknownFunction
        | ErrorKind::UnknownMethod => (
            format!("the chat template uses what this program lacks{line}: {why}"),
            "change that line of the template, or report it as a fault of this program",
        ),
        ErrorKind::OutOfFuel => (
            format!("the chat template does not end within {FUEL} steps{line}"),
            "shorten the messages, or correct the template's loops",
        ),
        ErrorKind::UndefinedError => (
            format!("the chat template reads a field that is not there{line}: {why}"),
            "give the messages the fields that the template reads",
        ),
        ErrorKind::TooManyArguments | ErrorKind::MissingArgument => (
            format!("the chat template calls with wrong arguments{line}: {why}"),
            "correct that line of the template; `varargs` and `kwargs` of macros are not supported",
        ),
        _ => (
            format!("the chat template fails{line}: {why}"),
            "correct that line of the template, or give it other messages",
        ),
    };
    Fault::model(what).help(format!("{remedy}; {NO_TEMPLATE}"))
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// Returns an argument passed by position or by name; else an undefined value.
fn option(given: Option<Value>, kwargs: &Kwargs, name: &str) -> Result<Value, Error> {
    match given {
        Some(value) => Ok(value),
        None => Ok(kwargs.get::<Option<Value>>(name)?.unwrap_or_default()),
    }
}

fn flag(given: Option<Value>, kwargs: &Kwargs, name: &str) -> Result<bool, Error> {
    Ok(option(given, kwargs, name)?.is_true())
}

#[cfg(test)]
mod tests;
