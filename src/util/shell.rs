//! Quoting of words for a shell.

/// Returns a word as a shell reads it, in quotes where it needs them.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:@%+,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_that_a_shell_would_change_are_quoted() {
        for plain in ["google/gemma-3-1b-it", "a.gguf", "./x_y", "--temp=0.5"] {
            assert_eq!(quoted(plain), plain);
        }
        assert_eq!(quoted("a'b"), r"'a'\''b'");
        assert_eq!(["", "a b", "~/x", "$HOME"].map(quoted), ["''", "'a b'", "'~/x'", "'$HOME'"]);
    }
}
