//! Permissions: checks API keys, origins of browser pages, and host names of requests.

use super::super::access::{ApiKey, PageOrigin, is_container_host, is_local_host, is_local_origin};
use super::super::pool::Client;
use crate::cli::api::error::ApiError;
use axum::http::header::{AUTHORIZATION, HOST, HeaderName, ORIGIN};
use axum::http::{HeaderMap, Version};
use std::net::IpAddr;

/// Paths that need no key.
const OPEN: [&str; 2] = ["/", "/health"];

/// Headers that identify a client. A request may have each only once.
const SINGLE: [HeaderName; 3] = [HOST, ORIGIN, AUTHORIZATION];

/// The permission rules.
pub struct Guard {
    keys: Vec<ApiKey>,
    origins: Vec<PageOrigin>,
}

impl Guard {
    pub fn new(keys: Vec<ApiKey>, origins: Vec<PageOrigin>) -> Guard {
        Guard { keys, origins }
    }

    /// Returns whether pages of a foreign origin may use the server.
    pub fn allows(&self, origin: &str) -> bool {
        is_local_origin(origin) || self.origins.iter().any(|allowed| allowed.text() == origin)
    }

    /// Returns whether a request comes from a page that may read the response.
    pub fn is_allowed_page(&self, headers: &HeaderMap) -> bool {
        let origin = headers.get(ORIGIN).and_then(|origin| origin.to_str().ok());
        origin.is_some_and(|origin| self.allows(origin))
    }

    /// Refuses requests without a required key, pages of other origins, and duplicate headers.
    ///
    /// Duplicates are refused because a proxy may have read the other one. A server without keys
    /// also refuses host names other than localhost, because an attacker's page could make its own
    /// name resolve to this machine.
    pub fn check(&self, version: Version, headers: &HeaderMap, path: &str) -> Result<(), ApiError> {
        if let Some(name) = SINGLE.iter().find(|name| headers.get_all(*name).iter().count() > 1) {
            return Err(ApiError::bad(format!("the request has several {name} headers")));
        }
        if version >= Version::HTTP_11 && !headers.contains_key(HOST) {
            return Err(ApiError::bad("the request has no Host header"));
        }
        let header = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        let host = header(HOST).unwrap_or_default();
        // A browser names the origin or the site in requests of pages.
        let is_page = header(ORIGIN).is_some() || headers.contains_key("sec-fetch-site");
        if let Some(origin) = header(ORIGIN) {
            let own = origin.split_once("://").is_some_and(|(_, authority)| authority == host);
            if !own && !self.allows(origin) {
                let message = format!(
                    "pages of {origin} may not use this server: it has to allow this origin"
                );
                return Err(ApiError::new(403, message).code("origin_not_allowed"));
            }
        }
        if self.keys.is_empty() {
            return match is_local_host(host) || !is_page && is_container_host(host) {
                true => Ok(()),
                false => {
                    let what = "a server without keys answers localhost and addresses alone: \
                        ask one of them, or give the server keys";
                    Err(ApiError::new(403, what).code("host_not_allowed"))
                }
            };
        }
        match given_key(headers) {
            _ if OPEN.contains(&path) => Ok(()),
            Some(key) if ApiKey::sent(key).is_among(&self.keys) => Ok(()),
            Some(_) => {
                Err(ApiError::new(401, "the API key is wrong: send another")
                    .code("invalid_api_key"))
            }
            None => Err(ApiError::new(401, "an API key is needed: Authorization: Bearer KEY")
                .code("invalid_api_key")),
        }
    }

    /// Returns the client of a request: its key, or its address if the server has no keys.
    pub fn client(&self, headers: &HeaderMap, address: IpAddr) -> Client {
        match given_key(headers).filter(|_| !self.keys.is_empty()) {
            Some(key) => Client::Key(ApiKey::sent(key).hash()),
            None => Client::at(address),
        }
    }
}

/// Returns the key that a request sends.
fn given_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let bearer = text("authorization")
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, key)| key.trim());
    bearer.or_else(|| text("x-api-key"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in list {
            map.append(*name, value.parse().unwrap());
        }
        map
    }

    #[test]
    fn heads_that_a_proxy_may_read_differently_are_refused() {
        let guard = Guard::new(vec!["key".parse().unwrap()], Vec::new());
        let status = |version, list: &[(&'static str, &str)]| {
            let list = [&[("x-api-key", "key")], list].concat();
            guard.check(version, &headers(&list), "/v1/models").map_err(|error| error.status)
        };
        assert_eq!(status(Version::HTTP_11, &[("host", "localhost")]), Ok(()));
        assert_eq!(status(Version::HTTP_10, &[]), Ok(()));
        assert_eq!(status(Version::HTTP_11, &[]), Err(400));
        for twice in [
            &[("host", "localhost"), ("host", "localhost")][..],
            &[("host", "a"), ("origin", "http://a"), ("origin", "http://b")],
            &[("host", "a"), ("authorization", "Bearer key"), ("authorization", "Bearer a")],
        ] {
            assert_eq!(status(Version::HTTP_11, twice), Err(400), "{twice:?}");
        }
    }

    #[test]
    fn keys_hosts_and_origins_are_checked() {
        let status = |guard: &Guard, path: &str, list: &[(&'static str, &str)]| {
            let checked = guard.check(Version::HTTP_10, &headers(list), path);
            checked.map_err(|error| error.status)
        };
        let open = Guard::new(Vec::new(), vec!["https://a.example/".parse().unwrap()]);
        let asks = |list: &[(&'static str, &str)]| status(&open, "/v1/models", list);
        assert_eq!(asks(&[("host", "localhost:8080")]), Ok(()));
        assert_eq!(asks(&[("host", "[::1]:8080")]), Ok(()));
        assert_eq!(asks(&[("host", "evil.example")]), Err(403));
        let page = |origin| asks(&[("host", "127.0.0.1:1"), ("origin", origin)]);
        assert_eq!(page("http://127.0.0.1:1"), Ok(()));
        assert_eq!(page("https://a.example"), Ok(()));
        assert_eq!(page("http://127.0.0.1:2"), Ok(()));
        assert_eq!(page("app://obsidian.md"), Ok(()));
        // A program in a container, and a page under the same name.
        let container = ("host", "host.docker.internal:8080");
        assert_eq!(asks(&[container]), Ok(()));
        assert_eq!(asks(&[("host", "host.docker.internal.evil.example")]), Err(403));
        for page in [("origin", "http://host.docker.internal:8080"), ("sec-fetch-site", "none")] {
            assert_eq!(asks(&[container, page]), Err(403));
        }
        // A page of the web with a name that resolves to this machine.
        let rebound = [("host", "evil.example"), ("origin", "http://evil.example")];
        assert_eq!(asks(&rebound), Err(403));
        for other in ["https://b.example", "null", "http://localhost.example"] {
            assert_eq!(page(other), Err(403), "{other}");
        }
        let keyed = Guard::new(["one", "two"].map(|key| key.parse().unwrap()).into(), Vec::new());
        let asks = |list: &[(&'static str, &str)]| status(&keyed, "/metrics", list);
        assert_eq!(asks(&[("authorization", "Bearer two"), ("host", "x.example")]), Ok(()));
        assert_eq!(asks(&[("x-api-key", "one")]), Ok(()));
        for wrong in ["Bearer on", "Bearer", "Basic one", "Bearer one two"] {
            assert_eq!(asks(&[("authorization", wrong)]), Err(401), "{wrong}");
        }
        assert_eq!(asks(&[]), Err(401));
        assert_eq!(status(&keyed, "/health", &[]), Ok(()));
    }
}
