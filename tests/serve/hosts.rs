//! Addresses of the server: a socket for one user, and both addresses of localhost.

#![cfg(unix)]

use crate::server::{Server, read_reply, request};
use crate::shell::{BINARY, command, gemma_in};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStderr};

/// Starts a server at `unix:gemma.sock` in `dir`, and waits until it answers.
fn start(dir: &Path) -> (Child, BufReader<ChildStderr>) {
    let mut command = command(BINARY, dir);
    let mut child = command.args(["serve", "--host", "unix:gemma.sock"]).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let (mut line, mut all) = (String::new(), String::new());
    while !line.contains("answers at unix:gemma.sock") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "no server: {all}");
        all += &line;
    }
    (child, said)
}

fn status(path: &Path) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(&request("localhost", "GET", "/health", "", "")).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn a_socket_is_for_its_user_and_replaces_one_that_was_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gemma.sock");
    let (mut first, _said) = start(dir.path());
    assert_eq!(status(&path), "200");
    let rights = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    assert_eq!(rights, 0o600, "{rights:o}");
    let shown = gemma_in(dir.path(), &["ps", "--url", "unix:gemma.sock"], b"").ok();
    assert!(shown.text().contains("for ever"), "{shown:?}");
    // A second server, and a file of the user.
    let serve = |path: &str| {
        let host = format!("unix:{path}");
        gemma_in(dir.path(), &["serve", "--host", &host], b"")
    };
    serve("gemma.sock").fails(1, &["unix:gemma.sock", "another process listens there"]);
    fs::write(dir.path().join("notes"), "mine").unwrap();
    serve("notes").fails(1, &["unix:notes", "not a socket"]);
    assert_eq!(fs::read(dir.path().join("notes")).unwrap(), b"mine");
    serve("away/gemma.sock").fails(1, &["directory that exists"]);
    serve("").fails(2, &["unix:"]);
    // A killed server leaves its socket; a terminated one removes it.
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(fs::metadata(&path).unwrap().file_type().is_socket());
    let (mut second, _said) = start(dir.path());
    assert_eq!(status(&path), "200");
    // SAFETY: a signal to a child that has not been waited for, so the id is still its own.
    assert_eq!(unsafe { libc::kill(second.id() as i32, libc::SIGTERM) }, 0);
    assert_eq!(second.wait().unwrap().code(), Some(143));
    assert!(!path.exists());
}

#[test]
fn localhost_is_both_addresses_of_this_machine() {
    let server = Server::start(&["--host", "localhost"]);
    let port = server.address.strip_prefix("localhost:").unwrap();
    for address in ["127.0.0.1", "[::1]"] {
        let Ok(mut stream) = TcpStream::connect(format!("{address}:{port}")) else {
            // Some machines have no IPv6.
            assert_eq!(address, "[::1]");
            continue;
        };
        stream.write_all(&request("localhost", "GET", "/health", "", "")).unwrap();
        assert_eq!(read_reply(&mut stream).unwrap().status, 200);
    }
}
