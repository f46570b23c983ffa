// Products of dense f32 matrices for image towers, head by head, with bias, limits and GELU. The
// order of sums is that of crates/base/src/tensor/product.rs. A thread computes 8 x 8 elements of a
// workgroup's tile. While 8 terms are multiplied, the next 8 are loaded.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 0) const bool B_ALONG = true;    // b is contiguous along the sum
layout(constant_id = 1) const uint B_TYPE = 0;        // 0: f32, 1: f16, 2: bf16
layout(constant_id = 2) const bool FOURS_ALONG = false;  // loads 4 contiguous terms
layout(constant_id = 3) const bool FOURS_ACROSS = false; // loads 4 contiguous columns
layout(constant_id = 4) const bool FACTORS = false;   // side has a factor for each row of a
layout(constant_id = 5) const bool CLIP_A = false;
layout(constant_id = 6) const bool BIAS = false;      // side has a bias for each column
layout(constant_id = 7) const bool CLIP_C = false;
layout(constant_id = 8) const bool GELU = false;

layout(constant_id = 9) const uint ACROSS = 16;       // threads in x direction of a tile, 8 to 16

const uint THREADS = 256, DEPTH = 8, SLICE = 512;
const uint DOWN = THREADS / ACROSS, ROWS = 8 * DOWN, COLS = 8 * ACROSS;
const uint LOADS = (2 * ROWS + THREADS - 1) / THREADS; // loads of four terms of a per thread

layout(push_constant, scalar) uniform Push {
    F32 a;         // [heads, m, k]
    uint64_t b;    // [heads, n, k], or [heads, k, n]
    F32 c;         // [heads, m, n]
    F32 side;      // [n], or [heads, m]
    uint m, n, k;
    uint a_stride; // floats between rows
    uint b_stride;
    uint c_stride;
    uint a_head;   // floats between heads
    uint b_head;
    uint c_head;
    uint share;    // heads of a that use the same head of b
    float a_least;
    float a_most;
    float c_least;
    float c_most;
    float factor;  // multiplies c
};

// Terms in groups of four rows or columns. One more group per line puts terms that are neighbours
// along the sum into different banks.
const uint A_PITCH = ROWS / 4 + 1, B_PITCH = COLS / 4 + 1;
shared vec4 as[2 * DEPTH * A_PITCH];
shared vec4 bs[2 * DEPTH * B_PITCH];

float clip(float v, float least, float most) {
    const float low = v < least ? least : v;
    return low > most ? most : low;
}

float b_at(uint i) {
    if (B_TYPE == 1) return float(F16(b).v[i]);
    if (B_TYPE == 2) return uintBitsToFloat(uint(U16(b).v[i]) << 16);
    return F32(b).v[i];
}

// Four contiguous values of b. `i` is a multiple of four.
vec4 b_four(uint i) {
    if (B_TYPE == 0) return F32x4(b).v[i / 4];
    const uvec2 two = U32x2(b).v[i / 4];
    if (B_TYPE == 1) return vec4(unpackHalf2x16(two.x), unpackHalf2x16(two.y));
    return uintBitsToFloat(uvec4(two.x << 16, two.x & 0xffff0000u, two.y << 16,
        two.y & 0xffff0000u));
}

// Four terms of a row of a, from p on. Terms outside of the matrix are 0.
vec4 load_a(uint head, uint row, uint p) {
    vec4 v = vec4(0.0);
    if (row >= m) return v;
    const uint at = head * a_head + row * a_stride + p;
    if (FOURS_ALONG) {
        if (p < k) v = F32x4(uint64_t(a)).v[at / 4];
    } else {
        [[unroll]] for (uint i = 0; i < 4; i++) if (p + i < k) v[i] = a.v[at + i];
    }
    if (CLIP_A)
        [[unroll]] for (uint i = 0; i < 4; i++) 
            if (p + i < k) v[i] = clip(v[i], a_least, a_most);
    if (FACTORS) {
        precise vec4 scaled = v * side.v[head * m + row];
        v = scaled;
    }
    return v;
}

// Four terms of a column of b, or one term of four columns. Terms outside of the matrix are 0.
vec4 load_b(uint head, uint col, uint p) {
    vec4 v = vec4(0.0);
    if (col >= n || p >= k) return v;
    const uint at = head / share * b_head
        + (B_ALONG ? col * b_stride + p : p * b_stride + col);
    if (B_ALONG ? FOURS_ALONG : FOURS_ACROSS) return b_four(at);
    [[unroll]] for (uint i = 0; i < 4; i++)
        if (B_ALONG ? p + i < k : col + i < n) v[i] = b_at(at + i);
    return v;
}

// Returns the final value of a complete sum.
float finish(float v, uint col) {
    precise float y = v;
    if (BIAS) y = y + side.v[col];
    if (CLIP_C) y = clip(y, c_least, c_most);
    if (GELU) y = gelu_tanh(y);
    y = y * factor;
    return y;
}

// Adds the sums of a slice to four elements of a row, from column `col` on.
void keep(uint row, uint col, vec4 sum, bool first, bool last) {
    if (row >= m || col >= n) return;
    const uint at = gl_WorkGroupID.z * c_head + row * c_stride + col;
    if (FOURS_ACROSS) {
        precise vec4 whole = first ? sum : F32x4(uint64_t(c)).v[at / 4] + sum;
        if (last) [[unroll]] for (uint i = 0; i < 4; i++) whole[i] = finish(whole[i], col + i);
        F32x4(uint64_t(c)).v[at / 4] = whole;
        return;
    }
    [[unroll]] for (uint i = 0; i < 4; i++) {
        if (col + i >= n) break;
        precise float whole = first ? sum[i] : c.v[at + i] + sum[i];
        c.v[at + i] = last ? finish(whole, col + i) : whole;
    }
}

void main() {
    const uint t = gl_LocalInvocationID.x, across = t % ACROSS, down = min(t / ACROSS, DOWN - 1);
    const uint m0 = gl_WorkGroupID.y * ROWS, n0 = gl_WorkGroupID.x * COLS;
    const uint head = gl_WorkGroupID.z;
    // A thread loads four terms of a row of a and of a column of b, or one term of four columns of
    // b.
    const uint line = t / 2, term = t % 2 * 4;
    const uint b_line = B_ALONG ? line : t % (COLS / 4) * 4;
    const uint b_term = B_ALONG ? term : t / (COLS / 4);
    const bool loads_b = t < 2 * COLS;
    vec4 a4[LOADS], b4 = load_b(head, n0 + b_line, b_term);
    [[unroll]] for (uint l = 0; l < LOADS; l++)
        a4[l] = load_a(head, m0 + l * THREADS / 2 + line, term);
    // Rows 4 down ... 4 down + 3, columns 4 across ... 4 across + 3, and both plus half a tile
    vec4 sum[8][2];
    [[unroll]] for (uint i = 0; i < 8; i++) sum[i][0] = sum[i][1] = vec4(0.0);
    uint turn = 0;
    for (uint p0 = 0; p0 < k; p0 += DEPTH) {
        const uint a0 = turn * DEPTH * A_PITCH, b0 = turn * DEPTH * B_PITCH;
        [[unroll]] for (uint l = 0; l < LOADS; l++)
            if (l * THREADS / 2 + line < ROWS)
                [[unroll]] for (uint i = 0; i < 4; i++)
                    as[a0 + (term + i) * A_PITCH + l * THREADS / 8 + line / 4][line % 4] = a4[l][i];
        if (!B_ALONG && loads_b) bs[b0 + b_term * B_PITCH + b_line / 4] = b4;
        if (B_ALONG && loads_b)
            [[unroll]] for (uint i = 0; i < 4; i++)
                bs[b0 + (term + i) * B_PITCH + line / 4][line % 4] = b4[i];
        barrier();
        const uint next = p0 + DEPTH;
        [[unroll]] for (uint l = 0; l < LOADS; l++)
            a4[l] = load_a(head, m0 + l * THREADS / 2 + line, next + term);
        b4 = load_b(head, n0 + b_line, next + b_term);
        // Terms after the last one are 0 x 0. They can only turn a sum of -0 into 0. The definition
        // does so too, because it adds sums to 0.
        [[unroll]] for (uint p = 0; p < DEPTH; p++) {
            const uint x0 = a0 + p * A_PITCH + down, y0 = b0 + p * B_PITCH + across;
            const vec4 x[2] = vec4[](as[x0], as[x0 + DOWN]);
            const vec4 y[2] = vec4[](bs[y0], bs[y0 + ACROSS]);
            [[unroll]] for (uint i = 0; i < 8; i++)
                [[unroll]] for (uint j = 0; j < 2; j++) {
                    precise vec4 more = fma(vec4(x[i / 4][i % 4]), y[j], sum[i][j]);
                    sum[i][j] = more;
                }
        }
        turn = 1 - turn;
        const bool last = next >= k;
        if (!last && next % SLICE != 0) continue;
        [[unroll]] for (uint i = 0; i < 8; i++)
            [[unroll]] for (uint j = 0; j < 2; j++) {
                if (t < DOWN * ACROSS)
                    keep(m0 + ROWS / 2 * (i / 4) + 4 * down + i % 4,
                        n0 + COLS / 2 * j + 4 * across, sum[i][j], p0 < SLICE, last);
                sum[i][j] = vec4(0.0);
            }
    }
}
