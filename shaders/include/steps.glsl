// The codes of a step in registers. The including file defines W (columns of a step). Layout:
// crates/vulkan/src/lower/layout.rs.

#include "grid.glsl"

const uint LOW_WORDS = W * LOW / 32, HIGH_WORDS = W * HIGH / 32; // in a step
const uint PIECE_WORDS = LOW_WORDS % 4 == 0 ? 4 : 2;
const uint CHUNK = W < 128 ? 128 / W : 1; // steps
// Bytes of a step of eight rows.
const uint LOW_EIGHT = 32 * LOW_WORDS, HIGH_EIGHT = 32 * HIGH_WORDS;

struct StepCodes {
    uint low[LOW_WORDS];
    uint high[HIGH_WORDS > 0 ? HIGH_WORDS : 1];
};

// No kernel of a pass writes weights, so the compiler may load them early.
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer CodeWord { uint v; };
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer CodePair { uvec2 v; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer CodeFour { uvec4 v; };

// Addresses of the planes of a matrix row, or of its octets and the grid: addresses that all lanes
// share, and 32-bit offsets from there. On some devices such loads need no further instruction.
struct RowCodes {
    uint64_t low;
    uint64_t high;
    uint skip_low;
    uint skip_high;
};

// Returns the addresses of row `row + skip` of an n-row matrix.
RowCodes row_codes(uint64_t codes, uint n, uint row, uint skip, uint steps) {
    if (IS_GRID) {
        const uint octets = steps * OCTET_BITS / 2; // bytes per row
        return RowCodes(
            codes + uint64_t(row) * octets, codes + uint64_t(n) * octets, skip * octets, 0);
    }
    const uint whole = (steps + CHUNK - 1) / CHUNK * CHUNK, own = row % 8 + skip;
    const uint low = whole * LOW_EIGHT, high = whole * HIGH_EIGHT;
    const uint64_t high_plane = codes + uint64_t((n + 7) / 8) * low;
    return RowCodes(codes + uint64_t(row / 8) * low, high_plane + uint64_t(row / 8) * high,
        own / 8 * low + own % 8 * (4 * PIECE_WORDS), own / 8 * high + own % 8 * (4 * HIGH_WORDS));
}

// Bytes from a piece of a step to the next one, per word of a piece.
const uint NEXT_PIECE = 32 * CHUNK;
// Returns the offset of the first piece of step s from `row.low`.
uint step_place(RowCodes row, uint s) {
    return row.skip_low + s / CHUNK * (CHUNK * LOW_EIGHT) + s % CHUNK * (32 * PIECE_WORDS);
}

void load_codes(RowCodes row, uint s, out StepCodes codes) {
    if (IS_GRID) {
        const uvec4 dwords =
            dwords_from(row.low + uint64_t(row.skip_low), s * (4 * OCTET_BITS));
        [[unroll]] for (uint i = 0; i < 4; i++) {
            const uvec2 fours = open_octet(row.high, octet_of(dwords, i));
            codes.low[2 * i] = fours.x, codes.low[2 * i + 1] = fours.y;
        }
        return;
    }
    const uint at = step_place(row, s);
    [[unroll]] for (uint q = 0; q < LOW_WORDS; q += PIECE_WORDS) {
        const uint64_t piece = row.low + uint64_t(at + q * NEXT_PIECE);
        if (PIECE_WORDS == 2) {
            const uvec2 v = CodePair(piece).v;
            codes.low[q] = v.x, codes.low[q + 1] = v.y;
        } else {
            const uvec4 v = CodeFour(piece).v;
            [[unroll]] for (uint e = 0; e < 4; e++) codes.low[q + e] = v[e];
        }
    }
    const uint64_t high = row.high + uint64_t(row.skip_high + s * HIGH_EIGHT);
    if (HIGH_WORDS == 1) {
        codes.high[0] = CodeWord(high).v;
    } else if (HIGH_WORDS == 2) {
        const uvec2 v = CodePair(high).v;
        codes.high[0] = v.x, codes.high[1] = v.y;
    }
}

// Returns columns 4k to 4k + 3 of a step as operands.
uint operand_of(StepCodes codes, uint k) {
    return operand(codes.low[k / PER_LOW], k % PER_LOW, codes.high[HIGH > 0 ? k / PER_HIGH : 0],
        k % PER_HIGH);
}
