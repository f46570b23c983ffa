// Weighted sum of the outputs of each row's experts, added in the order of the slots.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 1) const uint USED = 8;

layout(push_constant, scalar) uniform Push {
    F32 parts;    // [rows, used, dim]
    F32 weights;  // [rows, used]
    F32 out_;     // [rows, dim]
    Step step_;
    uint dim;
    uint _gap;
};

void main() {
    const uint col = gl_GlobalInvocationID.x;
    if (gl_WorkGroupID.y >= live_rows(step_, false) || col >= dim) return;
    const uint r = live_row(step_, false, gl_WorkGroupID.y);
    float part[USED], weight[USED];
    [[unroll]] for (uint i = 0; i < USED; i++) {
        part[i] = parts.v[(r * USED + i) * dim + col];
        weight[i] = weights.v[r * USED + i];
    }
    precise float sum = 0.0;
    [[unroll]] for (uint i = 0; i < USED; i++) sum = fma(weight[i], part[i], sum);
    out_.v[r * dim + col] = sum;
}
