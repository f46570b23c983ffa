// Sums and maxima over the blocks of a row, by the TEAMS subgroups of a workgroup. Each subgroup
// has some of the blocks, see row.glsl. All invocations must call these functions, and all get the
// result.
//
// The including file defines TEAMS and shared memory: floats `row_parts`, one per block and at
// least one per team, and integers `row_sums`, one per team.

// Stores the sum of squares of a block.
void keep_squares(float v[PER], uint block, uint cols) {
    const float sum = sum_squares(v);
    if (gl_SubgroupInvocationID == 0 && block * 128 < cols) row_parts[block] = sum;
}

// 1 / sqrt(mean square + eps) of a row, after `keep_squares` was called for all blocks.
float inv_rms_of_parts(uint cols, float eps) {
    barrier();
    precise float all = 0.0;
    for (uint i = gl_SubgroupInvocationID; i < (cols + 127) / 128; i += SG)
        all = all + row_parts[i];
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all = all + subgroupShuffleXor(all, d);
    barrier();
    precise float mean = all / float(cols) + eps;
    return inverse_root(mean);
}

// Returns the largest magnitude, as bits.
uint reduce_max(uint most) {
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) most = max(most, subgroupShuffleXor(most, d));
    if (gl_SubgroupInvocationID == 0) row_sums[gl_SubgroupID] = int(most);
    barrier();
    uint all = 0;
    for (uint i = gl_SubgroupInvocationID; i < TEAMS; i += SG) all = max(all, uint(row_sums[i]));
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all = max(all, subgroupShuffleXor(all, d));
    barrier();
    return all;
}

int reduce_int(int v) {
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) v += subgroupShuffleXor(v, d);
    if (gl_SubgroupInvocationID == 0) row_sums[gl_SubgroupID] = v;
    barrier();
    int all = 0;
    for (uint i = gl_SubgroupInvocationID; i < TEAMS; i += SG) all += row_sums[i];
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all += subgroupShuffleXor(all, d);
    barrier();
    return all;
}

// Stores the scale and the sum of row `r` of int8 values. `row_max` has the bits of its maximum.
void store_row_scale(RowArgs a, uint r, uint row_max, int sum) {
    a.scales.v[r] = step_of(scale_of(row_max), 127.0);
    a.sums.v[r] = sum;
}
