//! Journal of a conversion, from which the next run resumes.
//!
//! It has one line for the header, for each finished tensor and for the finished rows of a large
//! tensor. A line is JSON, a space and a digest.

use super::staging::open_staged;
use crate::layout::{ArtifactLayout, TensorPlan};
use crate::plan::QuantPlan;
use crate::{QuantizeOptions, SIDE_FILES};
use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::os::files::{Stamp, open_no_link};
use gemma_model::checkpoint::Checkpoint;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Name and digest of a file of the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SourceFile {
    name: String,
    /// SHA-256 of the file. For weight files, SHA-256 of their length and of samples, see
    /// [`Checkpoint::digest`].
    sha256: String,
}

/// Everything that determines the bytes of the result. A run resumes an earlier one only if both
/// headers are equal, except for `spelling` and `stamps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalHeader {
    journal: u32,
    version: String,
    source: Vec<SourceFile>,
    /// Stamps of the weight files. If they differ from the current ones, equal samples in `source`
    /// do not prove that the weights are equal. The finished tensors must then be compared.
    stamps: Vec<Stamp>,
    recipe: String,
    /// Options of the command line that chose the recipe, for messages. A run with other options
    /// may resume this one if its layout is the same.
    #[serde(default, rename = "asked")]
    spelling: String,
    recipe_sha256: String,
    solver: String,
    /// SHA-256 of the name, format and place of every tensor.
    layout_sha256: String,
    shard_bytes: u64,
}

impl JournalHeader {
    pub fn new(
        checkpoint: &Checkpoint,
        plan: &QuantPlan,
        options: &QuantizeOptions,
    ) -> Result<JournalHeader> {
        let mut hash = Sha256::new();
        for shard in 0..plan.layout.shards {
            hash.update(plan.layout.header(shard)?);
        }
        for e in &plan.layout.entries {
            hash.update(format!("{} {}\n", e.name, e.target));
        }
        // Stamps are read before the bytes. If a file changes in between, its stamp is too old, and
        // the change is detected later.
        let stamps = checkpoint.stamps()?;
        let mut source = Vec::new();
        let weights = checkpoint.weight_files().iter().map(String::as_str);
        for file in weights.chain(["config.json"]).chain(SIDE_FILES.iter().copied()) {
            if let Some(digest) = checkpoint.digest(file)? {
                source.push(SourceFile {
                    name: file.to_owned(),
                    sha256: gemma_base::util::hex(digest),
                });
            }
        }
        Ok(JournalHeader {
            journal: 3,
            version: env!("CARGO_PKG_VERSION").into(),
            source,
            stamps,
            recipe: plan.recipe.clone(),
            spelling: plan.spelling.clone(),
            recipe_sha256: plan.recipe_sha256.clone(),
            solver: plan.solver.clone(),
            layout_sha256: gemma_base::util::hex(hash.finalize()),
            shard_bytes: options.shard_bytes,
        })
    }

    /// Returns whether a run with this header may resume one with `other`.
    pub fn continues(&self, other: &JournalHeader) -> bool {
        let (spelling, stamps) = (other.spelling.clone(), other.stamps.clone());
        JournalHeader { spelling, stamps, ..self.clone() } == *other
    }

    /// Returns whether no weight file of the source was written or replaced since `other`.
    pub fn has_stamps_of(&self, other: &JournalHeader) -> bool {
        self.stamps == other.stamps
    }

    /// Describes the first difference from another run's header.
    fn difference(&self, other: &JournalHeader) -> String {
        if self.version != other.version {
            return format!("by version {} of this program", other.version);
        }
        for file in &other.source {
            match self.source.iter().find(|f| f.name == file.name) {
                None => return format!("when the source still had {}", file.name),
                Some(now) if now != file => return format!("before {} changed", file.name),
                Some(_) => {}
            }
        }
        if self.source.len() > other.source.len() {
            return "from a source with fewer files".into();
        }
        if (&self.recipe, &self.recipe_sha256) != (&other.recipe, &other.recipe_sha256) {
            return other.spelling();
        }
        if self.solver != other.solver {
            return format!("with the method {}", other.solver);
        }
        if self.spelling != other.spelling { other.spelling() } else { "with other options".into() }
    }

    /// Returns the options that chose the recipe, as the end of a sentence that begins with "was
    /// begun".
    fn spelling(&self) -> String {
        if self.spelling.is_empty() {
            format!("with --recipe {}", self.recipe)
        } else {
            format!("with {}", self.spelling)
        }
    }
}

/// A finished tensor, as a line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FinishedTensor {
    pub tensor: String,
    pub format: String,
    /// Offset in the data of its file.
    pub offset: u64,
    pub bytes: u64,
    pub sha256: String,
    pub source_sha256: String,
    pub relative_error: f64,
}

/// The finished rows of a tensor that is not finished, as a line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FinishedRows {
    pub tensor: String,
    pub rows: usize,
    /// Bytes of the rows in the file of the tensor.
    pub bytes: u64,
    /// Bytes of their scales in a file of the staging directory.
    pub side: u64,
    /// SHA-256 of both.
    pub sha256: String,
    pub source_sha256: String,
    /// Sums of squared errors and of squares, as the bits of f64.
    pub sums: [u64; 2],
}

/// A line after the header.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Tensor(FinishedTensor),
    Rows(FinishedRows),
}

/// Content of a journal that an earlier run left.
#[derive(Default)]
pub struct JournalState {
    /// Finished tensors in the order of the layout.
    pub done: Vec<FinishedTensor>,
    /// Finished rows of the next tensor.
    pub rows: Option<FinishedRows>,
    /// Whether the source was written, copied or moved since then. Its tensors must then be
    /// compared with `done`.
    pub is_moved: bool,
}

/// The open journal. Lines are appended.
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens or creates the journal, and returns the content that an earlier run left.
    ///
    /// Refuses a journal of another run, unless `restart` is set.
    pub fn open(
        path: &Path,
        header: &JournalHeader,
        layout: &ArtifactLayout,
        restart: bool,
    ) -> Result<(Journal, JournalState)> {
        let failed = || format!("opening {}", path.display());
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = open_no_link(&mut options, path).with_context(failed)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).with_context(failed)?;
        let mut journal = Journal { path: path.to_owned(), file };
        let mut lines = text.split_inclusive(|b| *b == b'\n').filter(|l| l.ends_with(b"\n"));
        let first = lines.next().map(|line| (line.len(), parse::<JournalHeader>(line)));
        let mut good = 0;
        let mut found = JournalState::default();
        match first {
            Some((length, Some(begun))) if !restart => {
                if !header.continues(&begun) {
                    return Err(other_run(path, &header.difference(&begun)).into());
                }
                good = length;
                found.is_moved = !header.has_stamps_of(&begun);
                let mut places = places(layout).peekable();
                for line in lines {
                    // A line that does not match was truncated or damaged. Its tensor and all later
                    // ones are converted again.
                    match (parse(line), places.peek()) {
                        (Some(Line::Tensor(done)), Some((e, offset)))
                            if e.name == done.tensor
                                && (*offset, e.bytes()) == (done.offset, done.bytes) =>
                        {
                            found.done.push(done);
                            found.rows = None;
                            places.next();
                        }
                        (Some(Line::Rows(rows)), Some((e, _)))
                            if e.name == rows.tensor && rows.rows < e.rows =>
                        {
                            found.rows = Some(rows);
                        }
                        _ => break,
                    }
                    good += line.len();
                }
            }
            _ => {}
        }
        journal.cut(good as u64)?;
        if good == 0 {
            journal.push(header)?;
            journal.sync()?;
        }
        Ok((journal, found))
    }

    /// Replaces the content of the journal by this header and these tensors.
    pub fn keep(&mut self, header: &JournalHeader, done: &[FinishedTensor]) -> Result<()> {
        self.cut(0)?;
        self.push(header)?;
        done.iter().try_for_each(|d| self.push(d))?;
        self.sync()
    }

    /// Appends a line.
    pub fn push<T: Serialize>(&mut self, line: &T) -> Result<()> {
        let json = serde_json::to_string(line)?;
        let text = format!("{json} {}\n", digest(&json));
        self.file
            .write_all(text.as_bytes())
            .with_context(|| format!("writing {}", self.path.display()))
    }

    pub fn sync(&mut self) -> Result<()> {
        self.file.sync_data().with_context(|| format!("writing {}", self.path.display()))
    }

    fn cut(&mut self, length: u64) -> Result<()> {
        let cut = self.file.set_len(length).and_then(|()| self.file.seek(SeekFrom::Start(length)));
        cut.map(|_| ()).with_context(|| format!("writing {}", self.path.display()))
    }
}

/// Returns the digest of a line: the first eight bytes of its SHA-256.
fn digest(json: &str) -> String {
    gemma_base::util::hex(&Sha256::digest(json)[..8])
}

/// Parses a whole line; `None` if it was truncated or damaged.
fn parse<T: DeserializeOwned>(line: &[u8]) -> Option<T> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let (json, stated) = line.rsplit_once(' ')?;
    if digest(json) != stated {
        return None;
    }
    serde_json::from_str(json).ok()
}

/// Returns the error for an earlier run with other options or another source. `path` is its
/// journal. `begun` is its difference, as the end of a sentence that begins with "was begun".
pub fn other_run(path: &Path, begun: &str) -> Fault {
    let directory = path.parent().unwrap_or(path).display();
    Fault::usage(format!("{directory} was begun {begun}"))
        .help("run it as it was begun to go on, or add --restart to throw away what is there")
}

/// Iterates over the tensors with their offsets in the data of their files.
pub fn places(layout: &ArtifactLayout) -> impl Iterator<Item = (&TensorPlan, u64)> {
    let (mut shard, mut at) = (0, 0);
    layout.entries.iter().map(move |e| {
        if e.shard != shard {
            (shard, at) = (e.shard, 0);
        }
        at += e.bytes();
        (e, at - e.bytes())
    })
}

/// Returns the number of finished tensors in the journal at `path`. Returns `None` if it has
/// neither finished tensors nor finished rows.
pub fn count(path: &Path) -> Option<usize> {
    let mut text = Vec::new();
    open_staged(path)?.read_to_end(&mut text).ok()?;
    let lines = text.split_inclusive(|b| *b == b'\n').skip(1);
    let mut lines = lines.filter_map(parse).peekable();
    lines.peek()?;
    Some(lines.filter(|line| matches!(line, Line::Tensor(_))).count())
}
