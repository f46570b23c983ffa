// Trellis codes: see crates/base/src/tensor/trellis.rs. STEP new bits a state, MULTIPLIER computes
// its two weights.

const uint ROW_BITS = STEP * 8;        // of a row of a tile: 32, 40, 48 or 64
const uint TILE_WORDS = ROW_BITS / 2;  // of a tile of 16 rows
const uint STATE_BITS = 16, STATE_MASK = 0xffff;
const int TRELLIS_OFFSET = 30;         // what a sum of nibbles is lessened by

// The word of a state, given as 16 bits with nothing above them. Its bytes' low nibbles are summed
// for the first weight, the high ones for the second.
uint word_of_state(uint state) { return state * MULTIPLIER; }

int nibbles_of(uint word, uint which) { return int(word >> (4 * which) & 0x0f0f0f0fu); }

int weight_of(uint word, uint which) {
    return dotPacked4x8EXT(nibbles_of(word, which), 0x01010101) - TRELLIS_OFFSET;
}
