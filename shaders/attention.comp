// Attention of a block of rows over pages of 256 positions, for the query heads of one kv head: a thread a position while scoring, a
// thread four channels of every few positions while summing values. Pages are either split over workgroups (partials are joined by
// who reads them) or walked here; both ways do the same operations in the same order.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "attention.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint HEAD_DIM = 128; // a power of two, 16 to 256
layout(constant_id = 3) const uint GQ = 1;         // query heads of a kv head
layout(constant_id = 4) const uint R = 1;          // rows of a block
layout(constant_id = 5) const uint KV = 1;         // see kv.glsl
layout(constant_id = 6) const bool SPLIT = true;
#include "kv.glsl"

layout(push_constant, scalar) uniform Push {
    F32 q;              // [rows, n_kv, GQ, HEAD_DIM]
    SharedF32 out_;     // the same; where pages are split, [live row, n_kv, GQ, slots, HEAD_DIM + 2]
    U32x4 k;            // [all_pages, n_kv, HEAD_DIM / KB, PAGE, KB]
    uint64_t v;         // [all_pages, n_kv, PAGE, HEAD_DIM]
    U32x4 scratch_k;    // [n_kv, HEAD_DIM / KB, max_rows, KB]
    uint64_t scratch_v; // [max_rows, n_kv, HEAD_DIM]
    Step step_;
    float scale;
    uint n_kv;
    uint pages;         // physical, of a sequence
    uint all_pages;
    uint window;        // 0: none
    uint max_rows;
    uint slots;         // pages of a row's partials
    uint64_t tail;      // see join.glsl
};

const uint PAIRS = R * GQ;
const uint TEAMS = 256 / SG;
const uint KEYS = HEAD_DIM / KB;              // 16-byte loads of a key
const uint BATCH = KEYS < 8 ? KEYS : 8;       // of them in flight together
const uint GROUP = GROUP_OF(HEAD_DIM);        // channels of a scale
const uint GROUPS = HEAD_DIM / GROUP;
const uint PARTS = 1024 / HEAD_DIM;           // positions summed side by side, each PARTS apart
const uint TURNS = PAGE / PARTS;
const bool EARLY = PAIRS <= 4;                // few sums to keep: values are loaded before the scores are done
const uint AHEAD = EARLY ? 16 : 8;            // values whose loads are in flight together
const uint CP = PAIRS < 4 ? 1 : PAIRS / 4;    // pairs whose partial sums fit the room of the exponentials
const uint VALUES = PAIRS * HEAD_DIM;         // outputs, each thread every 256th
const uint MINE = (VALUES + 255) / 256;

#include "join.glsl"

shared vec4 qs[PAIRS][HEAD_DIM / 4];
shared vec4 es[(PAIRS < 4 ? 4 : PAIRS) * PAGE / 4]; // exponentials [PAIRS, PAGE], then partial sums [CP, PARTS, HEAD_DIM]
shared float parts[PAIRS][TEAMS];
shared vec2 factors[PAIRS];    // what joins this page
shared vec2 page_ml[PAIRS];
shared uint16_t path[R][PAGE]; // scratch row of a position of this page
shared float value_scales[KV == KV_Q8 ? GROUPS : 1][KV == KV_Q8 ? PAGE : 1];

// Where a head's first scale in a page of the cache lies, and in scratch; groups are a page's, or scratch's, positions apart.
uint64_t cached_codes() { return uint64_t(all_pages) * n_kv * PAGE * HEAD_DIM; }
uint64_t scratch_codes() { return uint64_t(max_rows) * n_kv * HEAD_DIM; }
float scratch_scale(uint64_t base, uint head, uint group, uint row) {
    return scale_at(base, scratch_codes(), (head * GROUPS + group) * max_rows + row);
}

// Four channels of a scratch row's value.
vec4 scratch_value(uint row, uint head, uint channel, float scale_) {
    return four_of(raw_at(scratch_v, (row * n_kv + head) * (HEAD_DIM / 4) + channel), scale_);
}

void main() {
    const uint t = gl_LocalInvocationID.x, head = gl_WorkGroupID.x, i0 = gl_WorkGroupID.y * R;
    const uint live = step_.rows - step_.first;
    if (i0 >= live) return;
    // Rows of a block are of one sequence: where there are several, a block is a row.
    const uint root = step_.v[STEP_ROOTS * max_rows + step_.first + i0];
    const uint base = step_.v[STEP_POSITIONS * max_rows + root];
    const uint first_page = step_.v[STEP_SEQUENCES * max_rows + step_.first + i0] * pages;
    const bool chain = step_.chain != 0;
    uint position[R];
    uint lowest = 0xffffffffu, highest = 0;
    [[unroll]] for (uint j = 0; j < R; j++) {
        position[j] = step_.v[STEP_POSITIONS * max_rows + step_.first + min(i0 + j, live - 1)];
        lowest = min(lowest, first_visible(position[j], window) / PAGE);
        highest = max(highest, position[j]);
    }
    const uint end_all = highest / PAGE + 1;
    uint begin = lowest, end = end_all;
    if (SPLIT) {
        begin = lowest + gl_WorkGroupID.z;
        end = min(begin + 1, end);
        if (begin >= end) return;
    }
    for (uint i = t; i < VALUES; i += 256) {
        const uint pair = i / HEAD_DIM, d = i % HEAD_DIM;
        const uint r = step_.first + min(i0 + pair / GQ, live - 1);
        qs[pair][d / 4][d % 4] = q.v[((r * n_kv + head) * GQ + pair % GQ) * HEAD_DIM + d];
    }

    Running run = Running(0.0, 0.0); // of pair t
    float o[MINE];
    [[unroll]] for (uint k_ = 0; k_ < MINE; k_++) o[k_] = 0.0;

    for (uint page = begin; page < end; page++) {
        const uint p = page * PAGE + t;
        const bool uniform_keys = chain || (page + 1) * PAGE <= base;
        if (!uniform_keys && t < R) {
            uint node = step_.first + min(i0 + t, live - 1);
            while (node != NO_PARENT) {
                const uint at = step_.v[STEP_POSITIONS * max_rows + node];
                if (at / PAGE == page) path[t][at % PAGE] = uint16_t(node);
                if (at < page * PAGE) break;
                node = step_.v[STEP_PARENTS * max_rows + node];
            }
        }
        barrier();

        // Scores.
        float s[PAIRS];
        [[unroll]] for (uint n = 0; n < PAIRS; n++) s[n] = 0.0;
        const bool cached = p < base;
        if (p > highest) {
            // Nobody sees it. Its value will be multiplied with 0 nevertheless, and must be a number.
            if (KV == KV_Q8)
                [[unroll]] for (uint g = 0; g < GROUPS; g++) value_scales[g][t] = 0.0;
        } else if (cached || chain) {
            U32x4 from = cached ? k : scratch_k;
            const uint stride = cached ? PAGE : max_rows;
            const uint page_head = (first_page + page % pages) * n_kv + head, row = min(root + p - base, max_rows - 1);
            const uint at = cached ? page_head * KEYS * PAGE + t : head * KEYS * max_rows + row;
            const uint scales_at = cached ? page_head * GROUPS * PAGE + t : head * GROUPS * max_rows + row;
            const uint64_t codes = cached ? cached_codes() : scratch_codes();
            if (KV == KV_Q8)
                [[unroll]] for (uint g = 0; g < GROUPS; g++)
                    value_scales[g][t] = scale_at(cached ? v : scratch_v, codes, scales_at + g * stride);
            [[unroll]] for (uint c0 = 0; c0 < KEYS; c0 += BATCH) {
                uvec4 raw[BATCH];
                float scales[BATCH];
                [[unroll]] for (uint c = 0; c < BATCH; c++) {
                    raw[c] = from.v[at + (c0 + c) * stride];
                    scales[c] = scale_at(uint64_t(from), codes, scales_at + (c0 + c) * KB / GROUP * stride);
                }
                [[unroll]] for (uint c = 0; c < BATCH; c++)
                    [[unroll]] for (uint part = 0; part < KB / 4; part++) {
                        const vec4 key = four(raw[c], part, scales[c]);
                        [[unroll]] for (uint n = 0; n < PAIRS; n++)
                            s[n] = add_products(qs[n][(c0 + c) * (KB / 4) + part], key, s[n]);
                    }
            }
        } else {
            for (uint j = 0; j < R; j++) {
                const uint seen = step_.v[STEP_POSITIONS * max_rows + step_.first + min(i0 + j, live - 1)];
                if (p > seen) continue;
                const uint at = head * KEYS * max_rows + path[j][t];
                float mine[GQ];
                [[unroll]] for (uint g = 0; g < GQ; g++) mine[g] = 0.0;
                for (uint c = 0; c < KEYS; c++) {
                    const uvec4 raw = scratch_k.v[at + c * max_rows];
                    const float scale_ = scratch_scale(uint64_t(scratch_k), head, c * KB / GROUP, path[j][t]);
                    [[unroll]] for (uint part = 0; part < KB / 4; part++) {
                        const vec4 key = four(raw, part, scale_);
                        [[unroll]] for (uint g = 0; g < GQ; g++)
                            mine[g] = add_products(qs[j * GQ + g][c * (KB / 4) + part], key, mine[g]);
                    }
                }
                [[unroll]] for (uint n = 0; n < PAIRS; n++)
                    if (n / GQ == j) s[n] = mine[n % GQ];
            }
        }

        const uint channel = t % (HEAD_DIM / 4), part = t / (HEAD_DIM / 4);
        const uint page_v = ((first_page + page % pages) * n_kv + head) * PAGE * (HEAD_DIM / 4) + channel, group = channel * 4 / GROUP;
        uvec4 values[AHEAD];
#define LOAD_VALUES(TURN) \
    [[unroll]] for (uint u = 0; u < AHEAD; u++) { \
        const uint slot = min(TURN + u, TURNS - 1) * PARTS + part, at = page * PAGE + slot; \
        const uint in_scratch = (min(root + at - base, max_rows - 1) * n_kv + head) * (HEAD_DIM / 4) + channel; \
        values[u] = raw_at(at < base ? v : scratch_v, at < base ? page_v + slot * (HEAD_DIM / 4) : in_scratch); \
    }
        if (EARLY && uniform_keys) LOAD_VALUES(0)

        // Largest score, exponentials and their sum.
        const float NONE = uintBitsToFloat(0xff800000u);
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            const uint j = n / GQ;
            const bool seen = p <= position[j] && p >= first_visible(position[j], window);
            precise float scaled = s[n] * scale;
            s[n] = seen ? scaled : NONE;
            float m = s[n];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) m = max(m, subgroupShuffleXor(m, d));
            if (gl_SubgroupInvocationID == 0) parts[n][gl_SubgroupID] = m;
        }
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            float m = NONE;
            [[unroll]] for (uint i = 0; i < TEAMS; i++) m = max(m, parts[n][i]);
            if (t == n) page_ml[n].x = m;
            s[n] = s[n] == NONE ? 0.0 : exp_(s[n] - m);
            es[(n * PAGE + t) / 4][t % 4] = s[n];
        }
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            precise float l = s[n];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) l = l + subgroupShuffleXor(l, d);
            if (gl_SubgroupInvocationID == 0) parts[n][gl_SubgroupID] = l;
        }

        // Values. Beyond the last visible position all exponentials are 0.
        const uint turns = min(TURNS, (highest - page * PAGE) / PARTS + 1);
        vec4 sum[PAIRS];
        [[unroll]] for (uint n = 0; n < PAIRS; n++) sum[n] = vec4(0.0);
        if (uniform_keys) {
            for (uint turn0 = 0; turn0 < turns; turn0 += AHEAD) {
                if (!EARLY || turn0 > 0) LOAD_VALUES(turn0)
                [[unroll]] for (uint u = 0; u < AHEAD; u++) {
                    const uint slot = (turn0 + u) * PARTS + part;
                    if (TURNS % AHEAD != 0 && slot >= PAGE) break;
                    const vec4 value = four_of(values[u], KV == KV_Q8 ? value_scales[group][slot] : 1.0);
                    [[unroll]] for (uint n = 0; n < PAIRS; n++)
                        sum[n] = add_scaled(es[(n * PAGE + slot) / 4][slot % 4], value, sum[n]);
                }
            }
        } else {
            for (uint turn = 0; turn < turns; turn++) {
                const uint slot = turn * PARTS + part, at = page * PAGE + slot;
                float scale_ = KV == KV_Q8 && at < base ? value_scales[group][slot] : 1.0;
                vec4 value = at < base ? four_of(raw_at(v, page_v + slot * (HEAD_DIM / 4)), scale_) : vec4(0.0);
                [[unroll]] for (uint j = 0; j < R; j++) {
                    if (at > position[j]) continue;
                    if (at >= base) {
                        const uint row = uint(path[j][slot]);
                        value = scratch_value(row, head, channel, scratch_scale(scratch_v, head, group, row));
                    }
                    [[unroll]] for (uint g = 0; g < GQ; g++)
                        sum[j * GQ + g] = add_scaled(es[((j * GQ + g) * PAGE + slot) / 4][slot % 4], value, sum[j * GQ + g]);
                }
            }
        }
        barrier();
        if (t < PAIRS) {
            precise float l = 0.0;
            [[unroll]] for (uint i = 0; i < TEAMS; i++) l = l + parts[t][i];
            page_ml[t].y = l;
            const Running now = Running(page_ml[t].x, l);
            const uint at = step_.v[STEP_POSITIONS * max_rows + step_.first + min(i0 + t / GQ, live - 1)];
            const uint from = first_visible(at, window) / PAGE;
            if (page == from) {
                run = now;
                factors[t] = vec2(0.0, 1.0);
            } else if (page > from && page <= at / PAGE) {
                float fa, fb;
                run = join(run, now, fa, fb);
                factors[t] = vec2(fa, fb);
            }
        }

        // The parts' sums, in order, a few pairs at a time.
        [[unroll]] for (uint n0 = 0; n0 < PAIRS; n0 += CP) {
            [[unroll]] for (uint n = n0; n < n0 + CP; n++) es[((n - n0) * PARTS + part) * (HEAD_DIM / 4) + channel] = sum[n];
            barrier();
            [[unroll]] for (uint m = 0; m < MINE; m++) {
                const uint value = m * 256 + t, n = value / HEAD_DIM, d = value % HEAD_DIM;
                if (n < n0 || n >= n0 + CP) continue;
                precise float all = 0.0;
                for (uint h = 0; h < PARTS; h++) all = all + es[((n - n0) * PARTS + h) * (HEAD_DIM / 4) + d / 4][d % 4];
                const uint j = n / GQ;
                const uint seen = step_.v[STEP_POSITIONS * max_rows + step_.first + min(i0 + j, live - 1)];
                const uint from = first_visible(seen, window) / PAGE;
                if (page < from || page > seen / PAGE) continue;
                if (SPLIT) {
                    if (i0 + j >= live) continue;
                    const uint place = ((((i0 + j) * n_kv + head) * GQ + n % GQ) * slots + (page - from)) * (HEAD_DIM + 2);
                    out_.v[place + d] = all;
                    if (d < 2) out_.v[place + HEAD_DIM + d] = page_ml[n][d];
                } else {
                    o[m] = page == from ? all : join_output(o[m], all, factors[n].x, factors[n].y);
                }
            }
            barrier();
        }
    }
    if (JOIN) join_block(tail, step_.first, i0, min(R, live - i0), end_all - lowest, n_kv, slots);
    if (SPLIT) return;
    if (t < PAIRS) page_ml[t].y = run.l;
    barrier();
    [[unroll]] for (uint m = 0; m < MINE; m++) {
        const uint value = m * 256 + t, n = value / HEAD_DIM, d = value % HEAD_DIM, j = n / GQ;
        if (n >= PAIRS || i0 + j >= live) continue;
        precise float y = o[m] / page_ml[n].y;
        out_.v[(((step_.first + i0 + j) * n_kv + head) * GQ + n % GQ) * HEAD_DIM + d] = y;
    }
}
