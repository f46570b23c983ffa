// The codes of a step in registers. The including file defines W (columns of a step). Layout:
// crates/vulkan/src/lower/layout.rs.

#include "grid.glsl"

const uint LOW_WORDS = W * LOW / 32, HIGH_WORDS = W * HIGH / 32; // in a step
const uint PIECE_WORDS = LOW_WORDS % 4 == 0 ? 4 : 2;

struct StepCodes {
    uint low[LOW_WORDS];
    uint high[HIGH_WORDS > 0 ? HIGH_WORDS : 1];
};

// Addresses of the planes of a matrix row, or of its octets and the grid.
struct RowCodes {
    uint64_t low;
    uint64_t high;
};

// Returns the addresses of row `row` of an n-row matrix.
RowCodes row_codes(uint64_t codes, uint n, uint row, uint steps) {
    const uint octets = steps * OCTET_BITS / 2; // bytes per row
    if (IS_GRID) return RowCodes(codes + uint64_t(row) * octets, codes + uint64_t(n) * octets);
    const uint64_t low = codes + uint64_t(row) * (steps * LOW_WORDS * 4),
        high = codes + uint64_t(n) * (steps * LOW_WORDS * 4);
    return RowCodes(low, high + uint64_t(row) * (steps * HIGH_WORDS * 4));
}

void load_codes(RowCodes row, uint s, uint steps, out StepCodes codes) {
    if (IS_GRID) {
        const uvec4 dwords = dwords_from(row.low, s * (4 * OCTET_BITS));
        [[unroll]] for (uint i = 0; i < 4; i++) {
            const uvec2 fours = open_octet(row.high, octet_of(dwords, i));
            codes.low[2 * i] = fours.x, codes.low[2 * i + 1] = fours.y;
        }
        return;
    }
    const uint block = s / 8 * 8, width = min(8, steps - block);
    [[unroll]] for (uint q = 0; q < LOW_WORDS; q += PIECE_WORDS) {
        const uint piece = LOW_WORDS == PIECE_WORDS
            ? s : (block * LOW_WORDS + q * width) / PIECE_WORDS + s % 8;
        if (PIECE_WORDS == 2) {
            const uvec2 v = U32x2(row.low + uint64_t(piece * 8)).v[0];
            codes.low[q] = v.x, codes.low[q + 1] = v.y;
        } else {
            const uvec4 v = U32x4(row.low + uint64_t(piece * 16)).v[0];
            [[unroll]] for (uint e = 0; e < 4; e++) codes.low[q + e] = v[e];
        }
    }
    if (HIGH_WORDS == 1) {
        codes.high[0] = U32(row.high + uint64_t(s * 4)).v[0];
    } else if (HIGH_WORDS == 2) {
        const uvec2 v = U32x2(row.high + uint64_t(s * 8)).v[0];
        codes.high[0] = v.x, codes.high[1] = v.y;
    }
}

// Returns columns 4k to 4k + 3 of a step as operands.
uint operand_of(StepCodes codes, uint k) {
    return operand(codes.low[k / PER_LOW], k % PER_LOW, codes.high[HIGH > 0 ? k / PER_HIGH : 0],
        k % PER_HIGH);
}
