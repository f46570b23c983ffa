//! Which weights these are, told without reading them all.

use super::Checkpoint;
use anyhow::Result;
use sha2::{Digest, Sha256};

/// Pieces of each weight file that are looked at, and their bytes.
const PIECES: usize = 64;
const PIECE: usize = 4096;

impl Checkpoint {
    /// A hash that tells one set of weights from another: of config.json, of the quantiser's
    /// report, which holds the hash of every tensor, and of the length and evenly spread pieces of
    /// every weight file. Where the files lie does not matter.
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        let mut hash = Sha256::new();
        hash.update(serde_json::to_vec(&self.config)?);
        if let Some(report) = self.side_file("quant-report.json")? {
            hash.update(Sha256::digest(&report));
        }
        let mut piece = vec![0; PIECE];
        for shard in &self.shards {
            hash.update((shard.len() as u64).to_le_bytes());
            let room = shard.len().saturating_sub(PIECE);
            for i in 0..PIECES {
                let from = (room as u128 * i as u128 / (PIECES - 1) as u128) as usize;
                let piece = &mut piece[..PIECE.min(shard.len() - from)];
                shard.read_at(from, piece)?;
                hash.update(piece);
            }
        }
        Ok(hash.finalize().into())
    }
}
