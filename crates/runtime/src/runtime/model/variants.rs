//! Finds the GGUF models among the files of a repository, and the one that a tag names.
//!
//! The file names come from an untrusted list. The work is linear in the list's length, plus a
//! constant for each model with a requested tag.

use gemma_model::checkpoint::GgufNames;

/// Most tags that are tried for one model.
const MOST_TAGS: usize = 16;

/// A GGUF model of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufVariant {
    pub names: GgufNames,
    /// Name of the first file in lower case.
    folded: String,
}

impl GgufVariant {
    fn of_first(name: &str) -> Option<GgufVariant> {
        let names = GgufNames::of_first(name)?;
        Some(GgufVariant { names, folded: name.to_ascii_lowercase() })
    }

    /// Returns whether a tag in lower case is the name of the first file, or a part of it between
    /// separators: `q4_k` does not match `x-Q4_K_M.gguf`.
    fn is_called(&self, tag: &str) -> bool {
        let name = &*self.folded;
        let is_edge = |c: Option<char>| c.is_none_or(|c| matches!(c, '-' | '.' | '/'));
        let is_start = |c: Option<char>| is_edge(c) || c == Some('_');
        let base = name.rsplit('/').next();
        !tag.is_empty()
            && (name == tag
                || base == Some(tag)
                || name.match_indices(tag).any(|(at, _)| {
                    let (before, after) = (&name[..at], &name[at + tag.len()..]);
                    is_start(before.chars().next_back()) && is_edge(after.chars().next())
                }))
    }
}

/// Returns the GGUF models among the files of a repository, sorted by name.
pub fn variants<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<GgufVariant> {
    let mut found: Vec<GgufVariant> = names.into_iter().filter_map(GgufVariant::of_first).collect();
    found.sort_by(|a, b| a.names.cmp(&b.names));
    found
}

/// Returns the models that a tag or a file name matches.
pub fn tagged<'a>(variants: &'a [GgufVariant], tag: &str) -> Vec<&'a GgufVariant> {
    match variants.iter().find(|v| v.names.first() == tag) {
        Some(exact) => vec![exact],
        None => called(variants, tag).collect(),
    }
}

fn called<'a>(variants: &'a [GgufVariant], tag: &str) -> impl Iterator<Item = &'a GgufVariant> {
    let tag = tag.to_ascii_lowercase();
    variants.iter().filter(move |v| v.is_called(&tag))
}

/// Returns the shortest tag that matches only this model: the end of its name, or the name.
pub fn tag_of(variants: &[GgufVariant], variant: &GgufVariant) -> String {
    let stem = variant.names.stem();
    let tags = stem.match_indices(['-', '.', '/']).rev().map(|(at, _)| &stem[at + 1..]);
    let is_alone = |tag: &&str| called(variants, tag).take(2).eq([variant]);
    let mut tags = tags.take(MOST_TAGS);
    tags.find(is_alone).unwrap_or(variant.names.first()).to_owned()
}

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
            let found = tagged(&all, tag).into_iter().flat_map(|v| v.names.all());
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

    /// A list that claims more parts and has more separators than could be processed.
    #[test]
    fn hostile_names_cost_no_more_than_their_length() {
        let names: Vec<String> = (0..60_000).map(|i| format!("m{i}-00001-of-99999.gguf")).collect();
        let all = variants(names.iter().map(String::as_str));
        assert_eq!(all.len(), 60_000);
        assert_eq!(all[0].names.all().nth(1).unwrap(), "m0-00002-of-99999.gguf");
        assert_eq!(all[7].names.all().count(), 99_999);
        // The distinguishing tag is the 1,001st, which is not tried.
        let twins = ["x-c-", "x-d-"].map(|start| format!("{start}{}x.gguf", "a-".repeat(1000)));
        let all = variants(twins.iter().map(String::as_str));
        assert_eq!(tag_of(&all, &all[0]), twins[0]);
    }
}
