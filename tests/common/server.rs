//! `gemma serve` as a child process, and a client that can misbehave.

// Each test binary uses only a part of this module.
#![allow(dead_code)]

use super::shell::{BINARY, command};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A server that is ready to answer.
pub struct Server {
    pub child: Child,
    pub address: String,
    /// Output on standard error so far.
    said: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
    _home: Option<tempfile::TempDir>,
}

/// A response.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Asserts success.
    #[track_caller]
    pub fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// Returns the `data` of each event of a stream.
    pub fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }
}

impl Server {
    /// Starts a server of the bundled model on a free port, and waits until it answers.
    pub fn start(more: &[&str]) -> Server {
        let home = tempfile::tempdir().unwrap();
        let mut server = Server::start_in(home.path(), more, |_| {});
        server._home = Some(home);
        server
    }

    /// The same in a directory. `change` modifies the command.
    pub fn start_in(dir: &Path, more: &[&str], change: impl FnOnce(&mut Command)) -> Server {
        Server::try_start_in(dir, more, change).unwrap_or_else(|end| panic!("no server: {end:?}"))
    }

    /// The same. If the server ends before it answers, returns its exit code and standard error.
    pub fn try_start_in(
        dir: &Path,
        more: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Result<Server, (i32, String)> {
        let mut command = command(BINARY, dir);
        command.args(["serve", "--port", "0"]).args(more);
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (said, mut address) = (Arc::new(Mutex::new(String::new())), None);
        for line in lines.by_ref() {
            let line = line.unwrap();
            *said.lock().unwrap() += &format!("{line}\n");
            if let Some((_, rest)) = line.split_once("answers at http://") {
                address = rest.split(' ').next().map(str::to_owned);
                break;
            }
        }
        let Some(address) = address else {
            let code = super::shell::code(child.wait().unwrap());
            return Err((code, said.lock().unwrap().clone()));
        };
        let told = said.clone();
        let reader = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                *told.lock().unwrap() += &format!("{line}\n");
            }
        });
        Ok(Server { child, address, said, reader: Some(reader), _home: None })
    }

    pub fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Connects to the server without sending anything.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        stream
    }

    /// Sends these bytes and reads one response, which may be incomplete.
    pub fn send(&self, bytes: &[u8]) -> Option<Reply> {
        let mut stream = self.connect();
        // A server may answer and close the connection before it has read everything.
        let _ = stream.write_all(bytes);
        read_reply(&mut stream)
    }

    /// The same. Also returns `None` if the server no longer listens.
    pub fn try_send(&self, bytes: &[u8]) -> Option<Reply> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        let _ = stream.write_all(bytes);
        read_reply(&mut stream)
    }

    /// Sends a request with these headers in addition to the usual ones.
    pub fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Reply {
        let bytes = request(&self.address, method, path, headers, body);
        self.send(&bytes).expect("a response")
    }

    pub fn get(&self, path: &str) -> Reply {
        self.request("GET", path, "", "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.request("POST", path, "", &body.to_string())
    }

    /// Returns a figure of `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").body;
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
    }

    /// Waits until a figure of `/metrics` has this value.
    #[track_caller]
    pub fn wait_for(&self, name: &str, value: f64) {
        for _ in 0..600 {
            if self.metric(name) == value {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("{name} is {} and not {value}: {}", self.metric(name), self.said());
    }

    #[cfg(unix)]
    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child that has not been waited for, so the id is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Sends SIGTERM to the server.
    ///
    /// If it has already ended, its process still exists until it is waited for.
    #[cfg(unix)]
    pub fn terminate(&self) {
        self.signal(libc::SIGTERM);
    }

    /// Waits for the end. Returns the exit code and standard error.
    pub fn wait(mut self) -> (i32, String) {
        let code = super::shell::code(self.child.wait().unwrap());
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        let mut out = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert_eq!(out, "", "nothing goes to standard output");
        (code, self.said())
    }

    /// Returns the memory of the process in bytes.
    pub fn memory(&self) -> u64 {
        self.status_bytes("VmRSS:")
    }

    /// Returns the memory of the process in bytes, without pages of files.
    pub fn anonymous_memory(&self) -> u64 {
        self.status_bytes("RssAnon:")
    }

    /// Returns the peak memory of the process in bytes, since its start or a write to `clear_refs`.
    pub fn peak_memory(&self) -> u64 {
        self.status_bytes("VmHWM:")
    }

    fn status_bytes(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the bytes of a request that asks to close the connection afterwards.
pub fn request(host: &str, method: &str, path: &str, headers: &str, body: &str) -> Vec<u8> {
    let length = match method {
        "GET" => String::new(),
        _ => format!("Content-Length: {}\r\n", body.len()),
    };
    let first = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n");
    format!("{first}{length}{headers}\r\n{body}").into_bytes()
}

/// Reads a response to its end; `None` if there is none.
pub fn read_reply(stream: &mut TcpStream) -> Option<Reply> {
    let mut bytes = Vec::new();
    // A connection may be reset after the response.
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if is_chunked { unchunked(body) } else { body.to_owned() };
    Some(Reply { status, head: head.to_owned(), body })
}

/// Joins the chunks of a body, which may be incomplete.
fn unchunked(body: &str) -> String {
    let (mut out, mut rest) = (Vec::new(), body.as_bytes());
    while let Some(end) = rest.windows(2).position(|two| two == b"\r\n") {
        let length = std::str::from_utf8(&rest[..end]).unwrap_or_default();
        let length = usize::from_str_radix(length, 16).unwrap_or(0);
        rest = &rest[end + 2..];
        if length == 0 {
            break;
        }
        out.extend_from_slice(&rest[..length.min(rest.len())]);
        rest = &rest[(length + 2).min(rest.len())..];
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Returns the texts of a streamed chat answer, one for each choice.
pub fn streamed(events: &[Value], choices: usize) -> Vec<String> {
    let mut texts = vec![String::new(); choices];
    for choice in events.iter().filter_map(|event| event["choices"].as_array()).flatten() {
        let index = choice["index"].as_u64().unwrap() as usize;
        let text = choice["delta"]["content"].as_str().or(choice["text"].as_str());
        texts[index] += text.unwrap_or_default();
    }
    texts
}
