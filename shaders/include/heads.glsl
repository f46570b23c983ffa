// Norm and rotation of heads, by a linear layer's last workgroups on the output of the layer.
//
// The including file defines SG and SUBGROUPS (subgroups in a workgroup).

#include "last.glsl"

// The matrices of the call are those of queries, keys and values
layout(constant_id = 11) const bool HEADS = false;
// Index of the first of these three in this call.
layout(constant_id = 26) const uint FIRST_MATRIX = 0;
layout(constant_id = 12) const uint HEAD_DIM = 128;
layout(constant_id = 13) const uint KV = 1;
layout(constant_id = 28) const bool V_NORM = false;
#include "kv.glsl"

shared float whole[HEADS && KV == KV_Q8 ? SUBGROUPS * HEAD_DIM : 1];

#include "rope.glsl"

// Called after this workgroup has stored matrix rows n0 to n0 + rows of matrix `which` of the call,
// for `count` rows of activations from m0 on, counted from row `first`. `rows` divides a head.
void finish_heads(uint64_t epilogue_, uint which, uint n0, uint rows, uint m0, uint count,
    uint first) {
    RopeEpilogue epilogue = RopeEpilogue(epilogue_);
    RopeArgs a = epilogue.args;
    const uint matrix = FIRST_MATRIX + which;
    const uint head = n0 / HEAD_DIM + (matrix == 0 ? 0 : a.n_heads + (matrix - 1) * a.n_kv);
    if (!is_last(epilogue.counts, gl_WorkGroupID.x * (a.n_heads + 2 * a.n_kv) + head,
        HEAD_DIM / rows)) return;
    for (uint m = gl_SubgroupID; m < count; m += SUBGROUPS) rope_head(a, head, first + m0 + m);
}
