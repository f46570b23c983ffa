//! Patterns of recipe lines: globs over names of tensors, and two words for whole classes.
//!
//! The names are those of [`Role::short_name`]: the checkpoint's names without the model's prefix
//! and without `.weight`. `*` matches any characters except dots, `**` any characters, `{a,b}`
//! either text, and `{0,58..61}` numbers, including the last one of a range. `norms` matches every
//! vector and every router, `linears` every other matrix of a layer.

use anyhow::{Result, bail, ensure};
use gemma_model::models::Role;

/// Limit for the globs to which the braces of one pattern expand.
const MAX_GLOBS: usize = 10_000;

#[derive(Clone, Debug, PartialEq)]
pub enum Pattern {
    Norms,
    Linears,
    /// The globs to which the braces expand. A name matches if it matches any of them.
    Globs(Vec<String>),
}

impl Pattern {
    pub fn parse(text: &str) -> Result<Pattern> {
        ensure!(!text.is_empty(), "an empty pattern matches nothing");
        if let Some(c) =
            text.chars().find(|c| !(c.is_ascii_alphanumeric() || "._*{},".contains(*c)))
        {
            bail!("{c:?} cannot be part of a tensor's name");
        }
        Ok(match text {
            "norms" => Pattern::Norms,
            "linears" => Pattern::Linears,
            _ => Pattern::Globs(expand(text)?),
        })
    }

    pub fn matches(&self, role: Role, layer: usize) -> bool {
        match self {
            Pattern::Norms => !role.is_matrix() || role == Role::Router,
            Pattern::Linears => {
                role.is_matrix() && !matches!(role, Role::Embed | Role::Head | Role::Router)
            }
            Pattern::Globs(globs) => {
                let name = role.short_name(layer);
                globs.iter().any(|glob| glob_matches(glob.as_bytes(), name.as_bytes()))
            }
        }
    }
}

/// Expands the braces of `pattern`.
fn expand(pattern: &str) -> Result<Vec<String>> {
    let mut done = vec![String::new()];
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('{') {
        let Some((inside, after)) = after.split_once('}') else { bail!("`{{` without `}}`") };
        ensure!(!before.contains('}'), "`}}` without `{{`");
        ensure!(!inside.contains('{'), "braces within braces");
        let choices = choices(inside)?;
        ensure!(done.len() * choices.len() <= MAX_GLOBS, "stands for more than {MAX_GLOBS} names");
        done = done
            .iter()
            .flat_map(|d| choices.iter().map(move |c| format!("{d}{before}{c}")))
            .collect();
        rest = after;
    }
    ensure!(!rest.contains('}'), "`}}` without `{{`");
    done.iter_mut().for_each(|d| d.push_str(rest));
    Ok(done)
}

/// Expands `0,58..61` to 0, 58, 59, 60, 61.
fn choices(inside: &str) -> Result<Vec<String>> {
    let mut out = Vec::new();
    for choice in inside.split(',') {
        ensure!(!choice.is_empty(), "an empty choice in `{{{inside}}}`");
        let Some((first, last)) = choice.split_once("..") else {
            out.push(choice.to_owned());
            continue;
        };
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else {
            bail!("`{choice}` is not a range of numbers");
        };
        ensure!(first <= last, "`{choice}` runs backwards");
        out.extend((first..=last).map(|n| n.to_string()));
    }
    Ok(out)
}

fn glob_matches(glob: &[u8], name: &[u8]) -> bool {
    let star = |rest: &[u8], crosses: bool| {
        let end = if crosses {
            name.len()
        } else {
            name.iter().position(|c| *c == b'.').unwrap_or(name.len())
        };
        (0..=end).any(|n| glob_matches(rest, &name[n..]))
    };
    match glob {
        [] => name.is_empty(),
        [b'*', b'*', rest @ ..] => star(rest, true),
        [b'*', rest @ ..] => star(rest, false),
        [c, rest @ ..] => name.first() == Some(c) && glob_matches(rest, &name[1..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, role: Role, layer: usize) -> bool {
        Pattern::parse(pattern).unwrap().matches(role, layer)
    }

    #[test]
    fn patterns_mean_what_they_look_like() {
        assert!(
            matches("embed_tokens", Role::Embed, 0)
                && matches("{embed_tokens,lm_head}", Role::Head, 0)
        );
        assert!(!matches("embed_tokens", Role::Head, 0));
        assert!(
            matches("layers.*.mlp.gate_proj", Role::Gate, 17)
                && !matches("layers.*.mlp.gate_proj", Role::Up, 17)
        );
        for (layer, expected) in
            [(0, true), (1, false), (57, false), (58, true), (61, true), (62, false)]
        {
            assert_eq!(matches("layers.{0,58..61}.mlp.*", Role::Down, layer), expected, "{layer}");
        }
        // One star does not match across a dot.
        assert!(
            !matches("layers.*", Role::Down, 3)
                && matches("layers.**", Role::Down, 3)
                && matches("**", Role::Embed, 0)
        );
        assert!(!matches("layers.1.mlp.*", Role::Down, 11));
        assert!(
            matches("layers.*.self_attn.{q,k,v}_proj", Role::V, 2)
                && !matches("layers.*.self_attn.{q,k,v}_proj", Role::O, 2)
        );
        for role in [Role::QNorm, Role::FinalNorm, Role::PostFfnNorm] {
            assert!(matches("norms", role, 5) && !matches("linears", role, 5));
        }
        assert!(
            matches("linears", Role::Q, 5)
                && !matches("linears", Role::Embed, 0)
                && !matches("norms", Role::Q, 5)
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            "",
            "a b",
            "layers.[0-9]",
            "{",
            "}",
            "a}b{c",
            "{a",
            "{a,}",
            "{{a}}",
            "{3..1}",
            "{a..b}",
            "{0..9999}{0..9999}",
        ] {
            assert!(Pattern::parse(bad).is_err(), "{bad}");
        }
    }
}
