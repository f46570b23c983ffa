// Operands of matrix instructions from steps of columns, for linear_few and linear_many. The
// including file defines CODE, SIDE and W (columns of a step).

layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer Values { uvec4 v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer FloatFours {
    vec4 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer IntFours {
    ivec4 v[];
};

#include "codes.glsl"
#include "side.glsl"
#include "steps.glsl"

// Shared memory has two steps of 32 columns, or one longer step, as int8 in pieces of 16 bytes. A
// piece of zeros separates the pieces of two groups, so that a product covers one group: from the
// first piece on, the first group, and from the second piece on, the other one. Rows are one piece
// longer, so that they begin in different banks.
const uint PIECES = G == 2 ? 3 : W / 16;
const uint PITCH = (W > 32 ? W : 64) / 16 + 1; // of activations
const uint PITCH_CODES = (W > 32 ? 1 : 2) * PIECES + 1;

// Returns the int8 operands of columns 16 i to 16 i + 15 of a step.
uvec4 columns_of(StepCodes codes, uint i) {
    uvec4 columns;
    [[unroll]] for (uint e = 0; e < 4; e++) columns[e] = int8_of(operand_of(codes, 4 * i + e));
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
