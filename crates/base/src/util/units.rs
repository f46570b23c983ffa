//! Human-readable numbers, sizes and times.

/// Formats a number with commas: `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Formats a size with three digits: `917 B`, `1.23 MB`, `15.6 GB` (decimal units).
pub fn bytes(n: u64) -> String {
    let (mut value, mut unit) = (n as f64, "B");
    for next in ["kB", "MB", "GB", "TB"] {
        // 999.9 would be printed as 1000.
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    if unit == "B" { format!("{n} B") } else { format!("{} {unit}", digits3(value)) }
}

/// Formats a time: `23 s`, `12 min`, `17 h`.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 9.5 => format!("{s:.1} s"),
        s if s < 99.5 => format!("{s:.0} s"),
        s if s < 99.5 * 60.0 => format!("{:.0} min", s / 60.0),
        s if s < 9.95 * 3600.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.0} h", s / 3600.0),
    }
}

/// Formats a number with three significant digits: 1.23, 12.3, 123, 1234.
pub fn digits3(x: f64) -> String {
    let decimals = match x.abs() {
        // A number that rounds up to 10.00 has one decimal less.
        a if a < 9.995 => 2,
        a if a < 99.95 => 1,
        _ => 0,
    };
    format!("{x:.decimals$}")
}

/// Returns the shortest decimal number that parses to `x`: 0.95 rather than 0.949999988079071.
pub fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(x as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_readable() {
        assert_eq!(thousands(1234567), "1,234,567");
        assert_eq!(thousands(999), "999");
        let times = [
            (0.04, "0.0 s"),
            (23.4, "23 s"),
            (99.6, "2 min"),
            (5700.0, "95 min"),
            (7200.0, "2.0 h"),
            (61_000.0, "17 h"),
        ];
        for (seconds, text) in times {
            assert_eq!(duration(seconds), text);
        }
        assert_eq!(bytes(917), "917 B");
        assert_eq!(bytes(15_560_000_000), "15.6 GB");
    }
}
