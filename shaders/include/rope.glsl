// RMSNorm and rotation of one head of queries or keys by one subgroup. Keys and values are stored
// in the scratch rows of the step.
//
// The including file defines SG, HEAD_DIM, KV, V_NORM (values are normed, without weights) and
// SUBGROUPS (subgroups in a workgroup). For q8, it has shared memory `whole` [SUBGROUPS *
// HEAD_DIM].

const uint HALF = HEAD_DIM / 2;
const uint PAIRS_OF_LANE = (HALF + SG - 1) / SG;

const uint GROUP = GROUP_OF(HEAD_DIM), GROUPS = HEAD_DIM / GROUP; // channels with one scale
const uint WIDE = SG < GROUP ? SG : GROUP;                        // lanes per group
const uint TURNS = GROUP / WIDE;

// Address of a key or value of row `r` in scratch, which is the same for all lanes, and offset of a
// channel in bytes.
uint64_t stored_at(RopeArgs a, bool key, uint h, uint r) {
    if (key) return a.scratch_k + uint64_t(h * (HEAD_DIM / KB) * a.max_rows + r) * 16;
    return a.scratch_v + uint64_t(r * a.n_kv + h) * (HEAD_DIM * 16 / KB);
}
uint channel_at(RopeArgs a, bool key, uint d) {
    return (key ? d / KB * a.max_rows * KB + d % KB : d) * (16 / KB);
}

void store(RopeArgs a, bool key, uint h, uint d, uint r, float value) {
    const uint64_t at = stored_at(a, key, h, r) + uint64_t(channel_at(a, key, d));
    if (KV == KV_F32) F32(at).v[0] = value;
    else if (KV == KV_F16) F16(at).v[0] = float16_t(value);
    else whole[gl_SubgroupID * HEAD_DIM + d] = value;
}

// Rounds the head in `whole`. The scale of a group is 1/127 of its largest magnitude, rounded to
// f16 as it is stored. It is NaN if an f16 cannot hold it.
void store_codes(RopeArgs a, bool key, uint h, uint r) {
    if (KV != KV_Q8) return;
    subgroupBarrier();
    const uint64_t to = key ? a.scratch_k : a.scratch_v;
    const uint mine = gl_SubgroupID * HEAD_DIM;
    const uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint g0 = 0; g0 < GROUPS; g0 += SG / WIDE) {
        const uint g = g0 + lane / WIDE, first = g * GROUP + lane % WIDE;
        uint most = 0;
        if (g < GROUPS)
            [[unroll]] for (uint i = 0; i < TURNS; i++)
                most = max(most, magnitude(whole[mine + first + i * WIDE]));
        [[unroll]] for (uint d = WIDE / 2; d > 0; d /= 2)
            most = max(most, subgroupShuffleXor(most, d));
        const float unrounded = step_of(scale_of(most), 127.0);
        const bool fits = magnitude(unrounded) < floatBitsToUint(65520.0);
        const float16_t stored = float16_t(fits ? unrounded : not_a_number());
        const float scale = float(stored), inv = 1.0 / scale;
        const bool has_codes = fits && scale > 0.0;
        if (g >= GROUPS) continue;
        const uint64_t scales = to + uint64_t(a.max_rows) * a.n_kv * HEAD_DIM
            + uint64_t(h * GROUPS * a.max_rows + r) * 2;
        if (lane % WIDE == 0) F16(scales + uint64_t(g * a.max_rows * 2)).v[0] = stored;
        [[unroll]] for (uint i = 0; i < TURNS; i++) {
            const uint d = first + i * WIDE;
            precise float scaled = whole[mine + d] * inv;
            const int code = has_codes ? int(clamp(roundEven(scaled), -128.0, 127.0)) : 0;
            I8(stored_at(a, key, h, r) + uint64_t(channel_at(a, key, d))).v[0] = int8_t(code);
        }
    }
    subgroupBarrier(); // before `whole` is written again
}

// 1 / sqrt(mean square + eps) of a head. `part` is the sum of squares of a lane.
float inv_rms_of_head(float part, float eps) {
    precise float s = part;
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) s = s + subgroupShuffleXor(s, d);
    precise float mean = s / float(HEAD_DIM) + eps;
    return inverse_root(mean);
}

// Processes head `head` of row `r`, counted over queries, keys and values. Lane i has elements i, i
// + SG, ... of both halves.
void rope_head(RopeArgs a, uint head, uint r) {
    const uint lane = gl_SubgroupInvocationID;
    if (head >= a.n_heads + a.n_kv) {
        const uint h = head - a.n_heads - a.n_kv;
        const uint64_t from = uint64_t(a.v) + uint64_t(r * a.n_kv + h) * (HEAD_DIM * 4);
        float inv = 1.0;
        if (V_NORM) {
            precise float s = 0.0;
            for (uint d = lane; d < HEAD_DIM; d += SG) {
                const float v = SharedF32(from + uint64_t(d * 4)).v[0];
                s = fma(v, v, s);
            }
            inv = inv_rms_of_head(s, a.eps);
        }
        for (uint d = lane; d < HEAD_DIM; d += SG) {
            SharedF32 at = SharedF32(from + uint64_t(d * 4));
            precise float v = at.v[0] * inv;
            if (V_NORM) at.v[0] = v;
            store(a, false, h, d, r, v);
        }
        store_codes(a, false, h, r);
        return;
    }
    const bool query = head < a.n_heads;
    const uint h = query ? head : head - a.n_heads;
    const uint64_t rows = query ? uint64_t(a.q) : uint64_t(a.k),
        weights = query ? uint64_t(a.q_norm) : uint64_t(a.k_norm);
    const uint64_t at = rows + uint64_t(r * (query ? a.n_heads : a.n_kv) + h) * (HEAD_DIM * 4);
    const uint64_t table = uint64_t(a.table) + uint64_t(r) * (HEAD_DIM * 4);
    float x[PAIRS_OF_LANE], y[PAIRS_OF_LANE];
    precise float s = 0.0;
    [[unroll]] for (uint i = 0; i < PAIRS_OF_LANE; i++) {
        const uint d = i * SG + lane;
        x[i] = 0.0, y[i] = 0.0;
        if (d < HALF) {
            SharedF32 from = SharedF32(at + uint64_t(d * 4));
            x[i] = from.v[0];
            y[i] = from.v[HALF];
        }
        s = fma(x[i], x[i], s);
        s = fma(y[i], y[i], s);
    }
    const float inv = inv_rms_of_head(s, a.eps);
    [[unroll]] for (uint i = 0; i < PAIRS_OF_LANE; i++) {
        const uint d = i * SG + lane;
        if (d >= HALF) break;
        F32 w = F32(weights + uint64_t(d * 4)), turn = F32(table + uint64_t(d * 4));
        precise float nx = (x[i] * inv) * w.v[0];
        precise float ny = (y[i] * inv) * w.v[HALF];
        const float cos_ = turn.v[0], sin_ = turn.v[HALF];
        precise float rx = fma(nx, cos_, -(ny * sin_));
        precise float ry = fma(ny, cos_, nx * sin_);
        // The reference also stores rotated keys here. No kernel reads them.
        SharedF32 to = SharedF32(at + uint64_t(d * 4));
        to.v[0] = rx;
        to.v[HALF] = ry;
        if (!query) {
            store(a, true, h, d, r, rx);
            store(a, true, h, d + HALF, r, ry);
        }
    }
    if (!query) store_codes(a, true, h, r);
}
