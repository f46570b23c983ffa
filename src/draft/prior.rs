//! The mixer's weights before it has seen anything of the text at hand.

use super::mix::{FEATURES, SETS, Sets};

/// `warm` for a temperature above 0.
pub fn weights(warm: bool) -> Sets {
    let mut sets: Sets = [[0.0; FEATURES]; SETS];
    sets[0] = [0.4, 0.2, 0.4, 0.2, 1.0, warm as u8 as f32, 0.0];
    sets
}
