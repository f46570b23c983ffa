//! Exact numbers: decimals as written, and regular expressions for ranges of them.
//!
//! llguidance reads every number as an `f64`, so it cannot distinguish integers beyond 2^53. This
//! module compares and writes them digit by digit.

use std::cmp::Ordering;

use serde_json::{Map, Number, Value};

/// Largest magnitude up to which `f64` represents every integer.
const EXACT: u64 = 1 << 53;

/// A decimal number. The integer part has no leading zeros, the fraction no trailing zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decimal {
    is_negative: bool,
    /// At least one digit.
    integer: String,
    fraction: String,
}

impl Decimal {
    pub fn new(number: &Number) -> Decimal {
        let text = number.to_string().to_lowercase();
        let (is_negative, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, &text[..]),
        };
        let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
        let exponent: i64 = exponent.trim_start_matches('+').parse().unwrap_or(0);
        let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        // An f64 has at most three exponent digits.
        let mut digits = format!("{integer}{fraction}");
        let mut point = integer.len() as i64 + exponent.clamp(-400, 400);
        if point < 1 {
            digits.insert_str(0, &"0".repeat((1 - point) as usize));
            point = 1;
        }
        while (digits.len() as i64) < point {
            digits.push('0');
        }
        let (integer, fraction) = digits.split_at(point as usize);
        let integer = integer.trim_start_matches('0');
        let integer = if integer.is_empty() { "0" } else { integer }.to_owned();
        let fraction = fraction.trim_end_matches('0').to_owned();
        let is_zero = integer == "0" && fraction.is_empty();
        Decimal { is_negative: is_negative && !is_zero, integer, fraction }
    }

    fn compare_magnitude(&self, other: &Decimal) -> Ordering {
        let length = self.integer.len().cmp(&other.integer.len());
        let key = |of: &Decimal| (of.integer.clone(), of.fraction.clone());
        length.then_with(|| key(self).cmp(&key(other)))
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Decimal) -> Ordering {
        match (self.is_negative, other.is_negative) {
            (false, true) => Ordering::Greater,
            (true, false) => Ordering::Less,
            (false, false) => self.compare_magnitude(other),
            (true, true) => other.compare_magnitude(self),
        }
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Decimal) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A bound of a range, and whether it is inclusive.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    at: Decimal,
    is_inclusive: bool,
}

/// The numbers between two bounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Range {
    least: Option<Bound>,
    most: Option<Bound>,
}

impl Range {
    /// Reads the bounds of a schema. `exclusiveMinimum` may be a number or, as in draft 4, `true`.
    pub fn new(fields: &Map<String, Value>) -> Range {
        let bound = |plain: &str, exclusive: &str, stricter: Ordering| {
            let number = |key: &str| fields.get(key).and_then(Value::as_number).map(Decimal::new);
            let is_open = fields.get(exclusive) == Some(&Value::Bool(true));
            let plain = number(plain).map(|at| Bound { at, is_inclusive: !is_open });
            let open = number(exclusive).map(|at| Bound { at, is_inclusive: false });
            match (plain, open) {
                (Some(plain), Some(open)) if plain.at.cmp(&open.at) == stricter => Some(plain),
                (plain, open) => open.or(plain),
            }
        };
        Range {
            least: bound("minimum", "exclusiveMinimum", Ordering::Greater),
            most: bound("maximum", "exclusiveMaximum", Ordering::Less),
        }
    }

    pub fn contains(&self, number: &Number) -> bool {
        let number = Decimal::new(number);
        let fits = |bound: &Option<Bound>, wanted: Ordering| {
            bound.as_ref().is_none_or(|bound| {
                let order = number.cmp(&bound.at);
                order == wanted || order == Ordering::Equal && bound.is_inclusive
            })
        };
        fits(&self.least, Ordering::Greater) && fits(&self.most, Ordering::Less)
    }

    /// Returns whether llguidance enforces this range exactly with `f64` arithmetic.
    pub fn is_plain(&self) -> bool {
        let is_small =
            |bound: &Bound| bound.at.integer.parse::<u64>().is_ok_and(|integer| integer <= EXACT);
        [&self.least, &self.most].into_iter().flatten().all(is_small) && !self.includes_end()
    }

    /// Returns whether llguidance includes an excluded bound, such as the zero in 0 < x < 0.5.
    fn includes_end(&self) -> bool {
        let (Some(least), Some(most)) = (&self.least, &self.most) else { return false };
        let is_open = |bound: &Bound| !bound.is_inclusive && bound.at.fraction.is_empty();
        let integer = &least.at.integer;
        let is_one_side = integer == "0" || least.at.is_negative == most.at.is_negative;
        (is_open(least) || is_open(most)) && *integer == most.at.integer && is_one_side
    }

    /// Returns a Lark expression of terminals for the numbers in the range, or `None` if the range
    /// is empty.
    pub fn terminal(&self, is_integer: bool) -> Option<String> {
        let Range { least, most } = self;
        let mut parts = Vec::new();
        let zero = || Bound { at: Decimal::new(&0.into()), is_inclusive: true };
        if most.as_ref().is_none_or(|most| !most.at.is_negative) {
            let least = least.clone().filter(|least| !least.at.is_negative).unwrap_or_else(zero);
            parts.push(magnitudes("", &least, most.as_ref(), is_integer));
        }
        if least.as_ref().is_none_or(|least| least.at.is_negative) {
            let above_zero = || Bound { is_inclusive: false, ..zero() };
            let magnitude = |bound: &Bound| {
                let at = Decimal { is_negative: false, ..bound.at.clone() };
                Bound { at, ..bound.clone() }
            };
            let nearest = most.as_ref().filter(|most| most.at.is_negative).map(magnitude);
            let farthest = least.as_ref().map(magnitude);
            let nearest = nearest.unwrap_or_else(above_zero);
            parts.push(magnitudes("-", &nearest, farthest.as_ref(), is_integer));
        }
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(" | "))
    }
}

/// Replaces an excluded bound that llguidance would include by the next `f64`, inclusive.
pub fn settle(fields: &mut Map<String, Value>) {
    let range = Range::new(fields);
    if !range.includes_end() {
        return;
    }
    let float = |bound: &Option<Bound>| {
        let bound = bound.as_ref().filter(|bound| !bound.is_inclusive)?;
        let magnitude: f64 = bound.at.integer.parse().ok()?;
        (bound.at.fraction.is_empty() && magnitude <= EXACT as f64)
            .then_some(if bound.at.is_negative { -magnitude } else { magnitude })
    };
    if let Some(least) = float(&range.least).filter(|least| *least >= 0.0) {
        fields.shift_remove("exclusiveMinimum");
        fields.insert("minimum".into(), least.next_up().max(TINY).into());
    }
    if let Some(most) = float(&range.most).filter(|most| *most <= 0.0) {
        fields.shift_remove("exclusiveMaximum");
        fields.insert("maximum".into(), most.next_down().min(-TINY).into());
    }
}

/// Smallest positive number of a range without zero.
const TINY: f64 = 1e-60;

/// Returns a terminal for numbers with this sign and a magnitude between two bounds.
fn magnitudes(sign: &str, least: &Bound, most: Option<&Bound>, is_integer: bool) -> Option<String> {
    if let Some(most) = most {
        let order = least.at.compare_magnitude(&most.at);
        let is_empty = order == Ordering::Equal && !(least.is_inclusive && most.is_inclusive);
        if order == Ordering::Greater || is_empty {
            return None;
        }
        if is_integer && !has_integer(least, most) {
            return None;
        }
    }
    let mut all = vec![at_least(least)];
    all.extend(most.map(at_most));
    if is_integer {
        all.push(vec!["(0|[1-9][0-9]*)".into()]);
    }
    let regex = |options: Vec<String>| format!("/{sign}({})/", options.join("|"));
    let all: Vec<String> = all.into_iter().map(regex).collect();
    Some(format!("({})", all.join(" & ")))
}

/// Returns whether there is an integer between two non-negative bounds.
fn has_integer(least: &Bound, most: &Bound) -> bool {
    let next = match least.is_inclusive && least.at.fraction.is_empty() {
        true => least.at.integer.clone(),
        false => successor(&least.at.integer),
    };
    let next = Decimal { is_negative: false, integer: next, fraction: String::new() };
    match next.compare_magnitude(&most.at) {
        Ordering::Less => true,
        Ordering::Equal => most.is_inclusive,
        Ordering::Greater => false,
    }
}

/// Returns the next integer.
fn successor(digits: &str) -> String {
    let nines = digits.len() - digits.trim_end_matches('9').len();
    let (head, last) = digits.split_at(digits.len() - nines);
    let zeros = "0".repeat(last.len());
    match head.as_bytes().split_last() {
        None => format!("1{zeros}"),
        Some((digit, head)) => {
            format!("{}{}{zeros}", String::from_utf8_lossy(head), (digit + 1) as char)
        }
    }
}

const FRACTION: &str = "([.][0-9]+)?";

/// Returns regular expressions for unsigned numbers of at least `bound`.
fn at_least(bound: &Bound) -> Vec<String> {
    let Decimal { integer, fraction, .. } = &bound.at;
    let mut options = vec![format!("[1-9][0-9]{{{},}}{FRACTION}", integer.len())];
    for (i, digit) in digits(integer).filter(|(_, digit)| *digit < 9) {
        let rest = integer.len() - i - 1;
        let (head, above) = (&integer[..i], digit + 1);
        options.push(format!("{head}[{above}-9][0-9]{{{rest}}}{FRACTION}"));
    }
    for (i, digit) in digits(fraction).filter(|(_, digit)| *digit < 9) {
        options.push(format!("{integer}[.]{}[{}-9][0-9]*", &fraction[..i], digit + 1));
    }
    let more = format!("{integer}[.]{fraction}[0-9]*");
    options.push(match (bound.is_inclusive, fraction.is_empty()) {
        (true, true) => format!("{integer}{FRACTION}"),
        (true, false) => more,
        (false, _) => format!("{more}[1-9][0-9]*"),
    });
    options
}

/// Returns regular expressions for unsigned numbers of at most `bound`.
fn at_most(bound: &Bound) -> Vec<String> {
    let Decimal { integer, fraction, .. } = &bound.at;
    let mut options = Vec::new();
    let length = integer.len();
    if length > 1 {
        options.push(format!("0{FRACTION}"));
        options.push(format!("[1-9][0-9]{{0,{}}}{FRACTION}", length - 2));
    }
    for (i, digit) in digits(integer) {
        let smallest = u8::from(i == 0 && length > 1);
        if digit > smallest {
            let (head, rest, below) = (&integer[..i], length - i - 1, digit - 1);
            options.push(format!("{head}[{smallest}-{below}][0-9]{{{rest}}}{FRACTION}"));
        }
    }
    if !fraction.is_empty() {
        options.push(integer.clone());
    }
    for (i, digit) in digits(fraction) {
        let head = &fraction[..i];
        if i > 0 {
            options.push(format!("{integer}[.]{head}"));
        }
        if digit > 0 {
            options.push(format!("{integer}[.]{head}[0-{}][0-9]*", digit - 1));
        }
    }
    match (bound.is_inclusive, fraction.is_empty()) {
        (true, true) => options.push(format!("{integer}([.]0+)?")),
        (true, false) => options.push(format!("{integer}[.]{fraction}0*")),
        (false, _) => {}
    }
    if options.is_empty() {
        // No number is below zero. The caller excludes this range.
        options.push("[^0-9-]".into());
    }
    options
}

fn digits(text: &str) -> impl Iterator<Item = (usize, u8)> + '_ {
    text.bytes().map(|byte| byte - b'0').enumerate()
}

/// Returns whether llguidance writes this number of a `const` or `enum` exactly.
pub fn is_plain(number: &Number) -> bool {
    let magnitude = number.as_i64().map(i64::unsigned_abs).or(number.as_u64());
    match magnitude {
        Some(magnitude) => magnitude <= EXACT,
        None => number.as_f64().is_some_and(|number| number.abs() <= EXACT as f64),
    }
}

/// Returns the exact text of a number, or `None` beyond 64 bits, where the digits of the source are
/// lost.
pub fn exact_text(number: &Number) -> Option<String> {
    match number.as_f64() {
        Some(float) if number.is_f64() => {
            (float.abs() < u64::MAX as f64).then(|| match Decimal::new(number) {
                at if at.fraction.is_empty() => {
                    format!("{}{}", if at.is_negative { "-" } else { "" }, at.integer)
                }
                _ => number.to_string(),
            })
        }
        _ => Some(number.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn decimal(value: Value) -> Decimal {
        Decimal::new(value.as_number().unwrap())
    }

    #[test]
    fn decimals_have_their_order() {
        let ordered = [
            json!(-1e300),
            json!(i64::MIN),
            json!(-1.5),
            json!(-1e-7),
            json!(0),
            json!(1e-7),
            json!(0.3),
            json!(0.300_000_000_000_000_04),
            json!(9),
            json!(10.25),
            json!(9_007_199_254_740_992u64),
            json!(9_007_199_254_740_993u64),
            json!(u64::MAX),
            json!(3.402_823_466_385_288_6e38),
        ];
        for (i, a) in ordered.iter().enumerate() {
            for (j, b) in ordered.iter().enumerate() {
                assert_eq!(decimal(a.clone()).cmp(&decimal(b.clone())), i.cmp(&j), "{a} {b}");
            }
        }
        assert_eq!(decimal(json!(-0.0)), decimal(json!(0)));
        assert_eq!(decimal(json!(1e2)), decimal(json!(100)));
    }

    #[test]
    fn numbers_are_written_as_they_are_read() {
        for (number, text) in [
            (json!(1_234_567_890_123_456_789u64), Some("1234567890123456789")),
            (json!(i64::MIN), Some("-9223372036854775808")),
            (json!(u64::MAX), Some("18446744073709551615")),
            (json!(0.123_456_789_012_345_68), Some("0.12345678901234568")),
            (json!(-1e17), Some("-100000000000000000")),
            (json!(1e20), None),
        ] {
            assert_eq!(exact_text(number.as_number().unwrap()).as_deref(), text, "{number}");
        }
        // The JSON parser rounds to the nearest number.
        for text in ["0.12345678901234568", "1.7976931348623157e308", "5e-324", "0.1"] {
            let value: Value = serde_json::from_str(text).unwrap();
            assert_eq!(value.as_f64(), text.parse().ok(), "{text}");
        }
    }
}
