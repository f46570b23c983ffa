//! Identifies weights without reading them completely.

use super::Checkpoint;
use anyhow::{Context, Result};
use gemma_base::os::files::Stamp;
use sha2::{Digest, Sha256};

/// Number of sampled pieces per weight file, and bytes per piece.
const PIECES: usize = 64;
const PIECE: usize = 4096;

impl Checkpoint {
    /// Returns a hash that distinguishes sets of weights, independent of their paths.
    ///
    /// It covers config.json, the quantiser's report (which holds the hash of every tensor), and
    /// the length and evenly spaced samples of every weight file.
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        let mut hash = Sha256::new();
        hash.update(serde_json::to_vec(&self.config)?);
        if let Some(report) = self.side_file("quant-report.json")? {
            hash.update(Sha256::digest(&report));
        }
        (0..self.shards.len()).try_for_each(|shard| self.sample(shard, &mut hash))?;
        Ok(hash.finalize().into())
    }

    /// Returns a hash of one file; `None` if it does not exist.
    ///
    /// For a weight file it covers the length and evenly spaced samples, else the whole content.
    pub fn digest(&self, file: &str) -> Result<Option<[u8; 32]>> {
        let mut hash = Sha256::new();
        match self.shard_names.iter().position(|name| name == file) {
            Some(shard) => self.sample(shard, &mut hash)?,
            // The configuration of a GGUF file is in its metadata.
            None if self.gguf.is_some() && file == "config.json" => {
                hash.update(serde_json::to_vec(&self.config)?);
            }
            None => match self.side_file(file)? {
                Some(bytes) => hash.update(bytes),
                None => return Ok(None),
            },
        }
        Ok(Some(hash.finalize().into()))
    }

    /// Returns the stamps of the open weight files.
    pub fn stamps(&self) -> Result<Vec<Stamp>> {
        let stamps: Result<_, _> = self.shards.iter().map(|shard| shard.stamp()).collect();
        stamps.with_context(|| format!("looking at the files of {}", self.name))
    }

    /// Hashes the length and evenly spaced samples of a weight file.
    fn sample(&self, shard: usize, hash: &mut Sha256) -> Result<()> {
        let mut piece = vec![0; PIECE];
        let length = self.shards[shard].len();
        hash.update((length as u64).to_le_bytes());
        let room = length.saturating_sub(PIECE);
        for i in 0..PIECES {
            let from = (room as u128 * i as u128 / (PIECES - 1) as u128) as usize;
            let piece = &mut piece[..PIECE.min(length - from)];
            self.read_shard(shard, from, piece, &format_args!("byte {from}"))?;
            hash.update(piece);
        }
        Ok(())
    }
}
