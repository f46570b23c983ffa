// Products of dense f32 matrices in the order of crates/base/src/tensor/product.rs, for image
// towers: head by head, with bias, limits and GELU. A workgroup makes a tile of 128 x 128 elements,
// a thread 8 x 8 of them. While a tile of 8 terms is multiplied, the next one is loaded.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 0) const bool B_ALONG = true;    // neighbours in b are those along the sum
layout(constant_id = 1) const uint B_TYPE = 0;        // 0: f32, 1: f16, 2: bf16
layout(constant_id = 2) const bool FOURS_ALONG = false;  // loads of 4 neighbours along the sum
layout(constant_id = 3) const bool FOURS_ACROSS = false; // and of columns
layout(constant_id = 4) const bool FACTORS = false;   // side holds factors of a's rows
layout(constant_id = 5) const bool CLIP_A = false;
layout(constant_id = 6) const bool BIAS = false;      // side holds what is added to a column
layout(constant_id = 7) const bool CLIP_C = false;
layout(constant_id = 8) const bool GELU = false;

const uint TILE = 128, DEPTH = 8, SLICE = 512;

layout(push_constant, scalar) uniform Push {
    F32 a;         // [heads, m, k]
    uint64_t b;    // [heads, n, k], or [heads, k, n]
    F32 c;         // [heads, m, n]
    F32 side;      // [n], or [heads, m]
    uint m, n, k;
    uint a_stride; // floats from row to row
    uint b_stride;
    uint c_stride;
    uint a_head;   // floats from head to head
    uint b_head;
    uint c_head;
    uint share;    // heads of a that share one of b
    float a_least;
    float a_most;
    float c_least;
    float c_most;
    float factor;  // of c
};

// Four more columns, so that neighbours along the sum lie in different banks
const uint PITCH = TILE + 4;
shared float as[2 * DEPTH * PITCH];
shared float bs[2 * DEPTH * PITCH];

vec4 four(uint x) { return vec4(as[x], as[x + 1], as[x + 2], as[x + 3]); }
vec4 other_four(uint x) { return vec4(bs[x], bs[x + 1], bs[x + 2], bs[x + 3]); }

float clip(float v, float least, float most) {
    const float low = v < least ? least : v;
    return low > most ? most : low;
}

float b_at(uint i) {
    if (B_TYPE == 1) return float(F16(b).v[i]);
    if (B_TYPE == 2) return uintBitsToFloat(uint(U16(b).v[i]) << 16);
    return F32(b).v[i];
}

// Four neighbours, from a multiple of four on.
vec4 b_four(uint i) {
    if (B_TYPE == 0) return F32x4(b).v[i / 4];
    const uvec2 two = U32x2(b).v[i / 4];
    if (B_TYPE == 1) return vec4(unpackHalf2x16(two.x), unpackHalf2x16(two.y));
    return uintBitsToFloat(uvec4(two.x << 16, two.x & 0xffff0000u, two.y << 16,
        two.y & 0xffff0000u));
}

// Four terms of a row of a, from p on; 0 outside.
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

// Four terms of a column of b, or four columns of a term; 0 outside.
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

// What becomes of a finished element.
float finish(float v, uint col) {
    precise float y = v;
    if (BIAS) y = y + side.v[col];
    if (CLIP_C) y = clip(y, c_least, c_most);
    if (GELU) y = gelu_tanh(y);
    y = y * factor;
    return y;
}

// Adds the sums of a slice to the elements of a row from `col` on.
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
    const uint t = gl_LocalInvocationID.x, across = t % 16, down = t / 16;
    const uint m0 = gl_WorkGroupID.y * TILE, n0 = gl_WorkGroupID.x * TILE;
    const uint head = gl_WorkGroupID.z;
    // A thread loads four terms of a row of either factor, or four columns of a term of b.
    const uint line = t / 2, term = t % 2 * 4;
    const uint b_line = B_ALONG ? line : t % 32 * 4, b_term = B_ALONG ? term : t / 32;
    vec4 a4 = load_a(head, m0 + line, term), b4 = load_b(head, n0 + b_line, b_term);
    // Rows 4 down ... 4 down + 3 and 64 after, by columns 4 across ... and 64 after
    vec4 sum[8][2];
    [[unroll]] for (uint i = 0; i < 8; i++) sum[i][0] = sum[i][1] = vec4(0.0);
    uint from = 0;
    for (uint p0 = 0; p0 < k; p0 += DEPTH) {
        [[unroll]] for (uint i = 0; i < 4; i++) {
            as[from + (term + i) * PITCH + line] = a4[i];
            bs[from + (B_ALONG ? (term + i) * PITCH + line : b_term * PITCH + b_line + i)] = b4[i];
        }
        barrier();
        a4 = load_a(head, m0 + line, p0 + DEPTH + term);
        b4 = load_b(head, n0 + b_line, p0 + DEPTH + b_term);
        // Terms after the last one are 0 x 0. At most they turn a sum of -0 into 0, and so does
        // the definition, which adds sums to 0.
        [[unroll]] for (uint p = 0; p < DEPTH; p++) {
            const uint at = from + p * PITCH;
            const vec4 x[2] = vec4[](four(at + 4 * down), four(at + 64 + 4 * down));
            const vec4 y[2] = vec4[](other_four(at + 4 * across), other_four(at + 64 + 4 * across));
            [[unroll]] for (uint i = 0; i < 8; i++)
                [[unroll]] for (uint j = 0; j < 2; j++) {
                    precise vec4 more = fma(vec4(x[i / 4][i % 4]), y[j], sum[i][j]);
                    sum[i][j] = more;
                }
        }
        from = DEPTH * PITCH - from;
        const bool last = p0 + DEPTH >= k;
        if (!last && (p0 + DEPTH) % SLICE != 0) continue;
        [[unroll]] for (uint i = 0; i < 8; i++)
            [[unroll]] for (uint j = 0; j < 2; j++) {
                keep(m0 + 64 * (i / 4) + 4 * down + i % 4, n0 + 64 * j + 4 * across, sum[i][j],
                    p0 < SLICE, last);
                sum[i][j] = vec4(0.0);
            }
    }
}
