//! `gemma pull`: downloads a model from Hugging Face into the cache that Hugging Face's tools
//! share.
//!
//! `hub` makes the requests, `transfer` downloads one file into the cache. The layout is that of
//! `huggingface_hub`: `models--OWNER--NAME/{blobs,snapshots,refs}`.
//!
//! The requests use `ureq`. The crate `hf-hub` is not used: it names a file before anything can
//! check it, and it depends on a library under the MPL, which `deny.toml` refuses.

pub mod hub;
mod transfer;

use crate::cli::io::destination::replace;
use crate::cli::io::output::print;
use crate::cli::io::signals::Interrupt;
use crate::cli::options::UiOptions;
use crate::cli::settings::Typed;
use crate::error::{Fault, Kind};
use crate::models::architecture;
use crate::os;
use crate::runtime::model::acquire::{ResolvedName, how_to_get, is_id, pages, translate};
use crate::runtime::model::find::{caches, folder_of};
use crate::runtime::model::shapes::Shape;
use crate::runtime::model::variants::{GgufVariant, tag_of, tagged, variants};
use crate::util::files::{parent_of, rename_durably};
use crate::util::units::bytes;
use anyhow::{Context, Result};
use clap::Args;
use hub::{Hub, RemoteFile, Repository};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use transfer::{Download, cannot_write, incomplete, is_complete};

const EXAMPLES: &str = "\
Examples:
  gemma pull 4b
  gemma pull google/gemma-3-4b-it-qat-q4_0-gguf
  gemma pull ggml-org/gemma-3-4b-it-GGUF:Q4_K_M
  gemma chat -m \"$(gemma pull google/gemma-3-1b-it)\"";

/// Download a model from Hugging Face
///
/// The files go to the cache of Hugging Face's own tools: $HF_HUB_CACHE, or hub/ below $HF_HOME,
/// or ~/.cache/huggingface/hub. Their digests are checked. The same command resumes an interrupted
/// download. The path of the model goes to standard output. A gated model, such as Google's,
/// needs a token: $HF_TOKEN, or the file that `hf auth login` writes.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct PullArgs {
    /// OWNER/NAME on Hugging Face; :TAG or :FILE selects one of several GGUF files, for example
    /// :Q4_K_M. A size (27b, gemma4:31b) is Google's 4-bit file
    #[arg(value_name = "ID[:TAG]")]
    pub id: String,
    #[command(flatten)]
    pub ui: UiOptions,
}

/// Files of a checkpoint other than its weights.
const SIDE_FILES: [&str; 10] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// Limit of models in a message.
const MOST_LISTED: usize = 20;

pub fn run(options: &PullArgs, typed: &Typed) -> Result<u8> {
    os::signals::survive_closed_connections();
    let ui = &typed.ui;
    let ResolvedName { id, tag } = parse(&options.id)?;
    if !pages(&options.id).is_empty() {
        ui.note(format!("{} is {id}", options.id));
    }
    let cache = caches().into_iter().next().with_context(|| {
        Fault::usage("there is no home directory for the cache").help("set HF_HUB_CACHE")
    })?;
    let folder = cache.join(folder_of(&id));
    let hub = Hub::from_environment()?;
    let repository = hub.repository(&id)?;
    let wanted = choose(&id, tag.as_deref(), &repository)?;
    let missing: Vec<&RemoteFile> =
        wanted.iter().copied().filter(|file| !is_complete(&folder, file)).collect();
    check_space(&folder, &missing)?;
    if !missing.is_empty() {
        let total = sum(missing.iter().map(|file| file.size));
        let files = if missing.len() == 1 { "file" } else { "files" };
        if !ui.is_quiet() {
            ui.line(&format!("{id}: {} {files}, {}", missing.len(), bytes(total)));
        }
        let blobs = folder.join("blobs");
        fs::create_dir_all(&blobs).with_context(|| cannot_write(&blobs))?;
        let (interrupt, bar) = (Interrupt::watch()?, ui.bytes_bar("downloading", total, true));
        let (hub, id, commit) = (&hub, &id, &repository.commit);
        let (interrupt, bar) = (&interrupt, &bar);
        let download = Download { hub, id, commit, folder: &folder, interrupt, bar };
        let fetched = missing.iter().try_fold(true, |so_far, file| {
            let fetched = so_far && download.fetch(file)?;
            if fetched {
                bar.suspend(|| ui.detail(1, format!("{}: {}", file.name, bytes(file.size))));
            }
            anyhow::Ok(fetched)
        });
        bar.finish_and_clear();
        if !fetched? {
            ui.note(format!("interrupted; gemma pull {} resumes the download", options.id));
            return Ok(interrupt.exit_code().unwrap_or(130));
        }
    }
    let path = link(&folder, &repository, &wanted)?;
    print(&format!("{}\n", path.display()))?;
    Ok(0)
}

/// Parses an id and a tag from the command line. A size is Google's smallest file. For other names,
/// the error suggests the id that was probably meant.
fn parse(name: &str) -> Result<ResolvedName> {
    let (id, tag) = name.split_once(':').map_or((name, None), |(id, tag)| (id, Some(tag)));
    if let Some(why) = architecture::refusal(id) {
        let fault = Fault::model(format!("{id} does not run here: {why}"));
        return Err(fault.help("gemma plan lists the models that run").into());
    }
    if is_id(id) && tag.is_none_or(|tag| !tag.is_empty()) {
        return Ok(ResolvedName { id: id.to_owned(), tag: tag.map(str::to_owned) });
    }
    let meant = translate(name);
    let is_smallest = Shape::named(name).is_some_and(|(shape, recipe)| recipe == shape.smallest());
    let is_address = name.contains("hf.co/") || name.contains("huggingface.co/");
    match meant {
        Some(meant) if is_address || is_smallest => Ok(meant),
        Some(ResolvedName { id, .. }) => Err(Fault::usage(format!("`{name}` is not OWNER/NAME"))
            .help(format!("did you mean {id}? If so, {}", how_to_get(&id)))
            .into()),
        None => Err(Fault::usage(format!("`{name}` is not OWNER/NAME"))
            .help(
                "give a size, such as 4b or gemma4-12b, or the id of a page on Hugging Face, \
                 such as google/gemma-3-1b-it",
            )
            .into()),
    }
}

/// Returns the files to download: the GGUF model that the tag names, or else the checkpoint, or
/// else the only GGUF model.
fn choose<'a>(
    id: &str,
    tag: Option<&str>,
    repository: &'a Repository,
) -> Result<Vec<&'a RemoteFile>> {
    let files = &repository.files;
    let by_name: HashMap<&str, &RemoteFile> =
        files.iter().map(|file| (&*file.name, file)).collect();
    let all = variants(files.iter().map(|file| file.name.as_str()));
    let is_weights = |name: &str| name.ends_with(".safetensors") && !name.contains('/');
    let is_checkpoint = files.iter().any(|file| is_weights(&file.name));
    let is_odd = |name: &&String| is_weights(name) || (!is_checkpoint && name.ends_with(".gguf"));
    if let (None, Some(odd)) = (tag, repository.left_out.iter().find(is_odd)) {
        let what = format!("{id} has a file called {odd:?}, which not every system can store");
        return Err(Fault::model(what).help("name one of its GGUF files: ID:FILE").into());
    }
    let chosen = match tag {
        Some(tag) => tagged(&all, tag),
        None if is_checkpoint => {
            let is_wanted = |name: &str| is_weights(name) || SIDE_FILES.contains(&name);
            return Ok(files.iter().filter(|file| is_wanted(&file.name)).collect());
        }
        None => all.iter().collect(),
    };
    let of_name = |name: String| {
        by_name.get(&*name).copied().with_context(|| {
            Fault::model(format!("{id} has no {name}, which is a part of the model"))
        })
    };
    match (&chosen[..], &all[..]) {
        ([one], _) => {
            let all = one.names.all().map(of_name).chain(tower_of(files).map(Ok));
            all.collect()
        }
        (_, []) => {
            let what = format!("{id} has neither safetensors nor GGUF files");
            Err(Fault::model(what).help("give the id of a page with one of them").into())
        }
        (chosen, all) => {
            let what = match tag {
                Some(tag) if chosen.is_empty() => format!("{id} has no GGUF file {tag}"),
                Some(tag) => format!("{id} has {} GGUF files called {tag}", chosen.len()),
                None => format!("{id} has {} GGUF files", chosen.len()),
            };
            let size = |variant: &GgufVariant| {
                let names = variant.names.all();
                bytes(sum(names.map_while(|name| Some(by_name.get(&*name)?.size))))
            };
            let line =
                |v: &GgufVariant| format!("\n  gemma pull {id}:{}  # {}", tag_of(all, v), size(v));
            let named: Vec<&GgufVariant> = match chosen {
                [] => all.iter().collect(),
                several => several.to_vec(),
            };
            let mut list: String = named.iter().copied().take(MOST_LISTED).map(line).collect();
            if let Some(more) = named.len().checked_sub(MOST_LISTED + 1) {
                list += &format!("\n  and {} more", more + 1);
            }
            Err(Fault::usage(what).help(format!("name one of them:{list}")).into())
        }
    }
}

/// Returns the mmproj file, which reads images, if the repository has one. Prefers bf16, in which
/// models are trained, then f16, then f32.
fn tower_of(files: &[RemoteFile]) -> Option<&RemoteFile> {
    let is_tower = |file: &&RemoteFile| {
        let name = file.name.rsplit('/').next().unwrap_or(&file.name);
        name.contains("mmproj") && name.ends_with(".gguf")
    };
    let rank = |file: &&RemoteFile| {
        let name = file.name.to_ascii_lowercase();
        ["bf16", "f16", "f32"].iter().position(|kind| name.contains(kind)).unwrap_or(3)
    };
    files.iter().filter(is_tower).min_by_key(rank)
}

/// Adds sizes from the server. They may be wrong, so the sum saturates.
fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// Refuses a download that is larger than the free disk space.
fn check_space(folder: &Path, missing: &[&RemoteFile]) -> Result<()> {
    let has = |file: &RemoteFile| incomplete(folder, file).metadata().map_or(0, |meta| meta.len());
    let needed = sum(missing.iter().map(|file| file.size.saturating_sub(has(file))));
    let Some(directory) = folder.ancestors().find(|path| path.is_dir()) else { return Ok(()) };
    match os::files::free_bytes(directory) {
        Some(free) if free < needed => {
            let (needed, free, shown) = (bytes(needed), bytes(free), directory.display());
            let what = format!("the download needs {needed}, and {shown} has {free} free");
            let help = "make room, or name a directory on another disk: HF_HUB_CACHE=DIRECTORY";
            Err(Fault::new(Kind::Failure, what).help(help).into())
        }
        _ => Ok(()),
    }
}

/// Links the files into the snapshot, and makes it the current one. Returns the path of the model:
/// its first GGUF file, or the snapshot.
fn link(folder: &Path, repository: &Repository, files: &[&RemoteFile]) -> Result<PathBuf> {
    let snapshot = folder.join("snapshots").join(&repository.commit);
    for file in files {
        let path = snapshot.join(&file.name);
        let directory = path.parent().unwrap_or(&snapshot);
        fs::create_dir_all(directory).with_context(|| cannot_write(directory))?;
        let up = "../".repeat(2 + file.name.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", file.blob));
        if fs::read_link(&path).is_ok_and(|found| found == target) {
            continue;
        }
        replace_link(&target, &path).with_context(|| cannot_write(&path))?;
    }
    let refs = folder.join("refs");
    fs::create_dir_all(&refs).with_context(|| cannot_write(&refs))?;
    let main = refs.join("main");
    let commit = repository.commit.as_bytes();
    replace(&main, |file| file.write_all(commit), &main.display().to_string())?;
    remove_stale(folder, repository);
    let gguf = files.first().filter(|file| file.name.ends_with(".gguf"));
    Ok(gguf.map_or_else(|| snapshot.clone(), |file| snapshot.join(&file.name)))
}

/// Replaces `path` by a link in one step.
fn replace_link(target: &Path, path: &Path) -> io::Result<()> {
    let make = |path: &Path| os::files::make_symlink(target, path);
    let link = tempfile::Builder::new().prefix(".gemma-").make_in(parent_of(path), make)?;
    rename_durably(&link.into_temp_path(), path)
}

/// Removes partial files of versions that the repository no longer has. They would never be
/// resumed, and an incomplete file makes a model count as incomplete.
fn remove_stale(folder: &Path, repository: &Repository) {
    let current: HashSet<&str> = repository.files.iter().map(|file| &*file.blob).collect();
    for entry in fs::read_dir(folder.join("blobs")).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(blob) = name.strip_suffix(".incomplete") else { continue };
        if !current.contains(blob) {
            // If the file cannot be removed, opening the model reports it.
            let _ = fs::remove_file(entry.path());
        }
    }
}
