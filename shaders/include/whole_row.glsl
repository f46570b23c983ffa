// Work on a row by one workgroup of TEAMS subgroups, each with up to MINE blocks, TEAMS apart, from block FIRST on.
//
// Who includes this says what TEAMS, MINE and FIRST are (0 where sums or scales of the whole row are wanted) and has shared memory `parts` (floats, one a block) and `int_parts` (one a team).

float reduce_sum(float block_sums[MINE], uint blocks) {
    [[unroll]] for (uint b = 0; b < MINE; b++) {
        const uint block = FIRST + gl_SubgroupID + b * TEAMS;
        if (gl_SubgroupInvocationID == 0 && block < blocks) parts[block] = block_sums[b];
    }
    barrier();
    precise float all = 0.0;
    for (uint i = gl_SubgroupInvocationID; i < blocks; i += SG) all = all + parts[i];
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all = all + subgroupShuffleXor(all, d);
    barrier();
    return all;
}

// 1 / sqrt(mean square + eps) of the whole row.
float inv_rms(float v[MINE][PER], uint cols, float eps) {
    float sums[MINE];
    [[unroll]] for (uint b = 0; b < MINE; b++) sums[b] = sum_squares(v[b]);
    precise float mean = reduce_sum(sums, (cols + 127) / 128) / float(cols) + eps;
    return 1.0 / sqrt(mean);
}

float reduce_max(float most) {
    if (gl_SubgroupInvocationID == 0) parts[gl_SubgroupID] = most;
    barrier();
    float all = 0.0;
    for (uint i = gl_SubgroupInvocationID; i < TEAMS; i += SG) all = max(all, parts[i]);
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all = max(all, subgroupShuffleXor(all, d));
    barrier();
    return all;
}

int reduce_int(int v) {
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) v += subgroupShuffleXor(v, d);
    if (gl_SubgroupInvocationID == 0) int_parts[gl_SubgroupID] = v;
    barrier();
    int all = 0;
    for (uint i = gl_SubgroupInvocationID; i < TEAMS; i += SG) all += int_parts[i];
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all += subgroupShuffleXor(all, d);
    barrier();
    return all;
}

void load_row(F32 from, uint row, uint cols, out float v[MINE][PER]) {
    [[unroll]] for (uint b = 0; b < MINE; b++) load_block(from, row, FIRST + gl_SubgroupID + b * TEAMS, cols, v[b]);
}

void store_row(F32 to, uint row, uint cols, float v[MINE][PER]) {
    [[unroll]] for (uint b = 0; b < MINE; b++) store_block(to, row, FIRST + gl_SubgroupID + b * TEAMS, cols, v[b]);
}

// `x += rmsnorm(add) (1 + w_add)` where there is something to add (stored unless rows are gathered), then `rmsnorm(x) (1 + w)`, of row
// `from`.
void norm_row(RowArgs a, uint from, uint cols, bool gathered, out float v[MINE][PER]) {
    float w[MINE][PER];
    load_row(a.x, from, cols, v);
    load_row(a.w, 0, cols, w);
    if (uint64_t(a.add) != 0) {
        float added[MINE][PER], w_added[MINE][PER];
        load_row(a.w_add, 0, cols, w_added);
        load_row(a.add, from, cols, added);
        const float inv = inv_rms(added, cols, a.eps);
        [[unroll]] for (uint b = 0; b < MINE; b++)
            [[unroll]] for (uint i = 0; i < PER; i++) {
                precise float scaled = added[b][i] * inv;
                precise float sum = fma(scaled, 1.0 + w_added[b][i], v[b][i]);
                v[b][i] = sum;
            }
        if (!gathered) store_row(a.x, from, cols, v);
    }
    const float inv = inv_rms(v, cols, a.eps);
    [[unroll]] for (uint b = 0; b < MINE; b++)
        [[unroll]] for (uint i = 0; i < PER; i++) {
            precise float scaled = v[b][i] * inv;
            precise float y = scaled * (1.0 + w[b][i]);
            v[b][i] = y;
        }
}

// What the next linear layer wants of row `r`: the Hadamard, then int8 with scales (or plain floats).
void prepare_row(RowArgs a, inout float v[MINE][PER], uint r, uint cols, bool hadamard_, bool int8, uint group) {
    if (hadamard_)
        [[unroll]] for (uint b = 0; b < MINE; b++) hadamard(v[b], FIRST + gl_SubgroupID + b * TEAMS);
    if (!int8) {
        // The stride of floats is the row.
        store_row(F32(a.values), r, cols, v);
        return;
    }
    float row_max = 0.0;
    if (group == 0) {
        [[unroll]] for (uint b = 0; b < MINE; b++) row_max = max(row_max, largest(v[b]));
        [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) row_max = max(row_max, subgroupShuffleXor(row_max, d));
        row_max = reduce_max(row_max);
    }
    int sum = 0;
    [[unroll]] for (uint b = 0; b < MINE; b++)
        if ((FIRST + gl_SubgroupID + b * TEAMS) * 128 < cols)
            sum += round_block(a, v[b], r, FIRST + gl_SubgroupID + b * TEAMS, cols, group, row_max);
    if (group == 0) {
        sum = reduce_int(sum);
        if (gl_LocalInvocationID.x == 0) {
            precise float scale = row_max / 127.0;
            a.scales.v[r] = scale;
            a.sums.v[r] = sum;
        }
    }
}
