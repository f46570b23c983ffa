//! Ids of requests and answers, and the time.

use crate::util::hex;
use rand::RngCore;
use sha2::{Digest, Sha256};

/// Makes a random id.
pub fn new_id(prefix: &str) -> String {
    let mut bytes = [0; 12];
    rand::rng().fill_bytes(&mut bytes);
    format!("{prefix}{}", hex(bytes))
}

/// Source of the ids and the time in a response.
#[derive(Clone, Debug)]
pub enum Ids {
    /// Random ids, and the current time.
    Random,
    /// Ids derived from a text, and a time of 0, so that a repeated run writes the same bytes.
    Repeatable { text: String, made: u64 },
}

impl Ids {
    /// Makes ids that are derived from a text.
    pub fn of(text: String) -> Ids {
        Ids::Repeatable { text, made: 0 }
    }

    /// Makes the next id.
    pub fn make(&mut self, prefix: &str) -> String {
        let Ids::Repeatable { text, made } = self else { return new_id(prefix) };
        *made += 1;
        let digest = Sha256::new().chain_update(made.to_le_bytes()).chain_update(text).finalize();
        format!("{prefix}{}", hex(&digest[..12]))
    }

    /// Returns the seconds since 1970, or 0 in a repeatable response.
    pub fn time(&self) -> u64 {
        match self {
            Ids::Random => now(),
            Ids::Repeatable { .. } => 0,
        }
    }
}

/// Converts seconds since 1970 to a date and time such as `2026-11-26T16:05:33Z`.
pub fn date(seconds: u64) -> String {
    let (days, time) = (seconds / 86400, seconds % 86400);
    // Years begin in March in this calculation, so a leap day is the last day of a year. An era of
    // 400 years has 146,097 days.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year + month / 10, (month + 2) % 12 + 1);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Returns the seconds since 1970.
pub fn now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_become_dates() {
        for (seconds, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(date(seconds), want);
        }
    }
}
