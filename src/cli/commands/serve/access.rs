//! API keys, origins of browser pages and host names: parsers and rules.

use axum::http::Uri;
use axum::http::uri::Authority;
use sha2::{Digest, Sha256};
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// SHA-256 of an API key, which is one word of ASCII.
///
/// Hashes all have the same length, so the time of a comparison reveals nothing about the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ApiKey([u8; 32]);

impl ApiKey {
    /// Returns the hash of a key that a client sent.
    pub fn sent(text: &str) -> ApiKey {
        ApiKey(Sha256::digest(text).into())
    }

    pub fn hash(&self) -> [u8; 32] {
        self.0
    }

    /// Returns whether `self` is one of `keys`. All bytes of all keys are compared.
    pub fn is_among(&self, keys: &[ApiKey]) -> bool {
        let differs = |key: &ApiKey| key.0.iter().zip(self.0).fold(0, |all, (a, b)| all | (a ^ b));
        keys.iter().fold(false, |known, key| known | (differs(key) == 0))
    }
}

impl FromStr for ApiKey {
    type Err = String;

    fn from_str(key: &str) -> Result<ApiKey, String> {
        match key.len() {
            0 => Err("a key has at least one character: openssl rand -hex 32 makes one".into()),
            _ if key.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(ApiKey::sent(key)),
            n => {
                let what = format!("a key of {n} bytes is not one word of ASCII");
                Err(format!("{what}: openssl rand -hex 32 makes one"))
            }
        }
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(hidden)")
    }
}

/// Origin of browser pages, spelled as in the header `Origin`: lower case, without the default port
/// of its scheme and without a slash at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageOrigin(String);

impl PageOrigin {
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl FromStr for PageOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<PageOrigin, String> {
        if text.contains('*') {
            let what = "a pattern would allow pages that you do not know";
            return Err(format!("{what}: give each origin, such as https://chat.example.org"));
        }
        let wrong = || {
            let form = "an origin is SCHEME://HOST or SCHEME://HOST:PORT";
            format!("{form}, such as https://chat.example.org or app://obsidian.md")
        };
        let lower = text.to_ascii_lowercase();
        let uri: Uri = lower.parse().map_err(|_| wrong())?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(wrong());
        };
        let has_port = authority.as_str().len() > authority.host().len();
        let is_bare = lower.trim_end_matches('/') == format!("{scheme}://{authority}");
        let is_plain = !authority.as_str().contains('@') && !authority.host().is_empty();
        if !is_bare || !is_plain || has_port && authority.port_u16().is_none() {
            return Err(wrong());
        }
        let port = authority.port_u16().filter(|port| match scheme {
            "http" => *port != 80,
            "https" => *port != 443,
            _ => true,
        });
        let port = port.map(|port| format!(":{port}")).unwrap_or_default();
        Ok(PageOrigin(format!("{scheme}://{}{port}", authority.host())))
    }
}

/// Address that the server listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenHost {
    Address(IpAddr),
    /// 127.0.0.1 and [::1], which only this machine can reach.
    Localhost,
    /// A socket that only this user can connect to.
    Unix(PathBuf),
}

impl ListenHost {
    /// Returns whether other users or machines can reach the server.
    pub fn is_public(&self) -> bool {
        matches!(self, ListenHost::Address(address) if !address.is_loopback())
    }
}

impl fmt::Display for ListenHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenHost::Address(address) => address.fmt(f),
            ListenHost::Localhost => f.write_str("localhost"),
            ListenHost::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for ListenHost {
    type Err = String;

    fn from_str(text: &str) -> Result<ListenHost, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return match path.is_empty() {
                true => Err("unix: needs a path, such as unix:/run/user/1000/gemma.sock".into()),
                false => Ok(ListenHost::Unix(path.into())),
            };
        }
        if text.eq_ignore_ascii_case("localhost") {
            return Ok(ListenHost::Localhost);
        }
        let address = text.trim_matches(['[', ']']).parse().map(ListenHost::Address);
        address.map_err(|_| "expected an address, localhost or unix:PATH".into())
    }
}

/// Schemes of pages of local programs and browser extensions. Pages of the web never have them.
const APPS: [&str; 8] = [
    "app",
    "capacitor",
    "chrome-extension",
    "file",
    "moz-extension",
    "tauri",
    "vscode-file",
    "vscode-webview",
];

/// Returns whether an Origin header names a page of this machine: of a web server at localhost, a
/// program or an extension.
///
/// A page of the web has its own host name as origin, even if that name resolves to this machine. A
/// page without an origin has `null`.
pub fn is_local_origin(origin: &str) -> bool {
    let Some((scheme, rest)) = origin.split_once("://") else { return false };
    if !matches!(scheme, "http" | "https") {
        return APPS.contains(&scheme);
    }
    let Ok(authority) = rest.parse::<Authority>() else { return false };
    let has_port = authority.as_str().len() > authority.host().len();
    matches!(authority.host(), "localhost" | "127.0.0.1" | "[::1]")
        && !rest.contains('@')
        && (!has_port || authority.port_u16().is_some())
}

/// Returns whether a Host header names an IP address or localhost.
///
/// A missing header counts as empty.
pub fn is_local_host(host: &str) -> bool {
    if host.is_empty() {
        return true;
    }
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let is_plain = !host.contains('@');
    is_plain && (name.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok())
}

/// Names by which a container reaches the machine that it runs on.
const CONTAINER_HOSTS: [&str; 2] = ["host.docker.internal", "host.containers.internal"];

/// Returns whether a Host header names this machine as its containers do. A name of a network may
/// lead anywhere, so this counts only for requests that no page of a browser sends.
pub fn is_container_host(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    CONTAINER_HOSTS.iter().any(|own| own.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_words() {
        for bad in ["", " ", "a b", "a\n", "\u{e4}"] {
            assert!(bad.parse::<ApiKey>().is_err(), "{bad:?}");
        }
        let key: ApiKey = "secret".parse().unwrap();
        assert!(ApiKey::sent("secret").is_among(&["other".parse().unwrap(), key]));
        for sent in ["", "secre", "secret ", "Secret"] {
            assert!(!ApiKey::sent(sent).is_among(&[key]), "{sent:?}");
        }
        assert!(!format!("{key:?}").contains("secret"));
    }

    #[test]
    fn origins_are_spelled_as_browsers_spell_them() {
        for (given, want) in [
            ("https://a.example", "https://a.example"),
            ("https://a.example/", "https://a.example"),
            ("HTTPS://A.Example:443", "https://a.example"),
            ("http://localhost:80/", "http://localhost"),
            ("http://localhost:3000", "http://localhost:3000"),
            ("https://a.example:80", "https://a.example:80"),
            ("http://[::1]:5173", "http://[::1]:5173"),
            ("app://obsidian.md", "app://obsidian.md"),
            ("chrome-extension://abcdefghij", "chrome-extension://abcdefghij"),
            ("tauri://localhost", "tauri://localhost"),
        ] {
            assert_eq!(given.parse::<PageOrigin>().as_ref().map(PageOrigin::text), Ok(want));
        }
        for bad in [
            "",
            "*",
            "null",
            "https://*.example.org",
            "http://localhost:*",
            "a.example",
            "https://",
            "https://a.example/page",
            "https://a.example?x",
            "https://u@a.example",
            "a b",
            "http:/",
            "https://a.example:99999",
            "https://a.example:",
            "file:///x",
            "https://\u{e4}.example",
        ] {
            assert!(bad.parse::<PageOrigin>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn pages_of_this_machine_are_told_from_those_of_the_web() {
        for origin in [
            "http://localhost",
            "http://localhost:3000",
            "https://localhost:8443",
            "http://127.0.0.1:5173",
            "http://[::1]:80",
            "app://obsidian.md",
            "app://-",
            "tauri://localhost",
            "chrome-extension://abcdefghij",
            "moz-extension://0-1-2",
            "vscode-webview://0abc",
            "file://",
        ] {
            assert!(is_local_origin(origin), "{origin}");
        }
        for origin in [
            "null",
            "",
            "http://evil.example",
            "http://localhost.evil.example",
            "http://evil.example:8080",
            "http://localhost:3000@evil.example",
            "http://a@localhost",
            "http://localhost:",
            "http://localhost:x",
            "http://127.0.0.2",
            "http://10.0.0.1",
            "https://[::2]",
            "ftp://localhost",
            "application://x",
            "data:text/html,x",
            "localhost:3000",
        ] {
            assert!(!is_local_origin(origin), "{origin}");
        }
    }

    #[test]
    fn hosts_are_addresses_names_of_this_machine_and_sockets() {
        for (text, want, public) in [
            ("127.0.0.1", ListenHost::Address([127, 0, 0, 1].into()), false),
            ("0.0.0.0", ListenHost::Address([0, 0, 0, 0].into()), true),
            ("localhost", ListenHost::Localhost, false),
            ("unix:/run/g.sock", ListenHost::Unix("/run/g.sock".into()), false),
            ("unix:///run/g.sock", ListenHost::Unix("/run/g.sock".into()), false),
        ] {
            let host: ListenHost = text.parse().unwrap();
            assert_eq!((host.is_public(), &host), (public, &want));
        }
        for bad in ["", "unix:", "example.org", "127.0.0.1:80"] {
            assert!(bad.parse::<ListenHost>().is_err(), "{bad}");
        }
    }

    #[test]
    fn local_hosts_are_names_of_this_machine_and_addresses() {
        for host in ["", "localhost", "LocalHost:8080", "127.0.0.1", "10.0.0.1:80", "[::1]:8080"] {
            assert!(is_local_host(host), "{host:?}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "[[::1]]",
            "::1]",
            "a@localhost",
            " ",
            "localhost:8080:1",
            "?",
        ] {
            assert!(!is_local_host(host), "{host:?}");
        }
    }
}
