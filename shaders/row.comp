// Work on rows of the residual stream, one row per workgroup or (SPREAD) a few blocks of one. The
// row is a norm, gate times up, attention's merged pages, or the unchanged row. Then the Hadamard
// transform and the rounding to int8 prepare it for the next linear layer. See row.glsl and
// whole_row.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "attention.glsl"
#include "args.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint T = 512;       // threads
layout(constant_id = 3) const uint COLS = 128;
// x = (x + rmsnorm(add) w_add) scale if `add` is set; z = rmsnorm(x) w
layout(constant_id = 5) const bool NORM = false;
layout(constant_id = 6) const bool SELECTED = false;
layout(constant_id = 7) const bool PREPARE = false;
layout(constant_id = 8) const bool HADAMARD = false;
layout(constant_id = 9) const bool INT8 = false;  // otherwise the activations stay f32
layout(constant_id = 10) const uint GROUP = 0;    // columns with one scale; 0: all
layout(constant_id = 11) const bool GLU = false;  // z = gelu_tanh(x) * add
// Channels of a head if x has page partials of attention to merge; otherwise 0.
layout(constant_id = 12) const uint MERGE = 0;
// The work on a block needs no other part of the row except its groups.
layout(constant_id = 13) const bool SPREAD = false;
layout(constant_id = 14) const uint SLOTS = 1;    // rows of x per row of the step
// The factors of a gate are in x too: row 2 r + 1 has those of row 2 r.
layout(constant_id = 15) const bool PAIRS = false;

layout(push_constant, scalar) uniform Push { RowArgs args; };

const uint TEAMS = T / SG;
const uint BLOCKS = (COLS + 127) / 128;
const uint EACH = SPREAD ? 1 : (BLOCKS + TEAMS - 1) / TEAMS;
#define FIRST (SPREAD ? gl_WorkGroupID.y * TEAMS : 0)

shared float row_parts[BLOCKS > TEAMS ? BLOCKS : TEAMS];
shared int row_sums[TEAMS];

#include "row.glsl"
#include "pages.glsl"
#include "whole_row.glsl"

void main() {
    const uint live = live_rows(args.step_, SELECTED) * SLOTS;
    if (gl_WorkGroupID.x >= live) return;
    const uint r = live_row(args.step_, SELECTED, 0) * SLOTS + gl_WorkGroupID.x;
    float v[EACH][PER];
    if (NORM) {
        // A norm of selected rows gathers them. The prepared rows have the indices of its output.
        norm_row(args, SELECTED ? args.step_.v[STEP_SELECTED * args.max_rows + r] : r, COLS,
            SELECTED, v);
    } else if (MERGE != 0) {
        [[unroll]] for (uint b = 0; b < EACH; b++) 
            join_pages(args, gl_WorkGroupID.x, FIRST + gl_SubgroupID + b * TEAMS, COLS, MERGE,
                v[b]);
    } else {
        load_row(args.x, PAIRS ? 2 * r : r, COLS, v);
        if (GLU) {
            float up[EACH][PER];
            if (PAIRS) load_row(args.x, 2 * r + 1, COLS, up);
            else load_row(args.add, r, COLS, up);
            [[unroll]] for (uint b = 0; b < EACH; b++)
                [[unroll]] for (uint i = 0; i < PER; i++) v[b][i] = gelu_tanh(v[b][i]) * up[b][i];
        }
    }
    if (uint64_t(args.z) != 0) store_row(args.z, r, COLS, v);
    if (PREPARE) prepare_row(args, v, r, COLS, HADAMARD, INT8, GROUP);
}
