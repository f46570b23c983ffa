//! Download of one file into the cache.
//!
//! The bytes are written to `blobs/HASH.incomplete`. After an interruption the next download
//! continues with this file. The file is renamed only after its size and digest match the list.

use super::hub::{BlobHash, Hub, RemoteFile};
use crate::cli::io::signals::Interrupt;
use crate::error::{Fault, Kind, no_thread};
use crate::os;
use crate::util::files::rename_durably;
use crate::util::units::bytes;
use anyhow::{Context, Result, anyhow};
use indicatif::ProgressBar;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::sleep;
use std::time::Duration;

/// Consecutive attempts without progress before a download fails.
const ATTEMPTS: u32 = 4;

/// Bytes beyond all earlier attempts that count as progress. A server that repeatedly drops
/// connections or sends a byte at a time is given up.
const PROGRESS: u64 = 1 << 16;

/// Size of a read from the disk and from the network, in bytes.
const BUFFER: usize = 1 << 20;
const PIECE: usize = 1 << 17;

/// Interval at which a wait for the network checks for Ctrl-C.
const POLL: Duration = Duration::from_millis(100);

/// The download of a repository's files.
pub struct Download<'a> {
    pub hub: &'a Hub,
    pub id: &'a str,
    pub commit: &'a str,
    /// Folder of the repository in the cache.
    pub folder: &'a Path,
    pub interrupt: &'a Interrupt,
    pub bar: &'a ProgressBar,
}

/// A partially downloaded file.
struct PartialFile {
    file: File,
    path: PathBuf,
    length: u64,
    hasher: Hasher,
}

/// The digest of the bytes so far.
enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

/// Attempts of one download.
struct Attempts {
    /// Length of the file at its last progress.
    reached: u64,
    /// Attempts since then.
    failures: u32,
}

/// Returns the path of a complete file in the cache.
pub fn blob(folder: &Path, file: &RemoteFile) -> PathBuf {
    folder.join("blobs").join(&file.blob)
}

/// Returns the path of a partial file in the cache.
pub fn incomplete(folder: &Path, file: &RemoteFile) -> PathBuf {
    folder.join("blobs").join(format!("{}.incomplete", file.blob))
}

/// Returns whether the complete file is in the cache.
pub fn is_complete(folder: &Path, file: &RemoteFile) -> bool {
    blob(folder, file).metadata().is_ok_and(|meta| meta.is_file() && meta.len() == file.size)
}

impl Download<'_> {
    /// Downloads one file into the cache. Returns false if Ctrl-C interrupted it.
    pub fn fetch(&self, file: &RemoteFile) -> Result<bool> {
        let _lock = self.lock(file)?;
        if is_complete(self.folder, file) {
            self.bar.inc(file.size);
            return Ok(true);
        }
        let mut part = PartialFile::open(incomplete(self.folder, file), file)?;
        if !part.read_so_far(self)? {
            return Ok(false);
        }
        if part.length > file.size {
            part.restart(file, self.bar)?;
        }
        let mut attempts = Attempts { reached: part.length, failures: 0 };
        while part.length < file.size {
            let lost = self.continue_with(file, &mut part)?;
            if self.interrupt.exit_code().is_some() {
                return Ok(false);
            }
            let why = match lost {
                Some(why) => why,
                None if part.length >= file.size => break,
                None => anyhow!("the connection was closed"),
            };
            if !attempts.may_follow(part.length) {
                let what = format!("{} was interrupted: {why:#}", file.name);
                let so_far = format!("{} of {}", bytes(part.length), bytes(file.size));
                let help = format!("gemma pull {} again resumes after {so_far}", self.id);
                return Err(Fault::new(Kind::Failure, what).help(help).into());
            }
            sleep(Duration::from_millis(50 << (2 * attempts.failures)));
        }
        self.complete(file, part)?;
        Ok(true)
    }

    /// Locks the file against other pulls and Hugging Face's own tools.
    fn lock(&self, file: &RemoteFile) -> Result<File> {
        let cache = self.folder.parent().unwrap_or(self.folder);
        let name = self.folder.file_name().unwrap_or_default();
        let directory = cache.join(".locks").join(name);
        let path = directory.join(format!("{}.lock", file.blob));
        std::fs::create_dir_all(&directory).with_context(|| cannot_write(&directory))?;
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        let lock = os::files::open_regular(&mut options, &path);
        let lock = lock.with_context(|| cannot_write(&path))?;
        if matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
            let what = format!("another program is downloading {}", file.name);
            return Err(Fault::new(Kind::Failure, what).help("wait until it has finished").into());
        }
        Ok(lock)
    }

    /// Appends bytes until the file is complete, Ctrl-C is pressed, or the connection breaks.
    ///
    /// Returns the reason of a break.
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
            // A server without support for ranges sends the whole file.
            200 => part.restart(file, self.bar)?,
            206 | 416 => {
                part.restart(file, self.bar)?;
                return Ok(Some(anyhow!("the server sent another part than the requested one")));
            }
            408 | 429 | 500..=599 => {
                return Ok(Some(anyhow!("the server answered with status {status}")));
            }
            _ => return Err(self.hub.refusal(self.id, &response).into()),
        }
        // Reads one byte more than expected, to detect a file that is longer than listed.
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

    /// Waits for a thread.
    ///
    /// Returns `None` after Ctrl-C. The thread then runs until the process ends, because its read
    /// of a stalled connection cannot be interrupted.
    fn wait<T>(&self, results: &Receiver<T>) -> Option<T> {
        while self.interrupt.exit_code().is_none() {
            match results.recv_timeout(POLL) {
                Err(RecvTimeoutError::Timeout) => {}
                result => return result.ok(),
            }
        }
        None
    }

    /// Checks the size and digest of a file and renames it.
    fn complete(&self, file: &RemoteFile, part: PartialFile) -> Result<()> {
        let found = part.hasher.finish();
        let wrong = if part.length != file.size {
            Some(format!("it is longer than {} bytes", file.size))
        } else if found != file.blob {
            Some(format!("its {} is {found}, and should be {}", file.hash.name(), file.blob))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            std::fs::remove_file(&part.path).with_context(|| cannot_write(&part.path))?;
            let what = format!("{} arrived damaged: {wrong}", file.name);
            let help = format!("it was removed; gemma pull {} downloads it again", self.id);
            return Err(Fault::new(Kind::Failure, what).help(help).into());
        }
        part.file.sync_all().with_context(|| cannot_write(&part.path))?;
        let blob = blob(self.folder, file);
        rename_durably(&part.path, &blob).with_context(|| cannot_write(&blob))
    }
}

/// Runs `work` on a thread. Returns the receiver of its results.
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

/// Sends the pieces of a body, and an empty piece at its end.
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

impl Attempts {
    /// Records an attempt after which the file has this length.
    ///
    /// Returns whether another attempt may follow.
    fn may_follow(&mut self, length: u64) -> bool {
        self.failures += 1;
        if length >= self.reached.saturating_add(PROGRESS) {
            *self = Attempts { reached: length, failures: 1 };
        }
        self.failures < ATTEMPTS
    }
}

impl BlobHash {
    fn name(self) -> &'static str {
        match self {
            BlobHash::Sha256 => "sha256",
            BlobHash::Git => "Git hash",
        }
    }
}

impl Hasher {
    /// Starts the kind of digest that the list has for this file.
    fn new(file: &RemoteFile) -> Hasher {
        match file.hash {
            BlobHash::Sha256 => Hasher::Sha256(Sha256::new()),
            BlobHash::Git => Hasher::Git(Sha1::new_with_prefix(format!("blob {}\0", file.size))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hash) => hash.update(bytes),
            Hasher::Git(hash) => hash.update(bytes),
        }
    }

    /// Returns the digest in lower-case hexadecimal.
    fn finish(self) -> String {
        match self {
            Hasher::Sha256(hash) => hex::encode(hash.finalize()),
            Hasher::Git(hash) => hex::encode(hash.finalize()),
        }
    }
}

impl PartialFile {
    fn open(path: PathBuf, remote: &RemoteFile) -> Result<PartialFile> {
        let mut options = File::options();
        options.create(true).read(true).append(true);
        let file = os::files::open_regular(&mut options, &path);
        let file = file.with_context(|| cannot_write(&path))?;
        Ok(PartialFile { file, path, length: 0, hasher: Hasher::new(remote) })
    }

    /// Adds the bytes of earlier downloads to the digest. Returns false after Ctrl-C.
    fn read_so_far(&mut self, download: &Download<'_>) -> Result<bool> {
        let mut buffer = vec![0; BUFFER];
        loop {
            let n = self.file.read(&mut buffer).with_context(|| cannot_write(&self.path))?;
            self.hasher.update(&buffer[..n]);
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
        self.hasher.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Truncates the file.
    fn restart(&mut self, remote: &RemoteFile, bar: &ProgressBar) -> Result<()> {
        self.file.set_len(0).with_context(|| cannot_write(&self.path))?;
        bar.dec(self.length);
        (self.length, self.hasher) = (0, Hasher::new(remote));
        Ok(())
    }
}

/// Makes the error of a path in the cache that cannot be written.
pub fn cannot_write(path: &Path) -> Fault {
    let free = path.parent().and_then(os::files::free_bytes);
    let free = free.map_or(String::new(), |free| format!(" ({} are free there)", bytes(free)));
    Fault::new(Kind::Failure, format!("cannot write {}{free}", path.display())).help(
        "make room or get the right to write there, and repeat the command, which resumes; \
         HF_HUB_CACHE names another directory",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_bounded_by_the_bytes_that_they_bring() {
        let made = |lengths: &mut dyn Iterator<Item = u64>| {
            let mut attempts = Attempts { reached: 0, failures: 0 };
            1 + lengths.take_while(|length| attempts.may_follow(*length)).count() as u64
        };
        assert_eq!(made(&mut std::iter::repeat(0)), 4);
        // A server that sends a byte at a time, and a server that starts again and again.
        assert_eq!(made(&mut (1..)), 4);
        assert_eq!(made(&mut [1 << 20, 0].into_iter().cycle()), 4);
        assert_eq!(made(&mut (1..=100).map(|n| n * PROGRESS)), 101, "each makes progress");
        assert_eq!(made(&mut (1..).map(|n| (n * PROGRESS / 2).min(10 * PROGRESS))), 23);
    }

    #[test]
    fn small_files_have_the_digest_that_git_gives_them() {
        let blob = "d670460b4b4aece5915caf5c68d12f560a9fe3e4".to_owned();
        let name = "x".to_owned();
        let file = RemoteFile { name, size: 13, blob, hash: BlobHash::Git };
        let mut hasher = Hasher::new(&file);
        hasher.update(b"test ");
        hasher.update(b"content\n");
        // `echo "test content" | git hash-object --stdin`
        assert_eq!(hasher.finish(), file.blob);
    }
}
