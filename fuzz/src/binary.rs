//! Files that earlier runs have left, and what an NPU is given.

use super::DIRECTORY;
use gemma::npu::{txn, xclbin};
use gemma::runtime::drafting::costs::CostFile;
use std::sync::LazyLock;

/// The costs of passes, as they are and behind the key that they must have.
pub fn costs(data: &[u8]) {
    static FILE: LazyLock<CostFile> =
        LazyLock::new(|| CostFile::within(Some(DIRECTORY.clone()), b"model", "cpu", "f16"));
    let path = FILE.path().expect("it has a directory");
    let _ = std::fs::write(path, data);
    let _ = FILE.load();
    let body = data.strip_prefix(b"{").unwrap_or(data);
    let key = serde_json::Value::from(FILE.key());
    let with_key = [format!("{{\"v\": 1, \"key\": {key}, ").as_bytes(), body].concat();
    let _ = std::fs::write(path, with_key);
    let _ = FILE.load();
}

/// A file as it is, and the only section of one whose header is right.
pub fn xclbin(data: &[u8]) {
    const SECTION_AT: usize = 496;
    let mut whole = vec![0; SECTION_AT];
    let mut put = |at: usize, bytes: &[u8]| whole[at..][..bytes.len()].copy_from_slice(bytes);
    put(0, b"xclbin2\0");
    put(304, &((SECTION_AT + data.len()) as u64).to_le_bytes());
    put(448, &1u32.to_le_bytes());
    put(456, &32u32.to_le_bytes());
    put(480, &(SECTION_AT as u64).to_le_bytes());
    put(488, &(data.len() as u64).to_le_bytes());
    whole.extend_from_slice(data);
    for file in [data, &whole] {
        if let Ok(partition) = xclbin::parse(file) {
            let built = xclbin::build(&partition);
            assert!(xclbin::parse(&built).is_ok(), "what was read can be written and read again");
        }
    }
}

pub fn transactions(data: &[u8]) {
    let mut words: Vec<u32> =
        data.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    if words.len() > 3 && words[0] & 1 == 0 {
        // The stream's own length; nothing behind a wrong one would be reached.
        words[3] = 4 * words.len() as u32;
    }
    if let Ok((columns, ops)) = txn::decode(&words) {
        assert_eq!(txn::encode(columns, &ops).ok(), Some(words));
    }
}
