// The side of a matrix: scale and minimum of the groups of a step, see src/tensor/side.rs. The
// including file defines SIDE.

// Numbers of `SideKind`.
const uint SIDE_SCALE = 1, SIDE_SCALE_MIN = 2, SIDE_SIX_BIT_MIN = 3, SIDE_FOUR_BIT_MIN = 4,
    SIDE_EIGHT_BIT = 5, SIDE_SIX_BIT = 6, SIDE_SIX_BIT_SPLIT = 7, SIDE_FOUR_BIT = 8,
    SIDE_FOUR_BIT_WIDE = 9;

const bool HAS_MIN =
    SIDE == SIDE_SCALE_MIN || SIDE == SIDE_SIX_BIT_MIN || SIDE == SIDE_FOUR_BIT_MIN;
// Groups of a step. An element of 16 groups serves the 8 steps of a super-block.
const uint G = SIDE == SIDE_FOUR_BIT_MIN || SIDE == SIDE_EIGHT_BIT || SIDE == SIDE_SIX_BIT
    || SIDE == SIDE_FOUR_BIT ? 2 : 1;
// Steps of an element, and its bytes.
const uint SIDE_STEPS = SIDE == SIDE_SCALE || SIDE == SIDE_SCALE_MIN ? 1 : 8;
const uint SIDE_BYTES = SIDE == SIDE_SCALE ? 2 : SIDE == SIDE_SCALE_MIN ? 4
    : SIDE == SIDE_SIX_BIT_MIN ? 16 : SIDE == SIDE_FOUR_BIT_MIN ? 20 : SIDE == SIDE_EIGHT_BIT ? 18
    : SIDE == SIDE_SIX_BIT ? 14 : SIDE == SIDE_FOUR_BIT ? 10 : SIDE == SIDE_FOUR_BIT_WIDE ? 6 : 8;

// Scale of each group of a step, and its minimum where there are minima.
struct Factors {
    vec2 scale;
    vec2 least;
};

// Factors of step s of a row whose side begins at `row`.
Factors factors_of(uint64_t row, uint s) {
    const uint64_t at = row + uint64_t(s / SIDE_STEPS * SIDE_BYTES);
    const uint nth = s % 8;
    vec2 d = vec2(0.0); // of all groups
    ivec2 scale = ivec2(1), least = ivec2(-1);
    if (SIDE == SIDE_SCALE) {
        d.x = float(F16(at).v[0]);
    } else if (SIDE == SIDE_SCALE_MIN) {
        d = unpackHalf2x16(U32(at).v[0]);
        least.x = 1;
    } else if (SIDE == SIDE_SIX_BIT_MIN) {
        const uvec4 element = U32x4(at).v[0];
        const uvec3 bytes = element.yzw >> 8 * (nth % 4);
        d = unpackHalf2x16(element.x);
        scale.x = int(nth < 4 ? bytes.x & 63 : bytes.z & 15 | bytes.x >> 2 & 48);
        least.x = -int(nth < 4 ? bytes.y & 63 : bytes.z >> 4 & 15 | bytes.y >> 2 & 48);
    } else if (SIDE == SIDE_FOUR_BIT_MIN) {
        const uint both = uint(U16(at + uint64_t(4 + 2 * nth)).v[0]);
        d = unpackHalf2x16(U32(at).v[0]);
        scale = ivec2(both & 15, both >> 8 & 15);
        least = -ivec2(both >> 4 & 15, both >> 12);
    } else if (SIDE == SIDE_EIGHT_BIT) {
        const int both = int(U16(at + uint64_t(2 + 2 * nth)).v[0]);
        d.x = float(F16(at).v[0]);
        scale = ivec2(both << 24 >> 24, both << 16 >> 24);
    } else if (SIDE == SIDE_SIX_BIT) {
        const uint low = uint(U16(at + uint64_t(2 + 2 * nth % 8)).v[0]) >> 4 * (nth / 4),
            high = uint(U16(at + uint64_t(10 + 2 * nth % 4)).v[0]) >> 2 * (nth / 2);
        d.x = float(F16(at).v[0]);
        scale = ivec2(low & 15 | (high & 3) << 4, low >> 8 & 15 | (high >> 8 & 3) << 4) - 32;
    } else if (SIDE == SIDE_FOUR_BIT || SIDE == SIDE_FOUR_BIT_WIDE) {
        const uint first = nth * G; // group
        const uint s4 = uint(U16(at + uint64_t(2 + 2 * (first / 4))).v[0]) >> 4 * (first % 4);
        d.x = float(F16(at).v[0]);
        scale = 2 * ivec2(s4 & 15, s4 >> 4 & 15) + 1;
    } else {
        const uvec2 element = U32x2(at).v[0];
        d.x = unpackHalf2x16(element.x).x;
        scale.x = int(element.y >> 4 * nth & 15 | (element.x >> 16 + 2 * nth & 3) << 4) - 32;
    }
    return Factors(d.x * UNIT * vec2(scale), d.y * vec2(least));
}
