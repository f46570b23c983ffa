//! Programs and commands of an NPU.

use super::made_up::Cursor;
use gemma::npu::{txn, xclbin};

/// Parses a file, and a file with one section and a valid header.
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
    whole.extend_from_slice(Cursor::new(data).rest());
    for file in [data, &whole] {
        if let Ok(partition) = xclbin::parse(file) {
            let built = xclbin::build(&partition);
            assert!(xclbin::parse(&built).is_ok(), "what was read can be written and read again");
        }
    }
}

/// Parses a stream of words. The length in the header is right if the first bit is 0, because
/// nothing after a wrong length is read.
pub fn transactions(data: &[u8]) {
    let mut words: Vec<u32> =
        data.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    if words.len() > 3 && words[0] & 1 == 0 {
        Cursor::new(data);
        words[3] = 4 * words.len() as u32;
    }
    if let Ok((columns, ops)) = txn::decode(&words) {
        assert_eq!(txn::encode(columns, &ops).ok(), Some(words));
    }
}
