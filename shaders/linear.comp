// Linear layers with integer codes, see linear.glsl. A team of threads computes TEAM_ROWS matrix
// rows. Up to three matrices share their activations.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"
#include "args.glsl"
#include "experts.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;      // lanes of a subgroup
layout(constant_id = 2) const uint M = 1;        // rows of activations
layout(constant_id = 3) const uint NR = 1;       // matrix rows per thread
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 5) const uint W = 32;       // columns of a step
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 7) const uint U = 1;        // chunks that are loaded at the same time
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 128;      // threads
layout(constant_id = 27) const uint SIDE = 1;    // see side.glsl
layout(constant_id = 18) const bool PARTIAL = false; // the last chunk has fewer steps
const uint SUBGROUPS = T / SG;

#include "linear.glsl"
#include "heads.glsl"
#include "norm.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the other matrices, 16 bits each; 0: none
    Matrix more[2];
    uint64_t epilogue;  // for HEADS or NORM
};

void main() {
    uint first, m0, live;
    if (!take_rows(args, SELECTED, M, more_n, more, first, m0, live)) return;
    const uint ROWS = T / TEAM * TEAM_ROWS; // per workgroup
    LinearArgs a = args;
    uint group = gl_WorkGroupID.y;
    const uint which = take_matrix(a, group, ROWS, more_n, more);
    // The number of the team must be the same for all lanes of a subgroup.
    const uint EACH_TEAM = TEAM / SG, team = gl_SubgroupID / EACH_TEAM; // in subgroups
    const uint thread = gl_SubgroupID % EACH_TEAM * SG + gl_SubgroupInvocationID;
    linear(a, team, thread, group * ROWS + team * TEAM_ROWS, m0, first, live);
    if (HEADS) finish_heads(epilogue, which, group * ROWS, ROWS, m0, min(M, live - m0), first);
    if (NORM) finish_norm(epilogue, (a.n + ROWS - 1) / ROWS, first, live);
}
