//! Quotes words for a shell; on Windows for PowerShell.

/// Returns a word as this system's shell reads it, quoted if necessary.
pub fn quoted(word: &str) -> String {
    if cfg!(windows) { for_powershell(word) } else { for_sh(word) }
}

fn for_sh(word: &str) -> String {
    in_quotes(word, "-_./=:@%+,", r"'\''")
}

fn for_powershell(word: &str) -> String {
    in_quotes(word, r"-_./\=:+", "''")
}

/// Puts a word in single quotes, unless it has only letters, digits and `plain` characters. `quote`
/// replaces a quote in the word.
fn in_quotes(word: &str, plain: &str, quote: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || plain.contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', quote))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_that_a_shell_would_change_are_quoted() {
        for plain in ["google/gemma-3-1b-it", "a.gguf", "./x_y", "--temp=0.5"] {
            assert_eq!([for_sh(plain), for_powershell(plain)], [plain, plain]);
        }
        assert_eq!([for_sh("a'b"), for_powershell("a'b")], [r"'a'\''b'", "'a''b'"]);
        let words = ["", "a b", "~/x", "$HOME"];
        assert_eq!(words.map(for_sh), ["''", "'a b'", "'~/x'", "'$HOME'"]);
        assert_eq!(words.map(for_powershell), words.map(for_sh));
        let path = r"C:\a\b";
        assert_eq!([for_sh(path), for_powershell(path)], [r"'C:\a\b'", path]);
        assert_eq!(for_powershell("1,2"), "'1,2'");
    }
}
