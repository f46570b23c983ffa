//! Source of a checkpoint's files: a directory, or bytes inside the binary.

use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::os::{self, files::Stamp};
use gemma_base::util::files::open_regular;
use gemma_base::util::json;
use memmap2::Mmap;
use std::borrow::Cow;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::PathBuf;

/// Largest side file that is read into memory (Gemma's tokenizer.json has 33 MB).
const MAX_SIDE_FILE: u64 = 512 << 20;

/// A set of named files.
#[derive(Debug)]
pub enum Store {
    Directory(PathBuf),
    Memory(String, Vec<(&'static str, &'static [u8])>),
}

/// The bytes of one file.
#[derive(Debug)]
pub enum Bytes {
    Mapped(Mmap, File),
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map, _) => map,
            Bytes::Static(bytes) => bytes,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl Bytes {
    /// Reads from the file itself. Unlike with the map, a file that shrank is an error instead of a
    /// signal, and the bytes do not stay in this process.
    pub fn read_at(&self, start: usize, out: &mut [u8]) -> std::io::Result<()> {
        match self {
            Bytes::Mapped(_, file) => os::files::read_exact_at(file, out, start as u64),
            Bytes::Static(_) | Bytes::Owned(_) => {
                let part = self.get(start..start + out.len()).ok_or(ErrorKind::UnexpectedEof)?;
                out.copy_from_slice(part);
                Ok(())
            }
        }
    }

    pub fn stamp(&self) -> std::io::Result<Stamp> {
        match self {
            Bytes::Mapped(_, file) => Stamp::of_file(file),
            Bytes::Static(_) | Bytes::Owned(_) => Ok(Stamp::of_bytes(self.len() as u64)),
        }
    }

    /// Tells the system that these bytes will not be needed soon.
    pub fn release(&self, range: std::ops::Range<usize>) {
        if let Bytes::Mapped(map, _) = self {
            os::memory::release(map, range);
        }
    }
}

fn unreadable(file: &str, e: &std::io::Error) -> Fault {
    Fault::model(format!("{file}: {e}"))
        .help("check that the file is there, that it is a plain file and that you may read it")
}

impl Store {
    /// Returns the name of a file for errors.
    pub fn display(&self, file: &str) -> String {
        match self {
            Store::Directory(dir) => dir.join(file).display().to_string(),
            Store::Memory(name, _) => format!("{name}:{file}"),
        }
    }

    pub fn contains(&self, file: &str) -> bool {
        match self {
            Store::Directory(dir) => dir.join(file).is_file(),
            Store::Memory(_, files) => files.iter().any(|(name, _)| *name == file),
        }
    }

    /// Returns the sorted names of all files, without those in subdirectories.
    pub fn list(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = match self {
            Store::Directory(dir) => {
                let entries = std::fs::read_dir(dir)
                    .map_err(|e| unreadable(&dir.display().to_string(), &e))?;
                entries
                    .filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()))
                    .collect()
            }
            Store::Memory(_, files) => files.iter().map(|(name, _)| name.to_string()).collect(),
        };
        names.sort();
        Ok(names)
    }

    /// Reads a small file completely; `None` if there is none.
    pub fn read(&self, file: &str) -> Result<Option<Cow<'_, [u8]>>> {
        match self {
            Store::Memory(_, files) => Ok(files
                .iter()
                .find(|(name, _)| *name == file)
                .map(|(_, bytes)| Cow::Borrowed(*bytes))),
            Store::Directory(dir) => {
                let path = dir.join(file);
                let failed = |e: std::io::Error| unreadable(&path.display().to_string(), &e);
                let opened = match open_regular(&path) {
                    Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
                    opened => opened.map_err(failed)?,
                };
                let mut bytes = Vec::new();
                let read = opened.take(MAX_SIDE_FILE + 1).read_to_end(&mut bytes);
                if read.map_err(failed)? as u64 > MAX_SIDE_FILE {
                    return Err(Fault::model(format!(
                        "{} is larger than {} MB",
                        path.display(),
                        MAX_SIDE_FILE >> 20
                    ))
                    .into());
                }
                Ok(Some(Cow::Owned(bytes)))
            }
        }
    }

    /// Maps a large file.
    pub fn map(&self, file: &str) -> Result<Bytes> {
        let name = self.display(file);
        match self {
            Store::Memory(_, files) => match files.iter().find(|(n, _)| *n == file) {
                Some((_, bytes)) => Ok(Bytes::Static(bytes)),
                None => Err(Fault::model(format!("{name} is missing")).into()),
            },
            Store::Directory(dir) => {
                let failed = |e: std::io::Error| unreadable(&name, &e);
                let file = open_regular(&dir.join(file)).map_err(failed)?;
                if file.metadata().map_err(failed)?.len() == 0 {
                    return Err(Fault::model(format!("{name} is an empty file"))
                        .help("its download failed: fetch it again")
                        .into());
                }
                // SAFETY: the map is read-only and private to this process, and every range is
                // checked against its length. Offsets and sizes come only from a copy of its
                // header. Bytes that another process changes are therefore wrong weights, but not
                // memory errors. A shortened file faults: `os::crash` reports it.
                let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
                Ok(Bytes::Mapped(map, file))
            }
        }
    }

    /// Reads a JSON object; `None` if there is no such file.
    pub fn json(&self, file: &str) -> Result<Option<serde_json::Value>> {
        let Some(bytes) = self.read(file)? else { return Ok(None) };
        let name = self.display(file);
        let value: serde_json::Value = json::parse(&bytes).map_err(|e| {
            Fault::model(format!("{name} is not valid JSON: {e}"))
                .help("the file is damaged or was not fully downloaded: fetch it again")
        })?;
        if !value.is_object() {
            return Err(Fault::model(format!("{name} is not a JSON object"))
                .help("fetch the file again")
                .into());
        }
        Ok(Some(value))
    }
}
