//! Tables for people and for Markdown.

/// Formats a Markdown table with columns that are aligned in plain text too.
///
/// All columns except the first are right-aligned.
pub fn markdown(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0).max(3)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for (i, row) in rows.iter().enumerate() {
        for (c, w) in widths.iter().enumerate() {
            let cell = row.get(c).map_or("", String::as_str);
            out += &if c == 0 { format!("| {cell:w$} ") } else { format!("| {cell:>w$} ") };
        }
        out += "|\n";
        if i == 0 {
            for (c, w) in widths.iter().enumerate() {
                out += &if c == 0 {
                    format!("|{} ", "-".repeat(w + 1))
                } else {
                    format!("|{}: ", "-".repeat(*w))
                };
            }
            out += "|\n";
        }
    }
    out
}
