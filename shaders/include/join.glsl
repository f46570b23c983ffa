// The last workgroup of a block of rows merges the page partials of attention and prepares the
// result as row.comp does.
//
// The including file defines SG, HEAD_DIM, GQ and TEAMS (subgroups in a workgroup). Workgroup
// indices are (part of the query heads, block of rows, page).

#include "args.glsl"
#include "last.glsl"
#include "row.glsl"
#include "pages.glsl"

layout(constant_id = 7) const bool JOIN = false;
layout(constant_id = 8) const bool HADAMARD = false;
layout(constant_id = 9) const bool INT8 = false;
layout(constant_id = 10) const uint GROUP_COLS = 32; // 0: all
layout(constant_id = 11) const uint COLS = 128;

const bool ONE_SCALE = JOIN && INT8 && GROUP_COLS == 0;
const uint BLOCKS = COLS / 128;
const uint BLOCKS_EACH = (BLOCKS + TEAMS - 1) / TEAMS;

shared float row_parts[1]; // not used; reduce.glsl reduces integers here
shared int row_sums[ONE_SCALE ? TEAMS : 1];

#include "reduce.glsl"

// Rounds a row with one scale, by its largest magnitude. Its merged heads are stored in place of
// the partials of their first pages.
void round_joined(RowArgs a, uint index, uint r) {
    float v[BLOCKS_EACH][PER];
    uint most = 0;
    [[unroll]] for (uint b = 0; b < BLOCKS_EACH; b++) {
        const uint block = min(gl_SubgroupID + b * TEAMS, BLOCKS - 1);
        load_joined(a, index, block, COLS, HEAD_DIM, v[b]);
    }
    [[unroll]] for (uint b = 0; b < BLOCKS_EACH; b++) most = max(most, largest(v[b]));
    most = reduce_max(most);
    int sum = 0;
    [[unroll]] for (uint b = 0; b < BLOCKS_EACH; b++) {
        const uint block = gl_SubgroupID + b * TEAMS;
        if (block < BLOCKS) sum += round_block(a, v[b], r, block, COLS, 0, most);
    }
    sum = reduce_int(sum);
    if (gl_LocalInvocationIndex == 0) store_row_scale(a, r, most, sum);
}

// Merges live rows i0 to i0 + rows, counted from row `first` of the step. `pages` workgroups wrote
// their partials.
void join_block(uint64_t epilogue_, uint first, uint i0, uint rows, uint pages,
    uint heads, uint slots) {
    RowEpilogue epilogue = RowEpilogue(epilogue_);
    RowArgs a = epilogue.args;
    a.slots = slots;
    // Counters of a block of rows: one for each part of the heads, and one for all parts.
    const uint counter = gl_WorkGroupID.y * (heads + 1);
    if (!is_last(epilogue.counts, counter + gl_WorkGroupID.x, pages)) return;
    const uint blocks = GQ * HEAD_DIM / 128, first_block = gl_WorkGroupID.x * blocks;
    for (uint i = gl_SubgroupID; i < rows * blocks; i += TEAMS) {
        const uint index = i0 + i / blocks, block = first_block + i % blocks;
        float v[PER];
        join_pages(a, index, block, COLS, HEAD_DIM, v);
        if (ONE_SCALE) {
            if (uint64_t(a.z) != 0) store_block(a.z, first + index, block, COLS, v);
            if (HADAMARD) hadamard(v, block);
            store_joined(a, index, block, COLS, HEAD_DIM, v);
        } else {
            finish_block(a, v, first + index, block, COLS, HADAMARD, INT8, GROUP_COLS);
        }
    }
    if (!ONE_SCALE || !is_last(epilogue.counts, counter + heads, heads)) return;
    for (uint i = 0; i < rows; i++) round_joined(a, i0 + i, first + i0 + i);
}
