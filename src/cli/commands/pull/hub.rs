//! Requests to Hugging Face: the file list of a repository, and the content of files.

use crate::error::{Fault, Kind};
use crate::runtime::model::acquire::TOKEN;
use crate::runtime::model::find::hugging_face_home;
use crate::util::files::{is_portable, read_regular_text};
use crate::util::json;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::HashSet;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;
use ureq::http::header::LOCATION;
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

/// Timeout for a connection, for a response, and for each piece of it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Timeout for a complete list of files.
const LIST_PATIENCE: Duration = Duration::from_secs(300);

/// Limit of redirects of one request.
const MOST_REDIRECTS: usize = 10;

/// Limits of a file list in bytes and in files.
const LARGEST_LIST: u64 = 16 << 20;
const MOST_FILES: usize = 100_000;
/// Limit of JSON values in a list with that many files, as `json` counts them.
const MOST_VALUES: usize = 1 << 22;

/// The server, and the token for it.
#[derive(Clone)]
pub struct Hub {
    agent: Agent,
    pub endpoint: String,
    token: Option<AccessToken>,
}

#[derive(Clone)]
struct AccessToken {
    value: String,
    /// Variable or file that contains the token.
    source: String,
}

/// The current version of a repository.
pub struct Repository {
    pub commit: String,
    pub files: Vec<RemoteFile>,
    /// File names that some systems cannot store. These files are left out.
    pub left_out: Vec<String>,
}

/// A file of a repository.
#[derive(Clone, Debug)]
pub struct RemoteFile {
    /// Path inside the repository. Every system can store it.
    pub name: String,
    pub size: u64,
    /// Digest in lower-case hexadecimal. It is also the file's name in the cache.
    pub blob: String,
    pub hash: BlobHash,
}

/// Hash function of a file's digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobHash {
    /// SHA-256 of the content, for large files.
    Sha256,
    /// Git's hash of a blob, for small files: SHA-1 of the length and the content.
    Git,
}

impl Hub {
    /// Reads $HF_ENDPOINT and the token: $HF_TOKEN, or the file that `hf auth login` writes.
    pub fn from_environment() -> Result<Hub> {
        let text = |name: &str| {
            let value = std::env::var(name).ok().map(|value| value.trim().to_owned());
            value.filter(|value| !value.is_empty())
        };
        let is_offline = text("HF_HUB_OFFLINE")
            .is_some_and(|v| ["1", "on", "yes", "true"].contains(&&*v.to_lowercase()));
        if is_offline {
            let fault = Fault::usage("HF_HUB_OFFLINE forbids downloads");
            return Err(fault.help("unset HF_HUB_OFFLINE").into());
        }
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if endpoint.parse().ok().and_then(|uri| WebOrigin::of(&uri)).is_none() {
            return Err(Fault::usage(format!("HF_ENDPOINT is not a URL: {endpoint}"))
                .help("it looks like https://huggingface.co")
                .into());
        }
        let of_variable = |name: &str| {
            Some(AccessToken { value: text(name)?, source: format!("the variable {name}") })
        };
        let of_file = || {
            let path = text("HF_TOKEN_PATH").map(PathBuf::from);
            let path = path.or_else(|| Some(hugging_face_home()?.join("token")))?;
            let value = read_regular_text(&path, 4096).ok()?.trim().to_owned();
            let source = path.display().to_string();
            (!value.is_empty()).then_some(AccessToken { value, source })
        };
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            // `get` follows redirects itself, so that it can leave out the token.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("gemma/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(PATIENCE))
            .timeout_connect(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .build()
            .new_agent();
        Ok(Hub {
            agent,
            endpoint,
            token: of_variable("HF_TOKEN")
                .or_else(|| of_variable("HUGGING_FACE_HUB_TOKEN"))
                .or_else(of_file),
        })
    }

    /// Requests an address and follows redirects.
    ///
    /// Only the origin of the endpoint gets the token: large files are on another server, which
    /// must not see it.
    fn get(
        &self,
        url: &str,
        from: u64,
        patience: Option<Duration>,
    ) -> Result<Response<Body>, ureq::Error> {
        let address = |text: &str| {
            text.parse::<Uri>().map_err(|why| ureq::Error::BadUri(format!("{text}: {why}")))
        };
        let own = WebOrigin::of(&address(&self.endpoint)?);
        let mut uri = address(url)?;
        for _ in 0..=MOST_REDIRECTS {
            let mut request = self.agent.get(&uri);
            let is_own = WebOrigin::of(&uri) == own;
            if let Some(AccessToken { value, .. }) = self.token.as_ref().filter(|_| is_own) {
                request = request.header("authorization", format!("Bearer {value}"));
            }
            if from > 0 {
                request = request.header("range", format!("bytes={from}-"));
            }
            let response = request.config().timeout_global(patience).build().call()?;
            let target = response.headers().get(LOCATION);
            let Some(target) = target.filter(|_| response.status().is_redirection()) else {
                return Ok(response);
            };
            let target = target.to_str().ok().and_then(|target| redirected(&uri, target));
            uri = target.ok_or(ureq::Error::RedirectFailed)?;
        }
        Err(ureq::Error::TooManyRedirects)
    }

    /// Returns the files of the main branch.
    pub fn repository(&self, id: &str) -> Result<Repository> {
        let url = format!("{}/api/models/{id}/revision/main?blobs=true", self.endpoint);
        let response = self.get(&url, 0, Some(LIST_PATIENCE));
        let response = response.map_err(|e| self.unreachable(&e.to_string()))?;
        if response.status().as_u16() != 200 {
            return Err(self.refusal(id, &response).into());
        }
        let mut bytes = Vec::new();
        response
            .into_body()
            .into_reader()
            .take(LARGEST_LIST)
            .read_to_end(&mut bytes)
            .map_err(|e| self.unreachable(&e.to_string()))?;
        Repository::parse(&bytes).with_context(|| {
            let what = format!("{url} did not return a list of at most {MOST_FILES} files");
            Fault::new(Kind::Failure, what).help("check HF_ENDPOINT")
        })
    }

    /// Requests the bytes of a file, starting at `from`.
    pub fn open(
        &self,
        id: &str,
        commit: &str,
        name: &str,
        from: u64,
    ) -> Result<Response<Body>, ureq::Error> {
        let url = format!("{}/{id}/resolve/{commit}/{}", self.endpoint, escaped(name));
        self.get(&url, from, None)
    }

    /// Makes the error of a server that cannot be reached.
    pub fn unreachable(&self, why: &str) -> Fault {
        Fault::new(Kind::Failure, format!("{} cannot be reached: {why}", self.endpoint))
            .help("check the connection, and the proxy in HTTPS_PROXY if you need one")
    }

    /// Makes the error of a request that was refused, from its status.
    pub fn refusal(&self, id: &str, response: &Response<Body>) -> Fault {
        let header = |name: &str| {
            response.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
        };
        let page = format!("{}/{id}", self.endpoint);
        let status = response.status().as_u16();
        match (status, header("x-error-code"), &self.token) {
            (401 | 403, "GatedRepo", None) => {
                Fault::model(format!("{id} is gated: its licence has to be accepted once"))
                    .help(format!("accept it at {page}, then\n  {TOKEN}\n  gemma pull {id}"))
            }
            (401 | 403, "GatedRepo", Some(token)) => Fault::model(format!(
                "{id} is gated, and the account of this token has no access to it ({})",
                token.source
            ))
            .help(format!("accept the licence at {page} with that account, then repeat this")),
            (401, _, None) => Fault::model(format!("{id} does not exist, or is private"))
                .help(format!("check its spelling. A private model needs a token:\n  {TOKEN}")),
            (401, _, Some(token)) => {
                Fault::model(format!("the token in {} is not valid", token.source))
                    .help(format!("make another one:\n  {TOKEN}"))
            }
            (403, _, _) => Fault::model(format!(
                "access to {id} is forbidden{}",
                match header("x-error-message") {
                    "" => String::new(),
                    message => format!(": {message}"),
                }
            ))
            .help("the token needs the permission to read this repository"),
            (404, _, _) => Fault::model(format!("there is no model {id} at {}", self.endpoint))
                .help("check the spelling: OWNER/NAME, as in the address of its page"),
            _ => {
                let what = format!("{} answered with status {status}", self.endpoint);
                Fault::new(Kind::Failure, what).help("try again later")
            }
        }
    }
}

impl Repository {
    /// Parses a response of the server; `None` if it is not a list of files.
    pub fn parse(bytes: &[u8]) -> Option<Repository> {
        Repository::from_json(&json::parse_up_to(MOST_VALUES, bytes).ok()?)
    }

    fn from_json(json: &Value) -> Option<Repository> {
        let commit = hash(&json["sha"])?;
        let siblings = json["siblings"].as_array()?;
        if siblings.len() > MOST_FILES {
            return None;
        }
        let files = siblings.iter().map(RemoteFile::from_json).collect::<Option<Vec<_>>>()?;
        // The name becomes a path in the cache.
        let (files, others): (Vec<_>, Vec<_>) =
            files.into_iter().partition(|file| is_portable(&file.name));
        let names: HashSet<&str> = files.iter().map(|file| &*file.name).collect();
        let is_unique = names.len() == files.len();
        let left_out = others.into_iter().map(|file| file.name).collect();
        is_unique.then_some(Repository { commit, files, left_out })
    }
}

impl RemoteFile {
    fn from_json(json: &Value) -> Option<RemoteFile> {
        let name = json["rfilename"].as_str()?.to_owned();
        let lfs = json.get("lfs").filter(|lfs| !lfs.is_null());
        let size = lfs.and_then(|lfs| lfs["size"].as_u64()).or_else(|| json["size"].as_u64())?;
        let (digest, hash_kind, digits) = match lfs {
            Some(lfs) => (&lfs["sha256"], BlobHash::Sha256, 64),
            None => (&json["blobId"], BlobHash::Git, 40),
        };
        let blob = hash(digest).filter(|digest| digest.len() == digits)?;
        Some(RemoteFile { name, size, blob, hash: hash_kind })
    }
}

/// Scheme, host and port of an address.
#[derive(Debug, PartialEq, Eq)]
struct WebOrigin {
    is_encrypted: bool,
    host: String,
    port: u16,
}

impl WebOrigin {
    /// Returns the origin of an http or https address.
    fn of(uri: &Uri) -> Option<WebOrigin> {
        let is_encrypted = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let host = uri.host().filter(|host| !host.is_empty())?.to_ascii_lowercase();
        let port = uri.port_u16().unwrap_or(if is_encrypted { 443 } else { 80 });
        Some(WebOrigin { is_encrypted, host, port })
    }
}

/// Returns the address of a redirect: a complete one, or a path on the same server.
///
/// Redirects from https to http are refused.
fn redirected(from: &Uri, target: &str) -> Option<Uri> {
    let to: Uri = match target.strip_prefix('/') {
        Some(rest) if !rest.starts_with('/') => {
            format!("{}://{}{target}", from.scheme_str()?, from.authority()?).parse().ok()?
        }
        _ => target.parse().ok()?,
    };
    let (before, after) = (WebOrigin::of(from)?, WebOrigin::of(&to)?);
    (after.is_encrypted || !before.is_encrypted).then_some(to)
}

/// Returns a hexadecimal hash. It is safe to use as a file name.
fn hash(value: &Value) -> Option<String> {
    let text = value.as_str()?;
    let is_hash = (40..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    is_hash.then(|| text.to_ascii_lowercase())
}

/// Percent-encodes a path for a URL.
fn escaped(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let escape = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    path.bytes().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let origin = |url: &str| WebOrigin::of(&url.parse().unwrap());
        let hub = origin("https://hub.example/a");
        assert!(hub.is_some());
        for same in ["https://hub.example:443/b", "https://HUB.example"] {
            assert_eq!(origin(same), hub, "{same}");
        }
        for other in ["http://hub.example/a", "https://hub.example:8443/a", "https://x.hub.example"]
        {
            assert_ne!(origin(other), hub, "{other}");
        }
        assert_eq!(origin("ftp://hub.example"), None);
        let from: Uri = "https://hub.example/a?x".parse().unwrap();
        let to = |target: &str| redirected(&from, target).map(|uri| uri.to_string());
        assert_eq!(to("/b?y=1").as_deref(), Some("https://hub.example/b?y=1"));
        assert_eq!(to("https://cdn.example/c").as_deref(), Some("https://cdn.example/c"));
        for bad in ["http://hub.example/a", "//cdn.example/c", "b", "", "file:///etc/passwd"] {
            assert_eq!(to(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_list_of_files_is_read_and_hostile_names_are_refused() {
        let (git, sha) = ("a".repeat(40), "b".repeat(64));
        let list = |name: &str| {
            json!({"sha": git, "siblings": [
                {"rfilename": "config.json", "size": 3, "blobId": git},
                {"rfilename": name, "size": 135, "blobId": git,
                    "lfs": {"sha256": sha, "size": 7}},
            ]})
        };
        let found = Repository::from_json(&list("q/x.gguf")).unwrap();
        assert_eq!((found.commit, found.files.len()), (git.clone(), 2));
        let large = &found.files[1];
        assert_eq!((large.size, &large.blob, large.hash), (7, &sha, BlobHash::Sha256));
        assert_eq!((&found.files[0].blob, found.files[0].hash), (&git, BlobHash::Git));
        for name in ["../x", "/etc/x", "a//b", "a/..", "", "a\\b", "C:x", "a/nul.gguf", "b. "] {
            let found = Repository::from_json(&list(name)).unwrap();
            assert_eq!((found.files.len(), &found.left_out[..]), (1, &[name.to_owned()][..]));
        }
        assert!(Repository::from_json(&list("config.json")).is_none(), "one name, two files");
        let evil = json!({"sha": "../../x", "siblings": []});
        assert!(Repository::from_json(&evil).is_none());
        let file = json!({"rfilename": "x", "size": 3, "blobId": sha});
        let odd = json!({"sha": git, "siblings": [file]});
        assert!(Repository::from_json(&odd).is_none(), "a file that cannot be checked");
        assert_eq!(escaped("a b/ü-1.gguf"), "a%20b/%C3%BC-1.gguf");
    }
}
