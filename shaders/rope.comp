// RMSNorm and rotation of one head of queries or keys a workgroup; keys and values go to this step's scratch rows.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint HEAD_DIM = 128;
layout(constant_id = 3) const bool KV_F16 = true;

layout(push_constant, scalar) uniform Push {
    F32 q;       // [rows, n_heads, HEAD_DIM]
    F32 k;       // [rows, n_kv, HEAD_DIM]
    F32 v;
    F32 q_norm;  // [HEAD_DIM]
    F32 k_norm;
    F32 table;   // [max_rows, 2, HEAD_DIM / 2]
    uint64_t scratch_k; // [n_kv, HEAD_DIM / KB, max_rows, KB]
    uint64_t scratch_v; // [max_rows, n_kv, HEAD_DIM]
    Step step_;
    float eps;
    uint n_heads;
    uint n_kv;
    uint max_rows;
};

const uint HALF = HEAD_DIM / 2;
const uint PER = (HALF + SG - 1) / SG;

void store(uint64_t at, uint i, float value) {
    if (KV_F16) F16(at).v[i] = float16_t(value);
    else F32(at).v[i] = value;
}

// Channels of a key that lie together: 16 bytes.
const uint KB = KV_F16 ? 8 : 4;

uint key_at(uint h, uint d, uint r) { return ((h * (HEAD_DIM / KB) + d / KB) * max_rows + r) * KB + d % KB; }

// One subgroup, lane i with elements i, i + SG, ... of both halves.
void main() {
    const uint live = live_rows(step_, false);
    if (gl_WorkGroupID.y >= live) return;
    const uint r = step_.first + gl_WorkGroupID.y;
    const uint lane = gl_SubgroupInvocationID;
    const uint head = gl_WorkGroupID.x;
    if (head >= n_heads + n_kv) {
        const uint h = head - n_heads - n_kv;
        for (uint d = lane; d < HEAD_DIM; d += SG)
            store(scratch_v, (r * n_kv + h) * HEAD_DIM + d, v.v[(r * n_kv + h) * HEAD_DIM + d]);
        return;
    }
    const bool query = head < n_heads;
    const uint h = query ? head : head - n_heads;
    float a[PER], b[PER];
    precise float s = 0.0;
    [[unroll]] for (uint i = 0; i < PER; i++) {
        const uint d = i * SG + lane;
        a[i] = 0.0, b[i] = 0.0;
        if (d < HALF) {
            const uint at = (query ? r * n_heads + h : r * n_kv + h) * HEAD_DIM + d;
            a[i] = query ? q.v[at] : k.v[at];
            b[i] = query ? q.v[at + HALF] : k.v[at + HALF];
        }
        s = fma(a[i], a[i], s);
        s = fma(b[i], b[i], s);
    }
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) s = s + subgroupShuffleXor(s, d);
    precise float mean = s / float(HEAD_DIM) + eps;
    const float inv = 1.0 / sqrt(mean);
    [[unroll]] for (uint i = 0; i < PER; i++) {
        const uint d = i * SG + lane;
        if (d >= HALF) break;
        const float w_a = query ? q_norm.v[d] : k_norm.v[d], w_b = query ? q_norm.v[d + HALF] : k_norm.v[d + HALF];
        precise float x = (a[i] * inv) * (1.0 + w_a);
        precise float y = (b[i] * inv) * (1.0 + w_b);
        const float cos_ = table.v[r * HEAD_DIM + d], sin_ = table.v[r * HEAD_DIM + HALF + d];
        precise float rx = fma(x, cos_, -(y * sin_));
        precise float ry = fma(y, cos_, x * sin_);
        if (query) {
            const uint at = (r * n_heads + h) * HEAD_DIM + d;
            q.v[at] = rx;
            q.v[at + HALF] = ry;
        } else {
            store(scratch_k, key_at(h, d, r), rx);
            store(scratch_k, key_at(h, d + HALF, r), ry);
        }
    }
}
