// Linear layers with f32 or bf16 weights: a subgroup a matrix row, lanes along the columns, partial sums joined in a fixed tree.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint M = 1;
layout(constant_id = 3) const bool BF16 = false;
layout(constant_id = 8) const bool SELECTED = false;

layout(push_constant, scalar) uniform Push {
    uint64_t w; // [n, k]
    F32 x;      // [rows, stride]
    F32 out_;   // [rows, n]
    Step step_;
    uint n;
    uint k;
    uint stride;
};

float weight(uint64_t row, uint i) {
    if (BF16) return uintBitsToFloat(uint(U16(row).v[i]) << 16);
    return F32(row).v[i];
}

void main() {
    const uint lane = gl_SubgroupInvocationID;
    const uint live = live_rows(step_, SELECTED);
    const uint m0 = gl_WorkGroupID.x * M;
    if (m0 > 0 && m0 >= live) return;
    const uint n0 = gl_WorkGroupID.y * gl_NumSubgroups + gl_SubgroupID;
    const uint row = min(n0, n - 1);
    const uint64_t at = w + uint64_t(row) * k * (BF16 ? 2 : 4);
    precise float sum[M];
    uint xr[M];
    [[unroll]] for (uint m = 0; m < M; m++) {
        sum[m] = 0.0;
        xr[m] = live_row(step_, SELECTED, min(m0 + m, live - 1));
    }
    for (uint i = lane; i < k; i += SG) {
        const float v = weight(at, i);
        [[unroll]] for (uint m = 0; m < M; m++) sum[m] = fma(v, x.v[xr[m] * stride + i], sum[m]);
    }
    [[unroll]] for (uint m = 0; m < M; m++) {
        precise float y = sum[m];
        [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) y = y + subgroupShuffleXor(y, d);
        if (lane == 0 && m0 + m < live && n0 < n) out_.v[xr[m] * n + row] = y;
    }
}
