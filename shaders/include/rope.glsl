// RMSNorm and rotation of one head of queries or keys by one subgroup; keys and values go to this step's scratch rows.
//
// Who includes this says what SG, HEAD_DIM, KV and SUBGROUPS (of a workgroup) are, and has shared memory `whole` [SUBGROUPS * HEAD_DIM] where
// KV is q8.

const uint HALF = HEAD_DIM / 2;
const uint PAIRS_OF_LANE = (HALF + SG - 1) / SG;

const uint GROUP = GROUP_OF(HEAD_DIM), GROUPS = HEAD_DIM / GROUP; // of channels with one scale
const uint WIDE = SG < GROUP ? SG : GROUP;                        // lanes that work on a group
const uint TURNS = GROUP / WIDE;

uint key_at(RopeArgs a, uint h, uint d, uint r) { return ((h * (HEAD_DIM / KB) + d / KB) * a.max_rows + r) * KB + d % KB; }

uint value_at(RopeArgs a, uint h, uint d, uint r) { return (r * a.n_kv + h) * HEAD_DIM + d; }

void store(RopeArgs a, bool key, uint h, uint d, uint r, float value) {
    const uint at = key ? key_at(a, h, d, r) : value_at(a, h, d, r);
    const uint64_t to = key ? a.scratch_k : a.scratch_v;
    if (KV == KV_F32) F32(to).v[at] = value;
    else if (KV == KV_F16) F16(to).v[at] = float16_t(value);
    else whole[gl_SubgroupID * HEAD_DIM + d] = value;
}

// Rounds what lies in `whole`: a group's scale is a 127th of its largest magnitude, as the f16 that is stored.
void store_codes(RopeArgs a, bool key, uint h, uint r) {
    if (KV != KV_Q8) return;
    subgroupBarrier();
    const uint64_t to = key ? a.scratch_k : a.scratch_v;
    const uint mine = gl_SubgroupID * HEAD_DIM;
    const uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint g0 = 0; g0 < GROUPS; g0 += SG / WIDE) {
        const uint g = g0 + lane / WIDE, first = g * GROUP + lane % WIDE;
        float most = 0.0;
        if (g < GROUPS) [[unroll]] for (uint i = 0; i < TURNS; i++) most = max(most, abs(whole[mine + first + i * WIDE]));
        [[unroll]] for (uint d = WIDE / 2; d > 0; d /= 2) most = max(most, subgroupShuffleXor(most, d));
        const float16_t stored = float16_t(min(most / 127.0, 65504.0));
        const float scale = float(stored), inv = scale > 0.0 ? 1.0 / scale : 0.0;
        if (g >= GROUPS) continue;
        if (lane % WIDE == 0) F16(to + uint64_t(a.max_rows) * a.n_kv * HEAD_DIM).v[(h * GROUPS + g) * a.max_rows + r] = stored;
        [[unroll]] for (uint i = 0; i < TURNS; i++) {
            const uint d = first + i * WIDE;
            precise float scaled = whole[mine + d] * inv;
            const int code = int(clamp(roundEven(scaled), -128.0, 127.0));
            I8(to).v[key ? key_at(a, h, d, r) : value_at(a, h, d, r)] = int8_t(code);
        }
    }
    subgroupBarrier(); // before `whole` is written again
}

// Head `head` of row `r`: queries, then keys, then values. Lane i has elements i, i + SG, ... of both halves.
void rope_head(RopeArgs a, uint head, uint r) {
    SharedF32 q = SharedF32(uint64_t(a.q)), k = SharedF32(uint64_t(a.k)), v = SharedF32(uint64_t(a.v));
    const uint lane = gl_SubgroupInvocationID;
    if (head >= a.n_heads + a.n_kv) {
        const uint h = head - a.n_heads - a.n_kv;
        for (uint d = lane; d < HEAD_DIM; d += SG) store(a, false, h, d, r, v.v[value_at(a, h, d, r)]);
        store_codes(a, false, h, r);
        return;
    }
    const bool query = head < a.n_heads;
    const uint h = query ? head : head - a.n_heads;
    const uint base = (query ? r * a.n_heads + h : r * a.n_kv + h) * HEAD_DIM;
    float x[PAIRS_OF_LANE], y[PAIRS_OF_LANE];
    precise float s = 0.0;
    [[unroll]] for (uint i = 0; i < PAIRS_OF_LANE; i++) {
        const uint d = i * SG + lane;
        x[i] = 0.0, y[i] = 0.0;
        if (d < HALF) {
            x[i] = query ? q.v[base + d] : k.v[base + d];
            y[i] = query ? q.v[base + d + HALF] : k.v[base + d + HALF];
        }
        s = fma(x[i], x[i], s);
        s = fma(y[i], y[i], s);
    }
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) s = s + subgroupShuffleXor(s, d);
    precise float mean = s / float(HEAD_DIM) + a.eps;
    const float inv = 1.0 / sqrt(mean);
    [[unroll]] for (uint i = 0; i < PAIRS_OF_LANE; i++) {
        const uint d = i * SG + lane;
        if (d >= HALF) break;
        const float w_x = query ? a.q_norm.v[d] : a.k_norm.v[d], w_y = query ? a.q_norm.v[d + HALF] : a.k_norm.v[d + HALF];
        precise float nx = (x[i] * inv) * (1.0 + w_x);
        precise float ny = (y[i] * inv) * (1.0 + w_y);
        const float cos_ = a.table.v[r * HEAD_DIM + d], sin_ = a.table.v[r * HEAD_DIM + HALF + d];
        precise float rx = fma(nx, cos_, -(ny * sin_));
        precise float ry = fma(ny, cos_, nx * sin_);
        if (query) {
            q.v[base + d] = rx;
            q.v[base + d + HALF] = ry;
        } else {
            // As the twin leaves them; nobody reads them any more.
            k.v[base + d] = rx;
            k.v[base + d + HALF] = ry;
            store(a, true, h, d, r, rx);
            store(a, true, h, d + HALF, r, ry);
        }
    }
    if (!query) store_codes(a, true, h, r);
}
