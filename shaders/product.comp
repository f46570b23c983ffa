// Products of dense f32 matrices in the order of crates/base/src/tensor/product.rs. A workgroup
// computes a tile of 128 x 128 elements, a thread 8 x 8 of them.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;
// Whether a and b are contiguous along the sum, instead of along rows of a and columns of b
layout(constant_id = 0) const bool A_ALONG = true;
layout(constant_id = 1) const bool B_ALONG = true;

const uint TILE = 128, DEPTH = 16, SLICE = 512;

layout(push_constant, scalar) uniform Push {
    F32 a;       // [m, k], or [k, m]
    F32 b;       // [n, k], or [k, n]
    F32 c;       // [m, n]
    uint m, n, k;
    uint keep;   // 1: adds to the values of c
};

// Four more columns put terms that are neighbours along the sum into different banks
const uint PITCH = TILE + 4;
shared float as[DEPTH * PITCH];
shared float bs[DEPTH * PITCH];

vec4 four(uint x) { return vec4(as[x], as[x + 1], as[x + 2], as[x + 3]); }
vec4 other_four(uint x) { return vec4(bs[x], bs[x + 1], bs[x + 2], bs[x + 3]); }

// Element (i, p) of a matrix with `count` rows and `k` terms per sum.
float at(F32 x, bool along, uint count, uint i, uint p) {
    if (i >= count || p >= k) return 0.0;
    return x.v[along ? i * k + p : p * count + i];
}

// Row and term that a thread loads of a tile in its `turn`.
uvec2 loaded(bool along, uint t, uint turn) {
    const uint e = turn * 256 + t;
    return along ? uvec2(e / DEPTH, e % DEPTH) : uvec2(e % TILE, e / TILE);
}

void main() {
    const uint t = gl_LocalInvocationID.x, across = t % 16, down = t / 16;
    const uint m0 = gl_WorkGroupID.y * TILE, n0 = gl_WorkGroupID.x * TILE;
    for (uint s0 = 0; s0 < k; s0 += SLICE) {
        // Rows 4 down ... 4 down + 3, columns 4 across ... 4 across + 3, and both plus 64
        vec4 sum[8][2];
        [[unroll]] for (uint i = 0; i < 8; i++) sum[i][0] = sum[i][1] = vec4(0.0);
        const uint end = min(k, s0 + SLICE);
        for (uint p0 = s0; p0 < end; p0 += DEPTH) {
            barrier();
            [[unroll]] for (uint turn = 0; turn < TILE * DEPTH / 256; turn++) {
                const uvec2 u = loaded(A_ALONG, t, turn), v = loaded(B_ALONG, t, turn);
                as[u.y * PITCH + u.x] = at(a, A_ALONG, m, m0 + u.x, p0 + u.y);
                bs[v.y * PITCH + v.x] = at(b, B_ALONG, n, n0 + v.x, p0 + v.y);
            }
            barrier();
            // Adding 0 after the last term would turn a sum of -0 into 0.
            const uint depth = min(DEPTH, end - p0);
            for (uint p = 0; p < depth; p++) {
                const vec4 x[2] = vec4[](four(p * PITCH + 4 * down),
                    four(p * PITCH + 64 + 4 * down));
                const vec4 y[2] = vec4[](other_four(p * PITCH + 4 * across),
                    other_four(p * PITCH + 64 + 4 * across));
                [[unroll]] for (uint i = 0; i < 8; i++)
                    [[unroll]] for (uint j = 0; j < 2; j++) {
                        precise vec4 more = fma(vec4(x[i / 4][i % 4]), y[j], sum[i][j]);
                        sum[i][j] = more;
                    }
            }
        }
        [[unroll]] for (uint i = 0; i < 8; i++)
            [[unroll]] for (uint j = 0; j < 8; j++) {
                const uint row = m0 + 64 * (i / 4) + 4 * down + i % 4,
                    col = n0 + 64 * (j / 4) + 4 * across + j % 4;
                if (row >= m || col >= n) continue;
                precise float whole = sum[i][j / 4][j % 4];
                if (keep == 1 || s0 > 0) whole = c.v[row * n + col] + whole;
                c.v[row * n + col] = whole;
            }
    }
}
