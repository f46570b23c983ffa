// Attention of a block of rows over pages of 256 positions, for the query heads of one kv head: a thread a position while scoring, a
// thread a channel while summing values. Pages are either split over workgroups (partials are joined by attention_merge) or walked
// here; both ways do the same operations in the same order.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "attention.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint HEAD_DIM = 128; // a power of two up to 256
layout(constant_id = 3) const uint GQ = 2;         // query heads of a kv head
layout(constant_id = 4) const uint R = 8;          // rows of a block
layout(constant_id = 5) const bool KV_F16 = true;
layout(constant_id = 6) const bool SPLIT = true;

layout(push_constant, scalar) uniform Push {
    F32 q;              // [rows, n_kv, GQ, HEAD_DIM]
    F32 out_;           // the same; where pages are split, [live row, n_kv, GQ, pages, HEAD_DIM + 2]
    uint64_t k;         // [pages, n_kv, HEAD_DIM, PAGE]
    uint64_t v;         // [pages, n_kv, PAGE, HEAD_DIM]
    uint64_t scratch_k; // [n_kv, HEAD_DIM, max_rows]
    uint64_t scratch_v; // [max_rows, n_kv, HEAD_DIM]
    Step step_;
    float scale;
    uint n_kv;
    uint pages;         // physical
    uint window;        // 0: none
    uint max_rows;
    uint slots;         // pages of a row's partials
};

const uint PAIRS = R * GQ;
const uint PARTS = PAGE / HEAD_DIM;
const uint TEAMS = 256 / SG;
const uint BATCH = PAIRS <= 4 && HEAD_DIM >= 64 ? 64 : 16; // loads in flight together

shared vec4 qs[PAIRS][HEAD_DIM / 4];
shared vec4 es[PAIRS][PAGE / 4]; // exponentials, later partial sums of values
shared float parts[PAIRS][TEAMS];
shared uint16_t path[R][PAGE]; // scratch row of a position of this page

float load(uint64_t at, uint i) { return KV_F16 ? float(F16(at).v[i]) : F32(at).v[i]; }

// sum + a.x b.x + a.y b.y + ..., in this order.
float add_products(vec4 a, vec4 b, float sum) {
    precise float s = sum;
    [[unroll]] for (uint e = 0; e < 4; e++) s = fma(a[e], b[e], s);
    return s;
}

void main() {
    const uint t = gl_LocalInvocationID.x, head = gl_WorkGroupID.x, i0 = gl_WorkGroupID.y * R;
    const uint live = step_.rows - step_.first, base = step_.base;
    if (i0 >= live) return;
    const bool chain = step_.chain != 0;
    uint row[R], position[R];
    uint lowest = 0xffffffffu, highest = 0;
    [[unroll]] for (uint j = 0; j < R; j++) {
        row[j] = step_.first + min(i0 + j, live - 1);
        position[j] = step_.v[STEP_POSITIONS * max_rows + row[j]];
        lowest = min(lowest, first_visible(position[j], window) / PAGE);
        highest = max(highest, position[j]);
    }
    uint begin = lowest, end = highest / PAGE + 1;
    if (SPLIT) {
        begin = lowest + gl_WorkGroupID.z;
        end = min(begin + 1, end);
        if (begin >= end) return;
    }
    for (uint i = t; i < PAIRS * HEAD_DIM; i += 256) {
        const uint pair = i / HEAD_DIM, d = i % HEAD_DIM;
        const uint r = step_.first + min(i0 + pair / GQ, live - 1);
        qs[pair][d / 4][d % 4] = q.v[((r * n_kv + head) * GQ + pair % GQ) * HEAD_DIM + d];
    }

    Running run[PAIRS];
    float o[PAIRS];
    [[unroll]] for (uint n = 0; n < PAIRS; n++) run[n] = Running(0.0, 0.0), o[n] = 0.0;

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
        const uint page_k = (page % pages * n_kv + head) * HEAD_DIM * PAGE + t;
        const bool cached = p < base;
        const uint stride = cached ? PAGE : max_rows;
        if (cached || chain) {
            const uint64_t from = cached ? k : scratch_k;
            const uint at = cached ? page_k : head * HEAD_DIM * max_rows + min(p - base, max_rows - 1);
            for (uint d0 = 0; d0 < HEAD_DIM; d0 += BATCH) {
                vec4 key[BATCH / 4];
                [[unroll]] for (uint e = 0; e < BATCH; e++) key[e / 4][e % 4] = load(from, at + (d0 + e) * stride);
                [[unroll]] for (uint e = 0; e < BATCH / 4; e++)
                    [[unroll]] for (uint n = 0; n < PAIRS; n++) s[n] = add_products(qs[n][d0 / 4 + e], key[e], s[n]);
            }
        } else {
            [[unroll]] for (uint j = 0; j < R; j++) {
                if (p > position[j]) continue;
                const uint at = head * HEAD_DIM * max_rows + path[j][t];
                for (uint d = 0; d < HEAD_DIM; d += 4) {
                    vec4 key;
                    [[unroll]] for (uint e = 0; e < 4; e++) key[e] = load(scratch_k, at + (d + e) * max_rows);
                    [[unroll]] for (uint g = 0; g < GQ; g++)
                        s[j * GQ + g] = add_products(qs[j * GQ + g][d / 4], key, s[j * GQ + g]);
                }
            }
        }

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
        Running now[PAIRS];
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            float m = NONE;
            [[unroll]] for (uint i = 0; i < TEAMS; i++) m = max(m, parts[n][i]);
            now[n].m = m;
            s[n] = s[n] == NONE ? 0.0 : exp_(s[n] - m);
            es[n][t / 4][t % 4] = s[n];
        }
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            precise float l = s[n];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) l = l + subgroupShuffleXor(l, d);
            if (gl_SubgroupInvocationID == 0) parts[n][gl_SubgroupID] = l;
        }
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            precise float l = 0.0;
            [[unroll]] for (uint i = 0; i < TEAMS; i++) l = l + parts[n][i];
            now[n].l = l;
        }

        // Values: a part of the page's positions, channel d. Beyond the last visible one all exponentials are 0.
        const uint d = t % HEAD_DIM, first_slot = t / HEAD_DIM * HEAD_DIM;
        const uint end_slot = min(first_slot + HEAD_DIM, highest - page * PAGE + 1);
        float sum[PAIRS];
        [[unroll]] for (uint n = 0; n < PAIRS; n++) sum[n] = 0.0;
        const uint page_v = (page % pages * n_kv + head) * PAGE * HEAD_DIM + d;
        for (uint slot0 = first_slot; slot0 < end_slot; slot0 += BATCH) {
            const uint at0 = page * PAGE + slot0;
            if (at0 + BATCH <= base || chain) {
                vec4 value[BATCH / 4];
                [[unroll]] for (uint e = 0; e < BATCH; e++) {
                    const uint at = at0 + e;
                    value[e / 4][e % 4] =
                        at < base ? load(v, page_v + (slot0 + e) * HEAD_DIM)
                                  : load(scratch_v, (min(at - base, max_rows - 1) * n_kv + head) * HEAD_DIM + d);
                }
                [[unroll]] for (uint e = 0; e < BATCH / 4; e++)
                    [[unroll]] for (uint n = 0; n < PAIRS; n++)
                        sum[n] = add_products(es[n][slot0 / 4 + e], value[e], sum[n]);
                continue;
            }
            for (uint slot = slot0; slot < min(slot0 + BATCH, end_slot); slot++) {
                const uint at = page * PAGE + slot;
                const float cached_value = at < base ? load(v, page_v + slot * HEAD_DIM) : 0.0;
                [[unroll]] for (uint j = 0; j < R; j++) {
                    if (at > position[j]) continue;
                    const float value =
                        at < base ? cached_value : load(scratch_v, (uint(path[j][slot]) * n_kv + head) * HEAD_DIM + d);
                    [[unroll]] for (uint g = 0; g < GQ; g++) {
                        precise float more = fma(es[j * GQ + g][slot / 4][slot % 4], value, sum[j * GQ + g]);
                        sum[j * GQ + g] = more;
                    }
                }
            }
        }
        // The parts' sums, in order, through the room of the exponentials.
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) es[n][t / 4][t % 4] = sum[n];
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            precise float all = es[n][d / 4][d % 4];
            [[unroll]] for (uint h = 1; h < PARTS; h++) {
                const uint other = h * HEAD_DIM + d;
                all = all + es[n][other / 4][other % 4];
            }
            sum[n] = all;
        }
        barrier();

        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            const uint j = n / GQ;
            const uint from = first_visible(position[j], window) / PAGE;
            if (page < from || page > position[j] / PAGE) continue;
            if (SPLIT) {
                if (i0 + j >= live || t >= HEAD_DIM) continue;
                const uint at = (((i0 + j) * n_kv + head) * GQ + n % GQ) * slots + (page - from);
                out_.v[at * (HEAD_DIM + 2) + t] = sum[n];
                if (t == 0) {
                    out_.v[at * (HEAD_DIM + 2) + HEAD_DIM] = now[n].m;
                    out_.v[at * (HEAD_DIM + 2) + HEAD_DIM + 1] = now[n].l;
                }
            } else if (page == from) {
                run[n] = now[n];
                o[n] = sum[n];
            } else {
                float fa, fb;
                run[n] = join(run[n], now[n], fa, fb);
                o[n] = join_output(o[n], sum[n], fa, fb);
            }
        }
    }
    if (SPLIT || t >= HEAD_DIM) return;
    [[unroll]] for (uint n = 0; n < PAIRS; n++) {
        const uint j = n / GQ;
        if (i0 + j >= live) continue;
        precise float y = o[n] / run[n].l;
        out_.v[((row[j] * n_kv + head) * GQ + n % GQ) * HEAD_DIM + t] = y;
    }
}
