// Linear layers with integer codes: packed weight rows times up to M rows of int8 activations.
//
// Eight lanes share a matrix row and walk its steps (W columns each) in turn, so lane p meets steps p, p + 8, ... Integer sums are
// exact. Where a group of W columns has a scale of its own, lane p adds its groups in order, and the eight partial sums are joined
// in a fixed tree; cooperative-matrix kernels keep the same eight partial sums. Layout of the codes: src/vulkan/layout.rs.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;      // lanes of a subgroup
layout(constant_id = 2) const uint M = 1;        // rows of activations
layout(constant_id = 3) const uint NR = 1;       // matrix rows of a lane
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 5) const uint W = 32;       // columns of a step: the group where there is one
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 8) const bool SELECTED = false;

#include "codes.glsl"

layout(push_constant, scalar) uniform Push {
    uint64_t codes;
    F16 scales;    // [n, groups]; [n, 2] for i8a
    uint64_t x;    // i8 [rows, stride]
    F32 sx;        // [rows, groups]
    I32 sums;      // [rows, groups]
    F32 out_;      // [rows, n]
    Step step_;
    uint n;        // matrix rows
    uint steps;    // of a matrix row
    uint stride;   // bytes from row to row of x, a multiple of 16
    uint groups;   // of a row
};

const uint WORDS = W * BITS / 32;   // of a step, in pieces of 16 bytes (8 where a step has no more)
const uint PIECE = WORDS % 4 == 0 ? 4 : 2;
const uint XQ = W / 16;             // 16-byte loads of a step's activations

#define LANES 8

int reduce(int v) {
    v += subgroupShuffleXor(v, 4);
    v += subgroupShuffleXor(v, 2);
    return v + subgroupShuffleXor(v, 1);
}

float reduce(float v) {
    precise float s = v + subgroupShuffleXor(v, 4);
    s = s + subgroupShuffleXor(s, 2);
    s = s + subgroupShuffleXor(s, 1);
    return s;
}

void main() {
    const uint lane = gl_SubgroupInvocationID % LANES;
    const uint team = gl_LocalInvocationID.x / LANES;
    const uint teams = gl_WorkGroupSize.x / LANES;
    const uint live = live_rows(step_, SELECTED);
    const uint m0 = gl_WorkGroupID.x * M;
    if (m0 >= live) return;
    const uint n0 = (gl_WorkGroupID.y * teams + team) * NR;
    const uint row_bytes = steps * W * BITS / 8;

    // Rows beyond the last are computed again and not stored.
    uint xr[M];
    [[unroll]] for (uint m = 0; m < M; m++) xr[m] = live_row(step_, SELECTED, min(m0 + m, live - 1));
    uint64_t at[NR];
    uint nr[NR];
    [[unroll]] for (uint i = 0; i < NR; i++) {
        nr[i] = min(n0 + i, n - 1);
        at[i] = codes + uint64_t(nr[i]) * row_bytes;
    }

    int isum[NR][M];
    precise float fsum[NR][M];
    [[unroll]] for (uint i = 0; i < NR; i++)
        [[unroll]] for (uint m = 0; m < M; m++) isum[i][m] = 0, fsum[i][m] = 0.0;

    for (uint s = lane; s < steps; s += LANES) {
        const uint block = s - lane;                       // first step of this round
        const uint width = min(LANES, steps - block);      // lanes at work in it
        uint w[NR][WORDS];
        [[unroll]] for (uint i = 0; i < NR; i++)
            [[unroll]] for (uint q = 0; q < WORDS; q += PIECE) {
                const uint piece = (block * WORDS + q * width) / PIECE + lane;
                if (PIECE == 2) {
                    const uvec2 v = U32x2(at[i]).v[piece];
                    w[i][q] = v.x, w[i][q + 1] = v.y;
                } else {
                    const uvec4 v = U32x4(at[i]).v[piece];
                    [[unroll]] for (uint e = 0; e < 4; e++) w[i][q + e] = v[e];
                }
            }
        float scale[NR];
        if (GROUPED)
            [[unroll]] for (uint i = 0; i < NR; i++) scale[i] = float(scales.v[nr[i] * groups + s]) * UNIT;

        [[unroll]] for (uint m = 0; m < M; m++) {
            uvec4 xs[XQ];
            [[unroll]] for (uint q = 0; q < XQ; q++) xs[q] = U32x4(x + uint64_t(xr[m]) * stride).v[s * XQ + q];
            float sxg = 0.0;
            int xsum = 0;
            if (GROUPED) {
                sxg = sx.v[xr[m] * groups + s];
                xsum = sums.v[xr[m] * groups + s];
            }
            [[unroll]] for (uint i = 0; i < NR; i++) {
                int d = GROUPED ? 0 : isum[i][m];
                [[unroll]] for (uint q = 0; q < WORDS; q++)
                    [[unroll]] for (uint b = 0; b < PER_WORD; b++) {
                        const uint at4 = q * PER_WORD + b; // which four columns
                        d += dotPacked4x8EXT(four(w[i][q], b), int(xs[at4 / 4][at4 % 4]));
                    }
                if (GROUPED) {
                    precise float product = float(DOUBLE * d - OFFSET * xsum) * sxg;
                    fsum[i][m] = fma(product, scale[i], fsum[i][m]);
                } else {
                    isum[i][m] = d;
                }
            }
        }
    }

    [[unroll]] for (uint m = 0; m < M; m++)
        [[unroll]] for (uint i = 0; i < NR; i++) {
            float y;
            if (GROUPED) {
                y = reduce(fsum[i][m]);
            } else {
                y = row_result(reduce(isum[i][m]), sums.v[xr[m]], sx.v[xr[m]], scales, nr[i]);
            }
            if (lane == m % LANES && m0 + m < live && n0 + i < n) out_.v[xr[m] * n + nr[i]] = y;
        }
}
