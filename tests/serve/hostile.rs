//! Malicious and misbehaving clients: each gets a clear answer or loses its connection, memory
//! stays bounded, and other clients are not affected.

// It limits the address space of the server.
#[cfg(unix)]
mod metered;
// It reads the processor time and the peak memory of the server.
#[cfg(target_os = "linux")]
mod shapes;
#[cfg(target_os = "linux")]
mod siege;

use crate::{server, shell};
use serde_json::{Value, json};
use server::{Server, read_reply, request};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

fn hello() -> Value {
    let messages = json!([{"role": "user", "content": "Who are you?"}]);
    json!({"messages": messages, "temperature": 0, "max_tokens": 8})
}

/// Raises this process's limit of connections to the maximum.
fn raise_descriptors() {
    #[cfg(unix)]
    raise_limit();
}

#[cfg(unix)]
fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: plain system calls on a value of this function.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}

/// Returns a good client's answer, which never changes.
fn good(server: &Server) -> Value {
    server.post(CHAT, &hello()).ok()["choices"].clone()
}

/// Returns the status of a request with these bytes; `None` if the connection is closed.
fn status(server: &Server, bytes: &[u8]) -> Option<u16> {
    server.send(bytes).map(|reply| reply.status)
}

#[test]
fn bodies_that_are_no_requests_are_refused() {
    let server = Server::start(&["--max-body", "1", "--log", "off"]);
    let before = good(&server);
    let post = |body: &[u8]| {
        let head = request("localhost", "POST", CHAT, "", "");
        let head = String::from_utf8(head).unwrap();
        let head = head.replace("Content-Length: 0", &format!("Content-Length: {}", body.len()));
        server.send(&[head.as_bytes(), body].concat()).unwrap()
    };
    let deep = [b"{\"messages\": ".to_vec(), vec![b'['; 100_000]].concat();
    for body in [
        &b""[..],
        b"nonsense",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud800\"}]}",
        b"null",
        b"{\"messages\": [{}]}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}",
        b"{\"messages\": [{\"role\": \"root\", \"content\": \"a\"}]}",
        b"{\"max_tokens\": 1e99, \"messages\": []}",
        &deep,
    ] {
        let reply = post(body);
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.json()["error"]["message"].is_string(), "{reply:?}");
    }
    let huge = post(&vec![b' '; 1_000_001]);
    assert_eq!(huge.status, 413, "{huge:?}");
    // A Content-Length without a body of that length.
    let head = request("localhost", "POST", CHAT, "", "");
    let head = String::from_utf8(head).unwrap();
    for length in ["18446744073709551615", "2000000"] {
        let claimed = head.replace("Content-Length: 0", &format!("Content-Length: {length}"));
        let status = status(&server, claimed.as_bytes());
        assert!(matches!(status, Some(400 | 413 | 431)), "{length}: {status:?}");
    }
    // A body without an end.
    let chunked = head.replace("Content-Length: 0", "Transfer-Encoding: chunked");
    let mut stream = server.connect();
    stream.write_all(chunked.as_bytes()).unwrap();
    let chunk = [b"10000\r\n".to_vec(), vec![b' '; 0x10000], b"\r\n".to_vec()].concat();
    let sent = (0..1000).take_while(|_| stream.write_all(&chunk).is_ok()).count();
    assert!(sent < 1000, "{sent} chunks were taken");
    assert_eq!(good(&server), before);
}

#[test]
fn heads_that_two_servers_would_read_differently_are_refused() {
    let server = Server::start(&["--log", "off"]);
    let before = good(&server);
    let body = "0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let post =
        |head: &str| format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n{body}");
    for head in [
        "Content-Length: 4\r\nContent-Length: 5",
        "Content-Length: +5",
        "Content-Length: 5 5",
        "Content-Length: -1",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity",
        "Content-Length : 5",
        "Transfer-Encoding\t: chunked",
        " folded: x",
        "X\0: y",
    ] {
        let reply = server.send(post(head).as_bytes());
        let status = reply.as_ref().map(|reply| reply.status);
        assert!(status.is_none_or(|status| status == 400), "{head:?}: {reply:?}");
        let text = reply.map_or_else(String::new, |reply| reply.head + &reply.body);
        assert_eq!(text.matches("HTTP/1.1").count().max(1), 1, "{head:?}: {text}");
        assert!(!text.contains("\"version\""), "{head:?}: {text}");
    }
    // A head with both a length and chunks: however it is read, no part of the body becomes a
    // request.
    for both in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 44",
    ] {
        let reply = server.send((post(both) + "").as_bytes());
        let status = reply.as_ref().map(|reply| reply.status);
        assert!(status.is_none_or(|status| status == 400), "{both:?}: {reply:?}");
        assert!(!reply.is_some_and(|r| r.body.contains("\"version\"")), "{both:?}");
    }
    for line in [
        "GET",
        "GET /",
        "GET / HTTP/9.9",
        "GET /\u{0} HTTP/1.1",
        "\r\n\r\n\r\n",
        "\u{16}\u{3}\u{1}",
    ] {
        let reply = server.send(format!("{line}\r\nHost: localhost\r\n\r\n").as_bytes());
        assert!(
            reply.as_ref().is_none_or(|r| r.status == 400 || r.status == 505),
            "{line:?}: {reply:?}"
        );
    }
    let long =
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    assert!(matches!(status(&server, long.as_bytes()), None | Some(431)));
    let many = "X: y\r\n".repeat(1000);
    let many = format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n");
    assert!(matches!(status(&server, many.as_bytes()), None | Some(431)));
    assert_eq!(good(&server), before);
}

#[test]
fn what_decides_who_asks_is_said_once() {
    let server = Server::start(&["--log", "off"]);
    let asked = |head: &str| status(&server, format!("GET /v1/models {head}\r\n\r\n").as_bytes());
    let close = "HTTP/1.1\r\nConnection: close\r\nHost: localhost";
    assert_eq!(asked(close), Some(200));
    assert_eq!(asked("HTTP/1.0"), Some(200));
    for head in [
        "HTTP/1.1\r\nConnection: close",
        &format!("{close}\r\nHost: localhost"),
        &format!("{close}\r\nhost: attacker.example"),
        &format!("{close}\r\nOrigin: http://localhost\r\nOrigin: http://attacker.example"),
    ] {
        assert_eq!(asked(head), Some(400), "{head}");
    }
}

/// The log is printed on a terminal, and anyone can send text that ends up in it.
#[cfg(unix)]
#[test]
fn the_log_holds_nothing_that_a_terminal_obeys() {
    for format in ["text", "json"] {
        let server = Server::start(&["--log", format]);
        let ask = |method: &str, path: &str| {
            let bytes = request("localhost", method, path, "", "");
            assert!(status(&server, &bytes).is_some_and(|status| status >= 400), "{path}");
        };
        ask("GET", "/\u{9b}31m\u{9d}0;title\u{9c}\u{202e}gnp.exe\u{2066}");
        ask(&"M".repeat(30_000), "/");
        server.signal(libc::SIGTERM);
        let (_, said) = server.wait();
        let obeyed =
            |c: char| c != '\n' && (c.is_control() || ('\u{202a}'..'\u{206f}').contains(&c));
        assert!(!said.contains(obeyed), "{said:?}");
        assert!(said.contains("gnp.exe"), "{said}");
        assert!(said.lines().all(|line| line.len() < 1000), "{said}");
    }
}

#[cfg(unix)]
#[test]
fn strangers_need_a_key_and_pages_an_origin() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("keys"), "first-key\n\nsecond-key\n").unwrap();
    let options = ["--api-key-file", "keys", "--cors-origin", "HTTPS://Good.example:443/"];
    let server = Server::start_in(dir.path(), &options, |_| {});
    let asked = |headers: &str| server.request("POST", CHAT, headers, &hello().to_string());
    for wrong in [
        "",
        "Authorization: Bearer first-ke\r\n",
        "Authorization: Bearer first-key2\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: first-key\r\n",
        "X-Api-Key: \r\n",
    ] {
        let reply = asked(wrong);
        assert_eq!(reply.status, 401, "{wrong:?}: {reply:?}");
        assert_eq!(reply.json()["error"]["type"], "authentication_error");
        assert!(!reply.body.contains("first"), "{reply:?}");
    }
    assert_eq!(asked("Authorization: bearer second-key\r\n").status, 200);
    assert_eq!(asked("X-Api-Key: first-key\r\n").status, 200);
    let page = |origin: &str| asked(&format!("X-Api-Key: first-key\r\nOrigin: {origin}\r\n"));
    let allowed = page("https://good.example");
    assert_eq!(allowed.header("access-control-allow-origin"), Some("https://good.example"));
    assert_eq!((allowed.status, page("https://bad.example").status), (200, 403));
    let preflight = "Origin: https://good.example\r\nAccess-Control-Request-Method: POST\r\n";
    let preflight =
        format!("{preflight}Access-Control-Request-Headers: authorization,x-api-key\r\n");
    let allowed = server.request("OPTIONS", CHAT, &preflight, "");
    assert_eq!(allowed.status, 200);
    // `*` does not include Authorization, and is refused with credentials.
    assert_eq!(allowed.header("access-control-allow-headers"), Some("authorization,x-api-key"));
    assert_eq!(allowed.header("access-control-allow-credentials"), Some("true"));
    assert_eq!(allowed.header("access-control-allow-origin"), Some("https://good.example"));
    let methods = allowed.header("access-control-allow-methods").unwrap();
    assert!(methods.contains("POST") && methods.contains("GET"), "{methods}");
    assert_eq!(server.get("/metrics").status, 401);
    assert_eq!(server.get("/health").status, 200);
    server.signal(libc::SIGTERM);
    let (_, said) = server.wait();
    for (option, value, words) in [
        ("--api-key", "", "at least one character"),
        ("--api-key", "two words", "one word of ASCII"),
        ("--cors-origin", "*", "give each origin"),
        ("--cors-origin", "http://localhost:*", "give each origin"),
        ("--cors-origin", "good.example", "SCHEME://HOST"),
    ] {
        let end = Server::try_start_in(dir.path(), &[option, value], |_| {});
        let Err((code, why)) = end else { panic!("{option} {value:?} is taken") };
        assert!(code == 2 && why.contains(words), "{option} {value:?}: {code}, {why}");
    }
    assert!(!said.contains("first-key") && !said.contains("second-key"), "{said}");

    let open = Server::start(&["--log", "off"]);
    let named = |host: &str| {
        let bytes = request(host, "POST", CHAT, "", &hello().to_string());
        status(&open, &bytes)
    };
    assert_eq!(named("localhost:1"), Some(200));
    assert_eq!(named("attacker.example"), Some(403));
    let preflight = "Origin: http://localhost:3000\r\nAccess-Control-Request-Method: POST\r\n";
    let allowed = open.request("OPTIONS", CHAT, preflight, "");
    assert_eq!(allowed.header("access-control-allow-origin"), Some("http://localhost:3000"));
    let page = |origin: &str| {
        let headers = format!("Origin: {origin}\r\n");
        open.request("POST", CHAT, &headers, &hello().to_string())
    };
    assert_eq!(page(&format!("http://{}", open.address)).status, 200);
    assert_eq!(page("http://localhost:1").status, 200);
    for other in ["http://attacker.example", "null", "http://localhost.example"] {
        let reply = page(other);
        assert_eq!(reply.status, 403, "{reply:?}");
        assert_eq!(reply.header("access-control-allow-origin"), None);
    }
}

#[test]
fn slow_and_idle_connections_end_and_disturb_nobody() {
    raise_descriptors();
    let server = Server::start(&["--client-timeout", "2", "--log", "off"]);
    let before = good(&server);
    let idle: Vec<_> = (0..1000).map(|_| server.connect()).collect();
    // One client sends its head slowly, one its body; one keeps its connection for later.
    let whole = request("localhost", "POST", CHAT, "", &hello().to_string());
    let body_at = whole.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    let slow = |first: usize| {
        let mut stream = server.connect();
        stream.write_all(&whole[..first]).unwrap();
        for byte in &whole[first..] {
            std::thread::sleep(Duration::from_millis(300));
            if stream.write_all(&[*byte]).is_err() {
                break;
            }
        }
        read_reply(&mut stream)
    };
    let mut kept = server.connect();
    kept.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let head = scope.spawn(|| slow(10));
        let body = scope.spawn(|| slow(body_at));
        for _ in 0..5 {
            assert_eq!(good(&server), before);
        }
        assert!(head.join().unwrap().is_none_or(|reply| reply.status == 408));
        assert!(body.join().unwrap().is_none_or(|reply| reply.status == 408));
    });
    let mut said = Vec::new();
    let _ = kept.read_to_end(&mut said);
    assert!(said.starts_with(b"HTTP/1.1 200"));
    for mut stream in idle {
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert!(begun.elapsed() < Duration::from_secs(60));
    // Only the connection that requests the metrics is left.
    server.wait_for("gemma_connections", 1.0);
    assert_eq!(good(&server), before);
}

#[test]
fn who_never_reads_is_cut_off() {
    let options =
        ["--client-timeout", "2", "--ctx-size", "30000", "--parallel", "2", "--draft=off"];
    let server = Server::start(&[&options[..], &["--log", "off"]].concat());
    let before = good(&server);
    let mut body = hello();
    for (name, value) in [
        ("max_tokens", 29000.into()),
        ("ignore_eos", true.into()),
        ("stream", true.into()),
        ("logprobs", true.into()),
        ("top_logprobs", 20.into()),
    ] {
        body[name] = value;
    }
    let mut deaf = server.connect();
    deaf.write_all(&request("localhost", "POST", CHAT, "", &body.to_string())).unwrap();
    server.wait_for("gemma_running_texts", 1.0);
    assert_eq!(good(&server), before);
    let memory = server.memory();
    for _ in 0..1200 {
        if server.metric("gemma_running_texts") == 0.0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(server.metric("gemma_running_texts"), 0.0);
    assert!(server.metric("gemma_tokens_total") < 29000.0, "it was cut off before its end");
    assert!(server.memory() < memory + 100_000_000, "{memory} -> {}", server.memory());
    assert_eq!(good(&server), before);
    drop(deaf);
}

/// The server still writes answers to a client that has disconnected. SIGPIPE must not end the
/// server.
#[test]
fn who_leaves_before_the_answers_ends_nothing() {
    let server = Server::start(&["--log", "off"]);
    let before = good(&server);
    let many = request("localhost", "GET", "/v1/models", "", "").repeat(60);
    for _ in 0..20 {
        server.connect().write_all(&many).unwrap();
    }
    server.wait_for("gemma_connections", 1.0);
    assert_eq!(good(&server), before);
}

/// Many good, cancelled and malformed requests leave nothing in memory.
///
/// GEMMA_SERVE_SOAK is their number (default 300, 10000 for a full run).
#[test]
fn nothing_is_left_of_many_requests() {
    let count: usize = std::env::var("GEMMA_SERVE_SOAK").map_or(300, |n| n.parse().unwrap());
    let server = Server::start(&["--parallel", "4", "--log", "off", "--max-queue", "1000"]);
    let before = good(&server);
    let bad = request("localhost", "POST", CHAT, "", "{\"messages\": 5}");
    let well = request("localhost", "POST", CHAT, "", &hello().to_string());
    let ask = |n: usize| match n % 10 {
        0 => assert_eq!(status(&server, &bad), Some(400)),
        1 | 2 => {
            let mut stream = server.connect();
            stream.write_all(&well).unwrap();
            std::thread::sleep(Duration::from_millis((n * 7 % 40) as u64));
        }
        _ => {
            let reply = server.send(&well).expect("an answer");
            assert_eq!(reply.ok()["choices"], before);
        }
    };
    let run = |from: usize, to: usize| {
        std::thread::scope(|scope| {
            for lane in 0..8 {
                scope.spawn(move || (from + lane..to).step_by(8).for_each(ask));
            }
        });
        server.wait_for("gemma_running_texts", 0.0);
        server.wait_for("gemma_queue_length", 0.0);
        server.wait_for("gemma_connections", 1.0);
        server.memory()
    };
    let third = count / 3;
    run(0, third);
    let early = run(third, 2 * third);
    let late = run(2 * third, count);
    // The allocator's memory of each thread varies slightly.
    let most = early + early / 50 + 16_000_000;
    assert!(late <= most, "memory grew from {early} to {late}");
    assert_eq!(good(&server), before);
}
