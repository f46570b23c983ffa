//! Transfer of one file into the cache.
//!
//! The bytes go to `blobs/HASH.incomplete`, which an interrupted transfer leaves for the next one.
//! The file gets its own name only after its size and its sha256 are those of the list.

use super::hub::{Hub, RemoteFile};
use crate::cli::io::signals::Interrupt;
use crate::error::{Fault, Kind, no_thread};
use crate::os;
use crate::util::units::bytes;
use anyhow::{Context, Result, anyhow};
use indicatif::ProgressBar;
use sha2::{Digest, Sha256};
use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::sleep;
use std::time::Duration;

/// Attempts in a row that bring no byte before a transfer fails.
const ATTEMPTS: u32 = 4;

/// Bytes that are read at once from the disk and from the network.
const BUFFER: usize = 1 << 20;
const PIECE: usize = 1 << 17;

/// Time after which a wait for the network looks for Ctrl-C.
const POLL: Duration = Duration::from_millis(100);

/// The transfer of a repository's files.
pub struct Download<'a> {
    pub hub: &'a Hub,
    pub id: &'a str,
    pub commit: &'a str,
    /// Folder of the repository in the cache.
    pub folder: &'a Path,
    pub interrupt: &'a Interrupt,
    pub bar: &'a ProgressBar,
}

/// A file on its way.
struct PartialFile {
    file: File,
    path: PathBuf,
    length: u64,
    sha256: Sha256,
}

/// Returns the place of a file's bytes in the cache.
pub fn blob(folder: &Path, file: &RemoteFile) -> PathBuf {
    folder.join("blobs").join(&file.blob)
}

/// Returns the place of a file whose transfer is not complete.
pub fn incomplete(folder: &Path, file: &RemoteFile) -> PathBuf {
    folder.join("blobs").join(format!("{}.incomplete", file.blob))
}

/// Returns whether a file is in the cache as a whole.
pub fn is_complete(folder: &Path, file: &RemoteFile) -> bool {
    blob(folder, file).metadata().is_ok_and(|meta| meta.is_file() && meta.len() == file.size)
}

impl Download<'_> {
    /// Brings one file into the cache. Returns whether it is there: not after Ctrl-C.
    pub fn fetch(&self, file: &RemoteFile) -> Result<bool> {
        let _lock = self.lock(file)?;
        if is_complete(self.folder, file) {
            self.bar.inc(file.size);
            return Ok(true);
        }
        let mut part = PartialFile::open(incomplete(self.folder, file))?;
        if !part.read_so_far(self)? {
            return Ok(false);
        }
        if part.length > file.size {
            part.restart(self.bar)?;
        }
        let mut failures = 0;
        while part.length < file.size {
            let before = part.length;
            let lost = self.continue_with(file, &mut part)?;
            if self.interrupt.exit_code().is_some() {
                return Ok(false);
            }
            let why = match lost {
                Some(why) => why,
                None if part.length >= file.size => break,
                None => anyhow!("the connection was closed"),
            };
            failures = if part.length > before { 1 } else { failures + 1 };
            if failures == ATTEMPTS {
                let what = format!("{} was interrupted: {why:#}", file.name);
                let so_far = format!("{} of {}", bytes(part.length), bytes(file.size));
                let help = format!("gemma pull {} again resumes after {so_far}", self.id);
                return Err(Fault::new(Kind::Failure, what).help(help).into());
            }
            sleep(Duration::from_millis(50 << (2 * failures)));
        }
        self.complete(file, part)?;
        Ok(true)
    }

    /// Keeps other pulls and Hugging Face's own tools from writing to the same file.
    fn lock(&self, file: &RemoteFile) -> Result<File> {
        let cache = self.folder.parent().unwrap_or(self.folder);
        let name = self.folder.file_name().unwrap_or_default();
        let directory = cache.join(".locks").join(name);
        let path = directory.join(format!("{}.lock", file.blob));
        std::fs::create_dir_all(&directory).with_context(|| cannot_write(&directory))?;
        let lock = File::create(&path).with_context(|| cannot_write(&path))?;
        if matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
            let what = format!("another program is downloading {}", file.name);
            return Err(Fault::new(Kind::Failure, what).help("wait until it has finished").into());
        }
        Ok(lock)
    }

    /// Appends bytes until the file is whole, Ctrl-C, or the connection breaks. Returns the reason
    /// of a break, if there is one.
    fn continue_with(
        &self,
        file: &RemoteFile,
        part: &mut PartialFile,
    ) -> Result<Option<anyhow::Error>> {
        let (hub, from) = (self.hub.clone(), part.length);
        let [id, commit, name] = [self.id, self.commit, &file.name].map(str::to_owned);
        let answer =
            in_thread(move |answer| drop(answer.send(hub.open(&id, &commit, &name, from))))?;
        let response = match self.wait(&answer) {
            Some(Ok(response)) => response,
            Some(Err(e)) => return Ok(Some(e.into())),
            None => return Ok(None),
        };
        let status = response.status().as_u16();
        let range = response.headers().get("content-range").and_then(|v| v.to_str().ok());
        let start = format!("bytes {}-", part.length);
        match status {
            206 if range.is_some_and(|range| range.starts_with(&start)) => {}
            // A server that knows no ranges sends the whole file.
            200 => part.restart(self.bar)?,
            206 | 416 => {
                part.restart(self.bar)?;
                return Ok(Some(anyhow!("the server sent another part than was asked for")));
            }
            408 | 429 | 500..=599 => {
                return Ok(Some(anyhow!("the server answered with status {status}")));
            }
            _ => return Err(self.hub.refusal(self.id, &response).into()),
        }
        // One byte more shows a file that is longer than the list says.
        let body = response.into_body().into_reader().take(file.size - part.length + 1);
        let pieces = in_thread(move |pieces| send_pieces(body, pieces))?;
        while let Some(piece) = self.wait(&pieces) {
            match piece {
                Ok(piece) if piece.is_empty() => break,
                Ok(piece) => {
                    part.append(&piece)?;
                    self.bar.inc(piece.len() as u64);
                }
                Err(e) => return Ok(Some(e.into())),
            }
        }
        Ok(None)
    }

    /// Waits for a thread. Returns `None` after Ctrl-C: the thread is left to the end of the
    /// process, because nothing can end its read of a stalled connection.
    fn wait<T>(&self, results: &Receiver<T>) -> Option<T> {
        while self.interrupt.exit_code().is_none() {
            match results.recv_timeout(POLL) {
                Err(RecvTimeoutError::Timeout) => {}
                result => return result.ok(),
            }
        }
        None
    }

    /// Checks a file and gives it its name.
    fn complete(&self, file: &RemoteFile, part: PartialFile) -> Result<()> {
        let found = hex::encode(part.sha256.finalize());
        let wrong = match &file.sha256 {
            Some(sha256) if *sha256 != found => {
                Some(format!("its sha256 is {found}, and should be {sha256}"))
            }
            _ if part.length != file.size => Some(format!("it is longer than {} bytes", file.size)),
            _ => None,
        };
        if let Some(wrong) = wrong {
            std::fs::remove_file(&part.path).with_context(|| cannot_write(&part.path))?;
            let what = format!("{} arrived damaged: {wrong}", file.name);
            let help = format!("it was removed; gemma pull {} fetches it anew", self.id);
            return Err(Fault::new(Kind::Failure, what).help(help).into());
        }
        part.file.sync_all().with_context(|| cannot_write(&part.path))?;
        let blob = blob(self.folder, file);
        std::fs::rename(&part.path, &blob).with_context(|| cannot_write(&blob))
    }
}

/// Runs `work` in a thread, and returns the receiver of its results.
fn in_thread<T: Send + 'static>(
    work: impl FnOnce(&SyncSender<T>) + Send + 'static,
) -> Result<Receiver<T>> {
    let (sender, receiver) = sync_channel(4);
    std::thread::Builder::new()
        .name("download".into())
        .spawn(move || work(&sender))
        .with_context(no_thread)?;
    Ok(receiver)
}

/// Sends the pieces of a body; an empty piece ends it.
fn send_pieces(mut body: impl Read, pieces: &SyncSender<io::Result<Vec<u8>>>) {
    loop {
        let mut buffer = vec![0; PIECE];
        let piece = body.read(&mut buffer).map(|n| {
            buffer.truncate(n);
            buffer
        });
        let is_last = piece.as_ref().map_or(true, Vec::is_empty);
        if pieces.send(piece).is_err() || is_last {
            return;
        }
    }
}

impl PartialFile {
    fn open(path: PathBuf) -> Result<PartialFile> {
        let file = File::options().create(true).read(true).append(true).open(&path);
        let file = file.with_context(|| cannot_write(&path))?;
        Ok(PartialFile { file, path, length: 0, sha256: Sha256::new() })
    }

    /// Reads the bytes of earlier transfers for their digest. Returns false after Ctrl-C.
    fn read_so_far(&mut self, download: &Download<'_>) -> Result<bool> {
        let mut buffer = vec![0; BUFFER];
        loop {
            let n = self.file.read(&mut buffer).with_context(|| cannot_write(&self.path))?;
            self.sha256.update(&buffer[..n]);
            self.length += n as u64;
            download.bar.inc(n as u64);
            if download.interrupt.exit_code().is_some() {
                return Ok(false);
            }
            if n == 0 {
                return Ok(true);
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).with_context(|| cannot_write(&self.path))?;
        self.sha256.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Drops all bytes.
    fn restart(&mut self, bar: &ProgressBar) -> Result<()> {
        self.file.set_len(0).with_context(|| cannot_write(&self.path))?;
        bar.dec(self.length);
        (self.length, self.sha256) = (0, Sha256::new());
        Ok(())
    }
}

/// Returns the error for a place in the cache that cannot be written to.
pub fn cannot_write(path: &Path) -> Fault {
    let free = path.parent().and_then(os::files::free_bytes);
    let free = free.map_or(String::new(), |free| format!(" ({} are free there)", bytes(free)));
    Fault::new(Kind::Failure, format!("cannot write {}{free}", path.display())).help(
        "make room or get the right to write there, and repeat the command, which resumes; \
         HF_HUB_CACHE names another directory",
    )
}
