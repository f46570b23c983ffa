//! Finds the files of a GGUF model: one file, or parts named `name-00001-of-0000N.gguf`.

use super::container::{self, GgufEntry, MAGIC};
use super::metadata::Metadata;
use crate::checkpoint::store::{Bytes, Store};
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::util::files::open_regular;
use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A GGUF model with all its parts opened and checked.
#[derive(Debug)]
pub struct GgufFiles {
    /// The directory of the parts.
    pub store: Store,
    pub names: Vec<String>,
    pub parts: Vec<Bytes>,
    /// Metadata of the first part.
    pub metadata: Metadata,
    /// (part, tensor) pairs, ordered by part and then by offset in the file.
    pub tensors: Vec<(usize, GgufEntry)>,
}

/// Returns the GGUF file of `path`: itself, or the only model in the directory. `None` if `path` is
/// not a GGUF model.
pub fn find(path: &Path) -> Result<Option<PathBuf>> {
    if path.is_file() {
        let named = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        return Ok((named || begins_as_gguf(path)).then(|| path.to_owned()));
    }
    let Ok(entries) = fs::read_dir(path) else { return Ok(None) };
    let mut names: Vec<String> =
        entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    if names.iter().any(|n| n.ends_with(".safetensors")) {
        return Ok(None);
    }
    names.sort();
    let models: Vec<&String> = names.iter().filter(|n| GgufNames::of_first(n).is_some()).collect();
    match models[..] {
        [] => Ok(None),
        [only] => Ok(Some(path.join(only))),
        _ => {
            let what = format!("{} holds {} models", path.display(), models.len());
            let paths: Vec<String> =
                models.iter().map(|n| format!("\n  {}", path.join(n).display())).collect();
            Err(Fault::model(what)
                .help(format!("give the path of one of them:{}", paths.concat()))
                .into())
        }
    }
}

/// Names of the files of a GGUF model.
///
/// The first file's name tells the number of parts. Names are generated lazily, since a name can
/// claim 99,999 parts that do not exist.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GgufNames {
    first: String,
}

impl GgufNames {
    /// Returns the names of the model that starts with this file.
    ///
    /// These are the file itself, or all parts if it is the first part. `None` for later parts,
    /// vision towers, importance matrices and other files.
    pub fn of_first(name: &str) -> Option<GgufNames> {
        let is_other = name.contains("mmproj") || name.contains("imatrix");
        let is_first = part_of(name).is_none_or(|part| part.number == 1);
        (name.ends_with(".gguf") && !is_other && is_first)
            .then(|| GgufNames { first: name.to_owned() })
    }

    pub fn first(&self) -> &str {
        &self.first
    }

    /// Returns the name without part number and extension.
    pub fn stem(&self) -> &str {
        let stem = || self.first.strip_suffix(".gguf");
        part_of(&self.first).map(|part| part.stem).or_else(stem).unwrap_or(&self.first)
    }

    pub fn all(&self) -> impl Iterator<Item = String> {
        let count = part_of(&self.first).map_or(1, |part| part.count);
        (1..=count).map(move |i| match part_of(&self.first) {
            Some(part) => part.name(i),
            None => self.first.clone(),
        })
    }
}

fn begins_as_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    open_regular(path).and_then(|mut f| f.read_exact(&mut magic)).is_ok() && magic == *MAGIC
}

/// Parsed name of one file of a split model.
struct PartName<'a> {
    stem: &'a str,
    number: usize,
    count: usize,
}

impl PartName<'_> {
    /// Returns the name of the part with this number.
    fn name(&self, number: usize) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

/// Parses a name such as `stem-00002-of-00005.gguf`.
fn part_of(name: &str) -> Option<PartName<'_>> {
    let rest = name.strip_suffix(".gguf")?;
    let (rest, count) = rest.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let parse = |s: &str| {
        (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse().ok()).flatten()
    };
    let (number, count) = (parse(number)?, parse(count)?);
    (1..=count).contains(&number).then_some(PartName { stem, number, count })
}

/// Opens the file and, if it is one of several parts, all others.
pub fn open(path: &Path) -> Result<GgufFiles> {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let mut model = GgufFiles {
        store: Store::Directory(dir.to_owned()),
        names: vec![name.clone()],
        parts: Vec::new(),
        metadata: Metadata::default(),
        tensors: Vec::new(),
    };
    let bytes = model.store.map(&name)?;
    let (metadata, _) = container::parse(&model.store.display(&name), &bytes)?;
    let shown = model.store.display(&name);
    let bad = |what: String| Fault::model(format!("{shown}: {what}"));
    let count = metadata.int("split.count").unwrap_or(0);
    if count > 1 {
        let Some(part) = part_of(&name).filter(|p| p.count as i64 == count) else {
            let what =
                format!("is one of {count} parts, but is not called -0000N-of-{count:05}.gguf");
            return Err(bad(what)
                .help("give all parts the names they were published with, in one directory")
                .into());
        };
        model.names = (1..=part.count).map(|i| part.name(i)).collect();
        let missing: Vec<&String> =
            model.names.iter().filter(|n| !model.store.contains(n)).collect();
        if let Some(first) = missing.first() {
            let what = format!(
                "{} is missing; {} of {count} parts are not there",
                model.store.display(first),
                missing.len()
            );
            return Err(Fault::model(what)
                .help("the download is incomplete: fetch all parts")
                .into());
        }
    }
    let mut seen = HashMap::new();
    for (i, name) in model.names.iter().enumerate() {
        let shown = model.store.display(name);
        let bytes = model.store.map(name)?;
        let (metadata, tensors) = container::parse(&shown, &bytes)?;
        let number = metadata.int("split.no").unwrap_or(0);
        if model.names.len() > 1 && (metadata.int("split.count"), number) != (Some(count), i as i64)
        {
            let what = format!(
                "{shown} says that it is part {} of {}",
                number + 1,
                metadata.int("split.count").unwrap_or(1)
            );
            return Err(Fault::model(what)
                .help("the parts are of different exports: fetch all again")
                .into());
        }
        for tensor in tensors {
            if let Some(other) = seen.insert(tensor.name.clone(), i) {
                let what =
                    format!("{shown}: tensor `{}` is also in {}", tensor.name, model.names[other]);
                return Err(Fault::model(what)
                    .help("the parts are of different exports: fetch all again")
                    .into());
            }
            model.tensors.push((i, tensor));
        }
        model.parts.push(bytes);
        if i == 0 {
            model.metadata = metadata;
        }
    }
    if let Some(n) =
        model.metadata.int("split.tensors.count").filter(|n| *n != model.tensors.len() as i64)
    {
        let what = format!("the parts should hold {n} tensors, not {}", model.tensors.len());
        return Err(bad(what).help("the parts are of different exports: fetch all again").into());
    }
    Ok(model)
}
