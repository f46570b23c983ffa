// Work on a row by one workgroup of TEAMS subgroups. Each has up to EACH blocks, TEAMS apart,
// starting at block FIRST.
//
// The including file defines TEAMS, EACH, FIRST (0 for sums or scales of the whole row) and shared
// memory: floats `row_parts`, one per block and at least one per team, and integers `row_sums`, one
// per team.

#include "reduce.glsl"

// 1 / sqrt(mean square + eps) of the whole row.
float inv_rms(float v[EACH][PER], uint cols, float eps) {
    [[unroll]] for (uint b = 0; b < EACH; b++)
        keep_squares(v[b], FIRST + gl_SubgroupID + b * TEAMS, cols);
    return inv_rms_of_parts(cols, eps);
}

void load_row(F32 from, uint row, uint cols, out float v[EACH][PER]) {
    [[unroll]] for (uint b = 0; b < EACH; b++)
        load_block(from, row, FIRST + gl_SubgroupID + b * TEAMS, cols, v[b]);
}

// The same for floats that another workgroup of this dispatch may have written.
void load_shared_row(SharedF32 from, uint row, uint cols, out float v[EACH][PER]) {
    [[unroll]] for (uint b = 0; b < EACH; b++)
        load_shared_block(from, row, FIRST + gl_SubgroupID + b * TEAMS, cols, v[b]);
}

void store_row(F32 to, uint row, uint cols, float v[EACH][PER]) {
    [[unroll]] for (uint b = 0; b < EACH; b++)
        store_block(to, row, FIRST + gl_SubgroupID + b * TEAMS, cols, v[b]);
}

// `x = (x + rmsnorm(add) w_add) scale` if `add` is set (stored unless rows are gathered), then
// `rmsnorm(x) w`, for row `from`.
void norm_row(RowArgs a, uint from, uint cols, bool gathered, out float v[EACH][PER]) {
    float w[EACH][PER];
    load_row(a.x, from, cols, v);
    load_row(a.w, 0, cols, w);
    if (uint64_t(a.add) != 0) {
        float added[EACH][PER], w_added[EACH][PER];
        load_row(a.w_add, 0, cols, w_added);
        load_shared_row(SharedF32(uint64_t(a.add)), from, cols, added);
        const float inv = inv_rms(added, cols, a.eps);
        [[unroll]] for (uint b = 0; b < EACH; b++)
            add_scaled_block(v[b], added[b], inv, w_added[b], a.scale);
        if (!gathered) store_row(a.x, from, cols, v);
    }
    const float inv = inv_rms(v, cols, a.eps);
    [[unroll]] for (uint b = 0; b < EACH; b++) scale_block(v[b], inv, w[b]);
}

// Prepares row `r` for the next linear layer: Hadamard transform, then int8 with scales (or plain
// floats).
void prepare_row(RowArgs a, inout float v[EACH][PER], uint r, uint cols, bool hadamard_, bool int8,
    uint group) {
    if (hadamard_)
        [[unroll]] for (uint b = 0; b < EACH; b++)
            hadamard(v[b], FIRST + gl_SubgroupID + b * TEAMS);
    if (!int8) {
        // The rows of floats have no padding.
        store_row(F32(a.values), r, cols, v);
        return;
    }
    uint row_max = 0;
    if (group == 0) {
        [[unroll]] for (uint b = 0; b < EACH; b++) row_max = max(row_max, largest(v[b]));
        row_max = reduce_max(row_max);
    }
    int sum = 0;
    [[unroll]] for (uint b = 0; b < EACH; b++)
        if ((FIRST + gl_SubgroupID + b * TEAMS) * 128 < cols)
            sum += round_block(a, v[b], r, FIRST + gl_SubgroupID + b * TEAMS, cols, group, row_max);
    if (group == 0) {
        sum = reduce_int(sum);
        if (gl_LocalInvocationID.x == 0) store_row_scale(a, r, row_max, sum);
    }
}
