// Concatenates two parts of each row: one from the row itself, one from its parent.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant, scalar) uniform Push {
    F32 left;  // [rows, dim]
    F32 right; // [rows, dim]
    F32 out_;  // [rows, 2 * dim]
    Step step_;
    uint dim;
    uint max_rows;
};

void main() {
    const uint r = step_.first + gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (r >= step_.rows || i >= 2 * dim) return;
    const uint parent = step_.v[STEP_PARENTS * max_rows + r];
    float x;
    if (i < dim) x = left.v[r * dim + i];
    else x = right.v[parent * dim + i - dim];
    out_.v[2 * r * dim + i] = x;
}
