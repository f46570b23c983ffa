// Trellis codes, see crates/base/src/tensor/trellis.rs. A state has STEP new bits. MULTIPLIER
// defines its two weights.

const uint ROW_BITS = STEP * 8;        // bits per row of a tile: 32, 40, 48 or 64
const uint TILE_WORDS = ROW_BITS / 2;  // per tile of 16 rows
const uint STATE_BITS = 16, STATE_MASK = 0xffff;
const int TRELLIS_OFFSET = 30;         // subtracted from a sum of nibbles

// Returns the word of a state of 16 bits. The sum of its low nibbles defines the first weight, the
// sum of its high nibbles the second.
uint word_of_state(uint state) { return state * MULTIPLIER; }

int nibbles_of(uint word, uint which) { return int(word >> (4 * which) & 0x0f0f0f0fu); }

int weight_of(uint word, uint which) {
    return dotPacked4x8EXT(nibbles_of(word, which), 0x01010101) - TRELLIS_OFFSET;
}
