//! What an unfinished run has done, so that the next one goes on from there: a line of JSON per
//! finished tensor.

use crate::checkpoint::Checkpoint;
use crate::error::Fault;
use crate::os::files::{Stamp, refuse_links};
use crate::quant::layout::{Entry, Layout};
use crate::quant::plan::Plan;
use crate::quant::{Options, SIDE_FILES};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// A file of the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SourceFile {
    name: String,
    /// Of weights: of their length and of samples, see [`Checkpoint::digest`].
    sha256: String,
}

/// Whatever the bytes of the result depend on. A run continues another only if this is the same,
/// but for `asked` and `stamps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    journal: u32,
    version: String,
    source: Vec<SourceFile>,
    /// Of the weight files. Where they differ, the samples in `source` do not prove
    /// that the weights are the same: the tensors that are done have to be compared.
    stamps: Vec<Stamp>,
    recipe: String,
    /// How it was asked for. It is shown only: two ways to ask for the same layout are the same.
    #[serde(default)]
    asked: String,
    recipe_sha256: String,
    solver: String,
    /// Of every tensor's name, format and place.
    layout_sha256: String,
    shard_bytes: u64,
}

impl Header {
    pub fn new(checkpoint: &Checkpoint, plan: &Plan, options: &Options) -> Result<Header> {
        let mut hash = Sha256::new();
        for shard in 0..plan.layout.shards {
            hash.update(plan.layout.header(shard)?);
        }
        for e in &plan.layout.entries {
            hash.update(format!("{} {}\n", e.name, e.target));
        }
        // Before the bytes: of a change in between the stamp is too old, never too new.
        let stamps = checkpoint.stamps()?;
        let mut source = Vec::new();
        let weights = checkpoint.weight_files().iter().map(String::as_str);
        for file in weights.chain(["config.json"]).chain(SIDE_FILES.iter().copied()) {
            if let Some(digest) = checkpoint.digest(file)? {
                source.push(SourceFile { name: file.to_owned(), sha256: crate::util::hex(digest) });
            }
        }
        Ok(Header {
            journal: 2,
            version: env!("CARGO_PKG_VERSION").into(),
            source,
            stamps,
            recipe: plan.recipe.clone(),
            asked: plan.asked.clone(),
            recipe_sha256: plan.recipe_sha256.clone(),
            solver: plan.solver.clone(),
            layout_sha256: crate::util::hex(hash.finalize()),
            shard_bytes: options.shard_bytes,
        })
    }

    /// Whether a run with this header goes on from where one with `other` ended.
    pub fn continues(&self, other: &Header) -> bool {
        let (asked, stamps) = (other.asked.clone(), other.stamps.clone());
        Header { asked, stamps, ..self.clone() } == *other
    }

    /// Whether no weight file of the source was written or replaced in between.
    pub fn has_stamps_of(&self, other: &Header) -> bool {
        self.stamps == other.stamps
    }

    /// The first thing in which another run's header differs, in words.
    fn difference(&self, other: &Header) -> String {
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
            return other.asked();
        }
        if self.solver != other.solver {
            return format!("with the method {}", other.solver);
        }
        if self.asked != other.asked { other.asked() } else { "with other options".into() }
    }

    /// What was typed for the recipe, as a part of a sentence.
    fn asked(&self) -> String {
        if self.asked.is_empty() {
            format!("with --recipe {}", self.recipe)
        } else {
            format!("with {}", self.asked)
        }
    }
}

/// A tensor that is finished, as a line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    pub tensor: String,
    pub format: String,
    /// In the data of its file.
    pub offset: u64,
    pub bytes: u64,
    pub sha256: String,
    pub source_sha256: String,
    pub relative_error: f64,
}

/// What a journal says of an earlier run.
#[derive(Default)]
pub struct Found {
    /// In the order of the layout.
    pub done: Vec<Done>,
    /// The source was written, copied or moved since: whether `done` is of its tensors has to be
    /// looked at.
    pub is_moved: bool,
}

/// The open journal; lines are added at its end.
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens or begins the journal, and returns what an earlier run has left in it.
    ///
    /// A journal of another run is refused, unless `restart` says to begin again.
    pub fn open(
        path: &Path,
        header: &Header,
        layout: &Layout,
        restart: bool,
    ) -> Result<(Journal, Found)> {
        let failed = || format!("opening {}", path.display());
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = refuse_links(&mut options).open(path).with_context(failed)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).with_context(failed)?;
        let mut journal = Journal { path: path.to_owned(), file };
        let mut lines = text.split_inclusive(|b| *b == b'\n').filter(|l| l.ends_with(b"\n"));
        let first = lines.next().map(|line| (line.len(), serde_json::from_slice::<Header>(line)));
        let mut good = 0;
        let mut found = Found::default();
        match first {
            Some((length, Ok(begun))) if !restart => {
                if !header.continues(&begun) {
                    return Err(other_run(path, &header.difference(&begun)).into());
                }
                good = length;
                found.is_moved = !header.has_stamps_of(&begun);
                let mut places = places(layout);
                for line in lines {
                    // Whatever does not fit was torn off or damaged: it is done again, with all
                    // behind it.
                    let Ok(line_done) = serde_json::from_slice::<Done>(line) else { break };
                    match places.next() {
                        Some((e, offset))
                            if e.name == line_done.tensor
                                && (offset, e.bytes()) == (line_done.offset, line_done.bytes) => {}
                        _ => break,
                    }
                    good += line.len();
                    found.done.push(line_done);
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

    /// Keeps the header and the first `n` of these tensors.
    pub fn keep(&mut self, header: &Header, done: &[Done]) -> Result<()> {
        self.cut(0)?;
        self.push(header)?;
        done.iter().try_for_each(|d| self.push(d))?;
        self.sync()
    }

    /// Adds a line.
    pub fn push<T: Serialize>(&mut self, line: &T) -> Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text).with_context(|| format!("writing {}", self.path.display()))
    }

    pub fn sync(&mut self) -> Result<()> {
        self.file.sync_data().with_context(|| format!("writing {}", self.path.display()))
    }

    fn cut(&mut self, length: u64) -> Result<()> {
        let cut = self.file.set_len(length).and_then(|()| self.file.seek(SeekFrom::Start(length)));
        cut.map(|_| ()).with_context(|| format!("writing {}", self.path.display()))
    }
}

/// The refusal to go on with a run that was begun differently; `path` is its journal.
pub fn other_run(path: &Path, begun: &str) -> Fault {
    let directory = path.parent().unwrap_or(path).display();
    Fault::usage(format!("{directory} was begun {begun}"))
        .help("run it as it was begun to go on, or add --restart to throw away what is there")
}

/// Each tensor with its place in its file's data.
pub fn places(layout: &Layout) -> impl Iterator<Item = (&Entry, u64)> {
    let (mut shard, mut at) = (0, 0);
    layout.entries.iter().map(move |e| {
        if e.shard != shard {
            (shard, at) = (e.shard, 0);
        }
        at += e.bytes();
        (e, at - e.bytes())
    })
}

/// Lines of finished tensors in the journal at `path`.
pub fn count(path: &Path) -> usize {
    std::fs::read(path)
        .map_or(0, |text| text.iter().filter(|b| **b == b'\n').count().saturating_sub(1))
}
