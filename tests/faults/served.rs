//! A server with failing calls, and its two requests.

use crate::Faults;
use crate::server::Server;
use crate::shell::Run;
use serde_json::json;
use std::path::Path;

/// Starts a server, sends two requests, and ends it. The output of the run is the second answer.
///
/// A failure may end the server with an exit code, or fail the first request. A server that
/// continues has to answer the second request.
pub fn run(dir: &Path, faults: &Faults, device: &[&str]) -> Run {
    let options = [device, &["--cache-dir", "cache"]].concat();
    let started = Server::try_start_in(dir, &options, |command| {
        command.env(gemma::vulkan::ALLOW_CPU_DRIVER, "1");
        faults.put(command, dir);
    });
    let server = match started {
        Ok(server) => server,
        Err((code, err)) => return Run { code, out: Vec::new(), err },
    };
    let body = json!({"prompt": "The river was", "max_tokens": 8, "seed": 7, "ignore_eos": true});
    let ask = || {
        let body = body.to_string();
        let bytes = crate::server::request(&server.address, "POST", "/v1/completions", "", &body);
        let reply = server.try_send(&bytes)?;
        Some((reply.status, reply.json()["choices"][0]["text"].as_str().map(str::to_owned)))
    };
    let (first, second) = (ask(), ask());
    // A server that has already ended cannot receive a signal.
    server.terminate();
    let (code, err) = server.wait();
    // The exit code of a server that was terminated.
    let code = if code == 143 { 0 } else { code };
    let out = match (&first, &second) {
        (Some((200, Some(a))), Some((200, Some(b)))) if a == b => a.clone(),
        (Some((500.., _)), Some((200, Some(b)))) => b.clone(),
        _ if code != 0 => String::new(),
        _ => format!("{first:?}, then {second:?}"),
    };
    Run { code, out: out.into_bytes(), err }
}
