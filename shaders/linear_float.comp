// Linear layers with f32 or bf16 weights. A subgroup computes NR matrix rows, with lanes along the
// columns, and adds its partial sums in a fixed tree. Up to three matrices share their activations.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "args.glsl"
#include "experts.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint M = 1;
layout(constant_id = 3) const bool BF16 = false;
layout(constant_id = 4) const uint NR = 1;  // matrix rows per subgroup
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 128; // threads
const uint SUBGROUPS = T / SG;
const uint ROWS = SUBGROUPS * NR; // per workgroup

#include "heads.glsl"
#include "norm.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args; // codes and x are floats; a step is a column
    uint more_n;     // rows of the other matrices, 16 bits each; 0: none
    Matrix more[2];
    uint64_t epilogue;   // for HEADS or NORM
};

float weight(uint64_t row, uint i) {
    if (BF16) return uintBitsToFloat(uint(U16(row + uint64_t(i * 2)).v[0]) << 16);
    return F32(row + uint64_t(i * 4)).v[0];
}

void main() {
    const uint lane = gl_SubgroupInvocationID;
    uint first, m0, live;
    if (!take_rows(args, SELECTED, M, more_n, more, first, m0, live)) return;
    LinearArgs a = args;
    uint group = gl_WorkGroupID.y;
    const uint which = take_matrix(a, group, ROWS, more_n, more);
    const uint n0 = group * ROWS + gl_SubgroupID * NR;
    uint64_t at[NR], x[M];
    precise float sum[NR][M];
    [[unroll]] for (uint i = 0; i < NR; i++) {
        const uint row = matrix_row(a.n, min(n0 + i, a.n - 1));
        at[i] = a.matrix.codes + uint64_t(row) * (a.steps * (BF16 ? 2 : 4));
        [[unroll]] for (uint m = 0; m < M; m++) sum[i][m] = 0.0;
    }
    [[unroll]] for (uint m = 0; m < M; m++)
        x[m] = a.x + uint64_t(input_row(first + min(m0 + m, live - 1))) * a.stride;
    for (uint col = lane; col < a.steps; col += SG) {
        float v[M];
        [[unroll]] for (uint m = 0; m < M; m++) v[m] = F32(x[m] + uint64_t(col * 4)).v[0];
        [[unroll]] for (uint i = 0; i < NR; i++) {
            const float w = weight(at[i], col);
            [[unroll]] for (uint m = 0; m < M; m++) sum[i][m] = fma(w, v[m], sum[i][m]);
        }
    }
    [[unroll]] for (uint i = 0; i < NR; i++)
        [[unroll]] for (uint m = 0; m < M; m++) {
            precise float y = sum[i][m];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) y = y + subgroupShuffleXor(y, d);
            if (lane == 0 && m0 + m < live && n0 + i < a.n)
                a.matrix.out_.v[output_row(first + m0 + m) * a.n + n0 + i] = y;
        }
    if (HEADS) finish_heads(epilogue, which, group * ROWS, ROWS, m0, min(M, live - m0), first);
    if (NORM) finish_norm(epilogue, (a.n + ROWS - 1) / ROWS, first, live);
}
