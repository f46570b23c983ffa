// Copies keys and values of the accepted path from scratch to the cache. A workgroup copies one
// (path row, kv head, layer).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "table.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint KV = 1;
#include "kv.glsl"
#include "head.glsl"

struct Layer {
    uint64_t k;         // [all_pages, n_kv, head_dim / KB, PAGE, KB]
    uint64_t v;         // [all_pages, n_kv, PAGE, head_dim]
    uint64_t scratch_k; // [n_kv, head_dim / KB, max_rows, KB]
    uint64_t scratch_v; // [max_rows, n_kv, head_dim]
    uint pages;         // of one sequence
    uint all_pages;
    uint table;         // start of the layer's page tables among the tables of the step
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
    const Head to =
        head_of_page(layer.k, layer.v, layer.all_pages, n_kv, head_dim, head, page);
    const Head from =
        head_of_scratch(layer.scratch_k, layer.scratch_v, max_rows, n_kv, head_dim, head);
    // A key and a value have the same number of 16-byte pieces.
    for (uint c = gl_LocalInvocationID.x; c < head_dim / KB; c += gl_WorkGroupSize.x) {
        U32x4(key_at(to, c, slot)).v[0] = key_part(from, c, row);
        U32x4(to.values + uint64_t(slot * to.stride + c * 16)).v[0] =
            U32x4(from.values + uint64_t(row * from.stride + c * 16)).v[0];
    }
    if (KV != KV_Q8) return;
    const uint groups = head_dim / GROUP_OF(head_dim);
    for (uint g = gl_LocalInvocationID.x; g < groups; g += gl_WorkGroupSize.x) {
        U16(key_scale_at(to, g, slot)).v[0] = U16(key_scale_at(from, g, row)).v[0];
        U16(value_scale_at(to, g, slot)).v[0] = U16(value_scale_at(from, g, row)).v[0];
    }
}
