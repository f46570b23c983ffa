//! A server with 2 GB of address space, attacked with requests that once took memory or time beyond
//! their share. It answers other clients at the same time, and frees the memory.
//!
//! The tests are ignored, since they take minutes. The default is one round with fewer clients.
//! `GEMMA_SERVE_ROUNDS=20`, on a quiet machine with a release build, runs 20 rounds and checks the
//! times and the memory too.

use super::CHAT;
use super::metered::{Over, ask, ask_until, limited, questions};
use super::server::Server;
use super::shapes::{formed, many_references, one_reference, results, short_functions, typed};
use super::shell::{gemma_in, with_model};
use crate::gemma4;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Limit of another client's wait, for an answer and for `/health`, on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes that the C library's allocator may or may not keep.
const KEPT: u64 = 48 << 20;
/// Number of clients that attack at once.
const LANES: usize = 4;

/// An attack by several clients at once.
struct Attack {
    name: &'static str,
    path: &'static str,
    /// The parts of the body before and after a number that differs for each client.
    body: [String; 2],
    clients: usize,
    /// Whether the clients read the server's answers.
    reads: bool,
}

/// Splits a body at the text `NUMBER`, so that each client's body is different.
fn attack(name: &'static str, path: &'static str, clients: usize, body: &Value) -> Attack {
    let body = body.to_string();
    let (head, tail) = body.split_once("NUMBER").unwrap_or(("", &body));
    Attack { name, path, body: [head, tail].map(str::to_owned), clients, reads: true }
}

/// Returns all attacks of a round. Without `whole`, attacks of many clients have fewer of them.
fn attacks(whole: bool) -> Vec<Attack> {
    // A text of 15.5 MB waits while its slow grammar is compiled.
    let slow = format!("({}|NUMBER)", "(a|b)?".repeat(40_000));
    let long = "a b ".repeat(15_500_000 / 4);
    let waiting = json!({"messages": [{"role": "user", "content": long}], "max_tokens": 1,
        "regex": slow});
    // A choice of many values, which a response repeats.
    let choice = json!({"type": "auto", "x": vec![0; 250_000]});
    let schema = json!({"type": "string", "pattern": slow});
    let repeated = json!({"input": "Hi.", "max_output_tokens": 1, "tool_choice": choice,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}});
    let mut entries = vec![json!("NUMBER")];
    entries.extend((0..1_000_000).map(|n| json!(1_000_000_000_000_u64 + n)));
    let refused = formed(json!({"enum": entries}));
    // A refusal that quotes 15 MB and that no client reads.
    let quoted = json!({"messages": [{"role": "x".repeat(15_000_000), "content": "Hi."}]});
    let unread = attack("unread refusals", CHAT, if whole { 100 } else { 4 }, &quoted);
    let (many, tokens) = (if whole { 300 } else { 8 }, json!({"content": "a ".repeat(500_000)}));
    vec![
        attack("names", "/v1/messages", 2, &short_functions(60_000)),
        attack("references", CHAT, 2, &typed(many_references(120_000))),
        attack("references of an answer", CHAT, 2, &formed(many_references(120_000))),
        attack("one enum", CHAT, 1, &typed(one_reference(1_000))),
        attack("texts that wait", CHAT, if whole { 107 } else { 4 }, &waiting),
        attack("choices that wait", "/v1/responses", if whole { 60 } else { 24 }, &repeated),
        attack("refusals", CHAT, if whole { 2 } else { 1 }, &refused),
        attack("results", CHAT, 1, &results(150_000)),
        Attack { reads: false, ..unread },
        Attack { reads: false, ..attack("unread tokens", "/tokenize", many, &tokens) },
    ]
}

/// Sends the body of each client. A client disconnects if it has no answer after `patience`.
fn send(server: &Server, attack: &Attack, round: usize, patience: Duration) {
    let one = |client: usize| {
        // An attacker would have its own processor. Here it yields to the server.
        // SAFETY: a plain system call; on Linux it affects the calling thread.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::setpriority(libc::PRIO_PROCESS, 0, 19);
        }
        let [begin, end] = &attack.body;
        let number = if begin.is_empty() { String::new() } else { format!("{round}.{client}") };
        let length = begin.len() + number.len() + end.len();
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Api-Key: ill\r\n\
            Content-Length: {length}\r\n\r\n",
            attack.path
        );
        let mut stream = server.connect();
        stream.set_read_timeout(Some(patience)).unwrap();
        stream.set_write_timeout(Some(patience)).unwrap();
        for part in [&head, begin, &number, end] {
            // A server may answer and close the connection before it has read everything.
            let _ = stream.write_all(part.as_bytes());
        }
        if !attack.reads {
            return std::thread::sleep(patience);
        }
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said);
        let status = said.split(' ').nth(1).unwrap_or_default();
        assert!(["", "200", "400", "413", "429"].contains(&status), "{}: {status}", attack.name);
    };
    std::thread::scope(|scope| {
        for client in 0..attack.clients {
            let one = &one;
            scope.spawn(move || one(client));
        }
    });
}

/// Requests `/health` repeatedly. Returns the longest wait.
fn watch(server: &Server, over: &AtomicBool) -> Duration {
    let mut slowest = Duration::ZERO;
    while !over.load(Ordering::Relaxed) {
        let begun = Instant::now();
        assert_eq!(server.get("/health").status, 200);
        slowest = slowest.max(begun.elapsed());
        std::thread::sleep(Duration::from_millis(20));
    }
    slowest
}

/// Attacks a server with this model, and checks waits and memory.
fn besiege(dir: &Path, model: &[&str]) {
    let rounds = std::env::var("GEMMA_SERVE_ROUNDS").ok().map(|n| n.parse::<usize>().unwrap());
    let expected = questions().map(|(_, more)| {
        let options = ["generate", "-q", "--temp", "0", "-n", "20", "Say something."];
        gemma_in(dir, &[&options[..], model, &more].concat(), b"").text().to_owned()
    });
    // The attackers run on the server's processors, and the model gets one of them. With all of
    // them, each barrier of the model's threads would wait for attackers.
    let keys = ["--api-key", "ill", "--api-key", "good", "--client-timeout", "10", "--log", "off"];
    let options = [model, &keys, &["--threads", "1"]].concat();
    let server = Server::start_in(dir, &options, limited);
    for (which, expected) in expected.iter().enumerate() {
        ask(&server, which, expected);
    }
    let attacks = attacks(rounds.is_some());
    let patience = Duration::from_secs(if rounds.is_some() { 20 } else { 4 });
    // The first use of each thread and of each part of the program takes memory that stays.
    storm(&server, &attacks, &expected, 1_000..1_001, patience);
    let before = settled(&server);
    let all = 0..rounds.unwrap_or(1);
    let [slowest, health] = storm(&server, &attacks, &expected, all, patience);
    let (after, peak) = (settled(&server), server.peak_memory());
    println!(
        "slowest answer {} ms, /health {} ms, memory {} MB before, {} at its peak, {} after",
        slowest.as_millis(),
        health.as_millis(),
        before / 1_000_000,
        peak / 1_000_000,
        after / 1_000_000
    );
    if rounds.is_some() {
        assert!(slowest < PATIENCE && health < PATIENCE, "{slowest:?}, {health:?}");
        let kept = (before / 20).max(KEPT);
        assert!(after <= before + kept, "memory grew from {before} to {after}");
    }
    let said = server.said();
    assert!(!said.contains("panicked"), "{said}");
}

/// Sends all attacks of all rounds in random order, while four other clients send questions and one
/// requests `/health`. Returns the longest wait of both.
fn storm(
    server: &Server,
    attacks: &[Attack],
    expected: &[String; 3],
    rounds: Range<usize>,
    patience: Duration,
) -> [Duration; 2] {
    let all = rounds.flat_map(|n| attacks.iter().map(move |one| (n, one)));
    let mut all: Vec<_> = all.collect();
    all.shuffle(&mut SmallRng::seed_from_u64(9));
    let (next, over) = (Mutex::new(all.into_iter()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (next, over) = (&next, &over);
        let others = [0, 1, 2, 1]
            .map(|which| scope.spawn(move || ask_until(server, which, &expected[which], over)));
        let health = scope.spawn(|| watch(server, over));
        let over = Over(over);
        std::thread::scope(|scope| {
            for _ in 0..LANES {
                scope.spawn(move || {
                    while let Some((round, attack)) = taken(next) {
                        send(server, attack, round, patience);
                    }
                });
            }
        });
        drop(over);
        let slowest = others.into_iter().map(|other| other.join().unwrap()).max().unwrap();
        [slowest, health.join().unwrap()]
    })
}

fn taken<'a>(
    next: &Mutex<impl Iterator<Item = (usize, &'a Attack)>>,
) -> Option<(usize, &'a Attack)> {
    next.lock().unwrap().next()
}

/// Returns the memory of a server after it has finished all work.
fn settled(server: &Server) -> u64 {
    std::thread::sleep(Duration::from_secs(2));
    server.memory()
}

#[test]
#[ignore = "takes minutes: GEMMA_SERVE_ROUNDS=20 on a quiet machine"]
fn a_gemma_3_server_withstands_a_siege() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    besiege(dir.path(), &["-m", "m"]);
}

/// Gemma 4's calls have other grammars.
#[test]
#[ignore = "takes minutes: GEMMA_SERVE_ROUNDS=20 on a quiet machine"]
fn a_gemma_4_server_withstands_a_siege() {
    let dir = tempfile::tempdir().unwrap();
    let path = gemma4::model(dir.path());
    besiege(dir.path(), &["-m", path.to_str().unwrap(), "--draft", "off", "--ctx-size", "2048"]);
}
