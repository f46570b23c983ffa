// Operands of matrix instructions from chunks of columns, for linear_few and linear_many. The
// including file defines CODE, SIDE and W (columns of a step, at most 128).

layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer Values { uvec4 v[]; };

#include "codes.glsl"
#include "steps.glsl"
#include "side.glsl"

// A chunk of 128 columns is divided into quarters of 32. A lane loads a quarter of a matrix row.
struct Quarter {
    uint low[LOW];
    uint high[HIGH > 0 ? HIGH : 1];
};

// Shared memory has the quarters of 16 matrix rows as int8, in pieces of 16 bytes: those of the
// first quarter, then those of the others. Each row has a third piece. With two groups in a step it
// is zero and between the other two, so that a product covers one group: from the first piece on,
// the first group, and from the second piece on, the other one. Its length, and the two pieces
// between quarters, let rows begin in different banks.
const uint PITCH = 3, QUARTER = 16 * PITCH + 2, TILE = 4 * QUARTER;
// Rows of activations have a whole chunk.
const uint PITCH_X = 9;

// Loads the quarter of a chunk that is in step s.
void load_quarter(RowCodes row, uint s, uint quarter, out Quarter codes) {
    if (W == 32) {
        StepCodes step_;
        load_codes(row, s, step_);
        [[unroll]] for (uint e = 0; e < LOW; e++) codes.low[e] = step_.low[e];
        [[unroll]] for (uint e = 0; e < HIGH; e++) codes.high[e] = step_.high[e];
        return;
    }
    // Codes in long groups have one plane.
    const uint first = quarter % (W / 32) * LOW, at = step_place(row, s);
    [[unroll]] for (uint e = 0; e < LOW; e += 2) {
        const uint word = first + e, q = word / PIECE_WORDS * PIECE_WORDS;
        const uvec2 v = CodePair(row.low + uint64_t(at + q * NEXT_PIECE + 4 * (word - q))).v;
        codes.low[e] = v.x, codes.low[e + 1] = v.y;
    }
}

// Factors of two matrix rows 8 apart, as a lane needs them for its elements of a tile. Lanes pass
// them through shared memory: shuffles are slow where the compiler is not sure that all lanes take
// part.
uvec4 pair_of(Factors a, Factors b, uint g) {
    return floatBitsToUint(vec4(a.scale[g], b.scale[g], a.least[g], b.least[g]));
}

// Returns the int8 operands of columns 16 i to 16 i + 15 of a quarter.
uvec4 columns_of(Quarter codes, uint i) {
    uvec4 columns;
    [[unroll]] for (uint e = 0; e < 4; e++) {
        const uint k = 4 * i + e;
        columns[e] = int8_of(operand(codes.low[k / PER_LOW], k % PER_LOW,
            codes.high[HIGH > 0 ? k / PER_HIGH : 0], k % PER_HIGH));
    }
    return columns;
}

// Adds one more group to the sum of a part, in the order of linear.glsl. `base` is the scaled sum
// of the activations.
float add_group(int product, float sx, float scale, float base, float least, float sum) {
    precise float d = intBitsToFloat(product) - MAGIC;
    precise float scaled = d * sx;
    precise float more_ = fma(scaled, scale, sum);
    if (HAS_MIN) more_ = fma(base, least, more_);
    return more_;
}
