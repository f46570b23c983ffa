// Attention of a block of rows over pages of 256 positions, for query heads of one kv head. A
// thread computes the scores of one position, then sums four channels over every PARTS-th position.
// With SPLIT, each page has a workgroup, and the reader merges their partials. Otherwise one
// workgroup loops over the pages. Both do the same operations in the same order.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "table.glsl"
#include "attention.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint HEAD_DIM = 128; // a power of two, 16 to 512
layout(constant_id = 3) const uint GQ = 1;         // query heads of a workgroup
layout(constant_id = 4) const uint R = 1;          // rows of a block
layout(constant_id = 5) const uint KV = 1;         // see kv.glsl
layout(constant_id = 6) const bool SPLIT = true;
#include "kv.glsl"
#include "attention_push.glsl"
#include "places.glsl"
#include "head.glsl"

const uint PAIRS = R * GQ;
const uint TEAMS = 256 / SG;
const uint PARTS = 1024 / HEAD_DIM;           // positions that are summed in parallel
const uint TURNS = PAGE / PARTS;
// Few sums: values are loaded before the scores are done, without filling the registers
const bool EARLY = PAIRS <= 4;
const uint FEW = KEYS < 4 ? KEYS : 4;         // parts of a key that are loaded at the same time
const bool WIDE = PAIRS <= 2 && HEAD_DIM >= 256; // few sums, and many loads per row
const uint BATCH = !EARLY || KEYS < 8 ? FEW : WIDE ? 16 : 8; // more if few rows wait for them
const uint TURN = EARLY ? KEYS : FEW;         // parts of a key in unrolled code
const uint AHEAD = WIDE ? 32 : EARLY ? 16 : 4; // values that are loaded at the same time
// Pairs with partial sums that fit in the memory of the exponentials
const uint CP = PAIRS < 4 ? 1 : PAIRS / 4;
const uint VALUES = PAIRS * HEAD_DIM;         // outputs; a thread computes every 256th
const uint MINE = (VALUES + 255) / 256;

#include "join.glsl"

shared vec4 qs[PAIRS][HEAD_DIM / 4];
// Exponentials at `place`, later partial sums [CP, PARTS, HEAD_DIM]
shared vec4 es[(PAIRS < 4 ? 4 : PAIRS) * PAGE / 4];
shared float parts[PAIRS][TEAMS];
shared vec2 factors[PAIRS];    // to merge this page with the earlier ones
shared vec2 page_ml[PAIRS];
shared uint16_t path[R][PAGE]; // scratch row of a position of this page
shared uint16_t value_scales[KV == KV_Q8 ? GROUPS : 1][KV == KV_Q8 ? PAGE : 1]; // bits of f16
#include "attention_loads.glsl"
#define SCALE_OF(G, SLOT) (KV == KV_Q8 ? unpackHalf2x16(uint(value_scales[G][SLOT])).x : 1.0)

// Index of the exponential of pair n at a position of the page. Four turns of a part are adjacent,
// and parts begin in different banks of shared memory.
uint place(uint n, uint part, uint turn) {
    return n * (PAGE / 4) + part * (TURNS / 4) + (turn / 4 + part) % (TURNS / 4);
}

void main() {
    const uint t = gl_LocalInvocationID.x, head = gl_WorkGroupID.x, i0 = gl_WorkGroupID.y * R;
    const uint live = step_.rows - step_.first;
    if (i0 >= live) return;
    // All rows of a block are of one sequence. With several sequences, a block is one row.
    const uint root = step_.v[STEP_ROOTS * max_rows + step_.first + i0];
    const uint base = step_.v[STEP_POSITIONS * max_rows + root];
    const uint table_at =
        table_of(max_rows, table, step_.v[STEP_SEQUENCES * max_rows + step_.first + i0], pages);
    const Head scratch = scratch_head(head / SHARES);
    const bool chain = step_.chain != 0;
    uint position[R], last[R];
    uint lowest = 0xffffffffu, highest = 0;
    [[unroll]] for (uint j = 0; j < R; j++) {
        const uint r = step_.first + min(i0 + j, live - 1);
        position[j] = step_.v[STEP_POSITIONS * max_rows + r];
        last[j] = WHOLE ? of_step(STEP_POSITIONS, end_of(r)) : position[j];
        lowest = min(lowest, first_visible(position[j], window) / PAGE);
        highest = max(highest, last[j]);
    }
    const uint end_all = highest / PAGE + 1;
    uint begin = lowest, end = end_all;
    if (SPLIT) {
        begin = lowest + gl_WorkGroupID.z, end = min(begin + 1, end);
        if (begin >= end) return;
    }
    for (uint i = t; i < VALUES; i += 256) {
        const uint pair = i / HEAD_DIM, d = i % HEAD_DIM;
        const uint r = step_.first + min(i0 + pair / GQ, live - 1);
        const uint at = (r * SETS * GQ + pair % GQ) * HEAD_DIM + d;
        qs[pair][d / 4][d % 4] =
            F32(uint64_t(q) + uint64_t(head) * (GQ * HEAD_DIM * 4) + uint64_t(at * 4)).v[0];
    }

    Running run = Running(0.0, 0.0); // of pair t
    float o[MINE];
    [[unroll]] for (uint k_ = 0; k_ < MINE; k_++) o[k_] = 0.0;

    for (uint page = begin; page < end; page++) {
        const uint p = page * PAGE + t;
        const bool uniform_keys = chain || (page + 1) * PAGE <= base;
        if (!uniform_keys && t < R) {
            uint node = end_of(step_.first + min(i0 + t, live - 1));
            while (node != NO_PARENT) {
                const uint at = step_.v[STEP_POSITIONS * max_rows + node];
                if (at / PAGE == page) path[t][at % PAGE] = uint16_t(node);
                if (at < page * PAGE) break;
                node = step_.v[STEP_PARENTS * max_rows + node];
            }
        }
        barrier();

        float s[PAIRS];
        [[unroll]] for (uint n = 0; n < PAIRS; n++) s[n] = 0.0;
        const bool cached = p < base;
        const Head paged = paged_head(head / SHARES, step_.v[table_at + page % pages]);
        if (p > highest) {
            // No query sees this position, but its value is multiplied by 0 and must be finite.
            if (KV == KV_Q8)
                [[unroll]] for (uint g = 0; g < GROUPS; g++) value_scales[g][t] = uint16_t(0);
        }
        // First the keys of the cache, then those of scratch rows.
        [[dont_unroll]] for (uint fresh = 0; fresh < 2; fresh++) {
            if (p > highest || cached != (fresh == 0) || fresh > step_.chain) continue;
            Head h = scratch;
            if (fresh == 0) h = paged;
            const uint at = fresh == 0 ? t : min(root + p - base, max_rows - 1);
            if (KV == KV_Q8)
                [[unroll]] for (uint g = 0; g < GROUPS; g++)
                    value_scales[g][t] = U16(value_scale_at(h, g, at)).v[0];
            uvec4 raw[BATCH], later[BATCH];
            float scales[BATCH], later_scales[BATCH];
            LOAD_KEYS(raw, scales, h, at, 0, BATCH)
            [[dont_unroll]] for (uint turn = 0; turn < KEYS; turn += TURN)
                [[unroll]] for (uint c0 = turn; c0 < turn + TURN; c0 += BATCH) {
                    const uint next = c0 + BATCH;
                    if (!EARLY && next < KEYS) LOAD_KEYS(later, later_scales, h, at, next, BATCH)
                    ADD_KEYS(raw, scales, c0, BATCH, PAIRS, qs[n], s[n])
                    if (EARLY && next < KEYS) LOAD_KEYS(raw, scales, h, at, next, BATCH)
                    [[unroll]] for (uint c = 0; !EARLY && c < BATCH; c++)
                        raw[c] = later[c], scales[c] = later_scales[c];
                }
        }
        if (p <= highest && !cached && !chain) {
            [[dont_unroll]] for (uint j = 0; j < R; j++) {
                const uint r = step_.first + min(i0 + j, live - 1);
                if (p > of_step(STEP_POSITIONS, end_of(r))) continue;
                const uint row = path[j][t];
                float mine[GQ];
                [[unroll]] for (uint g = 0; g < GQ; g++) mine[g] = 0.0;
                [[dont_unroll]] for (uint c0 = 0; c0 < KEYS; c0 += FEW) {
                    uvec4 raw[FEW];
                    float scales[FEW];
                    LOAD_KEYS(raw, scales, scratch, row, c0, FEW)
                    ADD_KEYS(raw, scales, c0, FEW, GQ, qs[j * GQ + n], mine[n])
                }
                [[unroll]] for (uint n = 0; n < PAIRS; n++)
                    if (n / GQ == j) s[n] = mine[n % GQ];
            }
        }

        const uint channel = t % (HEAD_DIM / 4), part = t / (HEAD_DIM / 4),
            group = channel * 4 / GROUP;
        const bool all_cached = (page + 1) * PAGE <= base;
        uvec4 values[AHEAD];
        if (EARLY && uniform_keys) LOAD_VALUES(values, 0)

        // The largest score, the exponentials and their sum.
        const float NONE = uintBitsToFloat(0xff800000u);
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            const uint j = n / GQ;
            const bool seen = p <= last[j] && p >= first_visible(position[j], window);
            precise float scaled = s[n] * scale;
            // Infinity also replaces NaN: max() keeps it, and its exponential is NaN.
            s[n] = !seen ? NONE : is_finite(scaled) ? scaled : uintBitsToFloat(INFINITE);
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
            es[place(n, t % PARTS, t / PARTS)][t / PARTS % 4] = s[n];
        }
        barrier();
        [[unroll]] for (uint n = 0; n < PAIRS; n++) {
            precise float l = s[n];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) l = l + subgroupShuffleXor(l, d);
            if (gl_SubgroupInvocationID == 0) parts[n][gl_SubgroupID] = l;
        }

        // Sums of values. After the last visible position all exponentials are 0.
        const uint turns = min(TURNS, (highest - page * PAGE) / PARTS + 1);
        vec4 sum[PAIRS];
        [[unroll]] for (uint n = 0; n < PAIRS; n++) sum[n] = vec4(0.0);
        if (uniform_keys) {
            if (!EARLY) LOAD_VALUES(values, 0)
            for (uint turn0 = 0; turn0 < turns; turn0 += AHEAD) {
                uvec4 later[AHEAD];
                const uint next = turn0 + AHEAD;
                if (!EARLY && next < turns) LOAD_VALUES(later, next)
                [[unroll]] for (uint u = 0; u < AHEAD; u += 4) {
                    if (TURNS % AHEAD != 0 && turn0 + u >= TURNS) break;
                    vec4 four[4];
                    [[unroll]] for (uint i = 0; i < 4; i++)
                        four[i] = four_of(values[u + i],
                            SCALE_OF(group, (turn0 + u + i) * PARTS + part));
                    [[unroll]] for (uint n = 0; n < PAIRS; n++) {
                        const vec4 e = es[place(n, part, turn0 + u)];
                        [[unroll]] for (uint i = 0; i < 4; i++)
                            sum[n] = add_scaled(e[i], four[i], sum[n]);
                    }
                }
                if (EARLY && next < turns) LOAD_VALUES(values, next)
                [[unroll]] for (uint u = 0; !EARLY && u < AHEAD; u++) values[u] = later[u];
            }
        } else {
            for (uint turn = 0; turn < turns; turn++) {
                const uint slot = turn * PARTS + part, at = page * PAGE + slot;
                vec4 value = at >= base ? vec4(0.0)
                    : four_of(value_part(paged, channel, slot), SCALE_OF(group, slot));
                [[unroll]] for (uint j = 0; j < R; j++) {
                    if (at > last[j]) continue;
                    if (at >= base) {
                        const uint row = uint(path[j][slot]);
                        value = four_of(value_part(scratch, channel, row),
                            scale_from(value_scale_at(scratch, group, row)));
                    }
                    [[unroll]] for (uint g = 0; g < GQ; g++)
                        sum[j * GQ + g] = add_scaled(es[place(j * GQ + g, part, turn)][turn % 4],
                            value, sum[j * GQ + g]);
                }
            }
        }
        barrier();
        if (t < PAIRS) {
            precise float l = 0.0;
            [[unroll]] for (uint i = 0; i < TEAMS; i++) l = l + parts[t][i];
            page_ml[t].y = l;
            const Running now = Running(page_ml[t].x, l);
            const uint r = step_.first + min(i0 + t / GQ, live - 1);
            const uint at = of_step(STEP_POSITIONS, r);
            const uint from = first_visible(at, window) / PAGE;
            if (page == from) {
                run = now;
                factors[t] = vec2(0.0, 1.0);
            } else if (page > from && page <= of_step(STEP_POSITIONS, end_of(r)) / PAGE) {
                float fa, fb;
                run = join(run, now, fa, fb);
                factors[t] = vec2(fa, fb);
            }
        }

        // Adds the sums of the parts in order, for a few pairs at a time.
        [[unroll]] for (uint n0 = 0; n0 < PAIRS; n0 += CP) {
            [[unroll]] for (uint n = n0; n < n0 + CP; n++)
                es[((n - n0) * PARTS + part) * (HEAD_DIM / 4) + channel] = sum[n];
            barrier();
            [[unroll]] for (uint m = 0; m < MINE; m++) {
                const uint value = m * 256 + t, n = value / HEAD_DIM, d = value % HEAD_DIM;
                // Pairs that no thread has are removed at compile time.
                if ((m * 256 + 255) / HEAD_DIM < n0 || m * 256 / HEAD_DIM >= n0 + CP) continue;
                if (n < n0 || n >= n0 + CP) continue;
                precise float all = 0.0;
                for (uint h = 0; h < PARTS; h++)
                    all = all + es[((n - n0) * PARTS + h) * (HEAD_DIM / 4) + d / 4][d % 4];
                const uint j = n / GQ;
                const uint r = step_.first + min(i0 + j, live - 1);
                const uint seen = of_step(STEP_POSITIONS, r);
                const uint from = first_visible(seen, window) / PAGE;
                if (page < from || page > of_step(STEP_POSITIONS, end_of(r)) / PAGE) continue;
                if (SPLIT) {
                    if (i0 + j >= live) continue;
                    const uint place =
                        ((j * SETS * GQ + n % GQ) * slots + page - from) * (HEAD_DIM + 2) + d;
                    const uint64_t first =
                        uint64_t((i0 * SETS + head) * GQ) * (slots * (HEAD_DIM + 2) * 4);
                    SharedF32 to = SharedF32(uint64_t(out_) + first + uint64_t(place * 4));
                    to.v[0] = all;
                    if (d < 2) to.v[HEAD_DIM] = page_ml[n][d];
                } else {
                    o[m] = page == from ? all : join_output(o[m], all, factors[n].x, factors[n].y);
                }
            }
            barrier();
        }
    }
    if (JOIN)
        join_block(epilogue, step_.first, i0, min(R, live - i0), end_all - lowest, SETS, slots);
    if (SPLIT) return;
    if (t < PAIRS) page_ml[t].y = run.l;
    barrier();
    [[unroll]] for (uint m = 0; m < MINE; m++) {
        const uint value = m * 256 + t, n = value / HEAD_DIM, d = value % HEAD_DIM, j = n / GQ;
        if (n >= PAIRS || i0 + j >= live) continue;
        precise float y = o[m] / page_ml[n].y;
        const uint place = (((step_.first + i0 + j) * SETS + head) * GQ + n % GQ) * HEAD_DIM + d;
        SharedF32(uint64_t(out_) + uint64_t(place * 4)).v[0] = y;
    }
}
