//! Client of a running `gemma serve`: one request per connection, without TLS.

use crate::error::{Fault, Kind};
use crate::os::sockets;
use anyhow::{Context, Result};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Timeout of a request.
const PATIENCE: Duration = Duration::from_secs(60);
/// Limit of a response in bytes.
const LARGEST: u64 = 16 << 20;
const PORT: u16 = 8080;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress {
    /// Host and port.
    Tcp(String, u16),
    Unix(PathBuf),
}

impl FromStr for ServerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<ServerAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return Ok(ServerAddress::Unix(path.into()));
        }
        if text.starts_with("https://") {
            return Err("gemma has no TLS here: give the server's own http:// address".into());
        }
        let authority = text.strip_prefix("http://").unwrap_or(text);
        let authority = authority.trim_end_matches('/').trim_end_matches("/v1");
        let wrong = || "expected http://HOST:PORT, HOST:PORT or unix:PATH".to_owned();
        let is_bare = authority.ends_with(']') || !authority.contains(':');
        let (host, port) = match authority.rsplit_once(':').filter(|_| !is_bare) {
            Some((host, port)) => (host, port.parse().map_err(|_| wrong())?),
            None => (authority, PORT),
        };
        let is_host = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
        match !host.is_empty() && host.chars().all(is_host) {
            true => Ok(ServerAddress::Tcp(host.to_owned(), port)),
            false => Err(wrong()),
        }
    }
}

/// A client of one server.
pub struct ServerClient<'a> {
    pub address: &'a ServerAddress,
    pub key: Option<&'a str>,
}

impl ServerClient<'_> {
    pub fn get(&self, path: &str) -> Result<Value> {
        self.ask("GET", path, "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.ask("POST", path, &body.to_string())
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Result<Value> {
        let (shown, host) = match self.address {
            ServerAddress::Tcp(host, port) => {
                (format!("http://{host}:{port}"), format!("{host}:{port}"))
            }
            ServerAddress::Unix(path) => (path.display().to_string(), "localhost".to_owned()),
        };
        let mut request = format!("{method} {path} HTTP/1.0\r\nHost: {host}\r\n");
        if let Some(key) = self.key {
            request += &format!("Authorization: Bearer {key}\r\n");
        }
        request += &format!("Content-Length: {}\r\n\r\n{body}", body.len());
        let answer = self.exchange(request.as_bytes()).with_context(|| {
            Fault::new(Kind::Failure, format!("no server answers at {shown}"))
                .help("start one (gemma serve), or give its address: --url http://HOST:PORT")
        })?;
        let (head, body) = answer.split_once("\r\n\r\n").context("the answer is not HTTP")?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        let value: Value = serde_json::from_str(body).unwrap_or_default();
        if status == "200" {
            return Ok(value);
        }
        let error = &value["error"];
        let told = error["message"].as_str().or(error.as_str()).unwrap_or(head);
        let fault = Fault::new(Kind::Failure, format!("{shown} refused the request: {told}"));
        Err(match status {
            "401" => fault.help("give its key with --api-key or GEMMA_API_KEY"),
            _ => fault,
        }
        .into())
    }

    /// Sends a request and returns the complete response.
    fn exchange(&self, request: &[u8]) -> Result<String> {
        let answer = match self.address {
            ServerAddress::Unix(path) => talk(sockets::connect(path, PATIENCE)?, request)?,
            ServerAddress::Tcp(host, port) => {
                let name = host.trim_matches(['[', ']']);
                let mut last = None;
                let mut found = (name, *port).to_socket_addrs()?;
                let stream = found.find_map(|address| {
                    TcpStream::connect_timeout(&address, PATIENCE)
                        .map_err(|error| last = Some(error))
                        .ok()
                });
                let Some(stream) = stream else {
                    return Err(last.map_or_else(|| anyhow::anyhow!("no address"), Into::into));
                };
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                talk(stream, request)?
            }
        };
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}

fn talk(mut stream: impl Read + Write, request: &[u8]) -> Result<Vec<u8>> {
    stream.write_all(request)?;
    let mut answer = Vec::new();
    stream.take(LARGEST).read_to_end(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_spelled_in_many_ways() {
        let tcp = |host: &str, port| Ok(ServerAddress::Tcp(host.into(), port));
        for (text, want) in [
            ("http://127.0.0.1:8080", tcp("127.0.0.1", 8080)),
            ("http://localhost:99/", tcp("localhost", 99)),
            ("localhost:99/v1", tcp("localhost", 99)),
            ("example.org", tcp("example.org", 8080)),
            ("[::1]:5", tcp("[::1]", 5)),
            ("http://[::1]", tcp("[::1]", 8080)),
            ("unix:/run/g.sock", Ok(ServerAddress::Unix("/run/g.sock".into()))),
            ("unix:///run/g.sock", Ok(ServerAddress::Unix("/run/g.sock".into()))),
        ] {
            assert_eq!(text.parse(), want, "{text}");
        }
        for bad in ["", "http://", "https://a", "a:b", "a/b", "a b", "a:99999"] {
            assert!(bad.parse::<ServerAddress>().is_err(), "{bad}");
        }
    }
}
