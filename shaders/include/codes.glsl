// Integer codes as int8 operands of dot products, four at a time, and the conversion of integer
// sums to values.
//
// The bits of a row's codes are in one plane, or in two for codes of 3, 5 and 6 bits: the low 2 or
// 4 bits and the others. A word of a plane of b bits holds 32 / b columns: byte j has the columns
// j, j + 4, j + 8 and so on, from the lowest bits up. Signed codes are stored in two's complement.

#define CODE_I8 0
#define CODE_I4 1
#define CODE_I2 2
#define CODE_I8A 3
#define CODE_TRELLIS 6
#define CODE_U4 7     // q4_1, q4_k
#define CODE_U5 8     // q5_1, q5_k
#define CODE_S5 9     // q5_0
#define CODE_S6 10    // q6_k
#define CODE_U2 11    // q2_k
#define CODE_S3 12    // q3_k
#define CODE_LEVELS 13 // iq4_nl, iq4_xs
#define CODE_IQ2_XXS 14
#define CODE_IQ2_XS 15
#define CODE_IQ2_S 16
#define CODE_IQ3_XXS 17
#define CODE_IQ3_S 18
// Points on a grid are converted to codes of 8 bits when they are loaded, see grid.glsl.
#define IS_GRID (CODE >= CODE_IQ2_XXS)

const uint BITS = CODE == CODE_I2 || CODE == CODE_U2 ? 2 : CODE == CODE_S3 ? 3
    : CODE == CODE_I4 || CODE == CODE_U4 || CODE == CODE_LEVELS ? 4
    : CODE == CODE_U5 || CODE == CODE_S5 ? 5 : CODE == CODE_S6 ? 6 : 8;
// Parts of the sum of a row in groups, see linear.glsl.
const uint PARTS = 16;

// Bits of the high plane (0 without one) and of the low plane.
const uint HIGH = BITS == 6 ? 2 : BITS == 3 || BITS == 5 ? 1 : 0, LOW = BITS - HIGH;
// Groups of four columns in one word of each plane.
const uint PER_LOW = 8 / LOW, PER_HIGH = HIGH == 2 ? 4 : 8;
const bool SIGNED = CODE == CODE_I4 || CODE == CODE_S5 || CODE == CODE_S6 || CODE == CODE_S3;
// Signed codes of less than 8 bits are in the high bits of their operands, so their sign needs no
// extension.
const uint TOP = SIGNED ? 8 - BITS : 0;

// The integer of a weight is `(DOUBLE * operand - OFFSET) >> TOP`, plus 128 for i8a.
const int DOUBLE = CODE == CODE_I2 ? 2 : 1, OFFSET = CODE == CODE_I2 ? 3 : 0;
// Factor of all scales of this code.
#define UNIT (CODE == CODE_I2 ? 0.5 : CODE == CODE_IQ3_XXS ? 0.25 \
    : IS_GRID && CODE != CODE_IQ3_S ? 0.125 : 1.0)
// Factor of the sums of operands times activations: a power of two.
#define PRODUCT_UNIT (1.0 / float(1u << TOP))

// Group k of four columns in a word of a plane, shifted to bit `to` of each byte.
uint part(uint word, uint k, uint bits, uint to) {
    const uint from = k * bits, mask = ((1u << bits) - 1) * 0x01010101u << to;
    return (from > to ? word >> (from - to & 31) : word << (to - from & 31)) & mask;
}

// Returns the bits of b where the mask is set, and the bits of a elsewhere.
uint choose(uint mask, uint a, uint b) { return b & mask | a & ~mask; }

// Maps four codes of the IQ4 types to levels. Each bit of the codes halves the candidates, for all
// bytes at once. A table in memory is slow if each lane reads another entry.
uint levels_of(uint codes) {
    const int levels[16] = int[](
        -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
    uint mask[4], found[8];
    [[unroll]] for (uint bit = 0; bit < 4; bit++) {
        const uint ones = codes >> bit & 0x01010101u;
        mask[bit] = (ones << 8) - ones;
    }
    [[unroll]] for (uint i = 0; i < 8; i++) {
        const uint a = (levels[2 * i] & 0xff) * 0x01010101u,
            b = (levels[2 * i + 1] & 0xff) * 0x01010101u;
        found[i] = a ^ (a ^ b) & mask[0];
    }
    [[unroll]] for (uint i = 0; i < 4; i++)
        found[i] = choose(mask[1], found[2 * i], found[2 * i + 1]);
    [[unroll]] for (uint i = 0; i < 2; i++)
        found[i] = choose(mask[2], found[2 * i], found[2 * i + 1]);
    return choose(mask[3], found[0], found[1]);
}

// Group k of four columns, from one word of each plane, as int8 operands of a dot product.
uint operand(uint low, uint k, uint high, uint k_high) {
    uint four = part(low, k, LOW, TOP);
    if (HIGH > 0) four |= part(high, k_high, HIGH, TOP + LOW);
    return CODE == CODE_LEVELS ? levels_of(four) : four;
}

// Converts operands to weights times 1 << TOP as int8, because matrix instructions have no OFFSET.
uint int8_of(uint four) {
    if (CODE == CODE_I2) return ((four << 1 | 0x80808080u) - 0x03030303u) ^ 0x80808080u;
    return four;
}

// Value of a row of codes with one scale. `sum` is the sum of operands times x, `xsum` that of x.
// The side has the scale of each row, for i8a [rows, 2]: scale and minimum.
float row_result(int sum, int xsum, float sx, uint64_t side, uint n) {
    F16 floats = F16(side);
    if (CODE == CODE_I8A) {
        precise float product = float(sum + 128 * xsum) * sx;
        precise float base = float(xsum) * sx;
        precise float scaled = product * float(floats.v[2 * n]);
        return fma(base, float(floats.v[2 * n + 1]), scaled);
    }
    precise float product = float(DOUBLE * sum - OFFSET * xsum >> TOP) * sx;
    precise float y = product * (float(floats.v[n]) * UNIT);
    return y;
}
