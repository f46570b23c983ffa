// Reads memory, 128 bytes per lane, to measure the device's bandwidth.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant, scalar) uniform Push {
    U32x4 from;
    U32 sink;
};

void main() {
    const uint first = gl_WorkGroupID.x * 2048 + gl_LocalInvocationID.x;
    uvec4 all = uvec4(0);
    [[unroll]] for (uint i = 0; i < 8; i++) all ^= from.v[first + i * 256];
    // Without this use, the compiler would remove the loads. An accidental match does no harm at
    // the address from the host.
    if (all == uvec4(0x5bd1e995u, 0x1b873593u, 0xcc9e2d51u, 0x85ebca6bu)) sink.v[0] = 1;
}
