// Attention of a block of R rows over pages of 256 positions, for the GQ query heads of one kv head, by one side of 256 threads: a thread
// a position while scoring, a thread four channels of every few positions while summing values. Pages are either split (partials are
// joined by who reads them) or walked here; both ways do the same operations in the same order.
//
// Who includes this says what SG, HEAD_DIM (a power of two, 16 to 256), GQ, R, KV_F16, KB (channels of a key that lie together: 16
// bytes), SPLIT and SIDES (of a workgroup) are.

const uint PAIRS = R * GQ;
const uint SIDE_TEAMS = 256 / SG;
const uint KEYS = HEAD_DIM / KB;              // 16-byte loads of a key
const uint BATCH = KEYS < 8 ? KEYS : 8;       // of them in flight together
const uint PARTS = 1024 / HEAD_DIM;           // positions summed side by side, each PARTS apart
const uint TURNS = PAGE / PARTS;
const bool EARLY = PAIRS <= 4;
const uint AHEAD = EARLY ? 16 : 8;          // values whose loads are in flight together
const uint CP = PAIRS < 4 ? 1 : PAIRS / 4;    // pairs whose partial sums fit the room of the exponentials
const uint VALUES = PAIRS * HEAD_DIM;         // outputs, each thread every 256th
const uint OUTPUTS = (VALUES + 255) / 256;

shared vec4 qs[SIDES][PAIRS][HEAD_DIM / 4];
shared vec4 es[SIDES][(PAIRS < 4 ? 4 : PAIRS) * PAGE / 4]; // exponentials [PAIRS, PAGE], then partial sums [CP, PARTS, HEAD_DIM]
shared float side_parts[SIDES][PAIRS][SIDE_TEAMS];
shared vec2 factors[SIDES][PAIRS];    // what joins this page
shared vec2 page_ml[SIDES][PAIRS];
shared uint16_t path[SIDES][R][PAGE]; // scratch row of a position of this page

void unpack(uvec4 w, out vec4 a, out vec4 b) {
    if (KV_F16) {
        a = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y));
        b = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));
    } else {
        a = uintBitsToFloat(w);
        b = vec4(0);
    }
}

// Four channels of a value: as they lie, and as floats.
uvec4 raw_value(uint64_t base, uint i) { return KV_F16 ? uvec4(U32x2(base).v[i], 0, 0) : U32x4(base).v[i]; }
vec4 value_of(uvec4 raw) { return KV_F16 ? vec4(unpackHalf2x16(raw.x), unpackHalf2x16(raw.y)) : uintBitsToFloat(raw); }

// sum + a.x b.x + a.y b.y + ..., in this order.
float add_products(vec4 a, vec4 b, float sum) {
    precise float s = sum;
    [[unroll]] for (uint e = 0; e < 4; e++) s = fma(a[e], b[e], s);
    return s;
}

vec4 add_scaled(float e, vec4 value, vec4 sum) {
    precise vec4 s = fma(vec4(e), value, sum);
    return s;
}

// Rows `block` * R and on, kv head `head`, for one side; where pages are split, page `slot` of the rows' pages. Barriers meet those of the
// other sides: a side without work does that of another again and does not store.
void attention(AttentionArgs args, uint side, uint head, uint block, uint slot, bool stores) {
    const uint t = gl_LocalInvocationID.x % 256, i0 = block * R;
    const uint live = args.step_.rows - args.step_.first, base = args.step_.base;
    const bool chain = args.step_.chain != 0;
    uint position[R];
    uint lowest = 0xffffffffu, highest = 0;
    [[unroll]] for (uint j = 0; j < R; j++) {
        position[j] = args.step_.v[STEP_POSITIONS * args.max_rows + args.step_.first + min(i0 + j, live - 1)];
        lowest = min(lowest, first_visible(position[j], args.window) / PAGE);
        highest = max(highest, position[j]);
    }
    uint begin = lowest, end = highest / PAGE + 1;
    if (SPLIT) {
        stores = stores && lowest + slot < end;
        begin = min(lowest + slot, end - 1);
        end = begin + 1;
    }
    for (uint i = t; i < VALUES; i += 256) {
        const uint pair = i / HEAD_DIM, d = i % HEAD_DIM;
        const uint r = args.step_.first + min(i0 + pair / GQ, live - 1);
        qs[side][pair][d / 4][d % 4] = args.q.v[((r * args.n_kv + head) * GQ + pair % GQ) * HEAD_DIM + d];
    }

    Running run = Running(0.0, 0.0); // of pair t
    float o[OUTPUTS];
    [[unroll]] for (uint k_ = 0; k_ < OUTPUTS; k_++) o[k_] = 0.0;

    for (uint page = begin; page < end; page++) {
        const uint p = page * PAGE + t;
        const bool uniform_keys = chain || (page + 1) * PAGE <= base;
        if (!uniform_keys && t < R) {
            uint node = args.step_.first + min(i0 + t, live - 1);
            while (node != NO_PARENT) {
                const uint at = args.step_.v[STEP_POSITIONS * args.max_rows + node];
                if (at / PAGE == page) path[side][t][at % PAGE] = uint16_t(node);
                if (at < page * PAGE) break;
                node = args.step_.v[STEP_PARENTS * args.max_rows + node];
            }
        }
        barrier();

        // Scores.
        float s[PAIRS];
        [[unroll]] for (uint n = 0; n < PAIRS; n++) s[n] = 0.0;
        const bool cached = p < base;
        if (p > highest) {
            // Nobody sees it.
        } else if (cached || chain) {
            U32x4 from = cached ? args.k : args.scratch_k;
            const uint stride = cached ? PAGE : args.max_rows;
            const uint at = cached ? (page % args.pages * args.n_kv + head) * KEYS * PAGE + t
                                   : head * KEYS * args.max_rows + min(p - base, args.max_rows - 1);
            [[unroll]] for (uint c0 = 0; c0 < KEYS; c0 += BATCH) {
                uvec4 raw[BATCH];
                [[unroll]] for (uint c = 0; c < BATCH; c++) raw[c] = from.v[at + (c0 + c) * stride];
                [[unroll]] for (uint c = 0; c < BATCH; c++) {
                    vec4 a, b;
                    unpack(raw[c], a, b);
                    [[unroll]] for (uint n = 0; n < PAIRS; n++) {
                        s[n] = add_products(qs[side][n][(c0 + c) * (KB / 4)], a, s[n]);
                        if (KV_F16) s[n] = add_products(qs[side][n][(c0 + c) * 2 + 1], b, s[n]);
                    }
                }
            }
        } else {
            for (uint j = 0; j < R; j++) {
                const uint seen = args.step_.v[STEP_POSITIONS * args.max_rows + args.step_.first + min(i0 + j, live - 1)];
                if (p > seen) continue;
                const uint at = head * KEYS * args.max_rows + path[side][j][t];
                float mine[GQ];
                [[unroll]] for (uint g = 0; g < GQ; g++) mine[g] = 0.0;
                for (uint c = 0; c < KEYS; c++) {
                    vec4 a, b;
                    unpack(args.scratch_k.v[at + c * args.max_rows], a, b);
                    [[unroll]] for (uint g = 0; g < GQ; g++) {
                        mine[g] = add_products(qs[side][j * GQ + g][c * (KB / 4)], a, mine[g]);
                        if (KV_F16) mine[g] = add_products(qs[side][j * GQ + g][c * 2 + 1], b, mine[g]);
                    }
                }
                [[unroll]] for (uint n = 0; n < PAIRS; n++)
                    if (n / GQ == j) s[n] = mine[n % GQ];
            }
        }

        // Values whose loads are in flight together; where there are few sums to keep, the first go out before the scores are done.
        const uint channel = t % (HEAD_DIM / 4), part = t / (HEAD_DIM / 4);
        const uint page_v = (page % args.pages * args.n_kv + head) * PAGE * (HEAD_DIM / 4) + channel;
        uvec4 raw[AHEAD];
#define LOAD_VALUES(TURN) \
    [[unroll]] for (uint u = 0; u < AHEAD; u++) { \
        const uint place = min(TURN + u, TURNS - 1) * PARTS + part, at = page * PAGE + place; \
        const uint scratch = (min(at - base, args.max_rows - 1) * args.n_kv + head) * (HEAD_DIM / 4) + channel; \
        raw[u] = raw_value(at < base ? args.v : args.scratch_v, at < base ? page_v + place * (HEAD_DIM / 4) : scratch); \
    }
        if (EARLY && uniform_keys) LOAD_VALUES(0)

        // Largest score, exponentials and their sum.
        const float NONE = uintBitsToFloat(0xff800000u);
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            const uint j = n / GQ;
            const bool seen = p <= position[j] && p >= first_visible(position[j], args.window);
            precise float scaled = s[n] * args.scale;
            s[n] = seen ? scaled : NONE;
            float m = s[n];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) m = max(m, subgroupShuffleXor(m, d));
            if (gl_SubgroupInvocationID == 0) side_parts[side][n][t / SG] = m;
        }
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            float m = NONE;
            [[unroll]] for (uint i = 0; i < SIDE_TEAMS; i++) m = max(m, side_parts[side][n][i]);
            if (t == n) page_ml[side][n].x = m;
            s[n] = s[n] == NONE ? 0.0 : exp_(s[n] - m);
            es[side][(n * PAGE + t) / 4][t % 4] = s[n];
        }
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            precise float l = s[n];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) l = l + subgroupShuffleXor(l, d);
            if (gl_SubgroupInvocationID == 0) side_parts[side][n][t / SG] = l;
        }

        // Values. Beyond the last visible position all exponentials are 0.
        const uint turns = min(TURNS, (highest - page * PAGE) / PARTS + 1);
        vec4 sum[PAIRS];
        [[unroll]] for (uint n = 0; n < PAIRS; n++) sum[n] = vec4(0.0);
        if (uniform_keys) {
            for (uint turn0 = 0; turn0 < turns; turn0 += AHEAD) {
                if (!EARLY || turn0 > 0) LOAD_VALUES(turn0)
                [[unroll]] for (uint u = 0; u < AHEAD; u++) {
                    const uint place = (turn0 + u) * PARTS + part;
                    if (TURNS % AHEAD != 0 && place >= PAGE) break;
                    const vec4 value = value_of(raw[u]);
                    [[unroll]] for (uint n = 0; n < PAIRS; n++)
                        sum[n] = add_scaled(es[side][(n * PAGE + place) / 4][place % 4], value, sum[n]);
                }
            }
        } else {
            for (uint turn = 0; turn < turns; turn++) {
                const uint place = turn * PARTS + part, at = page * PAGE + place;
                vec4 value = at < base ? value_of(raw_value(args.v, page_v + place * (HEAD_DIM / 4))) : vec4(0.0);
                [[unroll]] for (uint j = 0; j < R; j++) {
                    if (at > position[j]) continue;
                    if (at >= base)
                        value = value_of(raw_value(args.scratch_v, (uint(path[side][j][place]) * args.n_kv + head) * (HEAD_DIM / 4) + channel));
                    [[unroll]] for (uint g = 0; g < GQ; g++)
                        sum[j * GQ + g] = add_scaled(es[side][((j * GQ + g) * PAGE + place) / 4][place % 4], value, sum[j * GQ + g]);
                }
            }
        }
        barrier();
        if (t < PAIRS) {
            precise float l = 0.0;
            [[unroll]] for (uint i = 0; i < SIDE_TEAMS; i++) l = l + side_parts[side][t][i];
            page_ml[side][t].y = l;
            const Running now = Running(page_ml[side][t].x, l);
            const uint at = args.step_.v[STEP_POSITIONS * args.max_rows + args.step_.first + min(i0 + t / GQ, live - 1)];
            const uint from = first_visible(at, args.window) / PAGE;
            if (page == from) {
                run = now;
                factors[side][t] = vec2(0.0, 1.0);
            } else if (page > from && page <= at / PAGE) {
                float fa, fb;
                run = join(run, now, fa, fb);
                factors[side][t] = vec2(fa, fb);
            }
        }

        // The parts' sums, in order, a few pairs at a time.
        [[unroll]] for (uint n0 = 0; n0 < PAIRS; n0 += CP) {
            [[unroll]] for (uint n = n0; n < n0 + CP; n++) es[side][((n - n0) * PARTS + part) * (HEAD_DIM / 4) + channel] = sum[n];
            barrier();
            [[unroll]] for (uint m = 0; m < OUTPUTS; m++) {
                const uint value = m * 256 + t, n = value / HEAD_DIM, d = value % HEAD_DIM;
                if (n < n0 || n >= n0 + CP) continue;
                precise float all = 0.0;
                for (uint h = 0; h < PARTS; h++) all = all + es[side][((n - n0) * PARTS + h) * (HEAD_DIM / 4) + d / 4][d % 4];
                const uint j = n / GQ;
                const uint seen = args.step_.v[STEP_POSITIONS * args.max_rows + args.step_.first + min(i0 + j, live - 1)];
                const uint from = first_visible(seen, args.window) / PAGE;
                if (page < from || page > seen / PAGE) continue;
                if (SPLIT) {
                    if (!stores || i0 + j >= live) continue;
                    const uint to = ((((i0 + j) * args.n_kv + head) * GQ + n % GQ) * args.slots + (page - from)) * (HEAD_DIM + 2);
                    args.out_.v[to + d] = all;
                    if (d < 2) args.out_.v[to + HEAD_DIM + d] = page_ml[side][n][d];
                } else {
                    o[m] = page == from ? all : join_output(o[m], all, factors[side][n].x, factors[side][n].y);
                }
            }
            barrier();
        }
    }
    if (SPLIT) return;
    if (t < PAIRS) page_ml[side][t].y = run.l;
    barrier();
    [[unroll]] for (uint m = 0; m < OUTPUTS; m++) {
        const uint value = m * 256 + t, n = value / HEAD_DIM, d = value % HEAD_DIM, j = n / GQ;
        if (n >= PAIRS || i0 + j >= live) continue;
        precise float y = o[m] / page_ml[side][n].y;
        args.out_.v[(((args.step_.first + i0 + j) * args.n_kv + head) * GQ + n % GQ) * HEAD_DIM + d] = y;
    }
}
