// Copies the accepted path's keys and values from scratch to the cache: a workgroup a (path row, kv
// head, layer).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "table.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint KV = 1;
#include "kv.glsl"

struct Layer {
    uint64_t k;         // [all_pages, n_kv, head_dim / KB, PAGE, KB]
    uint64_t v;         // [all_pages, n_kv, PAGE, head_dim]
    uint64_t scratch_k; // [n_kv, head_dim / KB, max_rows, KB]
    uint64_t scratch_v; // [max_rows, n_kv, head_dim]
    uint pages;         // of a sequence
    uint all_pages;
    uint table;         // where its page tables begin among those of the step
    uint unused;
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Layers { Layer v[]; };

layout(push_constant, scalar) uniform Push {
    Layers layers;
    Step step_;
    uint n_kv;
    uint head_dim;
    uint max_rows;
};

void main() {
    const uint head = gl_WorkGroupID.y;
    if (gl_WorkGroupID.x >= step_.n_path) return;
    const Layer layer = layers.v[gl_WorkGroupID.z];
    const uint row = step_.v[STEP_PATH * max_rows + gl_WorkGroupID.x];
    const uint position = step_.v[STEP_POSITIONS * max_rows + row],
        sequence = step_.v[STEP_SEQUENCES * max_rows + row];
    const uint table_at = table_of(max_rows, layer.table, sequence, layer.pages);
    const uint page = step_.v[table_at + position / PAGE % layer.pages], slot = position % PAGE;
    for (uint d = gl_LocalInvocationID.x; d < head_dim; d += gl_WorkGroupSize.x) {
        const uint blocks = head_dim / KB, part = d % KB;
        const uint k_to = (((page * n_kv + head) * blocks + d / KB) * PAGE + slot) * KB + part;
        const uint k_from = ((head * blocks + d / KB) * max_rows + row) * KB + part;
        const uint v_to = ((page * n_kv + head) * PAGE + slot) * head_dim + d,
            v_from = (row * n_kv + head) * head_dim + d;
        if (KV == KV_Q8) {
            I8(layer.k).v[k_to] = I8(layer.scratch_k).v[k_from];
            I8(layer.v).v[v_to] = I8(layer.scratch_v).v[v_from];
        } else if (KV == KV_F16) {
            U16(layer.k).v[k_to] = U16(layer.scratch_k).v[k_from];
            U16(layer.v).v[v_to] = U16(layer.scratch_v).v[v_from];
        } else {
            U32(layer.k).v[k_to] = U32(layer.scratch_k).v[k_from];
            U32(layer.v).v[v_to] = U32(layer.scratch_v).v[v_from];
        }
    }
    if (KV != KV_Q8) return;
    const uint groups = head_dim / GROUP_OF(head_dim);
    const uint64_t cached = uint64_t(layer.all_pages) * n_kv * PAGE * head_dim,
        scratch = uint64_t(max_rows) * n_kv * head_dim;
    for (uint g = gl_LocalInvocationID.x; g < groups; g += gl_WorkGroupSize.x) {
        const uint to = ((page * n_kv + head) * groups + g) * PAGE + slot,
            from = (head * groups + g) * max_rows + row;
        U16(layer.k + cached).v[to] = U16(layer.scratch_k + scratch).v[from];
        U16(layer.v + cached).v[to] = U16(layer.scratch_v + scratch).v[from];
    }
}
