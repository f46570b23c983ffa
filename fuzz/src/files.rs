//! Files that were written by earlier runs, other programs and servers.

use super::made_up::{Cursor, edited, raw_or};
use super::{DIRECTORY, file};
use gemma::cli::commands::generate::batch::resume::Growing;
use gemma::cli::commands::pull::hub::Repository;
use gemma::cli::io::destination::Destination;
use gemma::decode::prompt_cache::files::{HEAD, StoredPage};
use gemma::decode::prompt_cache::{PageDirectory, PageId};
use gemma::runtime::devices::driver::VerdictFile;
use gemma::runtime::drafting::costs::CostFile;
use gemma::runtime::model::others::{ollama_model, ollama_models};
use serde_json::{Value, json};
use std::fs;
use std::path::{Component, Path};
use std::sync::LazyLock;

/// The file of measured times of passes.
pub fn costs(data: &[u8]) {
    static FILE: LazyLock<CostFile> =
        LazyLock::new(|| CostFile::within(Some(DIRECTORY.clone()), b"model", "cpu", "f16"));
    static BASE: LazyLock<Value> = LazyLock::new(|| {
        json!({
            "v": 1, "key": FILE.key(), "costs": {"1": [0.01, 0.02], "2": [0.01, 0.02, 0.03]},
            "habits": {"d": {"survival": [[0.7, 12.0], [0.5, 12.0]], "level": 0.001}},
        })
    });
    let bytes = raw_or(data, |cursor| edited(cursor, &BASE, "0 3 18446744073709551615 d level"));
    fs::write(FILE.path().expect("it has a directory"), bytes).expect("the directory has room");
    let _ = FILE.load();
}

/// The file with the verdict of a driver's trial.
pub fn verdict(data: &[u8]) {
    static FILE: LazyLock<VerdictFile> =
        LazyLock::new(|| VerdictFile::of("radv 25.1", Some(DIRECTORY.clone())));
    static BASE: LazyLock<Value> = LazyLock::new(
        || json!({"v": 1, "key": "radv 25.1", "allows": "whole", "why": "x", "shapes": ["1x8x32"]}),
    );
    let bytes = raw_or(data, |cursor| edited(cursor, &BASE, "allows why shapes file"));
    fs::write(FILE.path().expect("it has a directory"), bytes).expect("the directory has room");
    let _ = FILE.load();
}

/// A page of the prompt cache in a damaged, cut or replaced file.
pub fn pages(data: &[u8]) {
    static PAGES: LazyLock<PageDirectory> = LazyLock::new(|| {
        PageDirectory::open(&DIRECTORY.join("pages"), 1 << 20).expect("the directory has room")
    });
    let mut cursor = Cursor::new(data);
    let mut page = || PageId { key: [cursor.byte(); 32], layers: cursor.byte().into(), nth: 0 };
    let (page, other) = (page(), page());
    let size = usize::from(cursor.byte());
    let mut written = vec![0; HEAD + size];
    written[HEAD..].copy_from_slice(&[cursor.byte()].repeat(size));
    PAGES.write(&other, &mut written.clone()).expect("the directory has room");
    PAGES.write(&page, &mut written).expect("the directory has room");
    let mut found = written.clone();
    for _ in 0..cursor.byte() % 4 {
        match cursor.byte() % 6 {
            0 => found.truncate(cursor.number() as usize),
            1 => found.extend_from_slice(cursor.bytes(usize::from(found.len() as u8))),
            2 => found = cursor.rest().to_vec(),
            3 => found = fs::read(PAGES.path(&other)).expect("it was written"),
            _ if found.is_empty() => {}
            _ => {
                let at = cursor.index(found.len());
                found[at] ^= cursor.byte();
            }
        }
    }
    fs::write(PAGES.path(&page), &found).expect("the directory has room");
    match PAGES.read(&page, size).expect("it can be removed") {
        StoredPage::Whole(bytes) => assert!(bytes == found && found == written),
        StoredPage::Damaged => assert!(found != written && !PAGES.holds(&page)),
        StoredPage::Missing => panic!("it was written"),
    }
    PAGES.remove(&page);
    PAGES.remove(&other);
}

/// Answers of an interrupted batch. After an error the file is unchanged.
pub fn answers(data: &[u8]) {
    static LINES: LazyLock<[Value; 2]> = LazyLock::new(|| {
        let usage = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5});
        let ours = json!({"v": 1, "id": "a", "text": "x", "finish_reason": "stop", "usage": usage,
            "seed": 7, "error": null});
        let openai = json!({
            "id": "b", "custom_id": "b", "error": null,
            "response": {"status_code": 200, "request_id": "b", "body": {
                "id": "b", "object": "chat.completion", "created": 0, "model": "m",
                "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"},
                    "finish_reason": "stop", "logprobs": null}],
                "usage": usage,
            }},
        });
        [ours, openai]
    });
    let bytes = raw_or(data, |cursor| {
        let mut bytes = Vec::new();
        for _ in 0..cursor.byte() % 5 {
            let base = &LINES[cursor.index(LINES.len())];
            bytes.extend(edited(cursor, base, "v id text error code message custom_id"));
            bytes.extend(cursor.one_of(&[&b"\n"[..], b"\n", b"\n", b"\r\n", b"", b" "]));
        }
        match cursor.byte() % 4 {
            0 => bytes.truncate(bytes.len().saturating_sub(cursor.byte().into())),
            1 => bytes.extend(vec![0; cursor.number().min(9000) as usize]),
            _ => {}
        }
        bytes
    });
    let path = file("answers.jsonl", &bytes);
    let place = Destination::from(path.as_path());
    let now = || fs::read(&path).expect("it is there");
    let Ok((mut growing, _)) = Growing::open(&place) else {
        return assert!(now() == bytes, "a file of something else was changed");
    };
    let kept = now();
    assert!(bytes.starts_with(&kept) && matches!(kept.last(), None | Some(b'\n')));
    let line = format!("{}\n", LINES[0]);
    growing.write(&line, None).expect("the directory has room");
    growing.finish().expect("the directory has room");
    let (_, done) = Growing::open(&place).expect("it holds answers");
    assert!(done.0.contains_key("\"a\""), "the answer is found again");
}

/// The list of a repository's files. Their names become paths in the cache.
pub fn listing(data: &[u8]) {
    static BASE: LazyLock<Value> = LazyLock::new(|| {
        let (git, sha) = ("a".repeat(40), "b".repeat(64));
        json!({"sha": git, "siblings": [
            {"rfilename": "config.json", "size": 3, "blobId": git},
            {"rfilename": "a/b.gguf", "size": 135, "blobId": git,
                "lfs": {"sha256": sha, "size": 7}},
        ]})
    });
    let bytes =
        raw_or(data, |cursor| edited(cursor, &BASE, "rfilename lfs size blobId sha256 sha"));
    let Some(repository) = Repository::parse(&bytes) else { return };
    let is_below =
        |name: &str| Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    for found in &repository.files {
        assert!(is_below(&found.name) && is_below(&found.blob) && !found.blob.contains('/'));
    }
    assert!(is_below(&repository.commit) && !repository.commit.contains('/'));
}

/// A manifest of Ollama, and the name of a model.
pub fn ollama(data: &[u8]) {
    static BASE: LazyLock<Value> = LazyLock::new(|| {
        json!({"layers": [
            {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"},
            {"mediaType": "application/vnd.ollama.image.model",
                "digest": format!("sha256:{}", "ab".repeat(32))},
        ]})
    });
    let root = DIRECTORY.join("ollama");
    let directory = root.join("manifests/registry.ollama.ai/library/m");
    fs::create_dir_all(&directory).expect("the directory has room");
    fs::create_dir_all(root.join("blobs")).expect("the directory has room");
    let blob = root.join("blobs").join(format!("sha256-{}", "ab".repeat(32)));
    fs::write(&blob, "GGUF").expect("the directory has room");
    let (name, data) = data.split_at(data.len().min(8));
    let bytes = raw_or(data, |cursor| edited(cursor, &BASE, "layers mediaType digest"));
    fs::write(directory.join("latest"), bytes).expect("the directory has room");
    let name = String::from_utf8_lossy(name);
    let named = [ollama_model(&root, "m"), ollama_model(&root, &name)];
    let listed = ollama_models(&root).into_iter().map(|(_, path)| path);
    for path in named.into_iter().flatten().chain(listed) {
        assert!(path == blob, "there is one model");
    }
}
