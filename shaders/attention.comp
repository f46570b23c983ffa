// Attention, see pages.glsl: a workgroup a block of rows and a kv head, or one page of those.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "attention.glsl"
#include "args.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint HEAD_DIM = 128; // a power of two, 16 to 256
layout(constant_id = 3) const uint GQ = 1;         // query heads of a kv head
layout(constant_id = 4) const uint R = 1;          // rows of a block
layout(constant_id = 5) const bool KV_F16 = true;
layout(constant_id = 6) const bool SPLIT = true;

layout(push_constant, scalar) uniform Push { AttentionArgs args; };

const uint KB = KV_F16 ? 8 : 4;
const uint SIDES = 1;
#include "pages.glsl"

void main() {
    if (gl_WorkGroupID.y * R < live_rows(args.step_, false)) attention(args, 0, gl_WorkGroupID.x, gl_WorkGroupID.y, gl_WorkGroupID.z, true);
}
