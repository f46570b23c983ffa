//! The GGUF models among the files of a repository, and the one that a tag names.

use crate::checkpoint::files_of_gguf;

/// A GGUF model of a repository: its files in order, one or all parts of a split one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufVariant {
    pub files: Vec<String>,
}

impl GgufVariant {
    /// Returns whether a tag is the name of the first file, or stands in it between separators:
    /// `Q4_K` does not name `x-Q4_K_M.gguf`.
    fn is_called(&self, tag: &str) -> bool {
        let (name, tag) = (self.files[0].to_ascii_lowercase(), tag.to_ascii_lowercase());
        let is_edge = |c: Option<char>| c.is_none_or(|c| matches!(c, '-' | '.' | '/'));
        let is_start = |c: Option<char>| is_edge(c) || c == Some('_');
        let base = name.rsplit('/').next();
        !tag.is_empty()
            && (name == tag
                || base == Some(&tag)
                || name.match_indices(&tag).any(|(at, _)| {
                    let (before, after) = (&name[..at], &name[at + tag.len()..]);
                    is_start(before.chars().next_back()) && is_edge(after.chars().next())
                }))
    }
}

/// Returns the GGUF models among the files of a repository, sorted by name.
pub fn variants<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<GgufVariant> {
    let mut found: Vec<GgufVariant> =
        names.into_iter().filter_map(files_of_gguf).map(|files| GgufVariant { files }).collect();
    found.sort_by(|a, b| a.files.cmp(&b.files));
    found
}

/// Returns the models that a tag or a file name stands for.
pub fn tagged<'a>(variants: &'a [GgufVariant], tag: &str) -> Vec<&'a GgufVariant> {
    let is_file = |v: &&GgufVariant| v.files[0] == tag;
    match variants.iter().find(is_file) {
        Some(exact) => vec![exact],
        None => variants.iter().filter(|v| v.is_called(tag)).collect(),
    }
}

/// Returns the shortest tag that stands for this model alone.
pub fn tag_of(variants: &[GgufVariant], variant: &GgufVariant) -> String {
    let file = &variant.files[0];
    let stem = file.strip_suffix(".gguf").unwrap_or(file);
    let stem = if variant.files.len() > 1 { &stem[..stem.len() - PART.len()] } else { stem };
    let tags = stem.match_indices(['-', '.', '/']).rev().map(|(at, _)| &stem[at + 1..]);
    let is_alone = |tag: &&str| !tag.is_empty() && tagged(variants, tag) == [variant];
    tags.into_iter().find(is_alone).map_or_else(|| file.clone(), str::to_owned)
}

/// Ends the name of the first of several parts.
const PART: &str = "-00001-of-00002";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_names_one_model_and_all_of_its_parts() {
        let all = variants([
            "README.md",
            "g-1b-it-Q4_K_M.gguf",
            "g-1b-it-Q4_K_S.gguf",
            "g-1b-it-UD-Q4_K_XL.gguf",
            "big/g-1b-it-BF16-00001-of-00002.gguf",
            "big/g-1b-it-BF16-00002-of-00002.gguf",
            "mmproj-F16.gguf",
        ]);
        assert_eq!(all.len(), 4);
        let named = |tag: &str| {
            let found = tagged(&all, tag).into_iter().flat_map(|v| v.files.clone());
            found.collect::<Vec<_>>()
        };
        assert_eq!(named("q4_k_m"), ["g-1b-it-Q4_K_M.gguf"]);
        assert_eq!(named("g-1b-it-Q4_K_S.gguf"), ["g-1b-it-Q4_K_S.gguf"]);
        assert_eq!(named("BF16").len(), 2);
        assert!(named("Q4_K").is_empty() && named("").is_empty() && named("F16").is_empty());
        assert_eq!(named("1b").len(), 5, "ambiguous");
        let tags: Vec<String> = all.iter().map(|v| tag_of(&all, v)).collect();
        assert_eq!(tags, ["BF16", "Q4_K_M", "Q4_K_S", "Q4_K_XL"]);
    }
}
