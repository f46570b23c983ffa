// Integer codes as four int8 operands of a dot product at a time, and the way from an integer sum
// to the row's value.
//
// A word of i4 holds columns 0..3 in its low nibbles and 4..7 in its high ones, as signed numbers
// (the code less 8). A word of i2 holds columns 4k..4k+3 in bits 2k, 2k+1 of its bytes. `value =
// code - offset` (i2: twice that), so `sum(value * x) = DOUBLE * dot(code, x) - OFFSET * sum(x)`.

#define CODE_I8 0
#define CODE_I4 1
#define CODE_I2 2
#define CODE_I8A 3
#define CODE_TRELLIS 6

#define BITS (CODE == CODE_I4 ? 4 : (CODE == CODE_I2 ? 2 : 8))
// Groups of four columns in a word of codes.
#define PER_WORD (CODE == CODE_I4 ? 2 : (CODE == CODE_I2 ? 4 : 1))
#define DOUBLE (CODE == CODE_I2 ? 2 : 1)
#define OFFSET (CODE == CODE_I4 ? 8 : (CODE == CODE_I2 ? 3 : 0))
// Factor of a scale.
#define UNIT (CODE == CODE_I2 ? 0.5 : 1.0)

// Four columns of codes, a byte each.
int four(uint word, uint k) {
    if (CODE == CODE_I4) return int((word ^ 0x88888888u) >> (4 * k) & 0x0f0f0f0fu);
    if (CODE == CODE_I2) return int((word >> (2 * k)) & 0x03030303u);
    return int(word);
}

// Four columns of codes as the int8 operands that dot products take. An i4 code becomes sixteen
// times its value: a nibble in the high half of a byte is signed, so no offset is subtracted.
int operand(uint word, uint k) {
    if (CODE == CODE_I4) return int((k == 0 ? word << 4 : word) & 0xf0f0f0f0u);
    return four(word, k);
}

// The operands of columns 0..15 and 16..31 of a step of 32 columns of i4, in their order.
uvec4 low_columns(uvec4 c) {
    return uvec4(operand(c.x, 0), operand(c.x, 1), operand(c.y, 0), operand(c.y, 1));
}
uvec4 high_columns(uvec4 c) {
    return uvec4(operand(c.z, 0), operand(c.z, 1), operand(c.w, 0), operand(c.w, 1));
}

// `sum(value * x)` is the sum of `operand` times x, times PRODUCT_UNIT (a power of two, for the
// floats that multiply the sum), less PRODUCT_OFFSET * sum(x).
#define PRODUCT_UNIT (CODE == CODE_I4 ? 0.0625 : 1.0)
#define PRODUCT_OFFSET (CODE == CODE_I4 ? 0 : OFFSET)

// Value of a row of codes with one scale: `sum` is of operands times x, `xsum` of x alone.
float row_result(int sum, int xsum, float sx, F16 scales, uint n) {
    if (CODE == CODE_I8A) {
        // Codes are stored less 128; [rows, 2]: scale, smallest value.
        precise float product = float(sum + 128 * xsum) * sx;
        precise float base = float(xsum) * sx;
        precise float scaled = product * float(scales.v[2 * n]);
        return fma(base, float(scales.v[2 * n + 1]), scaled);
    }
    precise float product = float(CODE == CODE_I4 ? sum / 16 : DOUBLE * sum - OFFSET * xsum) * sx;
    precise float y = product * (float(scales.v[n]) * UNIT);
    return y;
}
