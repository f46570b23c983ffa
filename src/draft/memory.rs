//! What the table and the mixers have learnt of one target, kept in a file between runs.
//!
//! `[magic 8][target 32][draft 32][weights u32][slots u32][weights f32][slots 11 x u32: place,
//! check, count, best][SHA-256 32]`, little-endian. The file appears whole or not at all (a new one
//! is renamed over it); what is not whole, of another version or of another target is ignored and
//! later replaced. Two processes take turns at saving, and each keeps what the other has learnt.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::util::files::{is_temporary, keep_newest, open_regular, write_whole};
use crate::util::hex;
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::mix::Mixer;
use super::table::{SLOTS, Slot, Table};
use super::verified::BEST;

const MAGIC: &[u8; 8] = b"gemmadm\x02";
const HASH: usize = 32;
const HEADER: usize = MAGIC.len() + 2 * HASH + 8;
const SLOT_WORDS: usize = 3 + BEST;
/// More weights than any mixers have.
const MOST_WEIGHTS: usize = 1 << 16;
/// How long another process is waited for: savers take some milliseconds each, and the text is
/// already there.
const PATIENCE: Duration = Duration::from_secs(2);
/// Targets whose files are kept, the latest ones.
const MOST_TARGETS: usize = 32;

/// Where one target's file lies.
#[derive(Clone, Debug)]
pub struct Memory {
    path: PathBuf,
    target: [u8; HASH],
    draft: [u8; HASH],
}

/// What a file held.
pub struct Kept {
    pub table: Table,
    /// Absent where they were learnt with another draft model.
    pub mixers: Option<[Mixer; 2]>,
}

impl Memory {
    /// `target` and `draft` identify the models' weights; zeros for no draft model.
    pub fn new(directory: &Path, target: [u8; HASH], draft: [u8; HASH]) -> Self {
        let name = hex(&target[..16]);
        Memory { path: directory.join(format!("{name}.table")), target, draft }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file; `None` where there is none. An error says why it cannot be used.
    pub fn load(&self) -> Result<Option<Kept>> {
        let mut kept = Kept { table: Table::new(), mixers: None };
        Ok(self.read_into(&mut kept.table)?.map(|mixers| Kept { mixers, ..kept }))
    }

    /// Adds what the file holds to the table, but for slots that the table has written itself.
    fn read_into(&self, table: &mut Table) -> Result<Option<Option<[Mixer; 2]>>> {
        let file = match open_regular(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).context("it cannot be read"),
        };
        let most = HEADER + HASH + 4 * (MOST_WEIGHTS + SLOTS * SLOT_WORDS);
        let mut bytes = Vec::new();
        file.take(most as u64 + 1).read_to_end(&mut bytes).context("it cannot be read")?;
        let Some((body, hash)) = bytes
            .split_at_checked(bytes.len().saturating_sub(HASH))
            .filter(|(body, _)| body.len() >= HEADER)
        else {
            bail!("it is cut short");
        };
        if &body[..MAGIC.len()] != MAGIC {
            bail!("it is not a draft memory of this version");
        }
        if Sha256::digest(body).as_slice() != hash {
            bail!("it is damaged: its checksum does not match");
        }
        let (target, rest) = body[MAGIC.len()..].split_at(HASH);
        let (draft, rest) = rest.split_at(HASH);
        if target != self.target {
            bail!("it belongs to another model");
        }
        let (words, odd) = rest.as_chunks::<4>();
        let words: Vec<u32> = words.iter().map(|w| u32::from_le_bytes(*w)).collect();
        let (weights, slots) = (words[0] as usize, words[1] as usize);
        if !odd.is_empty()
            || weights.checked_add(slots.saturating_mul(SLOT_WORDS)) != Some(words.len() - 2)
        {
            bail!("it is damaged: its sizes do not add up");
        }
        let (weights, slots) = words[2..].split_at(weights);
        for words in slots.as_chunks::<SLOT_WORDS>().0 {
            let [at, check, count, best @ ..] = *words;
            let slot = Slot { check, count: u8::try_from(count).unwrap_or(u8::MAX), best };
            if !table.restore(at as usize, slot) {
                bail!("it is damaged: an entry is not valid");
            }
        }
        let weights: Vec<f32> = weights.iter().map(|w| f32::from_bits(*w)).collect();
        let (cold, warm) = weights.split_at(weights.len() / 2);
        let mixers =
            Mixer::from_floats(cold).zip(Mixer::from_floats(warm)).map(|(cold, warm)| [cold, warm]);
        Ok(Some(mixers.filter(|_| draft == self.draft)))
    }

    /// Writes table and weights, along with what another process has saved meanwhile.
    pub fn save(&self, table: &Table, mixers: &[Mixer; 2]) -> Result<()> {
        let directory = self.path.parent().unwrap_or(Path::new("."));
        // The file tells what was talked about: nobody else's business.
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        let lock = self.path.with_extension("lock");
        let lock = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            // A pipe in its place is refused, not waited for.
            .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
            .open(&lock)
            .with_context(|| lock.display().to_string())?;
        let start = Instant::now();
        while let Err(e) = lock.try_lock() {
            if start.elapsed() > PATIENCE {
                return Err(e).context("another process holds the draft memory");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut all = table.clone();
        // What cannot be used is replaced.
        let _ = self.read_into(&mut all);
        write_whole(&self.path, &self.bytes(&all, mixers))?;
        keep_newest(directory, MOST_TARGETS, is_table);
        // Locks of tables that are gone. One that is held in this moment is of a saver that has no
        // table yet, and the worst that comes of it is that two savers meet.
        keep_newest(directory, 2 * MOST_TARGETS, |name| kind_of(name) == Some("lock"));
        Ok(())
    }

    fn bytes(&self, table: &Table, mixers: &[Mixer; 2]) -> Vec<u8> {
        let weights: Vec<u32> =
            mixers.iter().flat_map(|m| m.to_floats()).map(f32::to_bits).collect();
        let slots: Vec<u32> = table
            .used()
            .flat_map(|(at, slot)| {
                [at as u32, slot.check, slot.count as u32].into_iter().chain(slot.best)
            })
            .collect();
        let mut bytes = [&MAGIC[..], &self.target, &self.draft].concat();
        for words in
            [&[weights.len() as u32, (slots.len() / SLOT_WORDS) as u32][..], &weights, &slots]
        {
            bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        }
        let hash = Sha256::digest(&bytes);
        bytes.extend_from_slice(&hash);
        bytes
    }
}

/// A file of the directory.
pub struct Found {
    pub path: PathBuf,
    pub bytes: u64,
    /// Whether it holds what was learnt; a lock, or what a killed writer left, does not.
    pub is_table: bool,
}

/// The files in a directory that [`Memory`] made, by name; none where there is no directory.
pub fn found(directory: &Path) -> std::io::Result<Vec<Found>> {
    let mut files = Vec::new();
    let entries = match std::fs::read_dir(directory) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(files),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let (name, meta) = (entry.file_name(), entry.metadata()?);
        let name = name.to_str().unwrap_or_default();
        if meta.is_file() && (kind_of(name).is_some() || is_temporary(name)) {
            files.push(Found { path: entry.path(), bytes: meta.len(), is_table: is_table(name) });
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// What follows the target in the name of a file of ours.
fn kind_of(name: &str) -> Option<&str> {
    let (target, kind) = name.split_once('.')?;
    let is_target = target.len() == 32 && target.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_target && ["table", "lock"].contains(&kind)).then_some(kind)
}

fn is_table(name: &str) -> bool {
    kind_of(name) == Some("table")
}

#[cfg(test)]
mod tests {
    use super::super::table::Key;
    use super::*;

    fn table(first: u32) -> Table {
        let mut table = Table::new();
        (first..first + 50)
            .for_each(|i| table.put(Key::Pair(i, i + 1), &[(i + 2, 0.75), (i + 3, 0.25)]));
        table
    }

    fn mixers() -> [Mixer; 2] {
        [Mixer::new(false), Mixer::new(true)]
    }

    fn knows(kept: &Table, first: u32) -> bool {
        (first..first + 50).all(|i| {
            kept.get(Key::Pair(i, i + 1)).is_some_and(|s| s.list().next().unwrap().0 == i + 2)
        })
    }

    #[test]
    fn what_was_learnt_comes_back_and_two_processes_keep_both() {
        let directory = tempfile::tempdir().unwrap();
        let memory = Memory::new(&directory.path().join("a/b"), [1; 32], [2; 32]);
        assert!(memory.load().unwrap().is_none());
        memory.save(&table(0), &mixers()).unwrap();
        let kept = memory.load().unwrap().unwrap();
        assert!(knows(&kept.table, 0) && kept.mixers == Some(mixers()));
        // Another process that began before that.
        memory.save(&table(1000), &mixers()).unwrap();
        let kept = memory.load().unwrap().unwrap();
        assert!(knows(&kept.table, 0) && knows(&kept.table, 1000));
        // Weights are of use only with the draft model they were learnt with.
        let other = Memory::new(&directory.path().join("a/b"), [1; 32], [3; 32]);
        assert!(other.load().unwrap().unwrap().mixers.is_none());
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(memory.path()), mode(memory.path().parent().unwrap())), (0o600, 0o700));
    }

    #[test]
    fn damaged_foreign_and_half_written_files_are_refused_and_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let memory = Memory::new(directory.path(), [1; 32], [0; 32]);
        memory.save(&table(0), &mixers()).unwrap();
        let whole = std::fs::read(memory.path()).unwrap();
        let why = |bytes: &[u8]| {
            std::fs::write(memory.path(), bytes).unwrap();
            memory.load().err().unwrap().to_string()
        };
        for cut in (0..whole.len()).step_by(97) {
            assert!(why(&whole[..cut]).starts_with("it is"), "{cut}");
        }
        for at in (0..whole.len()).step_by(61) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            assert!(why(&bytes).starts_with("it is"), "{at}");
        }
        // Well sealed, but not what it should be.
        let sealed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = whole[..whole.len() - HASH].to_vec();
            change(&mut bytes);
            let hash = Sha256::digest(&bytes);
            [&bytes[..], &hash].concat()
        };
        assert!(why(&sealed(&|b| b[10] ^= 1)).contains("another model"));
        assert!(why(&sealed(&|b| b[0] ^= 1)).contains("version"));
        assert!(why(&sealed(&|b| b[HEADER - 4] ^= 1)).contains("sizes"));
        assert!(why(&sealed(&|b| b[HEADER - 1] = 0xff)).contains("sizes"));
        let last_slot = whole.len() - HASH - 4 * SLOT_WORDS;
        assert!(why(&sealed(&|b| b[last_slot + 3] = 0xff)).contains("entry"));
        std::fs::write(memory.path(), b"").unwrap();
        memory.save(&table(7), &mixers()).unwrap();
        assert!(knows(&memory.load().unwrap().unwrap().table, 7));
        std::fs::remove_file(memory.path()).unwrap();
        std::fs::create_dir(memory.path()).unwrap();
        assert!(memory.load().is_err() && memory.save(&table(0), &mixers()).is_err());
    }

    #[test]
    fn the_latest_targets_are_kept_and_files_of_others_are_not_ours() {
        let directory = tempfile::tempdir().unwrap();
        let of = |n: u8| Memory::new(directory.path(), [n; 32], [0; 32]);
        for n in 0..MOST_TARGETS as u8 {
            of(n).save(&table(0), &mixers()).unwrap();
        }
        let file = std::fs::File::options().write(true).open(of(3).path()).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        std::fs::write(directory.path().join("notes.table"), "mine").unwrap();
        of(200).save(&table(0), &mixers()).unwrap();
        let left = found(directory.path()).unwrap();
        let tables: Vec<&Path> = left.iter().filter(|f| f.is_table).map(|f| &*f.path).collect();
        assert!(tables.len() == MOST_TARGETS && tables.contains(&of(200).path()));
        assert!(!of(3).path().exists() && directory.path().join("notes.table").exists());
        assert!(found(&directory.path().join("none")).unwrap().is_empty());
    }

    #[test]
    fn savers_at_the_same_time_lose_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let memory = Memory::new(directory.path(), [1; 32], [0; 32]);
        std::thread::scope(|scope| {
            for i in 0..6 {
                let memory = memory.clone();
                scope.spawn(move || memory.save(&table(100 * i), &mixers()).unwrap());
            }
        });
        let kept = memory.load().unwrap().unwrap();
        assert!((0..6).all(|i| knows(&kept.table, 100 * i)));
    }
}
