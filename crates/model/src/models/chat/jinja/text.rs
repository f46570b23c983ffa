//! String functions that follow Python's `str`.

/// Returns whether Python treats the character as whitespace.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Strips whitespace or `chars` from the chosen sides of a text.
pub fn trimmed<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let is_stripped = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(is_stripped) } else { text };
    if right { text.trim_end_matches(is_stripped) } else { text }
}

/// Splits a text into lines, with or without their line ends.
pub fn lines(text: &str, with_ends: bool) -> Vec<&str> {
    let ends = [
        '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}',
        '\u{2029}',
    ];
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let tail = &rest[at..];
        let width = match tail.starts_with("\r\n") {
            true => 2,
            false => tail.chars().next().map_or(1, char::len_utf8),
        };
        found.push(&rest[..if with_ends { at + width } else { at }]);
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        found.push(rest);
    }
    found
}

/// Converts the first character to upper case and the others to lower case.
pub fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(|c| c.to_uppercase().collect::<String>());
    first.unwrap_or_default() + &characters.as_str().to_lowercase()
}

/// Returns the result of jinja2's filter `title`: words begin after spaces, `-` and brackets.
pub fn title_of_words(text: &str) -> String {
    let is_between = |c: char| is_space(c) || "-({[<".contains(c);
    text.split_inclusive(is_between).map(capitalized).collect()
}

/// Returns the result of `str.title`: words begin after any character that is not a letter.
pub fn title_of_letters(text: &str) -> String {
    let mut out = String::new();
    let mut is_word = false;
    for c in text.chars() {
        match is_word {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        is_word = c.is_alphabetic();
    }
    out
}

/// Pads a text to `width` characters on the chosen sides. Padding both sides centres it.
pub fn padded(text: &str, width: usize, fill: char, left: bool, right: bool) -> String {
    // No template needs more, and the limit bounds the memory.
    let room = width.min(1 << 20).saturating_sub(text.chars().count());
    let before = match (left, right) {
        (true, true) => room / 2 + (room & width & 1),
        (true, false) => room,
        _ => 0,
    };
    let fill = |n: usize| fill.to_string().repeat(n);
    fill(before) + text + &fill(room - before)
}

/// Splits a text at whitespace at most `most` times, from the left or from the right.
pub fn split_at_spaces(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = trimmed(text, None, !from_right, from_right);
    while !rest.is_empty() {
        let at = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = at.filter(|_| found.len() < most) else {
            found.push(trimmed(rest, None, from_right, !from_right));
            break;
        };
        let after = at + rest[at..].chars().next().map_or(1, char::len_utf8);
        let (piece, others) =
            if from_right { (&rest[after..], &rest[..at]) } else { (&rest[..at], &rest[after..]) };
        found.push(piece);
        rest = trimmed(others, None, !from_right, from_right);
    }
    if from_right {
        found.reverse();
    }
    found
}
