// Writes the elements of a product that each lane has. crates/vulkan/src/run/matrix_probe.rs
// compares their lanes and values with those that the kernels assume.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "matrix.glsl"

layout(local_size_x = 32) in;

layout(push_constant, scalar) uniform Push { I32 out_; }; // [lanes, 4]

const uint PITCH = 3; // pieces of 16 bytes between rows
shared uvec4 stage[24 * PITCH];

void main() {
    const uint lane = gl_SubgroupInvocationID;
    // Row r of 16: r, 1, -1, zeros, 2. Column n of 8: 8, n, -100, zeros, 3.
    if (lane < 16) {
        stage[lane * PITCH] = uvec4(lane | 0xff0100, 0, 0, 0);
        stage[lane * PITCH + 1] = uvec4(0, 0, 0, 0x02000000);
    } else if (lane < 24) {
        stage[lane * PITCH] = uvec4(8 | (lane - 16) << 8 | 0x9c0000, 0, 0, 0);
        stage[lane * PITCH + 1] = uvec4(0, 0, 0, 0x03000000);
    }
    subgroup_fence();
    Weights a;
    Activations b;
    coopMatLoad(a, stage, 0, PITCH, gl_CooperativeMatrixLayoutRowMajor);
    coopMatLoad(b, stage, 16 * PITCH, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
    const Product c = coopMatMulAdd(a, b, Product(7));
    [[unroll]] for (uint i = 0; i < 4; i++) out_.v[4 * lane + i] = c[i]; // 8 row + column + 113
}
