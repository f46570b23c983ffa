// Shared by the linear kernels by matrix instructions: types, and a group's way from product to
// sum.
//
// A lane has four elements of a product of 16 x 8: rows lane / 4 and lane / 4 + 8, columns 2 (lane
// % 4) and the one after it.

#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#include "common.glsl"
#include "args.glsl"

#define Weights coopmat<int8_t, gl_ScopeSubgroup, 16, 32, gl_MatrixUseA>
#define Activations coopmat<int8_t, gl_ScopeSubgroup, 32, 8, gl_MatrixUseB>
#define Product coopmat<int, gl_ScopeSubgroup, 16, 8, gl_MatrixUseAccumulator>

layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer Codes { uvec4 v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer ScaleFours {
    uvec2 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer FloatFours {
    vec4 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer ScalePairs {
    uint v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer FloatPairs {
    vec2 v[];
};

// 16-byte pieces from row to row in shared memory: two groups of int8, and one piece so that rows
// begin in different banks.
const uint PITCH = 5;

// A float whose last bits are an integer. Products begin with it, and the part above it is the
// exact sum: 16 * 8 * 127 * 32 < 2^22.
const float MAGIC = 12582912.0; // 1.5 * 2^23

// Orders shared memory among the lanes of a subgroup: writes before the fence are visible after it,
// and reads before it precede later writes.
void subgroup_fence() {
    controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared,
        gl_SemanticsAcquireRelease);
}

vec2 half_floats(uvec2 four, uint half_) { return unpackHalf2x16(half_ == 0 ? four.x : four.y); }

// The sum of a part with one more group, in the order of linear.glsl.
float add_group(int product, float sx, float scale, float sum) {
    precise float d = intBitsToFloat(product) - MAGIC;
    precise float scaled = d * sx;
    precise float more_ = fma(scaled, scale, sum);
    return more_;
}
