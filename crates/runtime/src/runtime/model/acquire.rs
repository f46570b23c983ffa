//! Help for unknown model names: the name that was probably meant, and the command that downloads
//! it. Only `gemma pull` downloads.

use crate::runtime::model::shapes::Shape;
use gemma_base::error::Fault;
use gemma_base::util::shell::quoted;
use gemma_model::models::architecture;
use std::path::{Path, PathBuf};

/// Google's models: size in GB of the bf16 directory, and of the 4-bit GGUF file if there is one.
const GIGABYTES: [(Shape, &str, Option<&str>); 8] = [
    (Shape::M270, "0.5", None),
    (Shape::B1, "2.0", Some("1.0")),
    (Shape::B4, "8.6", Some("3.2")),
    (Shape::B12, "24.4", Some("8.1")),
    (Shape::B27, "54.9", Some("17.2")),
    (Shape::Dense12, "24", Some("7.0")),
    (Shape::Mixture26, "52", Some("14.4")),
    (Shape::Dense31, "62", Some("17.7")),
];

/// Shell command, shown as help, that sets the token for later commands.
pub const TOKEN: &str = if cfg!(windows) {
    "$env:HF_TOKEN = 'hf_...'    # a token from https://huggingface.co/settings/tokens"
} else {
    "export HF_TOKEN=hf_...    # a token from https://huggingface.co/settings/tokens"
};

/// Extensions of weight and model files. No repository on Hugging Face has a name with one.
const FILES: [&str; 6] = [".gguf", ".safetensors", ".bin", ".pt", ".json", ".txt"];

/// Most directory entries that an error lists.
const LISTED: usize = 8;

/// Returns whether a name has the form `owner/name` of an id, as opposed to a path.
pub fn is_id(name: &str) -> bool {
    let part = |p: &str| {
        !p.is_empty()
            && !p.starts_with('.')
            && p.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let is_file = FILES.iter().any(|ending| name.to_ascii_lowercase().ends_with(ending));
    !is_file && matches!(name.split_once('/'), Some((owner, model)) if part(owner) && part(model))
}

/// Returns whether a model's licence must be accepted on its page.
pub fn is_gated(id: &str) -> bool {
    id.starts_with("google/gemma-3-")
}

/// Returns the commands that download a model that is not cached.
pub fn how_to_get(id: &str) -> String {
    if let Some(why) = architecture::refusal(id) {
        return format!("this model does not run here: {why}");
    }
    let is_gated = is_gated(id);
    let named = Shape::named(id).filter(|_| id.starts_with("google/"));
    let gigabytes = |shape: Shape, recipe: &str| {
        let (_, directory, file) = GIGABYTES.iter().find(|(known, ..)| *known == shape)?;
        if recipe == "q4_0" { *file } else { Some(*directory) }
    };
    let size = named.and_then(|(shape, recipe)| gigabytes(shape, recipe));
    let size = size.map_or(String::new(), |gb| format!(" ({gb} GB)"));
    let mut text = match is_gated {
        true => format!(
            "download it first{size}; its licence has to be accepted once, \
                at https://huggingface.co/{id}"
        ),
        false => format!("download it first{size}; its page is https://huggingface.co/{id}"),
    };
    if is_gated {
        text += &format!("\n  {TOKEN}");
    }
    text += &format!("\n  gemma pull {id}");
    if let Some((shape, "bf16")) = named
        && let Some((gb, page)) = gigabytes(shape, "q4_0").zip(shape.page("q4_0"))
    {
        text += &format!("\nor take Google's own 4-bit file, which runs as it is ({gb} GB):");
        text += &format!("\n  gemma pull {page}");
    }
    text
}

/// A model named in another program's style.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedName {
    pub id: String,
    /// The quantisation after a colon.
    pub tag: Option<String>,
}

/// Returns the id for a URL, a name without owner, or another program's name.
pub fn translate(name: &str) -> Option<ResolvedName> {
    let bare =
        name.strip_prefix("https://").or_else(|| name.strip_prefix("http://")).unwrap_or(name);
    let on_hub = ["huggingface.co/", "www.huggingface.co/", "hf.co/"]
        .iter()
        .find_map(|host| bare.strip_prefix(host));
    let rest = on_hub.unwrap_or(bare);
    let rest = rest.split(['?', '#']).next().unwrap_or(rest).trim_end_matches('/');
    if on_hub.is_none() && rest.len() != name.trim_end_matches('/').len() {
        return None;
    }
    let (rest, tag) = rest.split_once(':').map_or((rest, None), |(rest, tag)| (rest, Some(tag)));
    let mut parts = rest.split('/');
    let (first, second) = (parts.next()?, parts.next());
    let deeper = parts.next().is_some();
    match second {
        Some(second) if on_hub.is_some() || (tag.is_some() && !deeper) => {
            let id = format!("{first}/{second}");
            is_id(&id).then(|| ResolvedName { id, tag: tag.map(str::to_owned) })
        }
        None => official(first, tag),
        _ => None,
    }
}

/// Returns Google's model for a name without owner: `gemma3:27b`, `gemma-4-31b-it`. Other files of
/// a size, such as `gemma3:27b-it-q8_0`, mean Google's smallest one.
fn official(name: &str, tag: Option<&str>) -> Option<ResolvedName> {
    let whole = tag.map_or(name.to_owned(), |tag| format!("{name}:{tag}")).to_ascii_lowercase();
    if FILES.iter().any(|ending| whole.ends_with(ending)) {
        return None;
    }
    let cuts = whole.match_indices(['-', '_']).map(|(at, _)| &whole[..at]).rev();
    let of_size = |cut| Shape::named(cut).map(|(shape, _)| (shape, shape.smallest()));
    let mut cuts = cuts.filter(|cut| cut.ends_with(|c: char| c != '3'));
    let (shape, recipe) = Shape::named(&whole).or_else(|| cuts.find_map(of_size))?;
    let page = shape.page(recipe).or_else(|| shape.page("bf16"))?;
    // Gemma 4's base models have the name without a suffix.
    let base = if shape.family() == 4 { "" } else { "-pt" };
    let is_base = whole.split(['-', '_', ':']).any(|word| word == "pt");
    let id = if is_base { page.replacen("-it", base, 1) } else { page };
    Some(ResolvedName { id, tag: None })
}

/// Returns the ids of Google's pages for a size, or for a page's name without owner. The smallest
/// file comes first.
pub fn pages(name: &str) -> Vec<String> {
    match (Shape::sized(name), Shape::named(name)) {
        (Some(shape), _) => {
            ["q4_0", "bf16"].into_iter().filter_map(|recipe| shape.page(recipe)).collect()
        }
        (None, Some(_)) if !name.contains('/') => {
            let (name, tag) = name.split_once(':').map_or((name, None), |(n, t)| (n, Some(t)));
            official(name, tag).into_iter().map(|meant| meant.id).collect()
        }
        _ => Vec::new(),
    }
}

/// Expands `~` in a path that the shell did not expand because of quotes.
pub fn expanded(name: &str, home: Option<&Path>) -> Option<PathBuf> {
    Some(home?.join(name.strip_prefix("~/")?))
}

/// Returns the error for a path that does not exist, listing the models in its directory.
pub fn no_such_path(path: &Path) -> Fault {
    let what = format!("there is no model at {}", path.display());
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let shown = parent.map_or("the working directory".to_owned(), |p| {
        format!("{}/", p.display().to_string().trim_end_matches('/'))
    });
    let directory = parent.unwrap_or(Path::new("."));
    if !directory.is_dir() {
        return Fault::model(what)
            .help(format!("there is no directory {shown} either: check the path"));
    }
    let models = models_in(directory);
    let same = |name: &&String| {
        path.file_name().is_some_and(|typed| typed.to_string_lossy().eq_ignore_ascii_case(name))
    };
    if let Some(name) = models.iter().find(same) {
        let path = parent.map_or_else(|| PathBuf::from(name), |p| p.join(name));
        return Fault::model(what)
            .help(format!("did you mean -m {}?", quoted(&path.display().to_string())));
    }
    let more = models.len().saturating_sub(LISTED);
    let mut list = models[..models.len() - more].join(", ");
    if more > 0 {
        list += &format!(", and {more} more");
    }
    Fault::model(what).help(match list.as_str() {
        "" => format!(
            "{shown} holds no models; give a model directory, a GGUF file, \
                or an id such as google/gemma-3-1b-it that was downloaded"
        ),
        list => format!("{shown} holds {list}"),
    })
}

/// Returns the names of the models directly in a directory: GGUF files, and model directories.
fn models_in(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_gguf = |path: &Path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let is_model = |path: &Path| is_gguf(path) || path.join("config.json").is_file();
    let mut names: Vec<String> = entries
        .filter(|e| is_model(&e.path()))
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_paths() {
        assert!(is_id("google/gemma-3-27b-it"));
        for path in [
            "./x/y",
            "/x/y",
            "x",
            "a/b/c",
            "a/",
            "../b",
            "a b/c",
            "models/gemma-3-1B.gguf",
            "m/model.safetensors",
        ] {
            assert!(!is_id(path), "{path}");
        }
    }

    #[test]
    fn other_ways_to_name_a_model_are_translated() {
        let id =
            |name: &str| translate(name).map(|meant| (meant.id, meant.tag.unwrap_or_default()));
        for (name, want) in [
            ("gemma-3-27b-it", "google/gemma-3-27b-it"),
            ("gemma-3-27b", "google/gemma-3-27b-it-qat-q4_0-gguf"),
            ("27b", "google/gemma-3-27b-it-qat-q4_0-gguf"),
            ("270m", "google/gemma-3-270m-it"),
            ("26b", "google/gemma-4-26B-A4B-it-qat-q4_0-gguf"),
            ("gemma-3-12b-pt", "google/gemma-3-12b-pt"),
            ("gemma-4-12b-pt", "google/gemma-4-12B"),
            ("gemma3", "google/gemma-3-4b-it-qat-q4_0-gguf"),
            ("gemma3:latest", "google/gemma-3-4b-it-qat-q4_0-gguf"),
            ("gemma3:27b", "google/gemma-3-27b-it-qat-q4_0-gguf"),
            ("gemma3:27b-it-q8_0", "google/gemma-3-27b-it-qat-q4_0-gguf"),
            ("gemma3:270m-it-qat", "google/gemma-3-270m-it"),
            ("gemma3:27b-it-qat", "google/gemma-3-27b-it-qat-q4_0-gguf"),
            ("Gemma-3-1B-it", "google/gemma-3-1b-it"),
            ("gemma4:31b", "google/gemma-4-31B-it-qat-q4_0-gguf"),
            ("gemma-4-12b-it-qat", "google/gemma-4-12B-it-qat-q4_0-gguf"),
            ("hf.co/google/gemma-3-1b-it", "google/gemma-3-1b-it"),
            ("https://huggingface.co/google/gemma-3-1b-it/tree/main", "google/gemma-3-1b-it"),
            ("https://huggingface.co/google/gemma-3-1b-it?x=1", "google/gemma-3-1b-it"),
        ] {
            assert_eq!(id(name), Some((want.to_owned(), String::new())), "{name}");
        }
        for name in
            ["ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", "hf.co/ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"]
        {
            assert_eq!(id(name), Some(("ggml-org/gemma-3-4b-it-GGUF".into(), "Q4_K_M".into())));
        }
        for name in [
            "llama3:8b",
            "gemma2:9b",
            "gemma4:e4b",
            "gemma-3n-e4b",
            "gemma3.gguf",
            "gemma3-foo",
            "x",
            "a/b/c",
            "https://example.org/a/b",
            "./a/b:c",
        ] {
            assert_eq!(id(name), None, "{name}");
        }
        assert_eq!(expanded("~/x.gguf", Some(Path::new("/home/u"))), Some("/home/u/x.gguf".into()));
        assert_eq!(expanded("x~/y", Some(Path::new("/home/u"))), None);
    }

    #[test]
    fn a_size_stands_for_the_pages_of_google_with_the_smallest_first() {
        let both = ["google/gemma-3-27b-it-qat-q4_0-gguf", "google/gemma-3-27b-it"];
        for name in ["27b", "gemma3:27b", "gemma-3-27B"] {
            assert_eq!(pages(name), both, "{name}");
        }
        assert_eq!(pages("270m"), ["google/gemma-3-270m-it"]);
        assert_eq!(pages("gemma-3-27b-it"), both[1..]);
        assert_eq!(pages("gemma3:27b-it-qat"), both[..1]);
        for name in ["google/gemma-3-27b-it", "gemma3:27b-it-q8_0", "x"] {
            assert!(pages(name).is_empty(), "{name}");
        }
        for (shape, ..) in GIGABYTES {
            assert!(how_to_get(&pages(shape.name())[0]).contains(" GB)"), "{}", shape.name());
        }
    }

    #[test]
    fn a_mistyped_path_is_answered_with_what_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let help = |name: &str| no_such_path(&at(name)).help.unwrap();
        assert!(help("a.gguf").contains("holds no models"));
        std::fs::write(at("small.gguf"), "").unwrap();
        std::fs::write(at("notes.md"), "").unwrap();
        std::fs::create_dir(at("big")).unwrap();
        std::fs::write(at("big/config.json"), "").unwrap();
        assert!(help("x.gguf").ends_with("holds big, small.gguf"), "{}", help("x.gguf"));
        assert!(
            help("Small.GGUF").contains("did you mean -m")
                && help("Small.GGUF").ends_with("small.gguf?")
        );
        assert!(help("absent/x.gguf").contains("there is no directory"));
        for i in 0..20 {
            std::fs::write(at(&format!("{i}.gguf")), "").unwrap();
        }
        assert!(help("x").contains("and 14 more"), "{}", help("x"));
    }

    #[test]
    fn how_to_get_a_model_names_size_licence_and_the_smaller_file() {
        let text = how_to_get("google/gemma-3-27b-it");
        for part in [
            "54.9 GB",
            "licence",
            "HF_TOKEN",
            "gemma pull google/gemma-3-27b-it\n",
            "17.2 GB",
            "-qat-q4_0-gguf",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let file = how_to_get("google/gemma-3-27b-it-qat-q4_0-gguf");
        assert!(
            file.contains("17.2 GB") && !file.contains("54.9") && file.matches("qat").count() == 2,
            "{file}"
        );
        assert!(how_to_get("google/gemma-4-E4B-it").contains("embeddings for each layer"));
        let other = how_to_get("someone/else");
        assert!(
            other.contains("gemma pull someone/else")
                && !other.contains("licence")
                && !other.contains("GB"),
            "{other}"
        );
    }
}
