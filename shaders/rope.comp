// RMSNorm and rotation of one head of queries or keys a workgroup; keys and values go to this step's scratch rows.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint HEAD_DIM = 128;
layout(constant_id = 3) const uint KV = 1;
#include "kv.glsl"

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

const uint GROUP = GROUP_OF(HEAD_DIM), GROUPS = HEAD_DIM / GROUP; // of channels with one scale
const uint WIDE = SG < GROUP ? SG : GROUP;                        // lanes that work on a group
const uint TURNS = GROUP / WIDE;

shared float whole[KV == KV_Q8 ? HEAD_DIM : 1]; // a key or value to be rounded to int8

uint key_at(uint h, uint d, uint r) { return ((h * (HEAD_DIM / KB) + d / KB) * max_rows + r) * KB + d % KB; }

uint value_at(uint h, uint d, uint r) { return (r * n_kv + h) * HEAD_DIM + d; }

void store(bool key, uint h, uint d, uint r, float value) {
    const uint at = key ? key_at(h, d, r) : value_at(h, d, r);
    const uint64_t to = key ? scratch_k : scratch_v;
    if (KV == KV_F32) F32(to).v[at] = value;
    else if (KV == KV_F16) F16(to).v[at] = float16_t(value);
    else whole[d] = value;
}

// Rounds what lies in `whole`: a group's scale is a 127th of its largest magnitude, as the f16 that is stored.
void store_codes(bool key, uint h, uint r) {
    if (KV != KV_Q8) return;
    barrier();
    const uint64_t to = key ? scratch_k : scratch_v;
    const uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint g0 = 0; g0 < GROUPS; g0 += SG / WIDE) {
        const uint g = g0 + lane / WIDE, first = g * GROUP + lane % WIDE;
        float most = 0.0;
        if (g < GROUPS) [[unroll]] for (uint i = 0; i < TURNS; i++) most = max(most, abs(whole[first + i * WIDE]));
        [[unroll]] for (uint d = WIDE / 2; d > 0; d /= 2) most = max(most, subgroupShuffleXor(most, d));
        const float16_t stored = float16_t(min(most / 127.0, 65504.0));
        const float scale = float(stored), inv = scale > 0.0 ? 1.0 / scale : 0.0;
        if (g >= GROUPS) continue;
        if (lane % WIDE == 0) F16(to + uint64_t(max_rows) * n_kv * HEAD_DIM).v[(h * GROUPS + g) * max_rows + r] = stored;
        [[unroll]] for (uint i = 0; i < TURNS; i++) {
            const uint d = first + i * WIDE;
            precise float scaled = whole[d] * inv;
            const int code = int(clamp(roundEven(scaled), -128.0, 127.0));
            I8(to).v[key ? key_at(h, d, r) : value_at(h, d, r)] = int8_t(code);
        }
    }
}

// One subgroup, lane i with elements i, i + SG, ... of both halves.
void main() {
    const uint live = live_rows(step_, false);
    if (gl_WorkGroupID.y >= live) return;
    const uint r = step_.first + gl_WorkGroupID.y;
    const uint lane = gl_SubgroupInvocationID;
    const uint head = gl_WorkGroupID.x;
    if (head >= n_heads + n_kv) {
        const uint h = head - n_heads - n_kv;
        for (uint d = lane; d < HEAD_DIM; d += SG) store(false, h, d, r, v.v[value_at(h, d, r)]);
        store_codes(false, h, r);
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
            store(true, h, d, r, rx);
            store(true, h, d + HALF, r, ry);
        }
    }
    if (!query) store_codes(true, h, r);
}
