//! Files of the prompt cache: one per page of a text and group of layers with the same pages.
//!
//! The name of a file is a hash of the engine and of all tokens up to the page's end. A file holds
//! a magic number, a SHA-256 digest of name and content, and the content. A file that does not
//! match its name is ignored. Files are written atomically, and anyone may delete them at any time.

use super::PageId;
use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::kv::PAGE;
use gemma_base::os::files::{create_private_directories, is_closed_directory};
use gemma_base::tensor::{FIRST_PLACE, Token, is_place};
use gemma_base::util::files::{keep_newest_bytes, read_regular, touch, write_whole};
use gemma_base::util::hex;
use gemma_model::models::Images;
use sha2::{Digest, Sha256};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// First bytes of each file: format and version.
const MARK: &[u8; 8] = b"gemmaKV1";
/// Bytes before the content: magic number and digest.
pub const HEAD: usize = MARK.len() + 32;
/// Extension of the files' names.
const ENDING: &str = ".page";

/// Hash of an engine and of the tokens up to the end of a page.
pub type PageKey = [u8; 32];

/// A directory of pages with access for this user only.
#[derive(Clone, Debug)]
pub struct PageDirectory {
    path: PathBuf,
    /// Limit of the files' total bytes.
    pub most: u64,
}

/// Content of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum StoredPage {
    /// Header and page content.
    Whole(Vec<u8>),
    Missing,
    /// The file is not a page with this name.
    Damaged,
}

impl PageDirectory {
    /// Opens the directory, and creates it if it is missing. Fails if other users can enter it,
    /// because its files reveal prompts.
    pub fn open(path: &Path, most: u64) -> Result<PageDirectory> {
        let name = path.display();
        create_private_directories(path)
            .and_then(|()| path.canonicalize())
            .and_then(|path| Ok((is_closed_directory(&path)?, path)))
            .with_context(|| Fault::usage(format!("cannot make the directory {name}")))
            .and_then(|(is_closed, path)| match is_closed {
                true => Ok(PageDirectory { path, most }),
                false => Err(Fault::usage(format!("other users can read the directory {name}"))
                    .help("chmod 700 it, or name one that does not exist yet")
                    .into()),
            })
    }

    /// Returns the path of a page's file.
    pub fn path(&self, page: &PageId) -> PathBuf {
        self.path.join(name(page))
    }

    /// Returns whether the page's file exists. If so, marks it as recently used.
    pub fn touch(&self, page: &PageId) -> bool {
        touch(&self.path(page))
    }

    /// Returns whether the page's file exists.
    pub fn holds(&self, page: &PageId) -> bool {
        self.path(page).is_file()
    }

    /// Reads a page of `bytes` bytes. Removes a damaged file; fails if that is impossible.
    pub fn read(&self, page: &PageId, bytes: usize) -> io::Result<StoredPage> {
        let path = self.path(page);
        match read_regular(&path, (HEAD + bytes) as u64) {
            Ok(file) if is_whole(&file, page, bytes) => Ok(StoredPage::Whole(file)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(StoredPage::Missing),
            _ => match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                _ => Ok(StoredPage::Damaged),
            },
        }
    }

    /// Removes the file of a page, if possible.
    pub fn remove(&self, page: &PageId) {
        let _ = std::fs::remove_file(self.path(page));
    }

    /// Writes a page. Overwrites the first [`HEAD`] bytes of `file`; the others are the page.
    pub fn write(&self, page: &PageId, file: &mut [u8]) -> io::Result<()> {
        let (head, content) = file.split_at_mut(HEAD);
        head[..MARK.len()].copy_from_slice(MARK);
        head[MARK.len()..].copy_from_slice(&digest(page, content));
        write_whole(&self.path(page), file)
    }

    /// Removes the least recently used files until `bytes` more bytes fit.
    pub fn make_room(&self, bytes: u64) {
        let is_page = |name: &str| name.ends_with(ENDING);
        keep_newest_bytes(&self.path, self.most.saturating_sub(bytes), is_page);
    }
}

fn name(page: &PageId) -> String {
    format!("{}-{}{ENDING}", hex(page.key), page.layers)
}

fn digest(page: &PageId, content: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(name(page)).chain_update(content).finalize().into()
}

/// Returns whether a file's content matches its name.
fn is_whole(file: &[u8], page: &PageId, bytes: usize) -> bool {
    file.len() == HEAD + bytes
        && file.starts_with(MARK)
        && file[MARK.len()..HEAD] == digest(page, &file[HEAD..])
}

/// Returns the keys of a text's whole pages.
///
/// Each key hashes the previous key, so it covers all tokens from the start. A page with image
/// placeholders hashes the digests of the images. The list ends before an image without a digest.
pub fn keys(engine: [u8; 32], tokens: &[Token], images: Option<&Images>) -> Vec<PageKey> {
    let next = |key: &mut PageKey, page: &[Token]| {
        let mut hash = Sha256::new().chain_update(*key);
        match page.iter().any(|item| is_place(*item)) {
            false => hash.update(bytemuck::cast_slice(page)),
            true => hash.update(named(page, images?)?),
        }
        *key = hash.finalize().into();
        Some(*key)
    };
    tokens.chunks_exact(PAGE).scan(engine, next).collect()
}

/// Returns the bytes of a page with image placeholders, for hashing. A placeholder becomes the
/// index of its soft token, offset past all token ids. The digest of each placeholder's image
/// follows.
fn named(page: &[Token], images: &Images) -> Option<Vec<u8>> {
    let (mut items, mut digests) = (page.to_vec(), Vec::new());
    for item in items.iter_mut().filter(|item| is_place(**item)) {
        let (digest, index) = images.name(*item)?;
        *item = FIRST_PLACE + index as Token;
        digests.extend(digest);
    }
    Some([bytemuck::cast_slice(&items), &digests[..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(key: u8, layers: usize) -> PageId {
        PageId { key: [key; 32], layers, nth: 0 }
    }

    fn file(content: &[u8]) -> Vec<u8> {
        [&[0; HEAD], content].concat()
    }

    #[test]
    fn a_file_with_any_other_byte_is_ignored_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let directory = PageDirectory::open(&root.path().join("a/b"), 1000).unwrap();
        let (id, content) = (page(1, 2), b"keys and values");
        directory.write(&id, &mut file(content)).unwrap();
        let read = |id: &PageId| directory.read(id, content.len()).unwrap();
        let StoredPage::Whole(good) = read(&id) else { panic!("it was written") };
        assert_eq!(&good[HEAD..], content);
        let path = directory.path(&id);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            std::fs::write(&path, bad).unwrap();
            assert_eq!((read(&id), read(&id)), (StoredPage::Damaged, StoredPage::Missing), "{at}");
        }
        let long = [&good[..], b"x"].concat();
        for bad in [&good[..good.len() - 1], &good[..HEAD], b"", &long] {
            std::fs::write(&path, bad).unwrap();
            assert_eq!(read(&id), StoredPage::Damaged);
        }
        // Files of another page and of other layers, renamed to this name.
        for other in [page(2, 2), page(1, 1)] {
            directory.write(&other, &mut file(content)).unwrap();
            std::fs::rename(directory.path(&other), &path).unwrap();
            assert_eq!(read(&id), StoredPage::Damaged);
        }
        std::fs::create_dir(&path).unwrap();
        assert!(directory.read(&id, 1).is_err(), "it cannot be removed");
        assert!(!directory.holds(&id));
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_under_the_name_of_a_page_is_not_waited_for() {
        let root = tempfile::tempdir().unwrap();
        let directory = PageDirectory::open(&root.path().join("pages"), 1000).unwrap();
        let (id, content) = (page(1, 0), b"keys and values");
        let make = || std::process::Command::new("mkfifo").arg(directory.path(&id)).status();
        assert!(make().unwrap().success());
        assert!(!directory.touch(&id) && !directory.holds(&id));
        assert_eq!(directory.read(&id, content.len()).unwrap(), StoredPage::Damaged);
        assert!(make().unwrap().success());
        directory.write(&id, &mut file(content)).unwrap();
        assert!(directory.touch(&id));
    }

    #[test]
    fn files_that_were_of_use_longest_ago_go_first() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("pages");
        let directory = PageDirectory::open(&path, 3 * (HEAD as u64 + 10)).unwrap();
        let ids = [1, 2, 3].map(|key| page(key, 0));
        ids.iter().for_each(|id| directory.write(id, &mut file(&[7; 10])).unwrap());
        std::fs::write(path.join("a note"), [0; 1000]).unwrap();
        directory.make_room(0);
        assert!(ids.iter().all(|id| directory.holds(id)));
        assert!(directory.touch(&ids[0]) && !directory.touch(&page(4, 0)));
        directory.make_room(HEAD as u64 + 10);
        assert_eq!([0, 1, 2].map(|i| directory.holds(&ids[i])), [true, false, true]);
        assert!(path.join("a note").exists(), "only pages are removed");
    }

    /// Access rights are not checked on Windows.
    #[cfg(unix)]
    #[test]
    fn only_this_user_can_read_the_files() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("new/cache");
        let directory = PageDirectory::open(&path, 1000).unwrap();
        directory.write(&page(1, 0), &mut file(b"x")).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&directory.path(&page(1, 0)))), (0o700, 0o600));
        for open in [0o755, 0o710, 0o701] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(open)).unwrap();
            let refused = PageDirectory::open(&path, 1000).unwrap_err();
            assert!(format!("{refused:#}").contains("other users"), "{refused:#}");
        }
        std::fs::write(root.path().join("file"), "").unwrap();
        assert!(PageDirectory::open(&root.path().join("file"), 1000).is_err());
    }

    #[test]
    fn a_key_stands_for_the_engine_and_all_tokens_before() {
        let text: Vec<Token> = (0..700).collect();
        let all = keys([1; 32], &text, None);
        assert_eq!(all.len(), 2);
        assert_eq!(keys([1; 32], &text[..600], None), all);
        assert!(keys([1; 32], &text[..255], None).is_empty());
        let mut other = text.clone();
        other[3] = 9;
        let changed = keys([1; 32], &other, None);
        assert!(all[0] != changed[0] && all[1] != changed[1]);
        assert!(keys([2; 32], &text, None)[1] != all[1]);
    }

    #[test]
    fn a_key_names_an_image_by_its_digest_in_every_process() {
        let insert = |images: &Images, digest: u8| -> Vec<Token> {
            images.insert([digest; 32], vec![0.5; 300]).unwrap().places().collect()
        };
        let text = |image: &[Token]| [&[1, 2, 3], image, &[4; 500]].concat();
        let (first, second) = (Images::new(1, 300, 1 << 20), Images::new(1, 300, 1 << 20));
        let (a, b) = (insert(&first, 1), insert(&first, 2));
        let (other_b, other_a) = (insert(&second, 2), insert(&second, 1));
        assert_eq!(a, other_b, "processes number images as they come");
        let [a, b] = [a, b].map(|image| keys([1; 32], &text(&image), Some(&first)));
        let [other_a, other_b] =
            [other_a, other_b].map(|image| keys([1; 32], &text(&image), Some(&second)));
        assert_eq!((a.len(), &a, &b), (3, &other_a, &other_b));
        assert!((0..3).all(|page| a[page] != b[page]), "two images of one size");
        assert!(keys([1; 32], &text(&[FIRST_PLACE + 9000]), Some(&first)).is_empty());
    }
}
