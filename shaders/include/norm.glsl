// The last workgroup of a linear layer adds its output to the residual stream, normalises the sum
// and prepares it for the next linear layer, as row.comp does. The row is in shared memory, because
// registers for these last instructions would not be available to the main loop.
//
// The including file defines SG and SUBGROUPS (subgroups in a workgroup). The layer must have one
// matrix, and its workgroups must process all rows of activations.

#include "last.glsl"

layout(constant_id = 20) const bool NORM = false;
layout(constant_id = 21) const uint DIM = 128;            // columns of the stream
layout(constant_id = 22) const bool NEXT_PREPARE = false; // otherwise only the norm is stored
layout(constant_id = 23) const bool NEXT_HADAMARD = false;
layout(constant_id = 24) const bool NEXT_INT8 = false;
layout(constant_id = 25) const uint NEXT_GROUP = 0;       // columns with one scale; 0: all

const uint TEAMS = SUBGROUPS;
const uint DIM_BLOCKS = (DIM + 127) / 128;
const uint BLOCKS_EACH = (DIM_BLOCKS + TEAMS - 1) / TEAMS;
const uint BATCH = BLOCKS_EACH < 6 ? BLOCKS_EACH : 6; // blocks that are loaded at the same time

shared float stream_row[NORM ? DIM_BLOCKS * 128 : 1]; // each lane uses its own columns
shared float row_parts[NORM ? (DIM_BLOCKS > TEAMS ? DIM_BLOCKS : TEAMS) : 1];
shared int row_sums[NORM ? TEAMS : 1];

#include "row.glsl"
#include "reduce.glsl"

void put_block(uint block, float v[PER]) {
    if (block < DIM_BLOCKS)
        [[unroll]] for (uint i = 0; i < PER; i++) stream_row[column(block) + i] = v[i];
}

void take_block(uint block, out float v[PER]) {
    [[unroll]] for (uint i = 0; i < PER; i++)
        v[i] = stream_row[column(min(block, DIM_BLOCKS - 1)) + i];
}

#define BLOCK(B) (gl_SubgroupID + (b0 + (B)) * TEAMS)

// x = (x + rmsnorm(add) w_add) scale. Leaves rmsnorm(x) w in shared memory.
void norm_stream(RowArgs a, uint r) {
    for (uint b0 = 0; b0 < BLOCKS_EACH; b0 += BATCH) {
        float added[BATCH][PER];
        [[unroll]] for (uint b = 0; b < BATCH; b++)
            load_shared_block(SharedF32(uint64_t(a.add)), r, BLOCK(b), DIM, added[b]);
        [[unroll]] for (uint b = 0; b < BATCH; b++) {
            keep_squares(added[b], BLOCK(b), DIM);
            put_block(BLOCK(b), added[b]);
        }
    }
    const float inv_added = inv_rms_of_parts(DIM, a.eps);
    for (uint b0 = 0; b0 < BLOCKS_EACH; b0 += BATCH) {
        float x[BATCH][PER], w[BATCH][PER];
        [[unroll]] for (uint b = 0; b < BATCH; b++) {
            load_block(a.x, r, BLOCK(b), DIM, x[b]);
            load_block(a.w_add, 0, BLOCK(b), DIM, w[b]);
        }
        [[unroll]] for (uint b = 0; b < BATCH; b++) {
            float added[PER];
            take_block(BLOCK(b), added);
            add_scaled_block(x[b], added, inv_added, w[b], a.scale);
            store_block(a.x, r, BLOCK(b), DIM, x[b]);
            keep_squares(x[b], BLOCK(b), DIM);
            put_block(BLOCK(b), x[b]);
        }
    }
    const float inv = inv_rms_of_parts(DIM, a.eps);
    for (uint b0 = 0; b0 < BLOCKS_EACH; b0 += BATCH) {
        float w[BATCH][PER];
        [[unroll]] for (uint b = 0; b < BATCH; b++) load_block(a.w, 0, BLOCK(b), DIM, w[b]);
        [[unroll]] for (uint b = 0; b < BATCH; b++) {
            float v[PER];
            take_block(BLOCK(b), v);
            scale_block(v, inv, w[b]);
            if (uint64_t(a.z) != 0) store_block(a.z, r, BLOCK(b), DIM, v);
            put_block(BLOCK(b), v);
        }
    }
}

// Prepares the row in shared memory for the next linear layer, like prepare_row() in
// whole_row.glsl.
void prepare_stream(RowArgs a, uint r) {
    const bool one_scale = NEXT_INT8 && NEXT_GROUP == 0;
    uint most = 0;
    for (uint block = gl_SubgroupID; block < DIM_BLOCKS; block += TEAMS) {
        float v[PER];
        take_block(block, v);
        if (NEXT_HADAMARD) hadamard(v, block);
        if (one_scale) {
            most = max(most, largest(v));
            put_block(block, v);
        } else if (NEXT_INT8) {
            round_block(a, v, r, block, DIM, NEXT_GROUP, 0);
        } else {
            store_block(F32(a.values), r, block, DIM, v);
        }
    }
    if (!one_scale) return;
    most = reduce_max(most);
    int sum = 0;
    for (uint block = gl_SubgroupID; block < DIM_BLOCKS; block += TEAMS) {
        float v[PER];
        take_block(block, v);
        sum += round_block(a, v, r, block, DIM, 0, most);
    }
    sum = reduce_int(sum);
    if (gl_LocalInvocationIndex == 0) store_row_scale(a, r, most, sum);
}

// Called after this workgroup, one of `parties`, has stored its matrix rows for all `live` rows.
void finish_norm(uint64_t epilogue_, uint parties, uint first, uint live) {
    RowEpilogue epilogue = RowEpilogue(epilogue_);
    RowArgs a = epilogue.args;
    if (!is_last(epilogue.counts, 0, parties)) return;
    for (uint r = first; r < first + live; r++) {
        norm_stream(a, r);
        if (NEXT_PREPARE) prepare_stream(a, r);
    }
}
