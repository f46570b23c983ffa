// Reads weights that a later kernel will want into the device's cache, while a kernel with little to read runs beside it.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant, scalar) uniform Push {
    U32x4 from;
    U32 sink;
    uint count; // of 16-byte pieces
    uint never; // 0
};

void main() {
    const uint first = gl_WorkGroupID.x * 1024 + gl_LocalInvocationID.x;
    uvec4 all = uvec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) all ^= from.v[min(first + i * 256, count - 1)];
    // Without a use the loads would be dropped.
    if (never != 0) sink.v[first] = all.x ^ all.y ^ all.z ^ all.w;
}
