// RMSNorm and rotation, one head of a row a workgroup of one subgroup: see rope.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "args.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint HEAD_DIM = 128;
layout(constant_id = 3) const bool KV_F16 = true;

layout(push_constant, scalar) uniform Push { RopeArgs args; };

const uint KB = KV_F16 ? 8 : 4;
#include "rope.glsl"

void main() {
    if (gl_WorkGroupID.y < live_rows(args.step_, false)) 
        rope(args, gl_WorkGroupID.x, args.step_.first + gl_WorkGroupID.y);
}
