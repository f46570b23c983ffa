// Trellis codes: see src/tensor/trellis.rs. STEP new bits a state, WEIGHTS weights a state, MULTIPLIER computes them.

const uint ROW_BITS = STEP * 16 / WEIGHTS; // of a row of a tile: 32, 40, 48 or 64
const uint TILE_WORDS = ROW_BITS / 2;      // of a tile of 16 rows

// The four bytes of the state that ends `behind` bits before the end of the row held in `hi : lo` (the last bits of the row before
// it in front).
uint state_bytes(uint state) { return (state * MULTIPLIER) & 0x7f7f7f7fu; }

// Integer of a weight: one of two bytes, or all four.
int weight_of(uint bytes, uint which) {
    if (WEIGHTS == 1) {
        return int((bytes & 0xff) + (bytes >> 8 & 0xff) + (bytes >> 16 & 0xff) + (bytes >> 24)) - 254;
    }
    const uint two = which == 0 ? bytes : bytes >> 16;
    return int((two & 0xff) + (two >> 8 & 0xff)) - 127;
}
