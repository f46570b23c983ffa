// What the last workgroup of a block of rows does with attention's page partials: joins them and prepares them as row.comp does.
//
// Who includes this says what SG, HEAD_DIM, GQ and TEAMS (subgroups of a workgroup) are; a workgroup is (kv head, block of rows, page).

#include "args.glsl"
#include "last.glsl"
#include "row.glsl"
#include "pages.glsl"

layout(constant_id = 7) const bool JOIN = false;
layout(constant_id = 8) const bool HADAMARD = false;
layout(constant_id = 9) const bool INT8 = false;
layout(constant_id = 10) const uint GROUP_COLS = 32;

// Live rows i0 to i0 + rows, of the step's rows from `first` on; their partials come from `pages` workgroups.
void join_block(uint64_t tail_, uint first, uint i0, uint rows, uint pages, uint n_kv, uint slots) {
    RowTail tail = RowTail(tail_);
    RowArgs a = tail.args;
    a.slots = slots;
    if (!is_last(tail.counts, gl_WorkGroupID.y * n_kv + gl_WorkGroupID.x, pages)) return;
    const uint cols = n_kv * GQ * HEAD_DIM, blocks = GQ * HEAD_DIM / 128, first_block = gl_WorkGroupID.x * blocks;
    for (uint i = gl_SubgroupID; i < rows * blocks; i += TEAMS) {
        float v[PER];
        join_pages(a, i0 + i / blocks, first_block + i % blocks, cols, HEAD_DIM, v);
        finish_block(a, v, first + i0 + i / blocks, first_block + i % blocks, cols, HADAMARD, INT8, GROUP_COLS);
    }
}
