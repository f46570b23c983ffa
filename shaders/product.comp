// Products of dense f32 matrices in the order of src/tensor/product.rs: a workgroup makes a tile of
// 128 x 128 elements, a thread 8 x 8 of them.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;
// Neighbours in memory are neighbours along the sum, or along the rows of a and columns of b
layout(constant_id = 0) const bool A_ALONG = true;
layout(constant_id = 1) const bool B_ALONG = true;

const uint TILE = 128, DEPTH = 16, SLICE = 512;

layout(push_constant, scalar) uniform Push {
    F32 a;       // [m, k], or [k, m]
    F32 b;       // [n, k], or [k, n]
    F32 c;       // [m, n]
    uint m, n, k;
    uint keep;   // 1: adds to what c holds
};

// Two more columns, so that neighbours along the sum lie in different banks
shared float as[DEPTH][TILE + 2];
shared float bs[DEPTH][TILE + 2];

// Element (i, p) of a matrix with `count` rows and sums of `k`.
float at(F32 x, bool along, uint count, uint i, uint p) {
    if (i >= count || p >= k) return 0.0;
    return x.v[along ? i * k + p : p * count + i];
}

// Which element of a tile a thread loads in its `turn`: row and place in the sum.
uvec2 loaded(bool along, uint t, uint turn) {
    const uint e = turn * 256 + t;
    return along ? uvec2(e / DEPTH, e % DEPTH) : uvec2(e % TILE, e / TILE);
}

#define ADD_TERM(P) { \
    float x[8], y[8]; \
    [[unroll]] for (uint i = 0; i < 8; i++) { \
        x[i] = as[P][16 * i + down]; \
        y[i] = bs[P][16 * i + across]; \
    } \
    [[unroll]] for (uint i = 0; i < 64; i++) { \
        precise float more = fma(x[i / 8], y[i % 8], sum[i]); \
        sum[i] = more; \
    } \
}

void main() {
    const uint t = gl_LocalInvocationID.x, across = t % 16, down = t / 16;
    const uint m0 = gl_WorkGroupID.y * TILE, n0 = gl_WorkGroupID.x * TILE;
    for (uint s0 = 0; s0 < k; s0 += SLICE) {
        float sum[64]; // [8, 8]
        [[unroll]] for (uint i = 0; i < 64; i++) sum[i] = 0.0;
        const uint end = min(k, s0 + SLICE);
        for (uint p0 = s0; p0 < end; p0 += DEPTH) {
            barrier();
            [[unroll]] for (uint turn = 0; turn < TILE * DEPTH / 256; turn++) {
                const uvec2 u = loaded(A_ALONG, t, turn), v = loaded(B_ALONG, t, turn);
                as[u.y][u.x] = at(a, A_ALONG, m, m0 + u.x, p0 + u.y);
                bs[v.y][v.x] = at(b, B_ALONG, n, n0 + v.x, p0 + v.y);
            }
            barrier();
            // A sum that went on past its last term would turn -0 into 0.
            const uint depth = min(DEPTH, end - p0);
            if (depth == DEPTH)
                [[unroll]] for (uint p = 0; p < DEPTH; p++) ADD_TERM(p)
            else
                for (uint p = 0; p < depth; p++) ADD_TERM(p)
        }
        [[unroll]] for (uint i = 0; i < 64; i++) {
            const uint row = m0 + 16 * (i / 8) + down, col = n0 + 16 * (i % 8) + across;
            if (row >= m || col >= n) continue;
            precise float whole = sum[i];
            if (keep == 1 || s0 > 0) whole = c.v[row * n + col] + whole;
            c.v[row * n + col] = whole;
        }
    }
}
