//! Every reader of foreign bytes, under libFuzzer. `GEMMA_FUZZ_TARGET` says which; nothing that one
//! is given may panic, abort, or take more than it is worth. `scripts/fuzz.sh` builds and runs it.
#![no_main]

mod binary;
mod models;
mod texts;

use libfuzzer_sys::fuzz_target;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// A reader, by name.
const TARGETS: [(&str, fn(&[u8])); 16] = [
    ("safetensors", models::safetensors),
    ("artifact", models::artifact),
    ("config", models::config),
    ("generation", models::generation),
    ("gguf", models::gguf),
    ("gguf-split", models::gguf_split),
    ("tokenizer", texts::tokenizer),
    ("template", texts::template),
    ("grammar", texts::grammar),
    ("settings", texts::settings),
    ("recipe", texts::recipe),
    ("batch", texts::batch),
    ("server", texts::server),
    ("costs", binary::costs),
    ("xclbin", binary::xclbin),
    ("transactions", binary::transactions),
];

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("GEMMA_FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    let names = TARGETS.map(|(name, _)| name).join(", ");
    found.unwrap_or_else(|| panic!("GEMMA_FUZZ_TARGET is {name:?}, and none of {names}")).1
});

fuzz_target!(|data: &[u8]| TARGET(data));

/// A directory of this process in memory, for readers that take files.
static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = Path::new("/dev/shm").join(format!("gemma-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("room in /dev/shm");
    path
});

/// A file of that directory with these bytes.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = DIRECTORY.join(name);
    std::fs::write(&path, bytes).expect("room in /dev/shm");
    path
}

/// Takes a structure's fields off the front of what the fuzzer made up; zeros behind its end.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        front
    }

    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn word(&mut self) -> u64 {
        let mut word = [0; 8];
        let from = self.bytes(8);
        word[..from.len()].copy_from_slice(from);
        u64::from_le_bytes(word)
    }

    /// Mostly small, now and then at an edge: where counts, sizes and offsets go wrong.
    fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=200 => small.into(),
            201..=220 => 32 * u64::from(self.byte()),
            221..=235 => self.word(),
            236..=245 => u64::MAX - u64::from(self.byte()),
            _ => 1 << (self.byte() % 64),
        }
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::from(self.byte()) % list.len()]
    }
}
