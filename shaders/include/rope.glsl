// RMSNorm and rotation of queries and keys; keys and values go to this step's scratch rows.
//
// Who includes this says what SG, HEAD_DIM, KV_F16 and KB (channels of a key that lie together: 16 bytes) are.

const uint HALF = HEAD_DIM / 2;
const uint ROPE_PER = (HALF + SG - 1) / SG;

void store_kv(uint64_t at, uint i, float value) {
    if (KV_F16) F16(at).v[i] = float16_t(value);
    else F32(at).v[i] = value;
}

uint key_at(RopeArgs args, uint h, uint d, uint r) { return ((h * (HEAD_DIM / KB) + d / KB) * args.max_rows + r) * KB + d % KB; }

// One subgroup for one head of row `r`, lane i with elements i, i + SG, ... of both halves.
void rope(RopeArgs args, uint head, uint r) {
    const uint lane = gl_SubgroupInvocationID;
    if (head >= args.n_heads + args.n_kv) {
        const uint h = head - args.n_heads - args.n_kv;
        for (uint d = lane; d < HEAD_DIM; d += SG)
            store_kv(args.scratch_v, (r * args.n_kv + h) * HEAD_DIM + d, args.v.v[(r * args.n_kv + h) * HEAD_DIM + d]);
        return;
    }
    const bool query = head < args.n_heads;
    const uint h = query ? head : head - args.n_heads;
    float a[ROPE_PER], b[ROPE_PER];
    precise float s = 0.0;
    [[unroll]] for (uint i = 0; i < ROPE_PER; i++) {
        const uint d = i * SG + lane;
        a[i] = 0.0, b[i] = 0.0;
        if (d < HALF) {
            const uint at = (query ? r * args.n_heads + h : r * args.n_kv + h) * HEAD_DIM + d;
            a[i] = query ? args.q.v[at] : args.k.v[at];
            b[i] = query ? args.q.v[at + HALF] : args.k.v[at + HALF];
        }
        s = fma(a[i], a[i], s);
        s = fma(b[i], b[i], s);
    }
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) s = s + subgroupShuffleXor(s, d);
    precise float mean = s / float(HEAD_DIM) + args.eps;
    const float inv = 1.0 / sqrt(mean);
    [[unroll]] for (uint i = 0; i < ROPE_PER; i++) {
        const uint d = i * SG + lane;
        if (d >= HALF) break;
        const float w_a = query ? args.q_norm.v[d] : args.k_norm.v[d], w_b = query ? args.q_norm.v[d + HALF] : args.k_norm.v[d + HALF];
        precise float x = (a[i] * inv) * (1.0 + w_a);
        precise float y = (b[i] * inv) * (1.0 + w_b);
        const float cos_ = args.table.v[r * HEAD_DIM + d], sin_ = args.table.v[r * HEAD_DIM + HALF + d];
        precise float rx = fma(x, cos_, -(y * sin_));
        precise float ry = fma(y, cos_, x * sin_);
        if (query) {
            const uint at = (r * args.n_heads + h) * HEAD_DIM + d;
            args.q.v[at] = rx;
            args.q.v[at + HALF] = ry;
        } else {
            store_kv(args.scratch_k, key_at(args, h, d, r), rx);
            store_kv(args.scratch_k, key_at(args, h, d + HALF, r), ry);
        }
    }
}
