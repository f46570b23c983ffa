//! Methods of Python's strings, lists and dictionaries.

use super::repr::{pairs, tuple};
use super::{invalid, option, text};
use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Calls a method. minijinja-contrib implements those that behave the same in Python.
pub fn call(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let result = match (value.as_str(), value.kind()) {
        (Some(text), _) => of_text(text, method, args)?,
        (_, ValueKind::Map) => of_mapping(value, method, args)?,
        (_, ValueKind::Seq | ValueKind::Iterable) => of_list(value, method, args)?,
        _ => None,
    };
    match result {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn of_text(s: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(text::trimmed(s, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => split(s, method == "rsplit", args)?,
        "splitlines" => {
            let (ends, kwargs): (Option<Value>, Kwargs) = from_args(args)?;
            let with_ends = option(ends, &kwargs, "keepends")?.is_true();
            text::lines(s, with_ends).into_iter().map(Value::from).collect()
        }
        "partition" | "rpartition" => {
            let (between,): (&str,) = from_args(args)?;
            let is_right = method == "rpartition";
            let found = if is_right { s.rsplit_once(between) } else { s.split_once(between) };
            match found {
                _ if between.is_empty() => return Err(invalid("partition by an empty text")),
                Some((left, right)) => tuple([left, between, right].map(Value::from)),
                None if is_right => tuple(["", "", s].map(Value::from)),
                None => tuple([s, "", ""].map(Value::from)),
            }
        }
        "find" | "rfind" | "index" | "rindex" => find(s, method, args)?,
        "count" => {
            let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let (window, _) = window(s, start, end);
            Value::from(match what.is_empty() {
                true => window.chars().count() + 1,
                false => window.matches(what).count(),
            })
        }
        "startswith" | "endswith" if args.len() > 1 => {
            let (what, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
            let (window, _) = window(s, start, end);
            let fits = |what: &str| match method {
                "startswith" => window.starts_with(what),
                _ => window.ends_with(what),
            };
            Value::from(match what.as_str() {
                Some(what) => fits(what),
                None => what.try_iter()?.any(|what| what.as_str().is_some_and(fits)),
            })
        }
        "removeprefix" | "removesuffix" => {
            let (what,): (&str,) = from_args(args)?;
            let is_prefix = method == "removeprefix";
            let rest = if is_prefix { s.strip_prefix(what) } else { s.strip_suffix(what) };
            Value::from(rest.unwrap_or(s))
        }
        _ => return of_letters(s, method, args),
    }))
}

/// Calls a method that pads a text, or tests the case or kind of its characters.
fn of_letters(s: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "ljust" | "rjust" | "center" => {
            let (width, fill): (i64, Option<char>) = from_args(args)?;
            let width = width.max(0) as usize;
            let (left, right) = (method != "ljust", method != "rjust");
            Value::from(text::padded(s, width, fill.unwrap_or(' '), left, right))
        }
        "zfill" => {
            let (width,): (i64,) = from_args(args)?;
            let digits = s.strip_prefix(['+', '-']).unwrap_or(s);
            let sign = &s[..s.len() - digits.len()];
            let width = (width.max(0) as usize).saturating_sub(sign.len());
            Value::from(sign.to_owned() + &text::padded(digits, width, '0', true, false))
        }
        "title" => Value::from(text::title_of_letters(s)),
        "swapcase" => s
            .chars()
            .map(|c| match c.is_uppercase() {
                true => c.to_lowercase().to_string(),
                false => c.to_uppercase().to_string(),
            })
            .collect::<String>()
            .into(),
        "casefold" => Value::from(s.to_lowercase()),
        "isspace" => Value::from(!s.is_empty() && s.chars().all(text::is_space)),
        "isalpha" | "isdigit" | "isnumeric" | "isalnum" if s.is_empty() => Value::from(false),
        "isdecimal" => Value::from(!s.is_empty() && s.chars().all(|c| c.is_ascii_digit())),
        // A text without cased letters is neither upper nor lower case.
        "isupper" => Value::from(s.chars().any(char::is_uppercase) && s.to_uppercase() == s),
        "islower" => Value::from(s.chars().any(char::is_lowercase) && s.to_lowercase() == s),
        _ => return Ok(None),
    }))
}

fn split(s: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (between, most, kwargs): (Option<Value>, Option<Value>, Kwargs) = from_args(args)?;
    let (between, most) = (option(between, &kwargs, "sep")?, option(most, &kwargs, "maxsplit")?);
    kwargs.assert_all_used()?;
    let most = most.as_i64().and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let pieces: Vec<&str> = match between.as_str() {
        Some("") => return Err(invalid("split by an empty text")),
        Some(between) if from_right => {
            let mut pieces: Vec<&str> = s.rsplitn(most.saturating_add(1), between).collect();
            pieces.reverse();
            pieces
        }
        Some(between) => s.splitn(most.saturating_add(1), between).collect(),
        None => text::split_at_spaces(s, most, from_right),
    };
    Ok(pieces.into_iter().map(Value::from).collect())
}

fn find(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let (window, before) = window(s, start, end);
    let found = if method.starts_with('r') { window.rfind(what) } else { window.find(what) };
    match found {
        Some(at) => Ok(Value::from(before + window[..at].chars().count())),
        None if method.ends_with("index") => Err(invalid(format!("{method}: no {what:?} found"))),
        None => Ok(Value::from(-1)),
    }
}

/// Returns the characters from `start` to `end`, and the number of characters before them.
fn window(s: &str, start: Option<i64>, end: Option<i64>) -> (&str, usize) {
    if start.is_none() && end.is_none() {
        return (s, 0);
    }
    let length = s.chars().count();
    let place = |at: i64| match usize::try_from(at) {
        Ok(at) => at.min(length),
        Err(_) => length.saturating_sub(at.unsigned_abs() as usize),
    };
    let (start, end) = (place(start.unwrap_or(0)), end.map_or(length, place));
    let byte = |at: usize| s.char_indices().nth(at).map_or(s.len(), |(byte, _)| byte);
    (&s[byte(start)..byte(end.max(start))], start)
}

fn of_mapping(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match method {
        "items" => {
            let () = from_args(args)?;
            pairs(value).map(Value::from)
        }
        "copy" => Some(value.clone()),
        // transformers' method environment does not allow templates to change values.
        "update" | "pop" | "setdefault" | "clear" | "popitem" => return Err(changes(method)),
        _ => None,
    })
}

fn of_list(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match method {
        "count" | "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let mut items = value.try_iter()?;
            match method {
                "count" => Some(Value::from(items.filter(|item| item == what).count())),
                _ => match items.position(|item| item == *what) {
                    Some(at) => Some(Value::from(at)),
                    None => return Err(invalid("index: no such item in the list")),
                },
            }
        }
        "copy" => Some(value.clone()),
        "append" | "extend" | "insert" | "pop" | "remove" | "reverse" | "sort" | "clear" => {
            return Err(changes(method));
        }
        _ => None,
    })
}

fn changes(method: &str) -> Error {
    let what = format!("the method `{method}` changes a value, which transformers refuses too");
    Error::new(ErrorKind::InvalidOperation, what)
}
