// The side of a matrix in groups: scale and minimum of each group of columns, see
// crates/base/src/tensor/side.rs. Layout: crates/vulkan/src/lower/layout.rs. The including file
// defines SIDE and CHUNK.

// Numbers of `SideKind` in the base crate.
const uint SIDE_SCALE = 1, SIDE_SCALE_MIN = 2, SIDE_SIX_BIT_MIN = 3, SIDE_FOUR_BIT_MIN = 4,
    SIDE_EIGHT_BIT = 5, SIDE_SIX_BIT = 6, SIDE_SIX_BIT_SPLIT = 7, SIDE_FOUR_BIT = 8,
    SIDE_FOUR_BIT_WIDE = 9;

const bool HAS_MIN =
    SIDE == SIDE_SCALE_MIN || SIDE == SIDE_SIX_BIT_MIN || SIDE == SIDE_FOUR_BIT_MIN;
// Groups per step. An element with 16 groups covers the 8 steps of a super-block.
const uint G = SIDE == SIDE_FOUR_BIT_MIN || SIDE == SIDE_EIGHT_BIT || SIDE == SIDE_SIX_BIT
    || SIDE == SIDE_FOUR_BIT ? 2 : 1;
// Steps per element, and its bytes.
const uint SIDE_STEPS = SIDE == SIDE_SCALE || SIDE == SIDE_SCALE_MIN ? 1 : 8;
const uint SIDE_BYTES = SIDE == SIDE_SCALE ? 2 : SIDE == SIDE_SCALE_MIN ? 4
    : SIDE == SIDE_SIX_BIT_MIN ? 16 : SIDE == SIDE_FOUR_BIT_MIN ? 20 : SIDE == SIDE_EIGHT_BIT ? 18
    : SIDE == SIDE_SIX_BIT ? 14 : SIDE == SIDE_FOUR_BIT ? 10 : SIDE == SIDE_FOUR_BIT_WIDE ? 6 : 8;

// Bytes of a row in one piece: the elements of a chunk, or the element of a super-block.
const uint SIDE_PIECE = SIDE_STEPS == 1 ? CHUNK * SIDE_BYTES : SIDE_BYTES;

// Scale of each group of a step, and its minimum if the format has minima.
struct Factors {
    vec2 scale;
    vec2 least;
};

layout(buffer_reference, scalar, buffer_reference_align = 2) readonly buffer SideHalf {
    uint16_t v;
};
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer SideWord { uint v; };
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer SidePair { uvec2 v; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer SideFour { uvec4 v; };

// Returns the bytes of the side of eight rows.
uint side_of_eight(uint steps) {
    return 8 * SIDE_PIECE * (SIDE_STEPS == 1 ? (steps + CHUNK - 1) / CHUNK : steps / SIDE_STEPS);
}
// Returns the address of the side of the eight rows that include matrix row `row`, and the offset
// of row `row + skip` from there.
uint64_t side_rows(uint64_t side, uint row, uint steps) {
    return side + uint64_t(row / 8) * side_of_eight(steps);
}
uint side_skip(uint row, uint skip, uint steps) {
    const uint own = row % 8 + skip;
    return own / 8 * side_of_eight(steps) + own % 8 * SIDE_PIECE;
}

// Returns the offset of the element of step s in a row.
uint side_element(uint s) {
    return SIDE_STEPS == 1 ? s / CHUNK * (8 * SIDE_PIECE) + s % CHUNK * SIDE_BYTES
        : s / SIDE_STEPS * (8 * SIDE_PIECE);
}

// Loads the words of the element for step s that the step needs. The side of the matrix row begins
// `skip` bytes after `rows`. Loads are issued early, and factors_of decodes the bits later.
uvec4 load_side(uint64_t rows, uint skip, uint s) {
    const uint64_t at = rows + uint64_t(skip + side_element(s));
    const uint nth = s % 8;
    if (SIDE == SIDE_SCALE) return uvec4(SideHalf(at).v, 0, 0, 0);
    if (SIDE == SIDE_SCALE_MIN) return uvec4(SideWord(at).v, 0, 0, 0);
    if (SIDE == SIDE_SIX_BIT_MIN) return SideFour(at).v;
    if (SIDE == SIDE_SIX_BIT_SPLIT) return uvec4(SidePair(at).v, 0, 0);
    if (SIDE == SIDE_FOUR_BIT_MIN)
        return uvec4(SideWord(at).v, SideHalf(at + uint64_t(4 + 2 * nth)).v, 0, 0);
    const uint d = SideHalf(at).v;
    if (SIDE == SIDE_EIGHT_BIT) return uvec4(d, SideHalf(at + uint64_t(2 + 2 * nth)).v, 0, 0);
    if (SIDE == SIDE_FOUR_BIT || SIDE == SIDE_FOUR_BIT_WIDE)
        return uvec4(d, SideHalf(at + uint64_t(2 + nth * G / 4 * 2)).v, 0, 0);
    return uvec4(d, SideHalf(at + uint64_t(2 + 2 * nth % 8)).v,
        SideHalf(at + uint64_t(10 + 2 * nth % 4)).v, 0);
}

// Returns the factors of step s from the words of its element.
Factors factors_of(uvec4 words, uint s) {
    const uint nth = s % 8;
    vec2 d = unpackHalf2x16(words.x); // factors of all groups
    ivec2 scale = ivec2(1), least = ivec2(-1);
    if (SIDE == SIDE_SCALE_MIN) {
        least.x = 1;
    } else if (SIDE == SIDE_SIX_BIT_MIN) {
        const uvec3 bytes = words.yzw >> 8 * (nth % 4);
        scale.x = int(nth < 4 ? bytes.x & 63 : bytes.z & 15 | bytes.x >> 2 & 48);
        least.x = -int(nth < 4 ? bytes.y & 63 : bytes.z >> 4 & 15 | bytes.y >> 2 & 48);
    } else if (SIDE == SIDE_FOUR_BIT_MIN) {
        scale = ivec2(words.y & 15, words.y >> 8 & 15);
        least = -ivec2(words.y >> 4 & 15, words.y >> 12);
    } else if (SIDE == SIDE_EIGHT_BIT) {
        scale = ivec2(int(words.y) << 24 >> 24, int(words.y) << 16 >> 24);
    } else if (SIDE == SIDE_SIX_BIT) {
        const uint low = words.y >> 4 * (nth / 4), high = words.z >> 2 * (nth / 2);
        scale = ivec2(low & 15 | (high & 3) << 4, low >> 8 & 15 | (high >> 8 & 3) << 4) - 32;
    } else if (SIDE == SIDE_SIX_BIT_SPLIT) {
        scale.x = int(words.y >> 4 * nth & 15 | (words.x >> 16 + 2 * nth & 3) << 4) - 32;
    } else if (SIDE == SIDE_FOUR_BIT || SIDE == SIDE_FOUR_BIT_WIDE) {
        const uint four = words.y >> 4 * (nth * G % 4);
        scale = 2 * ivec2(four & 15, four >> 4 & 15) + 1;
    }
    return Factors(d.x * UNIT * vec2(scale), d.y * vec2(least));
}
