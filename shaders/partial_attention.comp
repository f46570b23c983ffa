// Attention of one query over the pages that an accelerator does not read (see OffloadedPages in
// crates/base/src/kv.rs). The result is not divided: sums of exponentials times values, the largest
// score, and the sum of exponentials. There are few pages, so one workgroup reads them all. A
// thread computes the scores of one position, then the sums of one channel.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "table.glsl"
#include "attention.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 2) const uint HEAD_DIM = 128; // a power of two, 16 to 256
layout(constant_id = 5) const uint KV = 1;         // see kv.glsl
#include "kv.glsl"
#include "head.glsl"

layout(push_constant, scalar) uniform Push {
    F32 q;              // [rows, n_heads, HEAD_DIM]
    F32 out_;           // [rows, n_heads, HEAD_DIM + 2]
    U32x4 k;            // [all_pages, n_kv, HEAD_DIM / KB, PAGE, KB]
    uint64_t v;         // [all_pages, n_kv, PAGE, HEAD_DIM]
    U32x4 scratch_k;    // [n_kv, HEAD_DIM / KB, max_rows, KB]
    uint64_t scratch_v; // [max_rows, n_kv, HEAD_DIM]
    Step step_;
    float scale;
    uint n_heads;
    uint n_kv;
    uint pages;         // entries of a sequence's page table
    uint all_pages;
    uint max_rows;
    uint lag;           // of OffloadedPages
    uint share;
    uint table;         // start of the layer's page tables among the tables of the step
};

#include "places.glsl"

const uint KEYS = HEAD_DIM / KB; // 16-byte parts of a key
const uint GROUP = GROUP_OF(HEAD_DIM);

shared vec4 qs[HEAD_DIM / 4];
shared float es[PAGE];
shared float parts[PAGE];
shared uint path[PAGE]; // scratch row of each position of the page

// Maximum and sum over all threads. Their order depends only on the positions. All threads get the
// same result.
float all_max(float mine) {
    const uint t = gl_LocalInvocationID.x;
    parts[t] = mine;
    barrier();
    for (uint d = PAGE / 2; d > 0; d /= 2) {
        if (t < d) parts[t] = max(parts[t], parts[t + d]);
        barrier();
    }
    const float all = parts[0];
    barrier();
    return all;
}

float all_sum(float mine) {
    const uint t = gl_LocalInvocationID.x;
    parts[t] = mine;
    barrier();
    for (uint d = PAGE / 2; d > 0; d /= 2) {
        if (t < d) {
            precise float both = parts[t] + parts[t + d];
            parts[t] = both;
        }
        barrier();
    }
    const float all = parts[0];
    barrier();
    return all;
}

void main() {
    const uint t = gl_LocalInvocationID.x, head = gl_WorkGroupID.x,
        kv_head = head / (n_heads / n_kv);
    if (gl_WorkGroupID.y >= step_.rows - step_.first) return;
    const uint row = step_.first + gl_WorkGroupID.y;
    const uint base = step_.v[STEP_POSITIONS * max_rows + step_.v[STEP_ROOTS * max_rows + row]];
    const uint table_at =
        table_of(max_rows, table, step_.v[STEP_SEQUENCES * max_rows + row], pages);
    const uint own = step_.v[STEP_POSITIONS * max_rows + row];
    const uint position = of_step(STEP_POSITIONS, end_of(row)); // the last visible position
    const uint begin = (own > lag ? own - lag : 0) / PAGE * share / 256;
    const uint query = row * n_heads + head;
    if (t < HEAD_DIM) qs[t / 4][t % 4] = q.v[query * HEAD_DIM + t];

    const Head scratch =
        head_of_scratch(uint64_t(scratch_k), scratch_v, max_rows, n_kv, HEAD_DIM, kv_head);
    Running run = Running(0.0, 0.0);
    float o = 0.0; // sum for channel t
    for (uint page = begin; page <= position / PAGE; page++) {
        if (t == 0 && (page + 1) * PAGE > base) {
            for (uint node = end_of(row); node != NO_PARENT;
                node = step_.v[STEP_PARENTS * max_rows + node]) {
                const uint at = step_.v[STEP_POSITIONS * max_rows + node];
                if (at / PAGE == page) path[at % PAGE] = node;
                if (at < page * PAGE) break;
            }
        }
        barrier();
        const uint p = page * PAGE + t;
        const Head paged = head_of_page(uint64_t(k), v, all_pages, n_kv, HEAD_DIM, kv_head,
            step_.v[table_at + page % pages]);
        float s = uintBitsToFloat(0xff800000u);
        if (p <= position) {
            Head h = scratch;
            if (p < base) h = paged;
            const uint at = p < base ? t : path[t];
            precise float sum = 0.0;
            for (uint c = 0; c < KEYS; c++) {
                const uvec4 raw = key_part(h, c, at);
                const float scale_ = key_scale(h, c * KB / GROUP, at);
                [[unroll]] for (uint part = 0; part < KB / 4; part++) {
                    const vec4 key = four(raw, part, scale_), of_query = qs[c * (KB / 4) + part];
                    [[unroll]] for (uint e = 0; e < 4; e++) sum = fma(of_query[e], key[e], sum);
                }
            }
            precise float scaled = sum * scale;
            s = is_finite(scaled) ? scaled : uintBitsToFloat(INFINITE); // all_max() keeps infinity
        }
        const float most = all_max(s), m = is_finite(most) ? most : not_a_number();
        const float e = p <= position ? exp_(s - m) : 0.0;
        es[t] = e;
        const float l = all_sum(e);
        float page_o = 0.0;
        if (t < HEAD_DIM) {
            const uint last = min(PAGE - 1, position - page * PAGE), channel = t / 4,
                group = t / GROUP;
            precise float sum = 0.0;
            for (uint slot = 0; slot <= last; slot++) {
                Head h = scratch;
                if (page * PAGE + slot < base) h = paged;
                const uint at = page * PAGE + slot < base ? slot : path[slot];
                const vec4 value = four_of(
                    value_part(h, channel, at), scale_from(value_scale_at(h, group, at)));
                sum = fma(es[slot], value[t % 4], sum);
            }
            page_o = sum;
        }
        if (page == begin) {
            run = Running(m, l);
            o = page_o;
        } else {
            float fa, fb;
            run = join(run, Running(m, l), fa, fb);
            o = join_output(o, page_o, fa, fb);
        }
        barrier();
    }
    const uint place = query * (HEAD_DIM + 2);
    if (t < HEAD_DIM) out_.v[place + t] = o;
    if (t == 0) out_.v[place + HEAD_DIM] = run.m;
    if (t == 1) out_.v[place + HEAD_DIM + 1] = run.l;
}
