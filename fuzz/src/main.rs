//! Fuzzing of all readers of foreign bytes with libFuzzer.
//!
//! `GEMMA_FUZZ_TARGET` names a reader, and `GEMMA_FUZZ_DIRECTORY` a directory for the files that
//! readers use. No input may cause a panic, an abort, a wrong result, or use of memory and time
//! beyond the limits. `scripts/check/fuzz.sh` builds and runs the program.
#![no_main]

mod binary;
mod blocks;
mod confined;
mod files;
mod gguf;
mod images;
mod journal;
mod made_up;
mod models;
mod requests;
mod texts;

use gemma::util::child;
use libfuzzer_sys::fuzz_target;
use made_up::MADE_UP;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::Ordering;

/// A reader's name and its test of an input.
type Target = (&'static str, fn(&[u8]));

const TARGETS: [Target; 28] = [
    ("safetensors", models::safetensors),
    ("artifact", models::artifact),
    ("config", models::config),
    ("generation", models::generation),
    ("vocabulary", models::vocabulary),
    ("gguf", gguf::whole),
    ("gguf-split", gguf::split),
    ("picture", images::picture),
    ("tower", images::tower),
    ("mmproj", images::mmproj),
    ("blocks", blocks::blocks),
    ("tokenizer", texts::tokenizer),
    ("template", texts::template),
    ("grammar", texts::grammar),
    ("settings", texts::settings),
    ("recipe", texts::recipe),
    ("batch", requests::batch),
    ("server", requests::server),
    ("bodies", requests::bodies),
    ("journal", journal::journal),
    ("answers", files::answers),
    ("pages", files::pages),
    ("costs", files::costs),
    ("verdict", files::verdict),
    ("listing", files::listing),
    ("ollama", files::ollama),
    ("xclbin", binary::xclbin),
    ("transactions", binary::transactions),
];

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("GEMMA_FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    let names = TARGETS.map(|(name, _)| name).join(", ");
    found.unwrap_or_else(|| panic!("GEMMA_FUZZ_TARGET is {name:?}, and none of {names}")).1
});

/// The directory of this process. The script may have made it in memory.
static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    std::env::var_os("GEMMA_FUZZ_DIRECTORY").expect("GEMMA_FUZZ_DIRECTORY is set").into()
});

fuzz_target!(init: begin(), |data: &[u8]| TARGET(data));

/// Compiles a grammar if this process was started as a child for that, or lists the targets.
fn begin() {
    if std::env::var("GEMMA_FUZZ_TARGET").is_ok_and(|name| name == "list") {
        println!("{}", TARGETS.map(|(name, _)| name).join("\n"));
        std::process::exit(0);
    }
    let argv: Vec<_> = std::env::args_os().collect();
    if child::role(&argv) == Some(gemma::grammar::ROLE) {
        std::process::exit(gemma::grammar::serve_parent().into());
    }
    // SAFETY: the function may be called at the end of a process.
    unsafe { libc::atexit(report) };
}

/// Prints the number of inputs that were made up of fields.
extern "C" fn report() {
    eprintln!("stat::made_up_units: {}", MADE_UP.load(Ordering::Relaxed));
}

/// Writes a file of the directory.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = DIRECTORY.join(name);
    std::fs::write(&path, bytes).expect("the directory has room");
    path
}
