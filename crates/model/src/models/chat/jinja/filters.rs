//! Filters, tests and operators that behave differently in jinja2 and minijinja.

use super::json::tojson;
use super::repr::{float_of, is_whole, pairs, str_of, tuple};
use super::text::{capitalized, is_space, lines, title_of_words, trimmed};
use super::{flag, invalid, option};
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, FormatStyle, Value, filters, format_filter};

/// Registers them in an environment.
pub fn add(env: &mut Environment) {
    minijinja_contrib::add_to_environment(env);
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| str_of(value));
    env.add_filter("escape", escape);
    env.add_filter("e", escape);
    env.add_filter("title", |value: &Value| title_of_words(&str_of(value)));
    env.add_filter("capitalize", |value: &Value| capitalized(&str_of(value)));
    env.add_filter("upper", |value: &Value| str_of(value).to_uppercase());
    env.add_filter("lower", |value: &Value| str_of(value).to_lowercase());
    env.add_filter("trim", |value: &Value, chars: Option<&str>| {
        trimmed(&str_of(value), chars, true, true).to_owned()
    });
    env.add_filter("replace", replace);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("join", join);
    env.add_filter("indent", indent);
    env.add_filter("truncate", truncate);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("round", round);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("items", items);
    env.add_filter("dictsort", dictsort);
    env.add_filter("center", |value: &Value, width: Option<usize>| {
        super::text::padded(&str_of(value), width.unwrap_or(80), ' ', true, true)
    });
    env.add_filter("wordcount", |value: &Value| {
        let text = str_of(value);
        let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        words.filter(|word| !word.is_empty()).count()
    });
    env.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map
        )
    });
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    env.add_function(super::syntax::CONCAT, |values: Rest<Value>| {
        values.iter().map(str_of).collect::<String>()
    });
    env.add_function(super::syntax::REMAINDER, remainder);
    env.add_function(super::syntax::FLOOR, floor_division);
}

fn escape(value: &Value) -> String {
    let mut out = String::new();
    for c in str_of(value).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

fn replace(value: &Value, old: &str, new: &str, count: Option<i64>) -> String {
    let text = str_of(value);
    match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => text.replacen(old, new, count),
        None => text.replace(old, new),
    }
}

fn default(
    value: &Value,
    other: Option<Value>,
    boolean: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let other = option(other, &kwargs, "default_value")?;
    let is_lax = flag(boolean, &kwargs, "boolean")?;
    kwargs.assert_all_used()?;
    let other = if other.is_undefined() { Value::from("") } else { other };
    let is_missing = value.is_undefined() || is_lax && !value.is_true();
    Ok(if is_missing { other } else { value.clone() })
}

fn join(
    value: &Value,
    between: Option<Value>,
    attribute: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let between = option(between, &kwargs, "d")?;
    let attribute = option(attribute, &kwargs, "attribute")?;
    kwargs.assert_all_used()?;
    let items = value.try_iter()?.map(|item| {
        if attribute.is_undefined() || attribute.is_none() {
            return Ok(str_of(&item));
        }
        let name = attribute.to_string();
        name.split('.').try_fold(item, |item, name| item.get_attr(name)).map(|x| str_of(&x))
    });
    Ok(items.collect::<Result<Vec<_>, Error>>()?.join(&str_of(&between)))
}

fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<Value>,
    blank: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let width = option(width, &kwargs, "width")?;
    let (is_first, is_blank) = (flag(first, &kwargs, "first")?, flag(blank, &kwargs, "blank")?);
    kwargs.assert_all_used()?;
    let spaces = match (width.as_str(), width.as_i64()) {
        (Some(text), _) => text.to_owned(),
        (_, Some(width)) if width <= 1000 => " ".repeat(width.max(0) as usize),
        (_, Some(_)) => return Err(invalid("indent: a width above 1000")),
        _ => "    ".to_owned(),
    };
    let text = str_of(value) + "\n";
    let mut out = String::new();
    for (i, line) in lines(&text, false).into_iter().enumerate() {
        out.push_str(if i > 0 { "\n" } else { "" });
        let is_indented = if i == 0 { is_first } else { is_blank || !line.is_empty() };
        out.push_str(if is_indented { &spaces } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

fn truncate(value: &Value, options: Rest<Value>) -> Result<String, Error> {
    type TruncateOptions = (Option<Value>, Option<Value>, Option<Value>, Option<Value>, Kwargs);
    let (most, killwords, end, leeway, kwargs): TruncateOptions = from_args(&options)?;
    let number = |given, name, default| {
        let value = option(given, &kwargs, name)?;
        Ok::<usize, Error>(value.as_usize().unwrap_or(default))
    };
    let (most, leeway) = (number(most, "length", 255)?, number(leeway, "leeway", 5)?);
    let cuts_words = flag(killwords, &kwargs, "killwords")?;
    let end = option(end, &kwargs, "end")?;
    kwargs.assert_all_used()?;
    let (text, end) = (str_of(value), end.as_str().unwrap_or("..."));
    if text.chars().count() <= most.saturating_add(leeway) {
        return Ok(text);
    }
    let kept = most.saturating_sub(end.chars().count());
    let cut: String = text.chars().take(kept).collect();
    let whole_words = cut.rsplit_once(' ').filter(|_| !cuts_words).map(|(words, _)| words);
    Ok(whole_words.unwrap_or(&cut).to_owned() + end)
}

fn int(
    value: &Value,
    default: Option<Value>,
    base: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let default = option(default, &kwargs, "default")?;
    let base = option(base, &kwargs, "base")?;
    kwargs.assert_all_used()?;
    let base = base.as_i64().and_then(|base| u32::try_from(base).ok()).unwrap_or(10);
    if !(2..=36).contains(&base) {
        return Err(invalid("int: a base from 2 to 36"));
    }
    let default = if default.is_undefined() { Value::from(0) } else { default };
    let whole = |x: f64| (x.abs() < 1e18).then(|| Value::from(x.trunc() as i64));
    if let Some(text) = value.as_str() {
        let digits = text.trim_matches(is_space).replace('_', "");
        let prefix = match base {
            16 => "0x",
            8 => "0o",
            2 => "0b",
            _ => "",
        };
        let bare = digits.strip_prefix(prefix).unwrap_or(&digits);
        let parsed = i128::from_str_radix(bare, base).ok().map(Value::from);
        return Ok(parsed.or_else(|| digits.parse().ok().and_then(whole)).unwrap_or(default));
    }
    if is_whole(value) {
        return Ok(value.clone());
    }
    Ok(float_of(value).and_then(whole).unwrap_or(default))
}

fn float(value: &Value, default: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = option(default, &kwargs, "default")?;
    kwargs.assert_all_used()?;
    let default = if default.is_undefined() { Value::from(0.0) } else { default };
    let number = match value.as_str() {
        Some(text) => text.trim_matches(is_space).replace('_', "").parse().ok(),
        None => float_of(value),
    };
    Ok(number.map_or(default, Value::from))
}

fn round(
    value: &Value,
    precision: Option<Value>,
    method: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let precision = option(precision, &kwargs, "precision")?.as_i64().unwrap_or(0);
    let method = option(method, &kwargs, "method")?;
    kwargs.assert_all_used()?;
    let x = float_of(value).ok_or_else(|| invalid("round of a value that is not a number"))?;
    if !(0..=300).contains(&precision) {
        return Err(invalid("round: a precision from 0 to 300"));
    }
    let scale = 10f64.powi(precision as i32);
    match method.as_str() {
        Some("ceil") => Ok(Value::from((x * scale).ceil() / scale)),
        Some("floor") => Ok(Value::from((x * scale).floor() / scale)),
        None | Some("common") if is_whole(value) => Ok(value.clone()),
        // Half to even, as in Python.
        None | Some("common") => {
            let text = format!("{x:.places$}", places = precision as usize);
            Ok(Value::from(text.parse::<f64>().unwrap_or(x)))
        }
        Some(other) => Err(invalid(format!("round has no method {other:?}"))),
    }
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::Iterable if value.len().is_none() => Ok(value.try_iter()?.count()),
        kind => value.len().ok_or_else(|| invalid(format!("length of a value of the kind {kind}"))),
    }
}

fn items(value: &Value) -> Result<Value, Error> {
    match pairs(value) {
        Some(pairs) => Ok(Value::from(pairs)),
        None if value.is_undefined() => Ok(Value::from(Vec::<Value>::new())),
        None => Err(invalid("items of a value that is not a mapping")),
    }
}

fn dictsort(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let sorted = filters::dictsort(value, kwargs)?;
    let pairs = sorted
        .try_iter()?
        .map(|pair| Ok(tuple([pair.get_item_by_index(0)?, pair.get_item_by_index(1)?])));
    pairs.collect::<Result<Vec<_>, Error>>().map(Value::from)
}

/// Returns `left % right`. If `left` is a text, it is a format as in Python.
fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(format) = left.as_str() {
        let is_tuple = matches!(right.kind(), ValueKind::Seq | ValueKind::Iterable);
        let values = match is_tuple {
            true => right.try_iter()?.collect(),
            false => vec![right.clone()],
        };
        return format_filter(FormatStyle::Printf, format, &values).map(Value::from);
    }
    arithmetic(
        "%",
        left,
        right,
        |a, b| a.checked_rem(b).map(|r| fitting(r, b)),
        |a, b| {
            let r = a % b;
            if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
        },
    )
}

/// Adjusts a remainder to have the sign of the divisor.
fn fitting(r: i128, divisor: i128) -> i128 {
    if r != 0 && (r < 0) != (divisor < 0) { r + divisor } else { r }
}

/// Returns `left // right`, rounded down as in Python.
fn floor_division(left: &Value, right: &Value) -> Result<Value, Error> {
    let whole = |a: i128, b: i128| {
        let quotient = a.checked_div(b)?;
        Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
    };
    arithmetic("//", left, right, whole, |a, b| (a / b).floor())
}

fn arithmetic(
    name: &str,
    left: &Value,
    right: &Value,
    whole: impl Fn(i128, i128) -> Option<i128>,
    float: impl Fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let impossible =
        || invalid(format!("{} {name} {} cannot be calculated", left.kind(), right.kind()));
    let (a, b) = (float_of(left).ok_or_else(impossible)?, float_of(right).ok_or_else(impossible)?);
    if b == 0.0 {
        return Err(invalid(format!("{a} {name} 0 is a division by zero")));
    }
    let is_int = |value: &Value| is_whole(value) || value.kind() == ValueKind::Bool;
    if !(is_int(left) && is_int(right)) {
        return Ok(Value::from(float(a, b)));
    }
    let integer = |value: &Value| match value.kind() {
        ValueKind::Bool => Ok(i128::from(value.is_true())),
        _ => i128::try_from(value.clone()),
    };
    let result = whole(integer(left)?, integer(right)?).ok_or_else(impossible)?;
    Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from))
}
