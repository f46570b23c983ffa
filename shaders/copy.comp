// A plain copy, 16 bytes a lane: what the device's memory can move, measured.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant, scalar) uniform Push {
    U32x4 from;
    U32x4 to;
};

void main() {
    const uint first = gl_WorkGroupID.x * 1024 + gl_LocalInvocationID.x;
    uvec4 v[4];
    [[unroll]] for (uint i = 0; i < 4; i++) v[i] = from.v[first + i * 256];
    [[unroll]] for (uint i = 0; i < 4; i++) to.v[first + i * 256] = v[i];
}
