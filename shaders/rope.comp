// RMSNorm and rotation of one head of queries or keys per workgroup, see rope.glsl. It is used if
// no linear layer's last workgroups do this work.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "args.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint HEAD_DIM = 128;
layout(constant_id = 3) const uint KV = 1;
layout(constant_id = 4) const bool V_NORM = false;
#include "kv.glsl"

layout(push_constant, scalar) uniform Push { RopeArgs args; };

const uint SUBGROUPS = 1;
shared float whole[KV == KV_Q8 ? HEAD_DIM : 1]; // key or value to round to int8

#include "rope.glsl"

void main() {
    const uint live = live_rows(args.step_, false);
    if (gl_WorkGroupID.y < live)
        rope_head(args, gl_WorkGroupID.x, args.step_.first + gl_WorkGroupID.y);
}
