//! Which weights these are, told without reading them all.

use super::Checkpoint;
use anyhow::{Context, Result};
use gemma_base::os::files::Stamp;
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
        (0..self.shards.len()).try_for_each(|shard| self.sample(shard, &mut hash))?;
        Ok(hash.finalize().into())
    }

    /// A hash of one file: of the length and evenly spread pieces where it holds weights, else of
    /// all of it. `None` where there is no such file.
    pub fn digest(&self, file: &str) -> Result<Option<[u8; 32]>> {
        let mut hash = Sha256::new();
        match self.shard_names.iter().position(|name| name == file) {
            Some(shard) => self.sample(shard, &mut hash)?,
            // A GGUF file has its configuration among its metadata.
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

    /// Stamps of the open weight files.
    pub fn stamps(&self) -> Result<Vec<Stamp>> {
        let stamps: Result<_, _> = self.shards.iter().map(|shard| shard.stamp()).collect();
        stamps.with_context(|| format!("looking at the files of {}", self.name))
    }

    /// Hashes the length and evenly spread pieces of a weight file.
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
