//! `gemma pull` with a small server on 127.0.0.1: cache, resumption, refusals and damaged files.

use crate::common::{Form, TinyModel, gguf};
use crate::shell;
use gemma::checkpoint::Dtype;
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use shell::{BINARY, Run, command, gemma_in, wait};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request: path, range and authorization.
type Seen = (String, String, String);

/// Responses of the server, set by tests.
#[derive(Default)]
struct Answers {
    /// Name, bytes, and whether the file is a large one on the other server.
    files: Vec<(String, Vec<u8>, bool)>,
    /// Address of the other server. It has the same host and another port.
    other: String,
    /// Number of bytes after which each of the next transfers of large files breaks off.
    cuts: Vec<usize>,
    /// Whether an interrupted transfer hangs instead of closing the connection.
    stalls: bool,
    ignores_ranges: bool,
    /// Whether requests for the rest of a file are refused.
    goes_back: bool,
    /// Bytes that the rest of a file begins late.
    late: usize,
    /// Wrong size, SHA-256 and Git hash to put into the list of files.
    size: Option<u64>,
    sha256: Option<String>,
    git: Option<String>,
    /// HTTP status and error code of refusals: of the list, and of files.
    list_status: Option<(u16, &'static str)>,
    file_status: Option<(u16, &'static str)>,
    seen: Vec<Seen>,
}

/// A server that runs until the test program ends.
pub struct FakeHub {
    endpoint: String,
    answers: Arc<Mutex<Answers>>,
}

impl FakeHub {
    pub fn new(files: &[(&str, &[u8], bool)]) -> FakeHub {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let address = |listener: &TcpListener| listener.local_addr().unwrap();
        let [endpoint, other] = listeners.each_ref().map(|l| format!("http://{}", address(l)));
        let files = files.iter().map(|(name, bytes, lfs)| ((*name).into(), bytes.to_vec(), *lfs));
        let answers = Answers { files: files.collect(), other, ..Answers::default() };
        let answers = Arc::new(Mutex::new(answers));
        for listener in listeners {
            let shared = answers.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let shared = shared.clone();
                    // A client that disconnects is not a failure of the server.
                    std::thread::spawn(move || drop(answer(stream.unwrap(), &shared)));
                }
            });
        }
        FakeHub { endpoint, answers }
    }

    fn set(&self, change: impl FnOnce(&mut Answers)) {
        change(&mut self.answers.lock().unwrap());
    }

    /// Returns the requests since the last call.
    fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.answers.lock().unwrap().seen)
    }

    /// Returns the ranges of requests for large files.
    fn ranges(&self) -> Vec<String> {
        let seen = self.seen().into_iter().filter(|(path, ..)| path.starts_with("/cdn/"));
        seen.map(|(_, range, _)| range).collect()
    }

    fn command(&self, home: &Path, args: &[&str]) -> Command {
        let mut command = command(BINARY, home);
        command.args(args).env("HF_ENDPOINT", &self.endpoint);
        command
    }

    pub fn pull(&self, home: &Path, id: &str) -> Run {
        wait(self.command(home, &["pull", id]), b"")
    }
}

/// Answers one request and closes the connection.
fn answer(mut stream: TcpStream, answers: &Mutex<Answers>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap()?;
    let path = first.split(' ').nth(1).unwrap().to_owned();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let header = |name: &str| headers.get(name).cloned().unwrap_or_default();
    let mut answers = answers.lock().unwrap();
    let range = header("range");
    answers.seen.push((path.clone(), range.clone(), header("authorization")));
    let refusal = match path.starts_with("/api/") {
        true => answers.list_status,
        false => answers.file_status,
    };
    if let Some((status, code)) = refusal {
        let head = format!("HTTP/1.1 {status} No\r\nx-error-code: {code}\r\n");
        return write!(stream, "{head}content-length: 0\r\nconnection: close\r\n\r\n");
    }
    if path.starts_with("/api/") {
        let list = listing(&answers).to_string();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n", list.len());
        return write!(stream, "{head}connection: close\r\n\r\n{list}");
    }
    let is_file = |name: &&(String, Vec<u8>, bool)| path.ends_with(&format!("/{}", name.0));
    let (_, bytes, is_large) = answers.files.iter().find(is_file).unwrap().clone();
    let is_cdn = path.starts_with("/cdn/");
    if is_large && !is_cdn {
        let name = path.split(&format!("/{COMMIT}/")).nth(1).unwrap();
        let other = &answers.other;
        let head = format!("HTTP/1.1 302 Found\r\nlocation: {other}/cdn/{name}\r\n");
        return write!(stream, "{head}content-length: 0\r\nconnection: close\r\n\r\n");
    }
    let from = range.strip_prefix("bytes=").and_then(|r| r.strip_suffix('-')?.parse().ok());
    if answers.goes_back && from.is_some() {
        return write!(stream, "HTTP/1.1 416 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    }
    let from = from.filter(|_| !answers.ignores_ranges).map(|from: usize| from + answers.late);
    let (rest, size) = (&bytes[from.unwrap_or(0)..], bytes.len());
    let head = match from {
        Some(from) => {
            format!("206 Partial Content\r\ncontent-range: bytes {from}-{}/{size}", size - 1)
        }
        None => "200 OK".to_owned(),
    };
    let length = rest.len();
    write!(stream, "HTTP/1.1 {head}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n")?;
    let is_cut = is_cdn && !answers.cuts.is_empty();
    let end = if is_cut { answers.cuts.remove(0).min(length) } else { length };
    let stalls = is_cut && answers.stalls;
    drop(answers);
    stream.write_all(&rest[..end])?;
    if stalls {
        std::thread::sleep(Duration::from_secs(120));
    }
    Ok(())
}

fn listing(answers: &Answers) -> Value {
    let file = |(name, bytes, is_large): &(String, Vec<u8>, bool)| {
        let size = answers.size.unwrap_or(bytes.len() as u64);
        let sha256 = answers.sha256.clone().unwrap_or_else(|| digest(bytes));
        match is_large {
            true => json!({"rfilename": name, "size": size, "blobId": "f".repeat(40),
                "lfs": {"sha256": sha256, "size": size, "pointerSize": 134}}),
            false => {
                let git = answers.git.clone().unwrap_or_else(|| git_hash(bytes));
                json!({"rfilename": name, "size": size, "blobId": git})
            }
        }
    };
    let siblings: Vec<Value> = answers.files.iter().map(file).collect();
    json!({"id": "org/m", "sha": COMMIT, "siblings": siblings})
}

fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn git_hash(bytes: &[u8]) -> String {
    let head = format!("blob {}\0", bytes.len());
    hex::encode(Sha1::new_with_prefix(head).chain_update(bytes).finalize())
}

/// Returns `n` bytes in which no two pieces are equal.
pub fn content(n: usize) -> Vec<u8> {
    (0..n as u32 / 4).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
}

const SIZE: usize = 600_000;

/// A server with one large file.
fn one_file() -> (tempfile::TempDir, FakeHub, Vec<u8>) {
    let bytes = content(SIZE);
    let hub = FakeHub::new(&[("m-Q4_0.gguf", &bytes, true), ("README.md", b"# m", false)]);
    (tempfile::tempdir().unwrap(), hub, bytes)
}

fn folder(home: &Path) -> PathBuf {
    home.join(".cache/huggingface/hub/models--org--m")
}

/// Returns the files in `blobs/`, sorted.
fn blobs(home: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder(home).join("blobs")).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Asserts that the file is at the path on standard output, and that there is nothing else.
#[track_caller]
fn is_pulled(run: Run, home: &Path, bytes: &[u8]) {
    let run = run.ok();
    let path = PathBuf::from(run.text().strip_suffix('\n').unwrap());
    assert_eq!(path, folder(home).join("snapshots").join(COMMIT).join("m-Q4_0.gguf"));
    assert!(fs::read(&path).unwrap() == bytes, "other bytes");
    let target = format!("../../blobs/{}", digest(bytes));
    assert_eq!(fs::read_link(&path).unwrap(), Path::new(&target));
    assert_eq!(blobs(home), [digest(bytes)]);
    assert_eq!(fs::read_to_string(folder(home).join("refs/main")).unwrap(), COMMIT);
}

#[test]
fn a_file_is_pulled_once_and_the_token_stays_with_the_hub() {
    let (home, hub, bytes) = one_file();
    let home = home.path();
    let mut command = hub.command(home, &["pull", "org/m"]);
    command.env("HF_TOKEN", "hf_secret");
    let run = wait(command, b"");
    assert!(run.err.contains("org/m: 1 file, 600 kB") && !run.err.contains("hf_secret"), "{run:?}");
    is_pulled(run, home, &bytes);
    let seen = hub.seen();
    let paths: Vec<&str> = seen.iter().map(|(path, ..)| &**path).collect();
    let resolve = format!("/org/m/resolve/{COMMIT}/m-Q4_0.gguf");
    assert_eq!(paths, ["/api/models/org/m/revision/main?blobs=true", &resolve, "/cdn/m-Q4_0.gguf"]);
    let tokens: Vec<&str> = seen.iter().map(|(.., token)| &**token).collect();
    assert_eq!(tokens, ["Bearer hf_secret", "Bearer hf_secret", ""]);
    let again = hub.pull(home, "org/m");
    assert_eq!(again.err, "");
    is_pulled(again, home, &bytes);
    assert_eq!(hub.seen().len(), 1, "only the list");
}

#[test]
fn a_redirect_within_the_origin_of_the_hub_keeps_the_token() {
    let (home, hub, bytes) = one_file();
    hub.set(|answers| answers.other = String::new());
    let mut command = hub.command(home.path(), &["pull", "org/m"]);
    command.env("HF_TOKEN", "hf_secret");
    is_pulled(wait(command, b""), home.path(), &bytes);
    let tokens: Vec<String> = hub.seen().into_iter().map(|(.., token)| token).collect();
    assert_eq!(tokens, ["Bearer hf_secret"; 3]);
}

#[test]
fn the_usual_variables_say_where_the_token_and_the_cache_are() {
    let (home, hub, _) = one_file();
    let at = |name: &str| home.path().join(name);
    fs::create_dir(at("hf")).unwrap();
    fs::write(at("hf/token"), "of-home\n").unwrap();
    fs::write(at("mine"), "of-path").unwrap();
    let pull = |variables: &[(&str, PathBuf)]| {
        let mut command = hub.command(home.path(), &["pull", "-q", "org/m"]);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let run = wait(command, b"").ok();
        assert_eq!(run.err, "");
        (run.text().to_owned(), hub.seen()[0].2.clone())
    };
    let (path, token) = pull(&[("HF_HOME", at("hf"))]);
    assert!(path.starts_with(at("hf/hub/models--org--m").to_str().unwrap()), "{path}");
    assert_eq!(token, "Bearer of-home");
    let (path, token) = pull(&[
        ("HF_HOME", at("hf")),
        ("HF_TOKEN_PATH", at("mine")),
        ("HF_HUB_CACHE", at("cache")),
    ]);
    assert!(path.starts_with(at("cache/models--org--m").to_str().unwrap()), "{path}");
    assert_eq!(token, "Bearer of-path");
    let offline = [("HF_HUB_OFFLINE", "1")];
    let mut command = hub.command(home.path(), &["pull", "org/m"]);
    command.envs(offline);
    wait(command, b"").fails(2, &["HF_HUB_OFFLINE"]);
    assert!(hub.seen().is_empty());
}

#[test]
fn a_broken_connection_is_resumed_by_the_same_run() {
    let (home, hub, bytes) = one_file();
    hub.set(|answers| answers.cuts = vec![200_000, 0, 100_000]);
    is_pulled(hub.pull(home.path(), "org/m"), home.path(), &bytes);
    assert_eq!(hub.ranges(), ["", "bytes=200000-", "bytes=200000-", "bytes=300000-"]);
    // Another part than the requested one is not appended.
    let (home, hub, bytes) = one_file();
    hub.set(|answers| (answers.cuts, answers.late) = (vec![100_000], 1));
    is_pulled(hub.pull(home.path(), "org/m"), home.path(), &bytes);
    assert_eq!(hub.ranges(), ["", "bytes=100000-", ""]);
}

#[test]
fn a_server_that_goes_back_again_and_again_is_given_up() {
    let (home, hub, _) = one_file();
    hub.set(|answers| (answers.cuts, answers.goes_back) = (vec![100_000; 100], true));
    hub.pull(home.path(), "org/m").fails(1, &["m-Q4_0.gguf was interrupted", "another part"]);
    assert_eq!(hub.ranges(), ["", "bytes=100000-", "", "bytes=100000-"]);
}

#[test]
fn a_connection_that_always_breaks_is_1_and_the_next_pull_resumes() {
    let (home, hub, bytes) = one_file();
    hub.set(|answers| answers.cuts = vec![200_000, 0, 0, 0]);
    hub.pull(home.path(), "org/m").fails(1, &["interrupted", "resumes after 200 kB of 600 kB"]);
    assert_eq!(blobs(home.path()), [format!("{}.incomplete", digest(&bytes))]);
    hub.seen();
    let refused = gemma_in(home.path(), &["generate", "hi", "-m", "org/m"], b"");
    refused.fails(3, &["not complete", "gemma pull org/m"]);
    is_pulled(hub.pull(home.path(), "org/m"), home.path(), &bytes);
    assert_eq!(hub.ranges(), ["bytes=200000-"]);
    // A server without support for ranges sends the whole file. A partial file that is too long is
    // downloaded again from the start.
    for (length, range) in [(1000, "bytes=1000-"), (SIZE + 1, "")] {
        fs::remove_dir_all(folder(home.path()).join("snapshots")).unwrap();
        let blob = folder(home.path()).join("blobs").join(digest(&bytes));
        fs::rename(&blob, blob.with_extension("incomplete")).unwrap();
        let file = File::options().write(true).open(blob.with_extension("incomplete")).unwrap();
        file.set_len(length as u64).unwrap();
        hub.set(|answers| answers.ignores_ranges = true);
        is_pulled(hub.pull(home.path(), "org/m"), home.path(), &bytes);
        assert_eq!(hub.ranges(), [range]);
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_stalled_transfer_and_the_next_pull_resumes() {
    let (home, hub, bytes) = one_file();
    for (signal, expected) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        hub.set(|answers| (answers.cuts, answers.stalls) = (vec![100_000], true));
        let child = hub.command(home.path(), &["pull", "org/m"]).spawn().unwrap();
        let partial = folder(home.path()).join(format!("blobs/{}.incomplete", digest(&bytes)));
        let length = if signal == libc::SIGINT { 100_000 } else { 200_000 };
        while partial.metadata().map_or(0, |meta| meta.len()) < length {
            std::thread::sleep(Duration::from_millis(10));
        }
        let start = Instant::now();
        // SAFETY: a signal to a child that has not been waited for, so the id is still its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!((shell::code(output.status), output.stdout.len()), (expected, 0), "{err}");
        assert!(err.contains("gemma pull org/m resumes the download"), "{err}");
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
    is_pulled(hub.pull(home.path(), "org/m"), home.path(), &bytes);
    assert_eq!(hub.ranges(), ["", "bytes=100000-", "bytes=200000-"]);
}

#[test]
fn damaged_bytes_are_1_and_are_removed() {
    let (home, hub, bytes) = one_file();
    let wrong = digest(b"other bytes");
    hub.set(|answers| answers.sha256 = Some(wrong.clone()));
    hub.pull(home.path(), "org/m").fails(1, &["m-Q4_0.gguf", "sha256", &wrong, &digest(&bytes)]);
    hub.set(|answers| (answers.sha256, answers.size) = (None, Some(SIZE as u64 - 1)));
    hub.pull(home.path(), "org/m").fails(1, &["m-Q4_0.gguf arrived damaged"]);
    assert!(blobs(home.path()).is_empty() && !folder(home.path()).join("snapshots").exists());
    hub.set(|answers| answers.size = None);
    is_pulled(hub.pull(home.path(), "org/m"), home.path(), &bytes);
}

#[test]
fn small_files_are_checked_too() {
    let home = tempfile::tempdir().unwrap();
    let hub = FakeHub::new(&[("config.json", b"{}", false), ("model.safetensors", b"x", true)]);
    let wrong = git_hash(b"other bytes");
    hub.set(|answers| answers.git = Some(wrong.clone()));
    let run = hub.pull(home.path(), "org/m");
    run.fails(1, &["config.json arrived damaged", "Git hash", &wrong, &git_hash(b"{}")]);
    assert!(blobs(home.path()).is_empty());
    hub.set(|answers| answers.git = None);
    hub.pull(home.path(), "org/m").ok();
    assert_eq!(blobs(home.path()).len(), 2);
}

/// Until the new link or version exists, the old one stays: a failed rename changes nothing.
#[cfg(target_os = "linux")]
#[test]
fn links_and_the_current_version_are_replaced_in_one_step() {
    let (home, hub, bytes) = one_file();
    let home = home.path();
    is_pulled(hub.pull(home, "org/m"), home, &bytes);
    let (link, main) = (
        folder(home).join("snapshots").join(COMMIT).join("m-Q4_0.gguf"),
        folder(home).join("refs/main"),
    );
    fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("old", &link).unwrap();
    fs::write(&main, "old").unwrap();
    let state = || (fs::read_link(&link).unwrap(), fs::read_to_string(&main).unwrap());
    let new = PathBuf::from(format!("../../blobs/{}", digest(&bytes)));
    for (call, link) in [("rename@1", Path::new("old")), ("rename@2", &new)] {
        let mut command = hub.command(home, &["pull", "org/m"]);
        command.env(gemma::testing::FAIL, call);
        wait(command, b"").fails(1, &["cannot write"]);
        assert_eq!(state(), (link.to_owned(), "old".to_owned()), "{call}");
    }
    is_pulled(hub.pull(home, "org/m"), home, &bytes);
    let entries = |directory: &Path| fs::read_dir(directory).unwrap().count();
    assert_eq!([&link, &main].map(|path| entries(path.parent().unwrap())), [1, 1]);
}

#[cfg(unix)]
#[test]
fn a_pipe_in_the_cache_is_refused_and_not_waited_for() {
    let (home, hub, bytes) = one_file();
    let home = home.path();
    let partial = folder(home).join(format!("blobs/{}.incomplete", digest(&bytes)));
    let locks = home.join(".cache/huggingface/hub/.locks/models--org--m");
    for pipe in [partial, locks.join(format!("{}.lock", digest(&bytes)))] {
        fs::create_dir_all(pipe.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&pipe);
        shell::bash(home, &format!("mkfifo '{}'", pipe.display())).ok();
        hub.pull(home, "org/m").fails(1, &["cannot write", "it is not a regular file"]);
        fs::remove_file(&pipe).unwrap();
    }
    is_pulled(hub.pull(home, "org/m"), home, &bytes);
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_1_before_and_during_the_download() {
    let (home, hub, bytes) = one_file();
    hub.set(|answers| answers.size = Some(1 << 60));
    hub.pull(home.path(), "org/m").fails(1, &["needs 1152922 TB", " free", "HF_HUB_CACHE"]);
    assert!(hub.ranges().is_empty() && !folder(home.path()).exists());
    hub.set(|answers| answers.size = None);
    let mut limited = command("bash", home.path());
    limited.args(["-c", "ulimit -f 300; exec \"$G\" pull org/m"]);
    limited.env("G", BINARY).env("HF_ENDPOINT", &hub.endpoint);
    wait(limited, b"").fails(1, &["cannot write", "File too large", "HF_HUB_CACHE"]);
    hub.seen();
    is_pulled(hub.pull(home.path(), "org/m"), home.path(), &bytes);
    assert_eq!(hub.ranges(), ["bytes=307200-"]);
}

#[test]
fn refusals_say_what_to_do() {
    let (home, hub, _) = one_file();
    let home = home.path();
    let page = format!("{}/org/m", hub.endpoint);
    let refused = |list, file, token: &str| {
        hub.set(|answers| (answers.list_status, answers.file_status) = (list, file));
        let mut command = hub.command(home, &["pull", "org/m"]);
        command.env("HF_TOKEN", token);
        wait(command, b"")
    };
    // The list of a gated model is public, but its files are not.
    let gated = |status| Some((status, "GatedRepo"));
    let run = refused(None, gated(401), "");
    run.fails(3, &["org/m is gated", &page, "export HF_TOKEN=", "gemma pull org/m"]);
    let run = refused(None, gated(403), "hf_x");
    run.fails(3, &["no access", "the variable HF_TOKEN", &page]);
    refused(Some((401, "RepoNotFound")), None, "").fails(3, &["does not exist, or is private"]);
    refused(Some((401, "")), None, "hf_x").fails(3, &["the token in the variable HF_TOKEN"]);
    refused(Some((403, "")), None, "hf_x").fails(3, &["access to org/m is forbidden"]);
    refused(Some((404, "RepoNotFound")), None, "hf_x").fails(3, &["there is no model org/m at"]);
    refused(Some((503, "")), None, "").fails(1, &["status 503"]);
    let mut nowhere = command(BINARY, home);
    nowhere.args(["pull", "org/m"]).env("HF_ENDPOINT", "http://127.0.0.1:1");
    wait(nowhere, b"").fails(1, &["http://127.0.0.1:1 cannot be reached"]);
    assert!(!folder(home).join("refs").exists());
}

#[test]
fn another_pull_of_the_same_file_is_not_disturbed() {
    let (home, hub, bytes) = one_file();
    let locks = home.path().join(".cache/huggingface/hub/.locks/models--org--m");
    fs::create_dir_all(&locks).unwrap();
    let lock = File::create(locks.join(format!("{}.lock", digest(&bytes)))).unwrap();
    lock.lock().unwrap();
    hub.pull(home.path(), "org/m").fails(1, &["another program is downloading m-Q4_0.gguf"]);
    drop(lock);
    is_pulled(hub.pull(home.path(), "org/m"), home.path(), &bytes);
}

#[test]
fn a_repository_of_several_files_needs_a_tag_and_parts_come_together() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    gguf::float_file(&TinyModel::tiny(1), 0).write(&home.join("tiny.gguf"));
    let tiny = fs::read(home.join("tiny.gguf")).unwrap();
    let hub = FakeHub::new(&[
        ("m-Q4_K_M.gguf", &tiny, true),
        ("m-Q8_0.gguf", &content(4000), true),
        ("big/m-BF16-00001-of-00002.gguf", &content(400), true),
        ("big/m-BF16-00002-of-00002.gguf", &content(800), true),
        ("mmproj-F16.gguf", b"vision", true),
    ]);
    let lines = ["has 3 GGUF files", "\n  gemma pull org/m:Q4_K_M  # ", "org/m:Q8_0  # 4.00 kB"];
    hub.pull(home, "org/m").fails(2, &lines);
    hub.pull(home, "org/m").fails(2, &["org/m:BF16  # 1.20 kB"]);
    hub.pull(home, "org/m:Q5_K").fails(2, &["no GGUF file Q5_K", "org/m:Q8_0"]);
    hub.pull(home, "org/m:m").fails(2, &["3 GGUF files called m"]);
    assert!(hub.ranges().is_empty());
    let absent = gemma_in(home, &["inspect", "org/m:Q4_K_M"], b"");
    absent.fails(3, &["org/m:Q4_K_M is not in", "gemma pull org/m:Q4_K_M"]);
    let file = hub.pull(home, "org/m:q4_k_m").ok();
    assert!(file.text().ends_with("/m-Q4_K_M.gguf\n"), "{file:?}");
    let inspect = |name: &str| gemma_in(home, &["inspect", name, "--json"], b"").ok().json();
    assert_eq!(inspect("org/m:Q4_K_M")["bytes"], inspect("tiny.gguf")["bytes"]);
    assert_eq!(inspect("org/m:m-Q4_K_M.gguf"), inspect("org/m"));
    let parts = hub.pull(home, &format!("{}:BF16", "https://hf.co/org/m")).ok();
    let path = Path::new(parts.text().trim_end());
    assert!(path.ends_with("big/m-BF16-00001-of-00002.gguf"), "{path:?}");
    assert_eq!(fs::read(path).unwrap(), content(400));
    assert_eq!(fs::read(path.with_file_name("m-BF16-00002-of-00002.gguf")).unwrap(), content(800));
}

#[test]
fn a_long_list_is_told_in_part_and_names_that_not_every_system_stores_are_left_out() {
    let home = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..5000).map(|i| format!("m{i}-00001-of-99999.gguf")).collect();
    let mut files: Vec<(&str, &[u8], bool)> =
        names.iter().map(|name| (&**name, b"x" as &[u8], true)).collect();
    files.push(("nul.gguf", b"x", true));
    let hub = FakeHub::new(&files);
    let run = hub.pull(home.path(), "org/m:Q4");
    let words = ["org/m has no GGUF file Q4", "\n  gemma pull org/m:m0-", "and 4980 more"];
    let run = run.fails(2, &words);
    assert_eq!(run.err.matches("gemma pull").count(), 20, "{}", run.err);
    hub.pull(home.path(), "org/m").fails(3, &["\"nul.gguf\", which not every system can store"]);
    let lacks = "org/m has no m7-00002-of-99999.gguf, which is a part of the model";
    hub.pull(home.path(), "org/m:m7-00001-of-99999.gguf").fails(3, &[lacks]);
}

#[test]
fn a_checkpoint_is_pulled_without_what_it_does_not_need() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    TinyModel::tiny(1).write(&home.join("tiny"), Form::TextV4, Dtype::BF16, 2);
    let read = |name: &str| fs::read(home.join("tiny").join(name)).unwrap();
    let weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let index = "model.safetensors.index.json";
    let hub = FakeHub::new(&[
        ("config.json", &read("config.json"), false),
        ("generation_config.json", &read("generation_config.json"), false),
        (index, &read(index), false),
        (weights[0], &read(weights[0]), true),
        (weights[1], &read(weights[1]), true),
        ("pytorch_model.bin", b"pickle", true),
        ("onnx/model.safetensors", b"other", true),
        ("README.md", b"# m", false),
    ]);
    let run = hub.pull(home, "org/m").ok();
    let snapshot = run.text().trim_end();
    let mut names: Vec<String> = fs::read_dir(snapshot)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let wanted = ["config.json", "generation_config.json", weights[0], weights[1], index];
    assert_eq!(names, wanted);
    let model = |name: &str| {
        let json = gemma_in(home, &["inspect", name, "--json"], b"").ok().json();
        (json["parameters"].clone(), json["bytes"].clone())
    };
    assert_eq!(model("org/m"), model("tiny"));
    assert_eq!(model(snapshot), model("tiny"));
}

#[test]
fn nothing_but_pull_asks_the_hub() {
    let (home, hub, _) = one_file();
    for args in [["generate", "hi", "-m", "org/m"], ["generate", "hi", "-m", "org/m:Q4_0"]] {
        let name = format!("gemma pull {}", args[3]);
        wait(hub.command(home.path(), &args), b"").fails(3, &[&name]);
    }
    for name in ["gemma3", "gemma3:4b", "gemma-3-4b", "4b"] {
        let command = "gemma pull google/gemma-3-4b-it-qat-q4_0-gguf";
        let args = ["generate", "hi", "-m", name];
        let help = ["Gemma 3 4b is not on this machine", "3.2 GB", command];
        wait(hub.command(home.path(), &args), b"").fails(3, &help);
    }
    for name in ["gemma-3-4b-it", "gemma3:4b-it-q8_0"] {
        let help = ["is not OWNER/NAME", "gemma pull google/gemma-3-4b-it-qat-q4_0-gguf"];
        hub.pull(home.path(), name).fails(2, &help);
    }
    for name in ["", "x", "a/b/c", "../x", "org/m:", "m.gguf", "/etc/passwd"] {
        hub.pull(home.path(), name).fails(2, &["is not OWNER/NAME"]);
    }
    gemma_in(home.path(), &["pull"], b"").fails(2, &["<ID[:TAG]>"]);
    assert!(hub.seen().is_empty());
}
